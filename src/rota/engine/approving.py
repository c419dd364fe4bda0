"""People agree, or refuse: one transaction from the vote to what it comes to.

| what happens | the approval | a job that waits for it |
|---|---|---|
| a vote that is not the last | pending | waits |
| the last vote that is needed | granted | PENDING, and the gatekeeper is told; the gate asks the policy once more |
| somebody refuses | rejected | DENIED, with a dead letter |
| its time passes | expired | DENIED, with a dead letter, by the leader |
| the job ends | closed, by the statement that ends it | |

Locks: what is approved first, then the approval, so those who cancel, vote and let expire wait and never in a circle.
Whoever comes second finds what the first has done, and is told so. If we die before the commit nothing was said; after
it the message to the gatekeeper is in the outbox, and the replayer is its net.

What else may wait for people (a step of a workflow) joins by `subjects`: who locks it, and what becomes of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol
from uuid import UUID

import msgspec
import structlog

from rota.engine.finish import JobEnd, Told
from rota.engine.gate import Decision, Verdict
from rota.engine.gatekeeper import Gatekeeper
from rota.engine.gatekeeper_approvals import materials
from rota.engine.submit_admit import approve
from rota.infra import audit, faults
from rota.infra.audit import AuditEntry
from rota.infra.postgres import Database, Transaction, query
from rota.model.approval import Approval, ApprovalState, Voter, guard_open, guard_vote
from rota.model.errors import ApprovalNotActionable, ApprovalStale, InvalidInput, NotFound, PostgresUnavailable
from rota.model.ids import JobId
from rota.model.lifecycle import JobState
from rota.model.reasons import Reason
from rota.policy.approvals import Approvals, count

LOCK_JOB = query(__package__, "job_lock")

log = structlog.get_logger(__name__)
REASON_MAX: Final = 1_000
EXPIRES_AT_ONCE: Final = 100
SYSTEM: Final = "policy"

After = Callable[[], Awaitable[None]]
"""What is to be done once it is committed."""


class Subjects(Protocol):
    """What may wait for an approval, of one kind."""

    async def locked(self, on: Transaction, subject: str) -> bytes | None:
        """Lock it; the hash of what is stored, or None when it does not wait for an approval any more."""
        ...

    async def decided(self, on: Transaction, approval: Approval, state: ApprovalState, why: str) -> After | None:
        """It was granted, rejected or has expired."""
        ...


class Said(msgspec.Struct, frozen=True):
    """What came of a vote."""

    approval: Approval
    changed: bool
    """False: it had been said before."""


class Approver:
    def __init__(self, database: Database, gatekeeper: Gatekeeper) -> None:
        self.database = database
        self.approvals: Approvals = gatekeeper.gated.approvals
        self.subjects: dict[str, Subjects] = {"job": _Jobs(gatekeeper)}
        self.on_decided: Callable[[Approval], None] = _ignore
        """Called with what was decided, once that is committed."""

    async def find(self, named: str) -> Approval:
        """By its own id, or the last one of the job or step that it names."""
        if "\0" in named:
            raise unknown(named)
        try:
            return await self.approvals.get(UUID(named))
        except ValueError:
            found = await self.approvals.latest("step", [named])
        except NotFound:
            found = await self.approvals.latest("job", [str(UUID(named))])
        if not found:
            raise unknown(named)
        [approval] = found.values()
        return approval

    async def approve(self, approval: Approval, voter: Voter, reason: str = "") -> Said:
        return await self._vote(approval, voter, reason, agrees=True)

    async def reject(self, approval: Approval, voter: Voter, reason: str = "") -> Said:
        return await self._vote(approval, voter, reason, agrees=False)

    async def _vote(self, given: Approval, voter: Voter, reason: str, *, agrees: bool) -> Said:
        _check_reason(reason)
        if given.kind not in self.subjects:
            raise ApprovalNotActionable(f"Nobody here carries out approvals of a {given.kind}: ask a server to.")
        async with self.database.transaction() as tx:
            stored = await self.subjects[given.kind].locked(tx, given.subject)
            approval = await self.approvals.lock(tx, given.id)
            guard_vote(approval, voter)
            if _said_before(approval, voter, agrees=agrees):
                return Said(approval, changed=False)
            guard_open(approval)
            _check_stored(approval, stored, agrees=agrees)
            approval = await self.approvals.vote(tx, approval, voter.name, reason, agrees=agrees)
            state = _comes_to(approval, agrees=agrees)
            after = await self._decide(tx, approval, state, voter.audited, reason)
            approval = await self.approvals.get(approval.id, on=tx)
            faults.at("approvals.before_commit")
        faults.reply("approvals.commit")
        await self._tell(approval, after)
        return Said(approval, changed=True)

    async def _decide(
        self, tx: Transaction, approval: Approval, state: ApprovalState, who: str, reason: str
    ) -> After | None:
        after = None
        if state is not ApprovalState.PENDING:
            await self.approvals.decide(tx, approval, state)
            after = await self.subjects[approval.kind].decided(tx, approval, state, _why(state, who, reason))
        act = "vote" if state is ApprovalState.PENDING else state.value
        detail = {
            "of": approval.subject,
            "show": str(approval.show_id),
            "rule": approval.rule,
            "reason": reason,
            "agreed": approval.agreed,
            **({"job": approval.subject} if approval.kind == "job" else {}),
        }
        await audit.append(tx, [AuditEntry(who, f"approval.{act}", f"approval:{approval.id}", detail)])
        return after

    async def _tell(self, approval: Approval, after: After | None) -> None:
        if after is not None:
            await after()
        if approval.state is not ApprovalState.PENDING and approval.decided_at is not None:
            count(approval, approval.state, approval.decided_at)
            self.on_decided(approval)

    async def expire(self) -> int:
        """Deny what nobody approved in time; returns how many. One that cannot be ended holds up no other."""
        expired = 0
        for each in await self.approvals.due(EXPIRES_AT_ONCE):
            try:
                expired += await self._expire(each)
            except PostgresUnavailable:
                raise
            except Exception:
                log.exception("approval_not_expired", approval=str(each))
        await self.approvals.measure()
        return expired

    async def _expire(self, each: UUID) -> bool:
        given = await self.approvals.get(each)
        if given.kind not in self.subjects:
            return False
        async with self.database.transaction() as tx:
            stored = await self.subjects[given.kind].locked(tx, given.subject)
            approval = await self.approvals.lock(tx, each)
            if approval.state is not ApprovalState.PENDING:
                return False
            if stored is None:
                await self.approvals.decide(tx, approval, ApprovalState.CLOSED)
                return False
            after = await self._decide(tx, approval, ApprovalState.EXPIRED, SYSTEM, "")
            approval = await self.approvals.get(each, on=tx)
            faults.at("approvals.before_expiry_commit")
        await self._tell(approval, after)
        return True

    async def granted(self, jobs: Sequence[JobId]) -> set[JobId]:
        """Those that may go on although they still wait: for the replayer."""
        found = await self.approvals.latest("job", [str(job) for job in jobs])
        return {JobId(UUID(subject)) for subject, each in found.items() if each.state is ApprovalState.GRANTED}


class _Jobs:
    def __init__(self, gatekeeper: Gatekeeper) -> None:
        self._gatekeeper = gatekeeper

    async def locked(self, on: Transaction, subject: str) -> bytes | None:
        job = JobId(UUID(subject))
        await on.rows(LOCK_JOB, job)
        stored = (await materials(on, [job])).get(job)
        return stored.hash if stored is not None and stored.waits else None

    async def decided(self, on: Transaction, approval: Approval, state: ApprovalState, why: str) -> After | None:
        job = JobId(UUID(approval.subject))
        if state is ApprovalState.GRANTED:
            await approve(on, [job])
            return None
        reason = Reason.APPROVAL_EXPIRED if state is ApprovalState.EXPIRED else Reason.APPROVAL_REJECTED
        decision = Decision(Verdict.DENY, reason.value, None, why)
        ended = await self._gatekeeper.deny(on, {job: decision}, JobState.DENIED)
        return lambda: self._told(ended)

    async def _told(self, ended: list[JobEnd]) -> None:
        told = Told()
        told.finished = ended
        await self._gatekeeper.finisher.tell(told)
        self._gatekeeper.on_ended(ended)


def unknown(named: str) -> NotFound:
    return NotFound(f"Nothing called {named[:64]!r} was asked to be approved: `rota approvals list` tells what was.")


def _comes_to(approval: Approval, *, agrees: bool) -> ApprovalState:
    if not agrees:
        return ApprovalState.REJECTED
    return ApprovalState.GRANTED if approval.agreed >= approval.quorum else ApprovalState.PENDING


def _said_before(approval: Approval, voter: Voter, *, agrees: bool) -> bool:
    """Approving what is approved changes nothing, nor does saying the same once more."""
    if agrees and approval.state is ApprovalState.GRANTED:
        return True
    vote = approval.vote_of(voter)
    return vote is not None and vote.agrees == agrees


def _check_stored(approval: Approval, stored: bytes | None, *, agrees: bool) -> None:
    if stored is None:
        raise ApprovalNotActionable(
            f"The {approval.kind} {approval.subject} does not wait for an approval any more: `rota explain` tells what"
            " became of it.",
            approval=str(approval.id),
        )
    if agrees and stored != approval.hash:
        raise ApprovalStale(
            f"What is stored of the {approval.kind} {approval.subject} is not what was asked to be approved: reject it,"
            " and look into who changed it.",
            approval=str(approval.id),
        )


def _check_reason(reason: str) -> None:
    if len(reason) > REASON_MAX or "\0" in reason:
        raise InvalidInput(f"A reason of {len(reason)} characters is too long: use at most {REASON_MAX}, without NUL.")


def _why(state: ApprovalState, who: str, reason: str) -> str:
    if state is ApprovalState.EXPIRED:
        return "nobody approved it in time"
    return f"{state} by {who}{f': {reason}' if reason else ''}"


def _ignore(_approval: Approval) -> None:
    return None

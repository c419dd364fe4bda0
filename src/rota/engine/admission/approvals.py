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

from rota.engine.admission.approval_requests import approvable_jobs
from rota.engine.admission.controller import AdmissionController
from rota.engine.admission.decision import AdmissionDecision, AdmissionVerdict
from rota.engine.admission.transitions import approve
from rota.engine.completion.finisher import CompletionResult, JobEnd
from rota.infra import audit, failpoints
from rota.infra.audit import AuditEntry
from rota.infra.postgres import Database, Transaction, query
from rota.model.approvals import Approval, ApprovalState, Voter, check_pending, check_voter
from rota.model.errors import ApprovalNotActionable, ApprovalStale, InvalidInput, NotFound, PostgresUnavailable
from rota.model.ids import JobId
from rota.model.job_states import JobState
from rota.model.reasons import Reason
from rota.policy.approvals import ApprovalStore, record_decision

LOCK_JOB = query("rota.engine.completion", "job_lock")

log = structlog.get_logger(__name__)
REASON_MAX: Final = 1_000
EXPIRE_BATCH_MAX: Final = 100
SYSTEM_ACTOR: Final = "policy"

AfterCommit = Callable[[], Awaitable[None]]
"""What is to be done once it is committed."""


class ApprovalSubjects(Protocol):
    """What may wait for an approval, of one kind."""

    async def lock(self, on: Transaction, subject: str) -> bytes | None:
        """Lock it; the hash of what is stored, or None when it does not wait for an approval any more."""
        ...

    async def apply_decision(
        self, on: Transaction, approval: Approval, state: ApprovalState, why: str
    ) -> AfterCommit | None:
        """It was granted, rejected or has expired."""
        ...


class VoteResult(msgspec.Struct, frozen=True):
    """What came of a vote."""

    approval: Approval
    changed: bool
    """False: it had been said before."""


class Approver:
    def __init__(self, database: Database, gatekeeper: AdmissionController) -> None:
        self.database = database
        self.approvals: ApprovalStore = gatekeeper.gated.approvals
        self.subjects: dict[str, ApprovalSubjects] = {"job": _JobApprovalSubjects(gatekeeper)}
        self.on_decided: Callable[[Approval], None] = _ignore
        """Called with what was decided, once that is committed."""

    async def find(self, named: str) -> Approval:
        """By its own id, or the last one of the job or step that it names."""
        if "\0" in named:
            raise approval_not_found(named)
        try:
            return await self.approvals.get(UUID(named))
        except ValueError:
            found = await self.approvals.latest("step", [named])
        except NotFound:
            found = await self.approvals.latest("job", [str(UUID(named))])
        if not found:
            raise approval_not_found(named)
        [approval] = found.values()
        return approval

    async def approve(self, approval: Approval, voter: Voter, reason: str = "") -> VoteResult:
        return await self._vote(approval, voter, reason, agrees=True)

    async def reject(self, approval: Approval, voter: Voter, reason: str = "") -> VoteResult:
        return await self._vote(approval, voter, reason, agrees=False)

    async def _vote(self, given: Approval, voter: Voter, reason: str, *, agrees: bool) -> VoteResult:
        _check_reason(reason)
        if given.kind not in self.subjects:
            raise ApprovalNotActionable(f"Nobody here carries out approvals of a {given.kind}: ask a server to.")
        async with self.database.transaction() as tx:
            stored = await self.subjects[given.kind].lock(tx, given.subject)
            approval = await self.approvals.lock(tx, given.id)
            check_voter(approval, voter)
            if _is_repeated_vote(approval, voter, agrees=agrees):
                return VoteResult(approval, changed=False)
            check_pending(approval)
            _check_unchanged(approval, stored, agrees=agrees)
            approval = await self.approvals.vote(tx, approval, voter.name, reason, agrees=agrees)
            state = _state_after_vote(approval, agrees=agrees)
            after = await self._decide(tx, approval, state, voter.audited, reason)
            approval = await self.approvals.get(approval.id, on=tx)
            failpoints.hit("approvals.before_commit")
        failpoints.after_send("approvals.commit")
        await self._after_commit(approval, after)
        return VoteResult(approval, changed=True)

    async def _decide(
        self, tx: Transaction, approval: Approval, state: ApprovalState, who: str, reason: str
    ) -> AfterCommit | None:
        after = None
        if state is not ApprovalState.PENDING:
            await self.approvals.decide(tx, approval, state)
            after = await self.subjects[approval.kind].apply_decision(
                tx, approval, state, _decision_text(state, who, reason)
            )
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

    async def _after_commit(self, approval: Approval, after: AfterCommit | None) -> None:
        if after is not None:
            await after()
        if approval.state is not ApprovalState.PENDING and approval.decided_at is not None:
            record_decision(approval, approval.state, approval.decided_at)
            self.on_decided(approval)

    async def expire(self) -> int:
        """Deny what nobody approved in time; returns how many. One that cannot be ended holds up no other."""
        expired = 0
        for each in await self.approvals.overdue(EXPIRE_BATCH_MAX):
            try:
                expired += await self._expire(each)
            except PostgresUnavailable:
                raise
            except Exception:
                log.exception("approval_not_expired", approval=str(each))
        await self.approvals.update_metrics()
        return expired

    async def _expire(self, each: UUID) -> bool:
        given = await self.approvals.get(each)
        if given.kind not in self.subjects:
            return False
        async with self.database.transaction() as tx:
            stored = await self.subjects[given.kind].lock(tx, given.subject)
            approval = await self.approvals.lock(tx, each)
            if approval.state is not ApprovalState.PENDING:
                return False
            if stored is None:
                await self.approvals.decide(tx, approval, ApprovalState.CLOSED)
                return False
            after = await self._decide(tx, approval, ApprovalState.EXPIRED, SYSTEM_ACTOR, "")
            approval = await self.approvals.get(each, on=tx)
            failpoints.hit("approvals.before_expiry_commit")
        await self._after_commit(approval, after)
        return True

    async def granted_jobs(self, jobs: Sequence[JobId]) -> set[JobId]:
        """Those that may go on although they still wait: for the replayer."""
        found = await self.approvals.latest("job", [str(job) for job in jobs])
        return {JobId(UUID(subject)) for subject, each in found.items() if each.state is ApprovalState.GRANTED}


class _JobApprovalSubjects:
    def __init__(self, gatekeeper: AdmissionController) -> None:
        self._gatekeeper = gatekeeper

    async def lock(self, on: Transaction, subject: str) -> bytes | None:
        job = JobId(UUID(subject))
        await on.rows(LOCK_JOB, job)
        stored = (await approvable_jobs(on, [job])).get(job)
        return stored.hash if stored is not None and stored.waits else None

    async def apply_decision(
        self, on: Transaction, approval: Approval, state: ApprovalState, why: str
    ) -> AfterCommit | None:
        job = JobId(UUID(approval.subject))
        if state is ApprovalState.GRANTED:
            await approve(on, [job])
            return None
        reason = Reason.APPROVAL_EXPIRED if state is ApprovalState.EXPIRED else Reason.APPROVAL_REJECTED
        decision = AdmissionDecision(AdmissionVerdict.DENY, reason.value, None, why)
        ended = await self._gatekeeper.deny(on, {job: decision}, JobState.DENIED)
        return lambda: self._after_denial(ended)

    async def _after_denial(self, ended: list[JobEnd]) -> None:
        told = CompletionResult()
        told.finished = ended
        await self._gatekeeper.finisher.after_commit(told)
        self._gatekeeper.on_ended(ended)


def approval_not_found(named: str) -> NotFound:
    return NotFound(f"Nothing called {named[:64]!r} was asked to be approved: `rota approvals list` tells what was.")


def _state_after_vote(approval: Approval, *, agrees: bool) -> ApprovalState:
    if not agrees:
        return ApprovalState.REJECTED
    return ApprovalState.GRANTED if approval.agreed >= approval.quorum else ApprovalState.PENDING


def _is_repeated_vote(approval: Approval, voter: Voter, *, agrees: bool) -> bool:
    """Approving what is approved changes nothing, nor does saying the same once more."""
    if agrees and approval.state is ApprovalState.GRANTED:
        return True
    vote = approval.vote_of(voter)
    return vote is not None and vote.agrees == agrees


def _check_unchanged(approval: Approval, stored: bytes | None, *, agrees: bool) -> None:
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


def _decision_text(state: ApprovalState, who: str, reason: str) -> str:
    if state is ApprovalState.EXPIRED:
        return "nobody approved it in time"
    return f"{state} by {who}{f': {reason}' if reason else ''}"


def _ignore(_approval: Approval) -> None:
    return None

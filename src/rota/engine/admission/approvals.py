"""Votes on approvals: one transaction from the vote to its effect.

| event | the approval | a job that waits for it |
|---|---|---|
| a vote before the quorum | pending | waits |
| the vote that reaches the quorum | granted | PENDING; the admission controller queries the policy again |
| a rejection | rejected | DENIED, with a dead letter |
| expiry | expired | DENIED, with a dead letter, by the leader |
| the job ends | closed, by the statement that ends it | |

Lock order: the subject, the approval, then the voter. Cancel, vote and expiry all use it, so they cannot deadlock. The
second of two concurrent requests sees the effect of the first and reports it. If the process dies before the commit,
nothing happened; after it, the message to the admission controller is in the outbox, and the replayer is the safety
net.

Other kinds of subjects (a workflow step) register in `subjects`: how to lock one, and how to apply the decision.
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
from rota.engine.completion.job_ends import JobEnd
from rota.engine.completion.publisher import CompletionResult
from rota.engine.principal_state import check_active
from rota.infra import audit, failpoints
from rota.infra.audit import AuditEntry
from rota.infra.postgres import Database, Transaction, query
from rota.model.approvals import Approval, ApprovalState, Voter, check_pending, check_voter
from rota.model.error_reactions import is_outage
from rota.model.errors import ApprovalNotActionable, ApprovalStale, InvalidInput, NotFound
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
"""Runs after the commit."""


class ApprovalSubjects(Protocol):
    """One kind of subject that can wait for an approval."""

    async def lock(self, on: Transaction, subject: str) -> bytes | None:
        """Lock the subject; returns the hash of what is stored, or None if it no longer waits for an approval."""
        ...

    async def apply_decision(
        self, on: Transaction, approval: Approval, state: ApprovalState, why: str
    ) -> AfterCommit | None:
        """Apply that the approval was granted, rejected or has expired."""
        ...


class VoteResult(msgspec.Struct, frozen=True):
    approval: Approval
    changed: bool
    """False: a repeated vote."""


class Approver:
    def __init__(self, database: Database, controller: AdmissionController) -> None:
        self.database = database
        self.approvals: ApprovalStore = controller.approval_requests.approvals
        self.subjects: dict[str, ApprovalSubjects] = {"job": _JobApprovalSubjects(controller)}
        self._events = controller.events

    async def find(self, reference: str) -> Approval:
        """By approval id, or the latest approval of the job or step with this id."""
        if "\0" in reference:
            raise approval_not_found(reference)
        try:
            return await self.approvals.get(UUID(reference))
        except ValueError:
            found = await self.approvals.latest("step", [reference])
        except NotFound:
            found = await self.approvals.latest("job", [str(UUID(reference))])
        if not found:
            raise approval_not_found(reference)
        [approval] = found.values()
        return approval

    async def approve(self, approval: Approval, voter: Voter, reason: str = "") -> VoteResult:
        return await self._vote(approval, voter, reason, agrees=True)

    async def reject(self, approval: Approval, voter: Voter, reason: str = "") -> VoteResult:
        return await self._vote(approval, voter, reason, agrees=False)

    async def _vote(self, request: Approval, voter: Voter, reason: str, *, agrees: bool) -> VoteResult:
        _check_reason(reason)
        if request.kind not in self.subjects:
            raise ApprovalNotActionable(
                f"This process cannot apply an approval of a {request.kind}: use the HTTP API of a server."
            )
        async with self.database.transaction() as tx:
            stored = await self.subjects[request.kind].lock(tx, request.subject)
            approval = await self.approvals.lock(tx, request.id)
            check_voter(approval, voter, agrees=agrees)
            await check_active(tx, voter.principal)
            if _is_repeated_vote(approval, voter, agrees=agrees):
                return VoteResult(approval, changed=False)
            check_pending(approval)
            _check_unchanged(approval, stored, agrees=agrees)
            approval = await self.approvals.vote(tx, approval, voter.principal.name, reason, agrees=agrees)
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
            self._events.approval_decided(approval)

    async def expire(self) -> int:
        """Deny subjects whose approval has expired; returns how many. One failure does not block the others."""
        expired = 0
        for each in await self.approvals.overdue(EXPIRE_BATCH_MAX):
            try:
                expired += await self._expire(each)
            except Exception as error:
                if is_outage(error):
                    raise
                log.exception("approval_expiry_failed", approval=str(each))
        await self.approvals.update_metrics()
        return expired

    async def _expire(self, each: UUID) -> bool:
        request = await self.approvals.get(each)
        if request.kind not in self.subjects:
            return False
        async with self.database.transaction() as tx:
            stored = await self.subjects[request.kind].lock(tx, request.subject)
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
        """Jobs whose approval was granted although they still wait; used by the replayer."""
        found = await self.approvals.latest("job", [str(job) for job in jobs])
        return {JobId(UUID(subject)) for subject, each in found.items() if each.state is ApprovalState.GRANTED}


class _JobApprovalSubjects:
    def __init__(self, controller: AdmissionController) -> None:
        self._controller = controller

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
        ended = await self._controller.deny(on, {job: decision}, JobState.DENIED)
        return lambda: self._after_denial(ended)

    async def _after_denial(self, ended: list[JobEnd]) -> None:
        result = CompletionResult()
        result.finished = ended
        await self._controller.publisher.publish(result)


def approval_not_found(reference: str) -> NotFound:
    return NotFound(f"There is no approval of {reference[:64]!r}: `rota approvals list` shows all approvals.")


def _state_after_vote(approval: Approval, *, agrees: bool) -> ApprovalState:
    if not agrees:
        return ApprovalState.REJECTED
    return ApprovalState.GRANTED if approval.agreed >= approval.quorum else ApprovalState.PENDING


def _is_repeated_vote(approval: Approval, voter: Voter, *, agrees: bool) -> bool:
    """Approving what is granted, or voting the same again, changes nothing."""
    if agrees and approval.state is ApprovalState.GRANTED:
        return True
    vote = approval.vote_of(voter)
    return vote is not None and vote.agrees == agrees


def _check_unchanged(approval: Approval, stored: bytes | None, *, agrees: bool) -> None:
    if stored is None:
        raise ApprovalNotActionable(
            f"The {approval.kind} {approval.subject} no longer waits for an approval: `rota explain` shows what"
            " happened to it.",
            approval=str(approval.id),
        )
    if agrees and stored != approval.hash:
        raise ApprovalStale(
            f"The stored {approval.kind} {approval.subject} differs from what was submitted for approval: reject it,"
            " and find out who changed it.",
            approval=str(approval.id),
        )


def _check_reason(reason: str) -> None:
    if len(reason) > REASON_MAX or "\0" in reason:
        raise InvalidInput(f"A reason of {len(reason)} characters is too long: use at most {REASON_MAX}, without NUL.")


def _decision_text(state: ApprovalState, who: str, reason: str) -> str:
    if state is ApprovalState.EXPIRED:
        return "not approved in time"
    return f"{state} by {who}{f': {reason}' if reason else ''}"

"""Admission controller: queries the policy about PENDING jobs and applies the decisions.

An outbox message that commits with the job notifies it (`rota.engine.admission.decision.admission_message`); the
pending replayer finds jobs whose message was lost. Jobs are decided in batches, and each batch takes effect in one
transaction:

| the policy's reply | the job becomes |
|---|---|
| ALLOW, ALLOW_WITH_CONSTRAINTS | SCHEDULED, its frames queued |
| REQUIRE_APPROVAL | APPROVAL_REQUIRED until the quorum is reached; then it is decided once more |
| THROTTLE | still PENDING; retried after the rule's delay, or `scheduler.safety_throttle_delay` |
| DENY, or an unknown effect | DENIED by the finisher, with a dead letter |
| none: the breaker is open | still PENDING; retried after `scheduler.safety_throttle_delay` |
| none, for another reason | still PENDING; retried after 1 to 30 s, doubling |

None of this counts as a dispatch attempt. With `input_policy.fail_mode` open, an unreachable policy lets jobs run:
only while this server is not draining, and only if the policy engine cannot be reached (an error or a malformed reply
never fails open). Each time it is logged, counted and audited, and the job's stored decision says so.

No row is locked during the policy call. A decision is applied only to jobs that are still PENDING, so of two
concurrent decisions on a job one takes effect. A decision older than `DECISION_TTL_S`, by the clock of PostgreSQL,
queues nothing (the process may have been paused and the rules changed), and the job is retried. If the process dies
before the commit, nothing happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

import msgspec
import structlog

from rota.api.admin import DeadLetter
from rota.engine.admission import audit
from rota.engine.admission.approval_requests import ApprovalRequests
from rota.engine.admission.decision import (
    ADMISSION_SUBJECT,
    ALLOWED,
    DECISION_TTL_S,
    AdmissionDecision,
    AdmissionGate,
    AdmissionVerdict,
    AllowAll,
    DeferAll,
    admission_decision_from,
)
from rota.engine.admission.policy_call import KERNEL_TIMEOUT_S, policy_input_from_row, query_kernel
from rota.engine.admission.transitions import AppliedDecisions, apply_decisions, defer
from rota.engine.completion.job_ends import COUNT_ENDS, JobEnd, finish_jobs
from rota.engine.completion.publisher import CompletionPublisher, CompletionResult
from rota.infra import failpoints
from rota.infra.clock import Clock, SystemClock
from rota.infra.nats import Acknowledgement, ConsumerSpec, Delivery, Terminate
from rota.infra.postgres import Database, Record, Transaction, query
from rota.infra.telemetry import metrics
from rota.model.error_reactions import is_outage, is_transient
from rota.model.errors import BreakerOpen, PostgresBusy, Unavailable
from rota.model.ids import JobId
from rota.model.job_states import JobState
from rota.model.policy.decision import Kernel, PolicyDecision, PolicyEffect
from rota.model.reasons import Reason
from rota.policy.decision_store import encode_decision
from rota.policy.request_builder import PolicyInput, group_stored_jobs
from rota.queue.dead_letters import DeadLetterQueue

MARK_DENIED = query(__package__, "gatekeeper_deny")
PENDING = query(__package__, "gatekeeper_pending")

log = structlog.get_logger(__name__)
CONSUMER_SPEC: Final = ConsumerSpec(stream="SYS", durable="gate", filter=ADMISSION_SUBJECT, ack_wait_s=3.0)
BATCH_JOBS_MAX: Final = 200
UNAVAILABLE: Final = AdmissionDecision(AdmissionVerdict.WAIT, Reason.POLICY_UNAVAILABLE.value)
FAIL_OPEN_TEXT: Final = "input policy fail-open: safety kernel unreachable"
FAIL_OPEN_DECISION: Final = AdmissionDecision(
    AdmissionVerdict.ALLOW,
    said=encode_decision(PolicyDecision(says=PolicyEffect.ALLOW, reason=FAIL_OPEN_TEXT)),
    because=FAIL_OPEN_TEXT,
)

DENIED = metrics.counter("rota_safety_denied", "Jobs denied by the policy.", labels=("topic",))
NO_DECISION = metrics.counter(
    "rota_safety_unavailable",
    "Jobs without a decision because the policy was unavailable, by topic.",
    labels=("topic",),
)
FAILED_OPEN = metrics.counter(
    "rota_scheduler_input_fail_open",
    "Jobs admitted without a policy decision (fail-open), by topic.",
    labels=("topic",),
)
DECISIONS = metrics.counter("rota_gate_decisions", "Admission decisions that took effect.", labels=("verdict",))

_NEVER: Final = datetime.max.replace(tzinfo=UTC)
_IDS = msgspec.msgpack.Decoder(list[UUID])


class PendingJob(msgspec.Struct, frozen=True):
    """A job that waits for a decision."""

    id: JobId
    reason: str | None
    seen: PolicyInput

    @property
    def show(self) -> str:
        return self.seen.show

    @property
    def topic(self) -> str:
        return self.seen.topic


class AdmissionOutcome(msgspec.Struct, frozen=True):
    """Result of a decision: jobs by verdict. Jobs that changed state meanwhile are in none of the lists."""

    asked: list[PendingJob]
    decisions: dict[JobId, AdmissionDecision]
    admitted: list[JobId]
    denied: list[JobId]
    held: list[JobId]


class AdmissionController:
    def __init__(
        self,
        database: Database,
        publisher: CompletionPublisher,
        kernel: Kernel | None = None,
        *,
        kernel_timeout_s: float = KERNEL_TIMEOUT_S,
        throttle_s: float = 5.0,
        fail_open: Callable[[], bool] = lambda: False,
        clock: Clock | None = None,
    ) -> None:
        self.database = database
        self.publisher = publisher
        self.events = publisher.events
        self.kernel = kernel
        self.kernel_timeout_s = kernel_timeout_s
        self.approval_requests = ApprovalRequests(database)
        self.is_ending = False
        """Draining: an unreachable policy no longer fails open, whatever the setting."""
        self._dead_letters = DeadLetterQueue(database)
        self._throttle_s = throttle_s
        self._fail_open = fail_open
        self._clock = clock or SystemClock()

    async def handle(self, batch: Sequence[Delivery]) -> list[Acknowledgement]:
        """Handle messages that name jobs to decide."""
        acknowledgements: list[Acknowledgement] = []
        jobs: dict[JobId, None] = {}
        for delivery in batch:
            try:
                jobs |= dict.fromkeys(JobId(job) for job in _IDS.decode(delivery.data))
                acknowledgements.append(None)
            except msgspec.DecodeError as error:
                acknowledgements.append(
                    Terminate(f"A message to the admission controller is not a list of job ids: {error}.")
                )
        await self.decide_all(list(jobs))
        failpoints.hit("gatekeeper.after_commit_before_ack")
        return acknowledgements

    async def decide_all(self, jobs: Sequence[JobId]) -> None:
        """Decide all of these jobs, in batches."""
        for at in range(0, len(jobs), BATCH_JOBS_MAX):
            await self.decide_isolated(jobs[at : at + BATCH_JOBS_MAX])

    async def decide_isolated(self, jobs: Sequence[JobId]) -> list[AdmissionOutcome]:
        """Decide one batch; if the policy fails on it, each job alone, so that one bad job does not block others."""
        try:
            return [await self.decide(jobs)]
        except Exception as error:
            if is_outage(error):
                raise
        outcomes, busy = [], None
        for job in jobs:
            try:
                outcomes.append(await self._decide_single(job))
            except PostgresBusy as error:
                busy = error
        if busy is not None:
            raise busy
        return outcomes

    async def _decide_single(self, job: JobId) -> AdmissionOutcome:
        try:
            return await self.decide([job])
        except Exception as error:
            if is_transient(error):
                raise
            log.exception("policy_failed", job=str(job))
            asked, now = await self._load_pending([job])
            return await self._apply(asked, [UNAVAILABLE] * len(asked), now)

    async def decide(self, jobs: Sequence[JobId]) -> AdmissionOutcome:
        """Query the policy about those jobs that are PENDING, and apply its decisions."""
        pending, now = await self._load_pending(jobs)
        if not pending:
            return AdmissionOutcome([], {}, [], [], [])
        queried_at = self._clock.monotonic()
        decisions = await self._policy_decisions(pending)
        failpoints.hit("gatekeeper.after_decision")
        if self._clock.monotonic() - queried_at > DECISION_TTL_S:
            log.warning("policy_decision_expired", jobs=len(pending))
            decisions = [UNAVAILABLE] * len(pending)
        return await self._apply(pending, decisions, now)

    async def _load_pending(self, jobs: Sequence[JobId]) -> tuple[list[PendingJob], datetime]:
        """The PENDING jobs, and the time of PostgreSQL before the policy is queried."""
        rows = await self.database.rows(PENDING, list(jobs))
        return [_pending_job(row) for row in rows], rows[0]["now"] if rows else _NEVER

    async def _policy_decisions(self, pending: Sequence[PendingJob]) -> list[AdmissionDecision]:
        if self.kernel is None:
            return [ALLOWED] * len(pending)
        grouped = group_stored_jobs([job.id for job in pending], [job.seen for job in pending])
        try:
            policy_decisions = await query_kernel(self.kernel, grouped.questions, self.kernel_timeout_s)
        except Unavailable as error:
            return self._decisions_without_policy(pending, error)
        decisions = grouped.map_jobs(
            policy_decisions, lambda policy_decision: admission_decision_from(policy_decision, self._throttle_s)
        )
        return await self.approval_requests.apply_grants([job.id for job in pending], decisions)

    def _decisions_without_policy(self, pending: Sequence[PendingJob], error: Exception) -> list[AdmissionDecision]:
        if self._fail_open() and not self.is_ending:
            log.warning(FAIL_OPEN_TEXT, jobs=len(pending), reason=str(error))
            return [FAIL_OPEN_DECISION] * len(pending)
        log.warning("policy_unavailable", jobs=len(pending), reason=str(error))
        wait_s = self._throttle_s if isinstance(error, BreakerOpen) else 0.0
        return [msgspec.structs.replace(UNAVAILABLE, because=str(error), wait_s=wait_s)] * len(pending)

    async def _apply(
        self, asked: Sequence[PendingJob], decisions: Sequence[AdmissionDecision], now: datetime
    ) -> AdmissionOutcome:
        by_job = {job.id: decision for job, decision in zip(asked, decisions, strict=True)}
        completion = CompletionResult()

        async def finish(on: Transaction, jobs: Mapping[JobId, AdmissionDecision], state: JobState) -> None:
            completion.finished = await self.deny(on, jobs, state)

        async with self.database.transaction() as tx:
            applied = await apply_decisions(tx, by_job, finish, until=now + timedelta(seconds=DECISION_TTL_S))
            await self._defer_not_admitted(tx, by_job, applied)
            requested = await self.approval_requests.request(tx, {job: by_job[job] for job in applied.held})
            denied = [end.job for end in completion.finished]
            outcome = AdmissionOutcome(list(asked), by_job, applied.admitted, denied, applied.held)
            await audit.append_decisions(tx, outcome)
            failpoints.hit("gatekeeper.before_commit")
        await self.publisher.publish(completion)
        self.events.approvals_requested(requested)
        _record_metrics(outcome, completion.finished)
        self.events.jobs_decided(outcome)
        return outcome

    async def _defer_not_admitted(
        self, on: Transaction, decisions: Mapping[JobId, AdmissionDecision], applied: AppliedDecisions
    ) -> None:
        """Defer jobs that were allowed but are still PENDING: their decision expired, or they need one and had none."""
        admitted = set(applied.admitted)
        not_admitted = [
            job for job, one in decisions.items() if one.verdict is AdmissionVerdict.ALLOW and job not in admitted
        ]
        if not_admitted:
            await defer(on, dict.fromkeys(not_admitted, UNAVAILABLE))

    async def deny(self, on: Transaction, jobs: Mapping[JobId, AdmissionDecision], state: JobState) -> list[JobEnd]:
        """End jobs that were never queued, each with a dead letter that says why; other jobs are left unchanged."""
        ids = sorted(jobs)
        digests = [one.digest if (one := jobs[job].said) is not None else None for job in ids]
        rows = await on.rows(MARK_DENIED, ids, state.value, [jobs[job].reason for job in ids], digests)
        frames: dict[UUID, int] = {row["pk_layer"]: row["frames"] for row in rows}
        ended = await on.value(COUNT_ENDS, list(frames), list(frames.values()), state.value, 0)
        finished = await finish_jobs(on, ended)
        dead_letters = [_dead_letter(end, jobs[end.job]) for end in finished]
        if dead_letters:
            await self._dead_letters.add(dead_letters, on=on)
        return finished


def gate_for(kernel: Kernel | None) -> AdmissionGate:
    """The gate for submissions in a caller's transaction; without a policy engine, jobs are queued immediately."""
    return AllowAll() if kernel is None else DeferAll()


def _pending_job(row: Record) -> PendingJob:
    return PendingJob(JobId(row["id"]), row["reason"], policy_input_from_row(row))


def _dead_letter(end: JobEnd, decision: AdmissionDecision) -> DeadLetter:
    why = decision.because or None
    return DeadLetter(kind="job", reason=decision.reason, cause=f"job:{end.job}", job=end.job, error=why)


def _record_metrics(outcome: AdmissionOutcome, denied: Sequence[JobEnd]) -> None:
    for end in denied:
        DENIED.labels(end.topic).inc()
    took_effect = {*outcome.admitted, *outcome.denied, *outcome.held}
    by_verdict: Counter[str] = Counter()
    for job in outcome.asked:
        decision = outcome.decisions[job.id]
        if decision.verdict is AdmissionVerdict.WAIT or job.id in took_effect:
            by_verdict[decision.verdict.value] += 1
        if decision.reason == Reason.POLICY_UNAVAILABLE.value:
            NO_DECISION.labels(job.topic).inc()
    for job in outcome.asked:
        if outcome.decisions[job.id] is FAIL_OPEN_DECISION and job.id in took_effect:
            FAILED_OPEN.labels(job.topic).inc()
    for verdict, jobs in by_verdict.items():
        DECISIONS.labels(verdict).inc(jobs)

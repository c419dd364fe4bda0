"""The gatekeeper: asks the policy about jobs that are PENDING, and does what it says.

It hears of them by a message that was committed with the job (`rota.engine.gate.wake`); what is lost on the way is
found by the replayer. Jobs are decided in batches, and what was decided takes effect in one transaction:

| the policy says | the job becomes |
|---|---|
| ALLOW, ALLOW_WITH_CONSTRAINTS | SCHEDULED, its frames queued |
| REQUIRE_APPROVAL | APPROVAL_REQUIRED, until enough people agree; then it comes here once more |
| THROTTLE | PENDING still; asked again after the rule's delay, or `scheduler.safety_throttle_delay` |
| DENY, or what nobody has heard of | DENIED, through the one finish path, with a dead letter |
| nothing: the breaker is open | PENDING still; asked again after `scheduler.safety_throttle_delay` |
| nothing, for another reason | PENDING still; asked again after 1 to 30 s, doubling |

None of it counts as an attempt to dispatch. With `input_policy.fail_mode` open, silence lets a job run: only while this
server is not ending, only when the kernel cannot be reached (one that fails on a job, or answers nonsense, opens
nothing), and each time it is logged, counted, audited, and the job says so by its word.

No row is locked while the policy thinks. Its word is carried out only on jobs that are still PENDING, so of two who ask
about the same job one takes effect; a word older than `WORD_S`, by the clock of PostgreSQL, queues nothing (we may have
been paused, and the rules changed), and the job is asked about again. If we die before the commit nothing happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

import msgspec
import structlog

from rota.engine import gatekeeper_audit
from rota.engine.finish import COUNT, Finisher, JobEnd, Told, finish_jobs
from rota.engine.gate import ALLOWED, GATE, WORD_S, AskLater, Decision, Gate, Verdict, decision_on
from rota.engine.gate import AllowAll as OpenGate
from rota.engine.gate_asking import ask, seen_in
from rota.engine.gatekeeper_approvals import Gated
from rota.engine.submit_admit import Settled, settle, wait
from rota.infra import faults
from rota.infra.clock import Clock, SystemClock
from rota.infra.nats import ConsumerSpec, Delivery, Reject
from rota.infra.nats import Verdict as Answer
from rota.infra.postgres import Database, Record, Transaction, query
from rota.infra.telemetry import metrics
from rota.model.errors import BreakerOpen, PostgresUnavailable, Unavailable
from rota.model.ids import JobId
from rota.model.lifecycle import JobState
from rota.model.policy import Kernel, Says, Word
from rota.model.reasons import Reason
from rota.policy.asking import Seen, about
from rota.policy.words import said
from rota.queue.dead_letters import DeadLetter

MARK = query(__package__, "gatekeeper_deny")
PENDING = query(__package__, "gatekeeper_pending")

log = structlog.get_logger(__name__)
SPEC: Final = ConsumerSpec(stream="SYS", durable="gate", filter=GATE, ack_wait_s=30.0)
BATCH: Final = 200
ASK_S: Final = 3.0
"""Longer than the client itself waits for the kernel."""
UNAVAILABLE: Final = Decision(Verdict.WAIT, Reason.POLICY_UNAVAILABLE.value)
FAIL_OPEN: Final = "input policy fail-open: safety kernel unreachable"
OPENED: Final = Decision(Verdict.ALLOW, said=said(Word(says=Says.ALLOW, reason=FAIL_OPEN)), because=FAIL_OPEN)

DENIED = metrics.counter("rota_safety_denied", "Jobs that the policy did not let run.", labels=("topic",))
NO_WORD = metrics.counter(
    "rota_safety_unavailable", "Jobs the policy gave no decision on, by topic.", labels=("topic",)
)
FAILED_OPEN = metrics.counter(
    "rota_scheduler_input_fail_open", "Jobs that ran without a word of the policy, by topic.", labels=("topic",)
)
DECIDED = metrics.counter("rota_gate_decisions", "Decisions of the gate that took effect.", labels=("verdict",))

_NEVER: Final = datetime.max.replace(tzinfo=UTC)
_IDS = msgspec.msgpack.Decoder(list[UUID])


class Pending(msgspec.Struct, frozen=True):
    """A job that waits for a decision."""

    id: JobId
    reason: str | None
    seen: Seen

    @property
    def show(self) -> str:
        return self.seen.show

    @property
    def topic(self) -> str:
        return self.seen.topic


class Judged(msgspec.Struct, frozen=True):
    """What came of asking: jobs by what was decided, those left out that had moved on meanwhile."""

    asked: list[Pending]
    decisions: dict[JobId, Decision]
    admitted: list[JobId]
    denied: list[JobId]
    held: list[JobId]


class Gatekeeper:
    def __init__(
        self,
        database: Database,
        finisher: Finisher,
        kernel: Kernel | None = None,
        *,
        throttle_s: float = 5.0,
        fail_open: Callable[[], bool] = lambda: False,
        clock: Clock | None = None,
    ) -> None:
        self.database = database
        self.finisher = finisher
        self.kernel = kernel
        self.gated = Gated(database)
        self.is_ending = False
        """From when on silence opens nothing, whatever is set."""
        self.on_ended: Callable[[list[JobEnd]], None] = _ignore
        self.on_judged: Callable[[Judged], None] = _ignore
        """Called with what took effect, once that is committed."""
        self._throttle_s = throttle_s
        self._fail_open = fail_open
        self._clock = clock or SystemClock()

    async def handle(self, batch: Sequence[Delivery]) -> list[Answer]:
        """Messages that name jobs to decide about."""
        answers: list[Answer] = []
        named: dict[JobId, None] = {}
        for delivery in batch:
            try:
                named |= dict.fromkeys(JobId(job) for job in _IDS.decode(delivery.data))
                answers.append(None)
            except msgspec.DecodeError as error:
                answers.append(Reject(f"A message to the gatekeeper is no list of jobs: {error}."))
        await self.judge_all(list(named))
        faults.at("gatekeeper.after_commit_before_ack")
        return answers

    async def judge_all(self, jobs: Sequence[JobId]) -> None:
        """Decide about all of these; what cannot be decided alone waits alone."""
        for at in range(0, len(jobs), BATCH):
            await self.judge_apart(jobs[at : at + BATCH])

    async def judge_apart(self, jobs: Sequence[JobId]) -> list[Judged]:
        """One batch; if the policy fails on it, each by itself, so that one bad job holds up no other."""
        try:
            return [await self.judge(jobs)]
        except PostgresUnavailable:
            raise
        except Exception:  # noqa: BLE001 - whatever it was: told for the job that it befalls alone
            return [await self._judge_alone(job) for job in jobs]

    async def _judge_alone(self, job: JobId) -> Judged:
        try:
            return await self.judge([job])
        except PostgresUnavailable:
            raise
        except Exception:
            log.exception("policy_failed", job=str(job))
            asked, now = await self._pending([job])
            return await self._carry_out(asked, [UNAVAILABLE] * len(asked), now)

    async def judge(self, jobs: Sequence[JobId]) -> Judged:
        """Ask about those that are PENDING, and do what is said."""
        pending, now = await self._pending(jobs)
        if not pending:
            return Judged([], {}, [], [], [])
        asked_at = self._clock.monotonic()
        decisions = await self._decided(pending)
        faults.at("gatekeeper.after_decision")
        if self._clock.monotonic() - asked_at > WORD_S:
            log.warning("decision_too_old", jobs=len(pending))
            decisions = [UNAVAILABLE] * len(pending)
        return await self._carry_out(pending, decisions, now)

    async def _pending(self, jobs: Sequence[JobId]) -> tuple[list[Pending], datetime]:
        """And a moment of PostgreSQL's before anybody is asked about them."""
        rows = await self.database.rows(PENDING, list(jobs))
        return [_pending(row) for row in rows], rows[0]["now"] if rows else _NEVER

    async def _decided(self, pending: Sequence[Pending]) -> list[Decision]:
        if self.kernel is None:
            return [ALLOWED] * len(pending)
        grouped = about([job.id for job in pending], [job.seen for job in pending])
        try:
            words = await ask(self.kernel, grouped.questions, ASK_S)
        except Unavailable as away:
            return self._silence(pending, away)
        decisions = grouped.each(words, lambda word: decision_on(word, self._throttle_s))
        return await self.gated.with_grants([job.id for job in pending], decisions)

    def _silence(self, pending: Sequence[Pending], away: Exception) -> list[Decision]:
        if self._fail_open() and not self.is_ending:
            log.warning(FAIL_OPEN, jobs=len(pending), reason=str(away))
            return [OPENED] * len(pending)
        log.warning("policy_unavailable", jobs=len(pending), reason=str(away))
        wait_s = self._throttle_s if isinstance(away, BreakerOpen) else 0.0
        return [msgspec.structs.replace(UNAVAILABLE, because=str(away), wait_s=wait_s)] * len(pending)

    async def _carry_out(self, asked: Sequence[Pending], decisions: Sequence[Decision], now: datetime) -> Judged:
        by_job = {job.id: decision for job, decision in zip(asked, decisions, strict=True)}
        told = Told()

        async def finish(on: Transaction, jobs: Mapping[JobId, Decision], state: JobState) -> None:
            told.finished = await self.deny(on, jobs, state)

        async with self.database.transaction() as tx:
            settled = await settle(tx, by_job, finish, until=now + timedelta(seconds=WORD_S))
            await self._ask_again(tx, by_job, settled)
            requested = await self.gated.request(tx, {job: by_job[job] for job in settled.held})
            denied = [end.job for end in told.finished]
            judged = Judged(list(asked), by_job, settled.admitted, denied, settled.held)
            await gatekeeper_audit.append(tx, judged)
            faults.at("gatekeeper.before_commit")
        await self.finisher.tell(told)
        self.on_ended(told.finished)
        self.gated.on_requested(requested)
        _count(judged, told.finished)
        self.on_judged(judged)
        return judged

    async def _ask_again(self, on: Transaction, decisions: Mapping[JobId, Decision], settled: Settled) -> None:
        """What was allowed and is PENDING all the same: by a word that was too old, or by none where others ask."""
        admitted = set(settled.admitted)
        left = [job for job, one in decisions.items() if one.verdict is Verdict.ALLOW and job not in admitted]
        if left:
            await wait(on, dict.fromkeys(left, UNAVAILABLE))

    async def deny(self, on: Transaction, jobs: Mapping[JobId, Decision], state: JobState) -> list[JobEnd]:
        """End jobs that were never queued, each with a dead letter that says why; the others are left as they are."""
        ids = sorted(jobs)
        digests = [one.digest if (one := jobs[job].said) is not None else None for job in ids]
        rows = await on.rows(MARK, ids, state.value, [jobs[job].reason for job in ids], digests)
        frames: dict[UUID, int] = {row["pk_layer"]: row["frames"] for row in rows}
        ended = await on.value(COUNT, list(frames), list(frames.values()), state.value, 0)
        finished = await finish_jobs(on, ended)
        await self.finisher.run_hooks(on, finished)
        letters = [_letter(end, jobs[end.job]) for end in finished]
        if letters:
            await self.finisher.queue.dead_letters.add(letters, on=on)
        return finished


def gate_before(kernel: Kernel | None) -> Gate:
    """What submitters ask in a transaction of the caller's; without a kernel what they submit is queued at once."""
    return OpenGate() if kernel is None else AskLater()


def _pending(row: Record) -> Pending:
    return Pending(JobId(row["id"]), row["reason"], seen_in(row))


def _letter(end: JobEnd, decision: Decision) -> DeadLetter:
    why = decision.because or None
    return DeadLetter(kind="job", reason=decision.reason, cause=f"job:{end.job}", job=end.job, error=why)


def _count(judged: Judged, denied: Sequence[JobEnd]) -> None:
    for end in denied:
        DENIED.labels(end.topic).inc()
    took_effect = {*judged.admitted, *judged.denied, *judged.held}
    by_verdict: Counter[str] = Counter()
    for job in judged.asked:
        decision = judged.decisions[job.id]
        if decision.verdict is Verdict.WAIT or job.id in took_effect:
            by_verdict[decision.verdict.value] += 1
        if decision.reason == Reason.POLICY_UNAVAILABLE.value:
            NO_WORD.labels(job.topic).inc()
    for job in judged.asked:
        if judged.decisions[job.id] is OPENED and job.id in took_effect:
            FAILED_OPEN.labels(job.topic).inc()
    for verdict, jobs in by_verdict.items():
        DECIDED.labels(verdict).inc(jobs)


def _ignore(_told: object) -> None:
    return None

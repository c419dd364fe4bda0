"""The gatekeeper: asks the policy about jobs that are PENDING, and does what it says.

It hears of them by a message that was committed with the job (`rota.engine.gate.wake`); what is lost on the way is
found by the replayer. Jobs are decided in batches, and what was decided takes effect in one transaction:

| the policy says | the job becomes |
|---|---|
| allow | SCHEDULED, its frames queued |
| require_approval | APPROVAL_REQUIRED, until somebody approves; then it comes here again |
| wait | PENDING still, with the reason; asked again after a moment |
| deny | DENIED, through the one finish path, with a dead letter |

No row is locked while the policy thinks. Its word is carried out only on jobs that are still PENDING, so of two who ask
about the same job one takes effect; a word older than `WORD_S` is not carried out at all (we may have been paused, and
the rules changed), and the job is asked about again. If we die before the commit nothing happened.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol
from uuid import UUID

import msgspec
import structlog

from rota.engine.finish import COUNT, Finisher, JobEnd, Told, finish_jobs
from rota.engine.gate import ALLOWED, GATE, AskLater, Decision, Gate, Verdict
from rota.engine.gate import AllowAll as OpenGate
from rota.engine.jobs import Job, Jobs
from rota.engine.submit_admit import settle
from rota.infra import faults
from rota.infra.clock import Clock, SystemClock
from rota.infra.nats import ConsumerSpec, Delivery, Reject
from rota.infra.nats import Verdict as Answer
from rota.infra.postgres import Database, Transaction, query
from rota.infra.telemetry import metrics
from rota.model.errors import PostgresUnavailable, Unavailable
from rota.model.ids import JobId
from rota.model.lifecycle import JobState
from rota.model.reasons import Reason
from rota.queue.dead_letters import DeadLetter

MARK = query(__package__, "gatekeeper_deny")

log = structlog.get_logger(__name__)
SPEC: Final = ConsumerSpec(stream="SYS", durable="gate", filter=GATE, ack_wait_s=30.0)
BATCH: Final = 200
WORD_S: Final = 30.0
UNAVAILABLE: Final = Decision(Verdict.WAIT, Reason.POLICY_UNAVAILABLE.value)

DENIED = metrics.counter("rota_safety_denied", "Jobs that the policy did not let run.", labels=("topic",))
NO_WORD = metrics.counter(
    "rota_safety_unavailable", "Jobs the policy gave no decision on, by topic.", labels=("topic",)
)
DECIDED = metrics.counter("rota_gate_decisions", "Decisions of the gate that took effect.", labels=("verdict",))

_IDS = msgspec.msgpack.Decoder(list[UUID])


class Policy(Protocol):
    async def decide(self, jobs: Sequence[Job]) -> Sequence[Decision]:
        """A decision for each, in their order. Raises `Unavailable` while it cannot say; it is asked again then."""
        ...


class AllowAll:
    """The policy of a Rota without one."""

    async def decide(self, jobs: Sequence[Job]) -> Sequence[Decision]:
        return [ALLOWED] * len(jobs)


def gate_before(policy: Policy | None) -> Gate:
    """What submitters ask where this policy decides; None: nobody does, and what is submitted is queued at once."""
    return OpenGate() if policy is None else AskLater()


class Judged(msgspec.Struct, frozen=True):
    """What came of asking: jobs by what was decided, those left out that had moved on meanwhile."""

    asked: list[Job]
    decisions: dict[JobId, Decision]
    admitted: list[JobId]
    denied: list[JobId]


class Gatekeeper:
    def __init__(
        self, database: Database, finisher: Finisher, policy: Policy | None = None, *, clock: Clock | None = None
    ) -> None:
        self.database = database
        self.finisher = finisher
        self.policy: Policy = policy or AllowAll()
        self.on_ended: Callable[[list[JobEnd]], None] = _ignore
        self.on_judged: Callable[[Judged], None] = _ignore
        """Called with what took effect, once that is committed."""
        self._jobs = Jobs(database)
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
            asked = await self._jobs.many([job])
            return await self._carry_out(asked, [UNAVAILABLE] * len(asked))

    async def judge(self, jobs: Sequence[JobId]) -> Judged:
        """Ask about those that are PENDING, and do what is said."""
        found = await self._jobs.many(jobs)
        waiting = Reason.WAITING_ON_JOB.value
        pending = [job for job in found if job.state is JobState.PENDING and job.reason != waiting]
        if not pending:
            return Judged([], {}, [], [])
        asked_at = self._clock.monotonic()
        decisions = await self._ask(pending)
        faults.at("gatekeeper.after_decision")
        if self._clock.monotonic() - asked_at > WORD_S:
            log.warning("decision_too_old", jobs=len(pending))
            decisions = [UNAVAILABLE] * len(pending)
        return await self._carry_out(pending, decisions)

    async def _ask(self, pending: Sequence[Job]) -> Sequence[Decision]:
        try:
            decisions = await self.policy.decide(pending)
        except Unavailable as away:
            log.warning("policy_unavailable", jobs=len(pending), reason=away.sentence)
            return [UNAVAILABLE] * len(pending)
        assert len(decisions) == len(pending), f"the policy gave {len(decisions)} decisions on {len(pending)} jobs"
        return decisions

    async def _carry_out(self, asked: Sequence[Job], decisions: Sequence[Decision]) -> Judged:
        by_job = {job.id: decision for job, decision in zip(asked, decisions, strict=True)}
        told = Told()

        async def finish(on: Transaction, jobs: Mapping[JobId, str], state: JobState) -> None:
            told.finished = await self.deny(on, jobs, state)

        async with self.database.transaction() as tx:
            admitted = await settle(tx, by_job, finish)
            faults.at("gatekeeper.before_commit")
        await self.finisher.tell(told)
        self.on_ended(told.finished)
        denied = [end.job for end in told.finished]
        _count(asked, by_job, admitted, told.finished)
        judged = Judged(list(asked), by_job, admitted, denied)
        self.on_judged(judged)
        return judged

    async def deny(self, on: Transaction, jobs: Mapping[JobId, str], state: JobState) -> list[JobEnd]:
        """End jobs that were never queued, each with a dead letter that says why; the others are left as they are."""
        rows = await on.rows(MARK, sorted(jobs), state.value, Reason.SAFETY_DENIED.value)
        frames: dict[UUID, int] = {row["pk_layer"]: row["frames"] for row in rows}
        ended = await on.value(COUNT, list(frames), list(frames.values()), state.value, 0)
        finished = await finish_jobs(on, ended)
        await self.finisher.run_hooks(on, finished)
        letters = [_letter(end, jobs[end.job]) for end in finished]
        if letters:
            await self.finisher.queue.dead_letters.add(letters, on=on)
        return finished


def _letter(end: JobEnd, why: str) -> DeadLetter:
    return DeadLetter(
        kind="job", reason=Reason.SAFETY_DENIED.value, cause=f"job:{end.job}", job=end.job, error=why or None
    )


def _count(
    asked: Sequence[Job], decisions: Mapping[JobId, Decision], admitted: Sequence[JobId], denied: Sequence[JobEnd]
) -> None:
    DECIDED.labels(Verdict.ALLOW.value).inc(len(admitted))
    DECIDED.labels(Verdict.DENY.value).inc(len(denied))
    for end in denied:
        DENIED.labels(end.topic).inc()
    waiting: dict[str, Counter[str]] = defaultdict(Counter)
    for job in asked:
        decision = decisions[job.id]
        if decision.verdict in (Verdict.WAIT, Verdict.REQUIRE_APPROVAL):
            waiting[decision.verdict.value][job.topic] += 1
            if decision.reason == Reason.POLICY_UNAVAILABLE.value:
                NO_WORD.labels(job.topic).inc()
    for verdict, topics in waiting.items():
        DECIDED.labels(verdict).inc(topics.total())


def _ignore(_told: object) -> None:
    return None

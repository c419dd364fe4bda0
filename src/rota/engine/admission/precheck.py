"""Asking the policy ahead: before jobs are written, so that what is plainly allowed is queued by the same statement.

Everything that is not an allowance, and every silence, leaves the job to the gatekeeper: it is written as PENDING.
After a silence nobody is asked for a moment, so an absent kernel costs those who submit one wait and not one each.

A word counts for `WORD_S` from a moment before it was asked for, by the clock of PostgreSQL, which compares (`until`).
We may be paused anywhere between the word and the write: the statement then refuses, and the job is written as PENDING.
What is left is a pause of PostgreSQL itself between that comparison, after the last lock that it waits for, and the
commit; no statement can see that, and its time limit bounds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

import structlog

from rota.engine.admission.decision import (
    DECISION_TTL_S,
    DEFERRED,
    AdmissionDecision,
    AdmissionVerdict,
    PrecheckResult,
    admission_decision_from,
)
from rota.engine.admission.policy_call import query_kernel
from rota.infra import failpoints
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, query
from rota.infra.telemetry import metrics
from rota.model.errors import Unavailable
from rota.model.ids import JobId
from rota.model.jobs.validation import ValidatedSubmission
from rota.model.policy.decision import Kernel, PolicyDecision, PolicyRequestGroup
from rota.policy.request_builder import PolicyRequestBuilder

NOW = query(__package__, "gate_now")

log = structlog.get_logger(__name__)
KERNEL_TIMEOUT_S: Final = 3.0
"""Longer than the client itself waits for the kernel."""
COOL_DOWN_S: Final = 1.0
CLOCK_SYNC_INTERVAL_S: Final = 30.0

PRECHECKED = metrics.counter(
    "rota_gate_ahead", "Jobs that the policy was asked about before they were written, by what came.", labels=("came",)
)


class PostgresClock:
    """The clock of PostgreSQL, read now and then and counted on by our own; never ahead of it."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._read: tuple[datetime, float] | None = None

    async def now(self) -> datetime:
        at = self._clock.monotonic()
        if self._read is None or at - self._read[1] > CLOCK_SYNC_INTERVAL_S:
            [row] = await self._database.rows(NOW, urgent=True)
            at = self._clock.monotonic()
            self._read = row["now"], at
        moment, read_at = self._read
        return moment + timedelta(seconds=at - read_at)


class AdmissionPrecheck:
    def __init__(self, database: Database, kernel: Kernel, *, clock: Clock | None = None) -> None:
        self.kernel = kernel
        self._clock = clock or SystemClock()
        self._time = PostgresClock(database, self._clock)
        self._asking = PolicyRequestBuilder()
        self._quiet_until = 0.0

    async def decide(self, jobs: Sequence[JobId], plans: Sequence[ValidatedSubmission]) -> PrecheckResult:
        """Allowed, or LATER; plans that wait for other jobs come to the gate when these have ended."""
        if self._clock.monotonic() < self._quiet_until:
            PRECHECKED.labels("quiet").inc(len(plans))
            return PrecheckResult([DEFERRED] * len(plans))
        at_once = [at for at, plan in enumerate(plans) if not plan.after]
        until = await self._time.now() + timedelta(seconds=DECISION_TTL_S)
        grouped = self._asking.group_submissions([jobs[at] for at in at_once], [plans[at] for at in at_once])
        words = await self._query_kernel(grouped.questions) if at_once else []
        failpoints.hit("gate.after_word")
        decisions = [DEFERRED] * len(plans)
        if words:
            for at, decision in zip(at_once, grouped.map_jobs(words, _allowed_or_deferred), strict=True):
                decisions[at] = decision
        allowed = sum(decision is not DEFERRED for decision in decisions)
        PRECHECKED.labels("allowed").inc(allowed)
        PRECHECKED.labels("later").inc(len(plans) - allowed)
        return PrecheckResult(decisions, until if allowed else None)

    async def _query_kernel(self, questions: list[PolicyRequestGroup]) -> Sequence[PolicyDecision]:
        """No word at all where there is not one for each."""
        try:
            return await query_kernel(self.kernel, questions, KERNEL_TIMEOUT_S)
        except Unavailable as away:
            log.warning("policy_silent", questions=len(questions), reason=away.sentence)
        except Exception:
            log.exception("policy_failed", questions=len(questions))
        self._quiet_until = self._clock.monotonic() + COOL_DOWN_S
        return []


def _allowed_or_deferred(word: PolicyDecision) -> AdmissionDecision:
    decision = admission_decision_from(word, 0.0)
    return decision if decision.verdict is AdmissionVerdict.ALLOW else DEFERRED

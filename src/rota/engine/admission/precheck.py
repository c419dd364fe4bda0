"""Precheck: queries the policy before jobs are written, so that allowed jobs are queued by the same statement.

Every other decision, and every failure, leaves the job to the admission controller: it is written as PENDING. After a
failure the policy is not queried for `COOL_DOWN_S`, so an unavailable policy costs submitters one timeout in total and
not one each.

A policy decision is valid for `DECISION_TTL_S`, measured from before the request was sent, by the clock of PostgreSQL,
which checks it (`until`). The process may be paused anywhere between the decision and the write: the statement then
refuses, and the job is written as PENDING. The remaining window is a pause of PostgreSQL itself between that check,
made after the last lock it waits for, and the commit; no statement can detect that, and the statement timeout bounds
it.
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
from rota.engine.admission.policy_call import KERNEL_TIMEOUT_S, query_kernel
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
COOL_DOWN_S: Final = 1.0
CLOCK_SYNC_INTERVAL_S: Final = 30.0

PRECHECKED = metrics.counter(
    "rota_gate_ahead", "Jobs prechecked by the policy before the write, by result.", labels=("came",)
)


class PostgresClock:
    """The clock of PostgreSQL, read periodically and extrapolated by our own; never ahead of it."""

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
    def __init__(
        self,
        database: Database,
        kernel: Kernel,
        *,
        kernel_timeout_s: float = KERNEL_TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        self.kernel = kernel
        self.kernel_timeout_s = kernel_timeout_s
        self._clock = clock or SystemClock()
        self._time = PostgresClock(database, self._clock)
        self._request_builder = PolicyRequestBuilder()
        self._cool_down_until = 0.0

    async def decide(self, jobs: Sequence[JobId], plans: Sequence[ValidatedSubmission]) -> PrecheckResult:
        """ALLOWED or DEFERRED; submissions that depend on other jobs are decided when those have ended."""
        if self._clock.monotonic() < self._cool_down_until:
            PRECHECKED.labels("quiet").inc(len(plans))
            return PrecheckResult([DEFERRED] * len(plans))
        independent = [at for at, plan in enumerate(plans) if not plan.after]
        until = await self._time.now() + timedelta(seconds=DECISION_TTL_S)
        grouped = self._request_builder.group_submissions(
            [jobs[at] for at in independent], [plans[at] for at in independent]
        )
        policy_decisions = await self._query_kernel(grouped.questions) if independent else []
        failpoints.hit("gate.after_word")
        decisions = [DEFERRED] * len(plans)
        if policy_decisions:
            for at, decision in zip(independent, grouped.map_jobs(policy_decisions, _allowed_or_deferred), strict=True):
                decisions[at] = decision
        allowed = sum(decision is not DEFERRED for decision in decisions)
        PRECHECKED.labels("allowed").inc(allowed)
        PRECHECKED.labels("later").inc(len(plans) - allowed)
        return PrecheckResult(decisions, until if allowed else None)

    async def _query_kernel(self, questions: list[PolicyRequestGroup]) -> Sequence[PolicyDecision]:
        """A decision for each request, or an empty list."""
        try:
            return await query_kernel(self.kernel, questions, self.kernel_timeout_s)
        except Unavailable as error:
            log.warning("policy_unavailable", questions=len(questions), reason=error.sentence)
        except Exception:
            log.exception("policy_failed", questions=len(questions))
        self._cool_down_until = self._clock.monotonic() + COOL_DOWN_S
        return []


def _allowed_or_deferred(policy_decision: PolicyDecision) -> AdmissionDecision:
    decision = admission_decision_from(policy_decision, 0.0)
    return decision if decision.verdict is AdmissionVerdict.ALLOW else DEFERRED

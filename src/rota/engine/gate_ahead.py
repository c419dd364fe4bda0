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

from rota.engine.gate import LATER, WORD_S, Decided, Decision, Verdict, decision_on
from rota.engine.gate_asking import ask
from rota.infra import faults
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, query
from rota.infra.telemetry import metrics
from rota.model.errors import Unavailable
from rota.model.ids import JobId
from rota.model.job_plan import Plan
from rota.model.policy import Kernel, Question, Word
from rota.policy.asking import Asking

NOW = query(__package__, "gate_now")

log = structlog.get_logger(__name__)
ASK_S: Final = 3.0
"""Longer than the client itself waits for the kernel."""
QUIET_S: Final = 1.0
CLOCK_S: Final = 30.0

AHEAD = metrics.counter(
    "rota_gate_ahead", "Jobs that the policy was asked about before they were written, by what came.", labels=("came",)
)


class ServerTime:
    """The clock of PostgreSQL, read now and then and counted on by our own; never ahead of it."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._read: tuple[datetime, float] | None = None

    async def now(self) -> datetime:
        at = self._clock.monotonic()
        if self._read is None or at - self._read[1] > CLOCK_S:
            [row] = await self._database.rows(NOW, urgent=True)
            at = self._clock.monotonic()
            self._read = row["now"], at
        moment, read_at = self._read
        return moment + timedelta(seconds=at - read_at)


class Ahead:
    def __init__(self, database: Database, kernel: Kernel, *, clock: Clock | None = None) -> None:
        self.kernel = kernel
        self._clock = clock or SystemClock()
        self._time = ServerTime(database, self._clock)
        self._asking = Asking()
        self._quiet_until = 0.0

    async def decide(self, jobs: Sequence[JobId], plans: Sequence[Plan]) -> Decided:
        """Allowed, or LATER; plans that wait for other jobs come to the gate when these have ended."""
        if self._clock.monotonic() < self._quiet_until:
            AHEAD.labels("quiet").inc(len(plans))
            return Decided([LATER] * len(plans))
        at_once = [at for at, plan in enumerate(plans) if not plan.after]
        until = await self._time.now() + timedelta(seconds=WORD_S)
        grouped = self._asking.about_plans([jobs[at] for at in at_once], [plans[at] for at in at_once])
        words = await self._ask(grouped.questions) if at_once else []
        faults.at("gate.after_word")
        decisions = [LATER] * len(plans)
        if words:
            for at, decision in zip(at_once, grouped.each(words, _ahead), strict=True):
                decisions[at] = decision
        allowed = sum(decision is not LATER for decision in decisions)
        AHEAD.labels("allowed").inc(allowed)
        AHEAD.labels("later").inc(len(plans) - allowed)
        return Decided(decisions, until if allowed else None)

    async def _ask(self, questions: list[Question]) -> Sequence[Word]:
        """No word at all where there is not one for each."""
        try:
            return await ask(self.kernel, questions, ASK_S)
        except Unavailable as away:
            log.warning("policy_silent", questions=len(questions), reason=away.sentence)
        except Exception:
            log.exception("policy_failed", questions=len(questions))
        self._quiet_until = self._clock.monotonic() + QUIET_S
        return []


def _ahead(word: Word) -> Decision:
    decision = decision_on(word, 0.0)
    return decision if decision.verdict is Verdict.ALLOW else LATER

"""Starts runs that PostgreSQL has begun; ends those at once that were refused, missed their slot or cannot start."""

from __future__ import annotations

from collections.abc import Callable

from rota.agents.completion import RunCompleter
from rota.agents.concurrency_permits import ConcurrencyPermit
from rota.agents.redis_index.index import FinishedRun
from rota.agents.registry import DeclaredAgent
from rota.agents.repository import AgentBeginResult, AgentBeginStatus, AgentRunEnd
from rota.agents.running import START_FAILURES, ActiveRun, AgentRun
from rota.infra.service.periodic import report_failure
from rota.infra.telemetry import metrics
from rota.model.agents import AgentOutcome, AgentRunResult, NextRun, is_missed, plan_next_run
from rota.model.settings.agents import FailureBackoffSettings

REFUSED = metrics.counter("rota_agents_acquire_refused", "Acquired agents whose run was refused.", labels=("reason",))


class RunStarter:
    """`start` runs the body of an agent."""

    def __init__(
        self,
        completer: RunCompleter,
        failure_backoff: FailureBackoffSettings,
        start: Callable[[ActiveRun, DeclaredAgent], None],
    ) -> None:
        self._completer = completer
        self._failure_backoff = failure_backoff
        self._start = start

    def try_start(
        self,
        begin: AgentBeginResult,
        declared: DeclaredAgent,
        now_ms: int,
        acquired_at: float,
        permits: list[ConcurrencyPermit],
    ) -> bool:
        """Whether a run has begun. A run that cannot start here does not block the others."""
        try:
            return self._start_or_skip(begin, declared, now_ms, acquired_at, permits)
        except Exception as error:  # noqa: BLE001 - begun in PostgreSQL, so it must be ended there
            report_failure(f"agent {begin.name!r}", error)
            START_FAILURES.labels(type(error).__name__).inc()
            self._completer.add_end(cancelled_end(begin.name, begin.run, now_ms), declared.spec.group)
            return False

    def _start_or_skip(
        self,
        begin: AgentBeginResult,
        declared: DeclaredAgent,
        now_ms: int,
        acquired_at: float,
        permits: list[ConcurrencyPermit],
    ) -> bool:
        spec = declared.spec
        if begin.verdict is not AgentBeginStatus.BEGUN:
            REFUSED.labels(begin.verdict).inc()
            due_ms = begin.due_ms if begin.verdict is AgentBeginStatus.EARLY else None
            self._completer.add_finished(FinishedRun(begin.name, begin.run, due_ms), spec.group)
            return False
        if not begin.backfill and is_missed(spec, begin.slot_ms, now_ms):
            self._skip(declared, begin, now_ms)
            return False
        until_ms = now_ms + spec.deadline_ms
        agent_run = AgentRun(begin.name, begin.run, begin.slot_ms, now_ms, until_ms, begin.backfill, begin.token)
        self._start(ActiveRun(spec, agent_run, begin.streak, permits[-1], acquired_at), declared)
        permits.pop()  # now owned by the run
        return True

    def _skip(self, declared: DeclaredAgent, begin: AgentBeginResult, now_ms: int) -> None:
        skipped = AgentRunResult(
            outcome=AgentOutcome.SKIPPED, acquired_ms=now_ms, now_ms=now_ms, slot_ms=begin.slot_ms, streak=begin.streak
        )
        plan = plan_next_run(declared.spec, skipped, self._failure_backoff, 0.0, 0.0)
        plan = NextRun(plan.due_ms, plan.slot_ms, begin.streak)
        end = AgentRunEnd(name=begin.name, run=begin.run, outcome=AgentOutcome.SKIPPED, took_ms=0, plan=plan)
        self._completer.add_end(end, declared.spec.group)


def cancelled_end(name: str, run: int, due_ms: int) -> AgentRunEnd:
    """The end of a run for which it is unknown whether PostgreSQL began it; it did not start here."""
    return AgentRunEnd(name=name, run=run, outcome=AgentOutcome.CANCELLED, took_ms=0, plan=NextRun(due_ms, None, None))

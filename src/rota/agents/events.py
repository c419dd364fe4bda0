"""Runs of agents as events, for whoever looks on: that one runs, how it ended, that it cannot be stopped.

The record is PostgreSQL; what is told was committed there. Thousands of runs end within a second of their beginning,
so a beginning is told only of those that still run `BEGUN_S` later: a short run is one event, its end. Telling is an
append to a queue of somebody else's (`rota.engine.events.publisher`), and never waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from rota.agents.repository import AgentRunEnd, RescheduledAgent
from rota.agents.running import ActiveRun

STARTED_EVENT_DELAY_S: Final = 0.2


PublishEvent = Callable[..., None]
"""Of a kind and its facts, as `Teller.tell` does."""


class AgentEventPublisher:
    def __init__(self, tell: PublishEvent | None, replica: str) -> None:
        self._tell = tell
        self._replica = replica

    def run_started(self, run: ActiveRun) -> None:
        if self._tell is not None:
            asyncio.get_running_loop().call_later(STARTED_EVENT_DELAY_S, self._publish_if_running, run)

    def runs_ended(self, ends: Iterable[AgentRunEnd]) -> None:
        """PostgreSQL has ended them."""
        if self._tell is None:
            return
        for end in ends:
            kind = {"failure": str(end.failure)} if end.failure is not None else {}
            self._tell(f"agent.{end.outcome.lower()}", agent=end.name, run=end.run, took_ms=end.took_ms, **kind)

    def runs_lost(self, seized: Iterable[RescheduledAgent]) -> None:
        """Runs of replicas that are gone."""
        if self._tell is not None:
            for each in seized:
                self._tell("agent.lost", agent=each.name, run=each.run)

    def run_quarantined(self, run: ActiveRun) -> None:
        if self._tell is not None:
            self._tell("agent.quarantined", agent=run.name, run=run.number, replica=self._replica)

    def _publish_if_running(self, run: ActiveRun) -> None:
        if self._tell is not None and run.task is not None and not run.task.done():
            self._tell("agent.started", agent=run.name, run=run.number, replica=self._replica)

"""Events of agent runs: started, ended, lost, quarantined.

PostgreSQL is the record; events are published after its commit. Thousands of runs end within a second, so a start is
published only if the run is still active after `STARTED_EVENT_DELAY_S`: a short run is one event, its end. Publishing
appends to a queue (`rota.engine.events.publisher`) and never blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from rota.agents.repository import AgentRunEnd, RescheduledAgent
from rota.agents.running import ActiveRun

STARTED_EVENT_DELAY_S: Final = 0.2


PublishEvent = Callable[..., None]
"""Takes an event kind and its fields, as `EventPublisher.emit` does."""


class AgentEventPublisher:
    def __init__(self, publish: PublishEvent, replica: str) -> None:
        self._publish = publish
        self._replica = replica

    def run_started(self, run: ActiveRun) -> None:
        asyncio.get_running_loop().call_later(STARTED_EVENT_DELAY_S, self._publish_if_running, run)

    def runs_ended(self, ends: Iterable[AgentRunEnd]) -> None:
        """Called with runs that PostgreSQL has ended."""
        for end in ends:
            kind = {"failure": str(end.failure)} if end.failure is not None else {}
            self._publish(f"agent.{end.outcome.lower()}", agent=end.name, run=end.run, took_ms=end.took_ms, **kind)

    def runs_lost(self, seized: Iterable[RescheduledAgent]) -> None:
        """Called with runs of dead replicas."""
        for each in seized:
            self._publish("agent.lost", agent=each.name, run=each.run)

    def run_quarantined(self, run: ActiveRun) -> None:
        self._publish("agent.quarantined", agent=run.name, run=run.number, replica=self._replica)

    def _publish_if_running(self, run: ActiveRun) -> None:
        if run.task is not None and not run.task.done():
            self._publish("agent.started", agent=run.name, run=run.number, replica=self._replica)

"""Which replicas live, and so which workers each of them feeds.

Every replica says once a second that it lives, and hears the others. A worker is fed by one of them (rendezvous hashing
over the names heard lately), so that two rarely fill the same place. For a moment they may disagree: then the worker
refuses what is too much, and nothing else depends on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final
from uuid import UUID

from rota.infra.clock import Clock, SystemClock
from rota.infra.nats import Bus, CoreMessage
from rota.infra.replica import replica_name
from rota.infra.service import Lifecycle
from rota.model.errors import NatsUnavailable
from rota.placement import owns_worker

SUBJECT: Final = "sys.server.heartbeat"
HEARTBEAT_INTERVAL_S: Final = 1.0
HEARTBEAT_TIMEOUT_S: Final = 4.0
NAME_MAX: Final = 200


class ClusterMembership:
    def __init__(self, bus: Bus, name: str | None = None, clock: Clock | None = None) -> None:
        self.bus = bus
        self.name = name or replica_name()
        self._clock = clock or SystemClock()
        self._heard: dict[str, float] = {}
        self._present: list[str] = [self.name]
        self.on_change: Callable[[], None] = _ignore
        """Called when a replica came or went."""
        self.hears_itself_since: float | None = None
        """Since when we hear ourselves without a gap: who does not can judge nobody else's silence."""

    def owns_worker(self, worker: UUID) -> bool:
        return owns_worker(self.name, worker, self._present)

    def live_replicas(self) -> list[str]:
        """Replicas heard lately; ourselves in any case."""
        now = self._clock.monotonic()
        lately = {name for name, at in self._heard.items() if now - at < HEARTBEAT_TIMEOUT_S}
        return sorted(lately | {self.name})

    def is_isolated(self) -> bool:
        """Whether our own voice has not come back lately."""
        return self._clock.monotonic() - self._heard.get(self.name, float("-inf")) > 2.5 * HEARTBEAT_INTERVAL_S

    async def run(self, life: Lifecycle) -> None:
        async with self.bus.subscribe_core(SUBJECT) as heard, asyncio.TaskGroup() as tasks:
            speaking = tasks.create_task(self._send_heartbeats())
            hearing = tasks.create_task(self._receive_heartbeats(heard))
            life.ready()
            await life.until_draining()
            speaking.cancel()
            hearing.cancel()

    async def _send_heartbeats(self) -> None:
        while True:
            try:
                await self.bus.publish_core(SUBJECT, self.name.encode())
            except NatsUnavailable:
                self.hears_itself_since = None
            self._refresh()
            await self._clock.sleep(HEARTBEAT_INTERVAL_S)

    async def _receive_heartbeats(self, heard: asyncio.Queue[CoreMessage]) -> None:
        while True:
            message = await heard.get()
            self.receive_heartbeat(message.data)

    def receive_heartbeat(self, data: bytes) -> None:
        """Somebody says its name. What cannot be one is passed over: nobody would feed the workers it was given."""
        name = data.decode(errors="replace")
        if 0 < len(name) <= NAME_MAX and name.isprintable() and "\ufffd" not in name:
            self._record_heartbeat(name)

    def _record_heartbeat(self, name: str) -> None:
        now = self._clock.monotonic()
        if name == self.name and (self.hears_itself_since is None or self.is_isolated()):
            self.hears_itself_since = now
        self._heard[name] = now
        if name not in self._present:
            self._refresh()

    def _refresh(self) -> None:
        present = self.live_replicas()
        self._heard = {name: self._heard[name] for name in present if name in self._heard}
        if present != self._present:
            self._present = present
            self.on_change()


def _ignore() -> None:
    return None

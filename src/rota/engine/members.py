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
from rota.infra.nats import Bus, Heard
from rota.infra.replica import replica_name
from rota.infra.service import Lifecycle
from rota.model.errors import NatsUnavailable
from rota.placement import feeds

SUBJECT: Final = "sys.server.heartbeat"
EVERY_S: Final = 1.0
SILENT_S: Final = 4.0
NAME_MAX: Final = 200


class Members:
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

    def feeds(self, worker: UUID) -> bool:
        return feeds(self.name, worker, self._present)

    def present(self) -> list[str]:
        """Replicas heard lately; ourselves in any case."""
        now = self._clock.monotonic()
        lately = {name for name, at in self._heard.items() if now - at < SILENT_S}
        return sorted(lately | {self.name})

    def deaf(self) -> bool:
        """Whether our own voice has not come back lately."""
        return self._clock.monotonic() - self._heard.get(self.name, float("-inf")) > 2.5 * EVERY_S

    async def run(self, life: Lifecycle) -> None:
        async with self.bus.hear(SUBJECT) as heard, asyncio.TaskGroup() as tasks:
            speaking = tasks.create_task(self._speak())
            hearing = tasks.create_task(self._hear(heard))
            life.ready()
            await life.until_draining()
            speaking.cancel()
            hearing.cancel()

    async def _speak(self) -> None:
        while True:
            try:
                await self.bus.tell(SUBJECT, self.name.encode())
            except NatsUnavailable:
                self.hears_itself_since = None
            self._look()
            await self._clock.sleep(EVERY_S)

    async def _hear(self, heard: asyncio.Queue[Heard]) -> None:
        while True:
            message = await heard.get()
            self.hear(message.data)

    def hear(self, data: bytes) -> None:
        """Somebody says its name. What cannot be one is passed over: nobody would feed the workers it was given."""
        name = data.decode(errors="replace")
        if 0 < len(name) <= NAME_MAX and name.isprintable() and "\ufffd" not in name:
            self._note(name)

    def _note(self, name: str) -> None:
        now = self._clock.monotonic()
        if name == self.name and (self.hears_itself_since is None or self.deaf()):
            self.hears_itself_since = now
        self._heard[name] = now
        if name not in self._present:
            self._look()

    def _look(self) -> None:
        present = self.present()
        self._heard = {name: self._heard[name] for name in present if name in self._heard}
        if present != self._present:
            self._present = present
            self.on_change()


def _ignore() -> None:
    return None

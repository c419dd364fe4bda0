"""Cluster membership: which replicas are alive, and which workers each of them dispatches to.

Every replica sends a heartbeat each second and receives those of the others. A worker is owned by one replica
(rendezvous hashing over the live names), so that two rarely fill the same slots. They may disagree briefly: the worker
then refuses what exceeds its slots, and nothing else depends on it.

A replica is suspected before it counts as dead: what it may have left undone is repaired early, because the repair is
harmless when it is alive after all.

With its heartbeat a replica announces the features of its version that all replicas must know before one may use them.
They have a subject of their own, because earlier versions expect nothing but a name in a heartbeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from uuid import UUID

import msgspec

from rota.infra.clock import Clock, SystemClock
from rota.infra.nats import Bus, CoreMessage
from rota.infra.replica import replica_name
from rota.infra.service import Lifecycle
from rota.model.errors import NatsUnavailable
from rota.placement import owns_worker

SUBJECT: Final = "sys.server.heartbeat"
FEATURES_SUBJECT: Final = "sys.server.features"
SERIES: Final = "series"
"""Frames in series (ADR 23): others count rows of `proc` as charges, and a frame that is handed back as refused."""
FEATURES: Final = (SERIES,)
HEARTBEAT_INTERVAL_S: Final = 1.0
HEARTBEAT_TIMEOUT_S: Final = 4.0
SUSPECTED_AFTER_S: Final = 2.5
NAME_MAX: Final = 200


class FeatureAnnouncement(msgspec.Struct, frozen=True):
    name: str
    features: tuple[str, ...]


class ClusterMembership:
    def __init__(
        self,
        bus: Bus,
        on_change: Callable[[Callable[[UUID], bool]], None],
        on_suspicion: Callable[[], None],
        name: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.bus = bus
        self.name = name or replica_name()
        self._clock = clock or SystemClock()
        self._last_heartbeat: dict[str, float] = {}
        self._features: dict[str, tuple[str, ...]] = {self.name: FEATURES}
        self._present: list[str] = [self.name]
        self._on_change = on_change
        """Called when a replica joined or left."""
        self._on_suspicion = on_suspicion
        """Called when another replica has fallen silent, and again when it has left."""
        self._suspected: set[str] = set()
        self.hears_itself_since: float | None = None
        """Since when our own heartbeats arrive without a gap; without them, silence of others means nothing."""

    def owns_worker(self, worker: UUID) -> bool:
        return owns_worker(self.name, worker, self._present)

    def live_replicas(self) -> list[str]:
        """Replicas with a recent heartbeat; always includes this one."""
        now = self._clock.monotonic()
        recent = {name for name, at in self._last_heartbeat.items() if now - at < HEARTBEAT_TIMEOUT_S}
        return sorted(recent | {self.name})

    def all_know(self, feature: str) -> bool:
        """Whether every live replica has announced this feature."""
        return all(feature in self._features.get(name, ()) for name in self._present)

    @property
    def last_heard_itself(self) -> float:
        """When our last own heartbeat arrived, by the monotonic clock."""
        return self._last_heartbeat.get(self.name, float("-inf"))

    def is_isolated(self) -> bool:
        """Whether our own heartbeats have stopped arriving."""
        return self._clock.monotonic() - self.last_heard_itself > 2.5 * HEARTBEAT_INTERVAL_S

    async def run(self, life: Lifecycle) -> None:
        async with (
            self.bus.subscribe_core(SUBJECT) as heartbeats,
            self.bus.subscribe_core(FEATURES_SUBJECT) as features,
            asyncio.TaskGroup() as tasks,
        ):
            running = [
                tasks.create_task(self._send_heartbeats()),
                tasks.create_task(_receive_each(heartbeats, self.receive_heartbeat)),
                tasks.create_task(_receive_each(features, self.receive_features)),
            ]
            life.ready()
            await life.until_draining()
            for task in running:
                task.cancel()

    async def _send_heartbeats(self) -> None:
        announcement = msgspec.json.encode(FeatureAnnouncement(self.name, FEATURES))
        while True:
            try:
                await self.bus.publish_core(FEATURES_SUBJECT, announcement)
                await self.bus.publish_core(SUBJECT, self.name.encode())
            except NatsUnavailable:
                self.hears_itself_since = None
            self._refresh()
            await self._clock.sleep(HEARTBEAT_INTERVAL_S)

    def receive_heartbeat(self, data: bytes) -> None:
        """Record a heartbeat. Invalid names are ignored: workers assigned to them would have no dispatcher."""
        name = data.decode(errors="replace")
        if 0 < len(name) <= NAME_MAX and name.isprintable() and "\ufffd" not in name:
            self._record_heartbeat(name)

    def receive_features(self, data: bytes) -> None:
        """Record the features of a replica that has sent a heartbeat, or is about to; others are not kept."""
        with suppress(msgspec.DecodeError):
            announcement = msgspec.json.decode(data, type=FeatureAnnouncement)
            if announcement.name in self._present or len(self._features) <= 2 * len(self._present):
                self._features[announcement.name] = announcement.features

    def _record_heartbeat(self, name: str) -> None:
        now = self._clock.monotonic()
        if name == self.name and (self.hears_itself_since is None or self.is_isolated()):
            self.hears_itself_since = now
        self._last_heartbeat[name] = now
        if name not in self._present:
            self._refresh()

    def _refresh(self) -> None:
        present = self.live_replicas()
        self._suspect(self._clock.monotonic() - SUSPECTED_AFTER_S)
        if set(self._present) - set(present):
            self._on_suspicion()
        self._last_heartbeat = {name: self._last_heartbeat[name] for name in present if name in self._last_heartbeat}
        if present != self._present:
            self._present = present
            self._features = {name: self._features[name] for name in present if name in self._features}
            self._on_change(self.owns_worker)

    def _suspect(self, before_s: float) -> None:
        silent = {name for name, at in self._last_heartbeat.items() if at < before_s and name != self.name}
        if silent - self._suspected:
            self._on_suspicion()
        self._suspected = silent


async def _receive_each(messages: asyncio.Queue[CoreMessage], receive: Callable[[bytes], None]) -> None:
    while True:
        message = await messages.get()
        receive(message.data)

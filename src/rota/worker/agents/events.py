"""Publishes events of a worker's agent runs. Agents do not need NATS: in an outage events queue, then some are dropped.

Crash of the worker: unpublished events, a few milliseconds of them, are lost. The replica that takes over reports the
runs it had started as lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from rota.engine.events.publisher import EventPublisher
from rota.infra.nats import Bus, BusMessage, NatsTarget, PublishReceipt, StreamSpec
from rota.infra.nats.topology import events_stream
from rota.infra.service import Lifecycle
from rota.model.errors import NatsUnavailable, RotaError
from rota.model.settings.servers import NatsSettings


class LazyBus:
    """Connects on the first publish, and again after a failed attempt."""

    def __init__(self, target: NatsTarget, streams: Sequence[StreamSpec]) -> None:
        self._target = target
        self._streams = streams
        self._bus: Bus | None = None

    async def publish_many(self, messages: Sequence[BusMessage], /) -> Sequence[PublishReceipt]:
        try:
            bus = self._bus or await self._connect()
        except RotaError as error:
            raise NatsUnavailable(error.sentence) from error
        return await bus.publish_many(messages)

    async def _connect(self) -> Bus:
        bus = await Bus.connect(self._target)
        try:
            await bus.ensure(self._streams)
        except BaseException:
            await bus.close()
            raise
        self._bus = bus
        return bus

    async def close(self) -> None:
        if self._bus is not None:
            await self._bus.close()


class AgentEvents:
    """`Service("agent_events", AgentEvents(...).run)`: list it before the agents service, so that it outlives it."""

    def __init__(self, target: NatsTarget, settings: NatsSettings) -> None:
        self._bus = LazyBus(target, [events_stream(settings)])
        self.publisher = EventPublisher(None, self._bus)

    async def run(self, life: Lifecycle) -> None:
        try:
            await self.publisher.run(life)
        finally:
            await self._bus.close()

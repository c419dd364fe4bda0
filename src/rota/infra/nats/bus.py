"""The bus: publish with message ids, consume with explicit answers, on streams that are declared.

    bus = await Bus.connect(NatsTarget(url=...))
    await bus.ensure([SYS, RESULTS])
    await bus.publish(Message(subject="sys.job.submit", data=b"...", msg_id="42:1"))
    async with bus.consumer(RESULTS) as results:
        async for batch in results.batches():
            ...

PostgreSQL is the record and the bus is disposable: NATS may lose acknowledged messages when power fails, and its whole
data may be wiped under us. So the bus remembers what was declared and makes it anew when it is gone, and whoever needs
a message to arrive keeps it in PostgreSQL until its effect is there, too (the outbox, and sweepers above it).

Delivery is at least once, in no promised order across redeliveries. What need not arrive (heartbeats, wake-ups,
questions that are asked again) is told past the streams: `tell`, `hear`, `ask`, `answer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final, Self

import msgspec
import structlog
from nats.aio.msg import Msg

from rota.infra.clock import Clock, SystemClock
from rota.infra.nats.connection import NatsConnection
from rota.infra.nats.consumer import Consumer
from rota.infra.nats.jetstream import JetStream, StoredMessage, StreamState
from rota.infra.nats.messages import BusMessage, PublishOutcome, PublishReceipt
from rota.infra.nats.ordered_reader import OrderedReader
from rota.infra.nats.publisher import NO_STREAM, JetStreamPublisher
from rota.infra.nats.streams import ConsumerSpec, NatsNames, StreamSpec, stream_for
from rota.infra.nats.target import NatsTarget
from rota.model.errors import InvalidInput, NatsUnavailable, SetupFailed

log = structlog.get_logger(__name__)

_MAX_DELIVERIES_SUBJECT: Final = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
_READY_POLL_INTERVAL_S = 0.05
_ADVISORY_QUEUE_MAX = 1024
CORE_QUEUE_MAX: Final = 10_000


class MaxDeliveriesAdvisory(msgspec.Struct, frozen=True, kw_only=True):
    """NATS gave a message up: no delivery was answered. It stays in its stream, unseen by the consumer."""

    stream: str
    consumer: str
    stream_seq: int
    deliveries: int


class CoreMessage(msgspec.Struct, frozen=True):
    """Told past the streams. `reply` is where an answer is awaited."""

    subject: str
    data: bytes
    reply: str = ""


class Bus:
    """One process's bus. Make it with `connect`, end it with `close`."""

    def __init__(self, target: NatsTarget, clock: Clock | None = None) -> None:
        self.target = target
        self._clock = clock or SystemClock()
        self._names = NatsNames(target.prefix)
        self._connection = NatsConnection(target)
        self._jetstream = JetStream(self._connection, self._names)
        self._publisher = JetStreamPublisher(self._connection, self._names)
        self._streams: dict[str, StreamSpec] = {}
        self._consumers: dict[tuple[str, str], ConsumerSpec] = {}

    @classmethod
    async def connect(cls, target: NatsTarget, clock: Clock | None = None) -> Self:
        """Reach NATS and its JetStream, so that a wrong URL, password or server is known now."""
        bus = cls(target, clock)
        await bus._connection.open()
        try:
            await bus._until_jetstream_answers()
            await bus._publisher.open()
        except BaseException:
            await bus.close()
            raise
        return bus

    async def close(self) -> None:
        """May be called again. Messages that were delivered and not answered come again, here or elsewhere."""
        await self._connection.close()

    @property
    def connected(self) -> bool:
        return self._connection.connected

    async def until_connected(self, timeout_s: float) -> bool:
        return await self._connection.until_connected(timeout_s)

    async def check(self) -> None:
        """For readiness: raises unless JetStream answers."""
        await self._jetstream.check()

    async def ensure(self, specs: Iterable[StreamSpec | ConsumerSpec]) -> None:
        """Make streams and consumers as declared, and remember them. Any number of replicas may do so at once."""
        wanted = list(specs)
        streams = [spec for spec in wanted if isinstance(spec, StreamSpec)]
        consumers = [spec for spec in wanted if isinstance(spec, ConsumerSpec)]
        self._streams.update((spec.name, spec) for spec in streams)
        for spec in consumers:
            assert spec.stream in self._streams, f"consumer {spec.durable} reads stream {spec.stream}: declare it, too"
            self._consumers[spec.stream, spec.durable] = spec
        await self._jetstream.ensure(streams, consumers)

    async def publish(self, message: BusMessage) -> PublishReceipt:
        """Store one message. NatsUnavailable means "unknown": publish it again under the same id."""
        (receipt,) = await self.publish_many([message])
        if receipt.outcome is PublishOutcome.REJECTED:
            raise InvalidInput(f"The message for {message.subject!r} cannot be published: {receipt.reason}.")
        if receipt.outcome is PublishOutcome.UNSETTLED:
            raise NatsUnavailable(
                f"NATS at {self.target.address} did not confirm a message for {message.subject!r} ({receipt.reason}): "
                "publish it again under the same id.",
                address=self.target.address,
            )
        return receipt

    async def publish_many(self, messages: Sequence[BusMessage]) -> list[PublishReceipt]:
        """Send all, then await all acknowledgements: one receipt per message, in order, within `publish_timeout_s`.

        Raises NatsUnavailable only when nothing was sent. Messages of one call are stored in its order, except those
        whose stream had to be made anew.
        """
        deadline = asyncio.get_running_loop().time() + self.target.publish_timeout_s
        receipts = await self._publisher.publish(messages, deadline)
        homeless = [place for place, receipt in enumerate(receipts) if receipt.reason == NO_STREAM]
        if homeless:
            again = await self._publish_unrouted([messages[place] for place in homeless], deadline)
            for place, receipt in zip(homeless, again, strict=True):
                receipts[place] = receipt
        return receipts

    @asynccontextmanager
    async def consumer(self, spec: ConsumerSpec) -> AsyncIterator[Consumer]:
        """A reader of a consumer that was ensured before."""
        assert (spec.stream, spec.durable) in self._consumers, f"consumer {spec.durable} was not ensured"
        consumer = Consumer(self._connection, self._names, spec, self._restore_consumer, self._clock)
        await consumer.open()
        try:
            yield consumer
        finally:
            await consumer.close()

    @asynccontextmanager
    async def ordered_reader(self, stream: str) -> AsyncIterator[OrderedReader]:
        """Messages of a declared stream from now on, in order, without answering for any of them."""
        assert stream in self._streams, f"stream {stream} was not ensured"
        tail = OrderedReader(self._connection, self._jetstream, stream, self._restore_stream, self._clock)
        try:
            yield tail
        finally:
            await tail.close()

    @asynccontextmanager
    async def max_deliveries_advisories(self) -> AsyncIterator[asyncio.Queue[MaxDeliveriesAdvisory]]:
        """Messages of our streams that NATS gives up from now on; each is told to one replica.

        Only consumers with few `spare_deliveries` give any up. An advisory is told once and not kept: a hint for
        an alarm or a dead letter, never the record.
        """
        queue: asyncio.Queue[MaxDeliveriesAdvisory] = asyncio.Queue(_ADVISORY_QUEUE_MAX)

        async def on_advisory(msg: Msg) -> None:
            told = msgspec.json.decode(msg.data, type=MaxDeliveriesAdvisory)
            bare = self._names.bare_stream(told.stream)
            if bare in self._streams and self._names.stream(bare) == told.stream and not queue.full():
                queue.put_nowait(msgspec.structs.replace(told, stream=bare))

        group = f"rota-exhausted-{self.target.prefix.lower()}"
        route = await self._connection.subscribe(f"{_MAX_DELIVERIES_SUBJECT}.>", on_advisory, queue=group)
        try:
            yield queue
        finally:
            await self._connection.unsubscribe(route)

    async def publish_core(self, subject: str, data: bytes) -> None:
        """To whoever hears `subject` now. Nothing is kept, and nobody may be listening."""
        await self._connection.send(self._names.subject(subject), data)

    @asynccontextmanager
    async def subscribe_core(
        self, subject: str, *, group: str = "", most: int = CORE_QUEUE_MAX
    ) -> AsyncIterator[asyncio.Queue[CoreMessage]]:
        """What is told on `subject` (a pattern) from now on; with a `group`, one of its members hears each.

        When the reader is `most` behind, the newest are dropped: what is told this way is told again.
        """
        queue: asyncio.Queue[CoreMessage] = asyncio.Queue(most)

        async def on_message(msg: Msg) -> None:
            if not queue.full():
                queue.put_nowait(CoreMessage(self._names.bare_subject(msg.subject), msg.data, msg.reply))

        route = await self._connection.subscribe(self._names.subject(subject), on_message, queue=group)
        try:
            yield queue
        finally:
            await self._connection.unsubscribe(route)

    async def request(self, subject: str, data: bytes) -> bytes:
        """The answer of one who hears `subject`; NatsUnavailable when there is none in time."""
        return await self._connection.request(self._names.subject(subject), data)

    async def respond(self, question: CoreMessage, data: bytes) -> None:
        if question.reply:
            await self._connection.send(question.reply, data)

    async def ack_floor(self, spec: ConsumerSpec) -> int | None:
        """Up to which message of its stream a consumer has answered everything; None when it has answered all."""
        return await self._jetstream.ack_floor(spec)

    @property
    def server_version(self) -> str:
        """Of the server we are connected to; empty while there is none."""
        return self._connection.server_version

    async def get_message(self, stream: str, stream_seq: int) -> StoredMessage | None:
        """A message as its stream keeps it, or None when it is gone."""
        return await self._jetstream.get_message(stream, stream_seq)

    async def last_message(self, stream: str, subject: str) -> StoredMessage | None:
        """The last message of one subject that a stream keeps."""
        return await self._jetstream.last_message(stream, subject)

    async def subjects(self, stream: str, pattern: str) -> list[str]:
        """Subjects that fit a pattern and of which a stream keeps a message."""
        return await self._jetstream.subjects(stream, pattern)

    async def stream_state(self, stream: str) -> StreamState | None:
        """What a stream has now; None when there is no such stream."""
        return await self._jetstream.stream_state(stream)

    async def _until_jetstream_answers(self) -> None:
        """A server that has just started listens before its JetStream does."""
        deadline = self._clock.monotonic() + self.target.connect_timeout_s
        while True:
            try:
                return await self._jetstream.check()
            except NatsUnavailable:
                if self._clock.monotonic() >= deadline:
                    raise
            await self._clock.sleep(_READY_POLL_INTERVAL_S)

    async def _publish_unrouted(self, messages: Sequence[BusMessage], deadline: float) -> list[PublishReceipt]:
        """No stream took these: NATS has lost it, or none was ever declared for them."""
        homes = [stream_for(message.subject, self._streams.values()) for message in messages]
        lost = [message for message, home in zip(messages, homes, strict=True) if home]
        again = iter(
            await self._restore_and_publish(lost, {home.name for home in homes if home}, deadline) if lost else ()
        )
        return [
            next(again)
            if home
            else PublishReceipt(PublishOutcome.REJECTED, reason=f"no declared stream takes subject {message.subject!r}")
            for message, home in zip(messages, homes, strict=True)
        ]

    async def _restore_and_publish(
        self, messages: Sequence[BusMessage], streams: set[str], deadline: float
    ) -> list[PublishReceipt]:
        try:
            async with asyncio.timeout_at(deadline):
                for name in streams:
                    await self._restore_stream(name)
            return await self._publisher.publish(messages, deadline)
        except (NatsUnavailable, SetupFailed, TimeoutError) as error:
            log.warning("streams_not_restored", streams=sorted(streams), kind=type(error).__name__)
            return [PublishReceipt(PublishOutcome.UNSETTLED, reason="its stream is gone")] * len(messages)

    async def _restore_consumer(self, spec: ConsumerSpec) -> None:
        await self._restore_stream(spec.stream)

    async def _restore_stream(self, name: str) -> None:
        """Make a stream that NATS has lost anew, with every consumer that was declared for it."""
        consumers = [spec for spec in self._consumers.values() if spec.stream == name]
        await self._jetstream.ensure([self._streams[name]], consumers)

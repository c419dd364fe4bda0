"""The bus: publish with message ids and consume with explicit acknowledgement, on declared streams.

    bus = await Bus.connect(NatsTarget(url=...))
    await bus.ensure([SYS, RESULTS])
    await bus.publish(BusMessage(subject="sys.job.submit", data=b"...", msg_id="42:1"))
    async with bus.consumer(RESULTS) as results:
        async for batch in results.batches():
            ...

PostgreSQL is the system of record and the bus is disposable: NATS may lose acknowledged messages on power failure, and
its data may be wiped while Rota runs. So the bus remembers its declarations and re-creates lost streams, and a message
that must arrive stays in PostgreSQL until its effect is recorded there (outbox, reconcilers above it).

Delivery is at least once; order is not preserved across redeliveries. Messages that may be lost (heartbeats, wake-ups,
repeated requests) bypass the streams: `publish_core`, `subscribe_core`, `request`, `respond`.
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
    """NATS stopped delivering a message after its last unacknowledged delivery. The message stays in its stream."""

    stream: str
    consumer: str
    stream_seq: int
    deliveries: int


class CoreMessage(msgspec.Struct, frozen=True):
    """A message outside the streams. `reply` is the subject that expects the response."""

    subject: str
    data: bytes
    reply: str = ""


class Bus:
    """The bus of one process. Create it with `connect`, end it with `close`."""

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
        """Connect to NATS and JetStream, so that a wrong URL, password or server fails on start."""
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
        """Idempotent. Unacknowledged deliveries are redelivered, here or elsewhere."""
        await self._connection.close()

    @property
    def connected(self) -> bool:
        return self._connection.connected

    async def until_connected(self, timeout_s: float) -> bool:
        return await self._connection.until_connected(timeout_s)

    async def check(self) -> None:
        """For readiness: raise unless JetStream answers."""
        await self._jetstream.check()

    async def ensure(self, specs: Iterable[StreamSpec | ConsumerSpec]) -> None:
        """Create streams and consumers as declared, and remember them. Safe on several replicas concurrently."""
        declared = list(specs)
        streams = [spec for spec in declared if isinstance(spec, StreamSpec)]
        consumers = [spec for spec in declared if isinstance(spec, ConsumerSpec)]
        self._streams.update((spec.name, spec) for spec in streams)
        for spec in consumers:
            assert spec.stream in self._streams, (
                f"consumer {spec.durable} reads stream {spec.stream}: declare it as well"
            )
            self._consumers[spec.stream, spec.durable] = spec
        await self._jetstream.ensure(streams, consumers)

    async def publish(self, message: BusMessage) -> PublishReceipt:
        """Store one message. NatsUnavailable means an unknown outcome: publish again under the same id."""
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

        Raises NatsUnavailable only when nothing was sent. Messages of one call are stored in order, except those whose
        stream had to be re-created.
        """
        deadline = asyncio.get_running_loop().time() + self.target.publish_timeout_s
        receipts = await self._publisher.publish(messages, deadline)
        unrouted = [index for index, receipt in enumerate(receipts) if receipt.reason == NO_STREAM]
        if unrouted:
            retried = await self._publish_unrouted([messages[index] for index in unrouted], deadline)
            for index, receipt in zip(unrouted, retried, strict=True):
                receipts[index] = receipt
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
        """Messages of a declared stream from now on, in order, without acknowledgement."""
        assert stream in self._streams, f"stream {stream} was not ensured"
        reader = OrderedReader(self._connection, self._jetstream, stream, self._restore_stream, self._clock)
        try:
            yield reader
        finally:
            await reader.close()

    @asynccontextmanager
    async def max_deliveries_advisories(self) -> AsyncIterator[asyncio.Queue[MaxDeliveriesAdvisory]]:
        """Messages of our streams that NATS stops delivering from now on; one replica receives each advisory.

        Only consumers with few `spare_deliveries` produce any. Advisories are not stored: use them as a hint for an
        alert or a dead letter, never as the record.
        """
        queue: asyncio.Queue[MaxDeliveriesAdvisory] = asyncio.Queue(_ADVISORY_QUEUE_MAX)

        async def on_advisory(msg: Msg) -> None:
            advisory = msgspec.json.decode(msg.data, type=MaxDeliveriesAdvisory)
            bare = self._names.bare_stream(advisory.stream)
            if bare in self._streams and self._names.stream(bare) == advisory.stream and not queue.full():
                queue.put_nowait(msgspec.structs.replace(advisory, stream=bare))

        group = f"rota-exhausted-{self.target.prefix.lower()}"
        subscription = await self._connection.subscribe(f"{_MAX_DELIVERIES_SUBJECT}.>", on_advisory, queue=group)
        try:
            yield queue
        finally:
            await self._connection.unsubscribe(subscription)

    async def publish_core(self, subject: str, data: bytes) -> None:
        """Publish to the current subscribers of `subject`. Not stored; there may be no subscriber."""
        await self._connection.send(self._names.subject(subject), data)

    @asynccontextmanager
    async def subscribe_core(
        self, subject: str, *, group: str = "", most: int = CORE_QUEUE_MAX
    ) -> AsyncIterator[asyncio.Queue[CoreMessage]]:
        """Core messages on `subject` (a pattern) from now on; with a `group`, one member receives each.

        When the reader is `most` messages behind, the newest are dropped: senders repeat core messages.
        """
        queue: asyncio.Queue[CoreMessage] = asyncio.Queue(most)

        async def on_message(msg: Msg) -> None:
            if not queue.full():
                queue.put_nowait(CoreMessage(self._names.bare_subject(msg.subject), msg.data, msg.reply))

        subscription = await self._connection.subscribe(self._names.subject(subject), on_message, queue=group)
        try:
            yield queue
        finally:
            await self._connection.unsubscribe(subscription)

    async def request(self, subject: str, data: bytes) -> bytes:
        """The response of one subscriber of `subject`; NatsUnavailable when none arrives in time."""
        return await self._connection.request(self._names.subject(subject), data)

    async def respond(self, request: CoreMessage, data: bytes) -> None:
        if request.reply:
            await self._connection.send(request.reply, data)

    async def ack_floor(self, spec: ConsumerSpec) -> int | None:
        """The sequence up to which a consumer has acknowledged everything; None when nothing is pending."""
        return await self._jetstream.ack_floor(spec)

    @property
    def server_version(self) -> str:
        """Version of the connected server; empty while disconnected."""
        return self._connection.server_version

    @property
    def max_payload(self) -> int:
        """The server's limit for one message in bytes; NatsUnavailable while disconnected."""
        return self._connection.max_payload

    async def get_message(self, stream: str, stream_seq: int) -> StoredMessage | None:
        """A stored message, or None when it is gone."""
        return await self._jetstream.get_message(stream, stream_seq)

    async def last_message(self, stream: str, subject: str) -> StoredMessage | None:
        """The latest message of one subject in a stream."""
        return await self._jetstream.last_message(stream, subject)

    async def subjects(self, stream: str, pattern: str) -> list[str]:
        """The subjects matching a pattern that have messages in a stream."""
        return await self._jetstream.subjects(stream, pattern)

    async def stream_state(self, stream: str) -> StreamState | None:
        """The current state of a stream; None when it does not exist."""
        return await self._jetstream.stream_state(stream)

    async def _until_jetstream_answers(self) -> None:
        """Poll: a starting server accepts connections before JetStream is ready."""
        deadline = self._clock.monotonic() + self.target.connect_timeout_s
        while True:
            try:
                return await self._jetstream.check()
            except NatsUnavailable:
                if self._clock.monotonic() >= deadline:
                    raise
            await self._clock.sleep(_READY_POLL_INTERVAL_S)

    async def _publish_unrouted(self, messages: Sequence[BusMessage], deadline: float) -> list[PublishReceipt]:
        """Retry messages that no stream accepted: NATS lost the stream, or none is declared for them."""
        streams = [stream_for(message.subject, self._streams.values()) for message in messages]
        routable = [message for message, stream in zip(messages, streams, strict=True) if stream]
        names = {stream.name for stream in streams if stream}
        retried = iter(await self._restore_and_publish(routable, names, deadline) if routable else ())
        return [
            next(retried)
            if stream
            else PublishReceipt(
                PublishOutcome.REJECTED, reason=f"no declared stream accepts subject {message.subject!r}"
            )
            for message, stream in zip(messages, streams, strict=True)
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
            log.warning("stream_restore_failed", streams=sorted(streams), kind=type(error).__name__)
            return [PublishReceipt(PublishOutcome.UNSETTLED, reason="its stream is gone")] * len(messages)

    async def _restore_consumer(self, spec: ConsumerSpec) -> None:
        await self._restore_stream(spec.stream)

    async def _restore_stream(self, name: str) -> None:
        """Re-create a stream that NATS lost, with every consumer declared for it."""
        consumers = [spec for spec in self._consumers.values() if spec.stream == name]
        await self._jetstream.ensure([self._streams[name]], consumers)

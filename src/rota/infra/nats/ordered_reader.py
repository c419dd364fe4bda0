"""Reads a stream from now on, in order, each message once, without acknowledgement.

    async with bus.ordered_reader("EVENTS") as reader:
        async for batch in reader.batches():
            ...  # `StreamMessage`s, and `StreamGap` where messages are missing

The reader uses a push consumer that NATS removes when it has no subscriber. Guarantees:
- order, no duplicates: the consumer numbers what it sends. A message that does not follow its predecessor is dropped,
  and a new consumer is created after the last accepted message;
- no silent loss: stream sequences have no holes, so a jump means that the stream's limits removed messages. A
  re-created stream counts from one again; its creation time (`StreamState.mark`) distinguishes it. It is read before
  and after the consumer is created, so that no message is attributed to the wrong stream. Both cases yield `StreamGap`;
- memory: at most `BUFFER_BYTES_MAX` are buffered. Messages beyond that are dropped and read again.

After a lost connection, or without a heartbeat for `SILENCE_TIMEOUT_S`, reading restarts after the last message. If
this process dies, NATS removes the consumer within `INACTIVE_THRESHOLD_S`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Final

import msgspec
import structlog
from nats.aio.msg import Msg

from rota.infra.clock import Clock
from rota.infra.nats.connection import BusSubscription, NatsConnection
from rota.infra.nats.delivery import parse_ack_subject
from rota.infra.nats.jetstream import JetStream
from rota.model.backoff import Backoff
from rota.model.error_reactions import Reaction, reaction_to
from rota.model.errors import RotaError

log = structlog.get_logger(__name__)

HEARTBEAT_INTERVAL_S: Final = 1.0
SILENCE_TIMEOUT_S: Final = 2.5 * HEARTBEAT_INTERVAL_S
INACTIVE_THRESHOLD_S: Final = 10.0
BUFFER_BYTES_MAX: Final = 16 * 1024 * 1024
RESTART_BACKOFF: Final = Backoff(first_s=0.05, longest_s=2.0)


class StreamMessage(msgspec.Struct, frozen=True):
    """A message of the stream created at `mark`."""

    mark: str
    seq: int
    data: bytes


class StreamGap(msgspec.Struct, frozen=True):
    """Messages before sequence `seq` of the stream `mark` are missing, or belonged to an earlier incarnation of it."""

    mark: str
    seq: int


StreamItem = StreamMessage | StreamGap


class OrderedReader:
    """For one task only. Created by `Bus.ordered_reader`."""

    def __init__(
        self,
        connection: NatsConnection,
        jetstream: JetStream,
        stream: str,
        restore: Callable[[str], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self.stream = stream
        self.mark = ""
        """Creation time of the stream being read; empty before the first start."""
        self.seq = 0
        """The last sequence returned, or the one after which reading started."""
        self._connection = connection
        self._jetstream = jetstream
        self._restore = restore
        self._clock = clock
        self._waiting: deque[StreamMessage] = deque()
        self._bytes = 0
        self._arrived = (0, 0)
        """Consumer and stream sequence of the last arrived message."""
        self._subscription: BusSubscription | None = None
        self._changed = asyncio.Event()
        self._silent_at = 0.0
        self._broken = ""
        self._failures = 0

    async def close(self) -> None:
        self._connection.watchers.discard(self)
        await self._stop_consumer()

    async def batches(self) -> AsyncIterator[list[StreamItem]]:
        """Non-empty batches, forever, across outages."""
        while True:
            if batch := await self.read():
                yield batch

    async def read(self) -> list[StreamItem]:
        """Messages that arrived since the last call; waits briefly for the first. An outage is only a long wait."""
        if self._subscription is None:
            return await self._restart()
        if not self._waiting:
            await self._await_message()
        batch: list[StreamItem] = []
        while self._waiting:
            batch += self._with_gap(self._waiting.popleft())
        self._bytes = 0
        if self._broken:
            log.info("ordered_reader_restarted", stream=self.stream, reason=self._broken)
            await self._stop_consumer()
        return batch

    def on_connected(self) -> None:
        self._mark_broken("reconnected")

    def on_disconnected(self) -> None:
        self._mark_broken("disconnected")

    def _with_gap(self, message: StreamMessage) -> list[StreamItem]:
        gap = [StreamGap(message.mark, message.seq - 1)] if message.seq != self.seq + 1 else []
        self.seq = message.seq
        return [*gap, message]

    async def _await_message(self) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._silent_at - self._clock.monotonic())):
                if not self._broken:
                    await self._changed.wait()
        if not self._waiting and not self._broken and self._clock.monotonic() >= self._silent_at:
            self._failures += 1
            self._mark_broken("silent")

    async def _restart(self) -> list[StreamItem]:
        """Create a consumer after the last message; returns a gap when that position no longer exists."""
        self._connection.watchers.add(self)
        if self._failures:
            await self._clock.sleep(RESTART_BACKOFF.pause_s(self._failures, 0.5))
        if not await self._connection.until_connected(SILENCE_TIMEOUT_S):
            return []
        try:
            return await self._start_consumer()
        except RotaError as error:
            # A refusal, too: a new reader would begin at the end of the stream and miss events silently.
            if reaction_to(error) is Reaction.BUG:
                raise
            self._failures += 1
            log.info("ordered_reader_start_failed", stream=self.stream, reason=error.sentence)
            await self._stop_consumer()
            return []

    async def _start_consumer(self) -> list[StreamItem]:
        state = await self._jetstream.stream_state(self.stream)
        if state is None:
            await self._restore(self.stream)
            return []
        gap: list[StreamItem] = []
        if not self.mark:
            self.mark, self.seq = state.mark, state.last_seq
        elif state.mark != self.mark or self.seq > state.last_seq:
            # A stream that lost its tail reuses sequence numbers: treat it as a new one.
            self.mark, self.seq = state.mark, 0 if state.mark != self.mark else state.last_seq
            gap = [StreamGap(self.mark, self.seq)]
        inbox = self._connection.new_inbox()
        self._arrived, self._broken = (0, self.seq), ""
        self._silent_at = self._clock.monotonic() + SILENCE_TIMEOUT_S
        self._subscription = await self._connection.subscribe(inbox, self._on_message)
        await self._jetstream.create_push_consumer(
            self.stream, inbox, self.seq + 1, HEARTBEAT_INTERVAL_S, INACTIVE_THRESHOLD_S
        )
        after = await self._jetstream.stream_state(self.stream)
        if after is None or after.mark != self.mark:
            self._waiting.clear()
            self._mark_broken("re-created")
        else:
            self._failures = 0
        return gap

    async def _stop_consumer(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await self._connection.unsubscribe(subscription)
        self._waiting.clear()
        self._bytes = 0

    async def _on_message(self, msg: Msg) -> None:
        self._silent_at = self._clock.monotonic() + SILENCE_TIMEOUT_S
        if self._broken:
            return
        if not msg.reply.startswith("$JS.ACK."):
            self._on_status(msg)
            return
        _, seq, consumer_seq, _ = parse_ack_subject(msg.reply)
        if consumer_seq != self._arrived[0] + 1 or seq <= self._arrived[1]:
            self._mark_broken("out of order")
        elif self._bytes + len(msg.data) > BUFFER_BYTES_MAX and self._waiting:
            self._mark_broken("slow consumer")
        else:
            self._arrived = (consumer_seq, seq)
            self._waiting.append(StreamMessage(self.mark, seq, msg.data))
            self._bytes += len(msg.data)
            self._changed.set()

    def _on_status(self, msg: Msg) -> None:
        """A heartbeat carries the number of messages sent, which reveals lost ones."""
        headers = msg.headers or {}
        if headers.get("Status") != "100":
            self._mark_broken(headers.get("Description", "").strip() or "ended")
        elif (sent := headers.get("Nats-Last-Consumer")) is not None and int(sent) != self._arrived[0]:
            self._mark_broken("messages lost")

    def _mark_broken(self, reason: str) -> None:
        self._broken = reason
        self._changed.set()

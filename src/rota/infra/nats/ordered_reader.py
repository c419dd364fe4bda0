"""Reading a stream to its end and on, in order, each message once: for whoever follows it and answers for nothing.

    async with bus.tail("EVENTS") as tail:
        async for read in tail.batches():
            ...  # `Tailed` messages, and `Missed` where some are not there any more

A tail is a push consumer that NATS forgets when nobody listens; nothing is acknowledged. What holds, and by whom:
- order, and nothing twice: the consumer counts what it sends. Whatever does not follow what came before it is dropped,
  and a new consumer is made behind the last message that was taken;
- nothing is missed in silence: messages of the stream are numbered without a hole, so a jump is what its limits have
  removed. A stream that was made anew counts from one again; it is told from the old one by the moment it was made
  (`StreamState.mark`), looked at before and after the consumer is made, so that no message is taken for one of the
  other stream. Both are told as `Missed`;
- memory: at most `WAITING_BYTES` lie here. What is beyond that is dropped and read again.

If the connection is lost, or not even a heartbeat comes for `SILENT_S`, all of this begins anew behind the last
message. If we die, the consumer goes within `FORGOTTEN_S`.
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
from rota.model.errors import NatsUnavailable

log = structlog.get_logger(__name__)

HEARTBEAT_INTERVAL_S: Final = 1.0
SILENCE_TIMEOUT_S: Final = 2.5 * HEARTBEAT_INTERVAL_S
INACTIVE_THRESHOLD_S: Final = 10.0
BUFFER_BYTES_MAX: Final = 16 * 1024 * 1024
RESTART_BACKOFF: Final = Backoff(first_s=0.05, longest_s=2.0)


class StreamMessage(msgspec.Struct, frozen=True):
    """A message of the stream that was made at `mark`."""

    mark: str
    seq: int
    data: bytes


class StreamGap(msgspec.Struct, frozen=True):
    """Between what was read before and number `seq` of the stream `mark`, some are not there, or were of another."""

    mark: str
    seq: int


StreamItem = StreamMessage | StreamGap


class OrderedReader:
    """Not for two tasks. Make it with `Bus.tail`."""

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
        """Which stream is read; empty before the first."""
        self.seq = 0
        """The last number that was handed out, or that reading began behind."""
        self._connection = connection
        self._jetstream = jetstream
        self._restore = restore
        self._clock = clock
        self._waiting: deque[StreamMessage] = deque()
        self._bytes = 0
        self._arrived = (0, 0)
        """The last message that came, by the count of the consumer and of the stream."""
        self._route: BusSubscription | None = None
        self._changed = asyncio.Event()
        self._silent_at = 0.0
        self._broken = ""
        self._failures = 0

    async def close(self) -> None:
        self._connection.watchers.discard(self)
        await self._stop_consumer()

    async def batches(self) -> AsyncIterator[list[StreamItem]]:
        """What has come, for ever and through outages; never an empty batch."""
        while True:
            if batch := await self.read():
                yield batch

    async def read(self) -> list[StreamItem]:
        """What has come since the last time; waits for the first of it, or for a moment. An outage is a long wait."""
        if self._route is None:
            return await self._restart()
        if not self._waiting:
            await self._await_message()
        batch: list[StreamItem] = []
        while self._waiting:
            batch += self._with_gap(self._waiting.popleft())
        self._bytes = 0
        if self._broken:
            log.info("tail_begins_again", stream=self.stream, because=self._broken)
            await self._stop_consumer()
        return batch

    def on_connected(self) -> None:
        self._mark_broken("reconnected")

    def on_disconnected(self) -> None:
        self._mark_broken("disconnected")

    def _with_gap(self, message: StreamMessage) -> list[StreamItem]:
        missed = [StreamGap(message.mark, message.seq - 1)] if message.seq != self.seq + 1 else []
        self.seq = message.seq
        return [*missed, message]

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
        """A consumer behind what was read; tells when there is no such place any more."""
        self._connection.watchers.add(self)
        if self._failures:
            await self._clock.sleep(RESTART_BACKOFF.pause_s(self._failures, 0.5))
        if not await self._connection.until_connected(SILENCE_TIMEOUT_S):
            return []
        try:
            return await self._start_consumer()
        except NatsUnavailable as away:
            self._failures += 1
            log.info("tail_waits", stream=self.stream, reason=away.sentence)
            await self._stop_consumer()
            return []

    async def _start_consumer(self) -> list[StreamItem]:
        state = await self._jetstream.stream_state(self.stream)
        if state is None:
            await self._restore(self.stream)
            return []
        missed: list[StreamItem] = []
        if not self.mark:
            self.mark, self.seq = state.mark, state.last_seq
        elif state.mark != self.mark or self.seq > state.last_seq:
            # In a stream that lost its end, numbers are given a second time: it is as good as another one.
            self.mark, self.seq = state.mark, 0 if state.mark != self.mark else state.last_seq
            missed = [StreamGap(self.mark, self.seq)]
        inbox = self._connection.new_inbox()
        self._arrived, self._broken = (0, self.seq), ""
        self._silent_at = self._clock.monotonic() + SILENCE_TIMEOUT_S
        self._route = await self._connection.subscribe(inbox, self._on_message)
        await self._jetstream.create_push_consumer(
            self.stream, inbox, self.seq + 1, HEARTBEAT_INTERVAL_S, INACTIVE_THRESHOLD_S
        )
        after = await self._jetstream.stream_state(self.stream)
        if after is None or after.mark != self.mark:
            self._waiting.clear()
            self._mark_broken("made anew")
        else:
            self._failures = 0
        return missed

    async def _stop_consumer(self) -> None:
        route, self._route = self._route, None
        if route is not None:
            await self._connection.unsubscribe(route)
        self._waiting.clear()
        self._bytes = 0

    async def _on_message(self, msg: Msg) -> None:
        self._silent_at = self._clock.monotonic() + SILENCE_TIMEOUT_S
        if self._broken:
            return
        if not msg.reply.startswith("$JS.ACK."):
            self._on_status(msg)
            return
        _, seq, place, _ = parse_ack_subject(msg.reply)
        if place != self._arrived[0] + 1 or seq <= self._arrived[1]:
            self._mark_broken("out of order")
        elif self._bytes + len(msg.data) > BUFFER_BYTES_MAX and self._waiting:
            self._mark_broken("too far behind")
        else:
            self._arrived = (place, seq)
            self._waiting.append(StreamMessage(self.mark, seq, msg.data))
            self._bytes += len(msg.data)
            self._changed.set()

    def _on_status(self, msg: Msg) -> None:
        """A heartbeat says how many were sent: some of them may have been lost on the way."""
        headers = msg.headers or {}
        if headers.get("Status") != "100":
            self._mark_broken(headers.get("Description", "").strip() or "ended")
        elif (sent := headers.get("Nats-Last-Consumer")) is not None and int(sent) != self._arrived[0]:
            self._mark_broken("lost on the way")

    def _mark_broken(self, because: str) -> None:
        self._broken = because
        self._changed.set()

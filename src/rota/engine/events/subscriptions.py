"""Event subscriptions: each replica reads the stream once into a ring in memory, and any number of subscribers read it.

    async with stream.subscribe(EventFilter(kinds=("job",)), after=None) as subscription:
        while True:
            for batch in await subscription.read(wait_s=15):
                ...

The ring has one page per stream message, at most `RING_BYTES` in all. A subscription is a position in the ring and has
no queue of its own: a thousand idle ones cost nothing, and one that the ring has overtaken gets `SlowConsumer` and must
resume. Guarantees:
- events come in order, without duplicates or omissions: `rota.infra.nats.ordered_reader` ensures it for the ring, and a
  subscription goes from page to page;
- every known gap appears in its place as a `reset` event: messages that the reader missed, an unreadable message, or a
  resume position that neither ring nor stream has;
- a subscription can resume from any position that the ring or the stream still has. The stream is read message by
  message, at the subscriber's pace, until the ring has the rest; the stream's identity is checked after each batch,
  before the batch is delivered;
- a position ahead of this replica (another one was faster) is waited for.

When a replica dies its subscribers resume elsewhere from the last event they received.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import msgspec
import structlog

from rota.infra.clock import Clock, SystemClock
from rota.infra.nats import Bus, OrderedReader, StreamGap, StreamMessage
from rota.infra.nats.topology import EVENTS_STREAM
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.errors import InvalidInput, NatsUnavailable, Refused
from rota.model.events import (
    RESET_KIND,
    EventBatch,
    EventFilter,
    EventGroup,
    EventMessage,
    StreamPosition,
    to_event_batches,
)
from rota.model.protocol import decode

log = structlog.get_logger(__name__)

RING_BYTES: Final = 16 * 1024 * 1024
RING_PAGES: Final = 8192
PAGE_OVERHEAD_BYTES: Final = 1024
"""Added to the size of a page's events."""
READ_EVENTS_MAX: Final = 1000
"""Approximate limit of one read: bounds the memory of a slow reader."""
CATCH_UP_MESSAGES_MAX: Final = 32
READY_TIMEOUT_S: Final = 5.0
"""How long a first subscriber waits for the stream."""

GAPS = metrics.counter("rota_events_missed", "Known gaps in the events delivered, by reason.", labels=("reason",))
READERS = metrics.gauge("rota_events_readers", "Event subscriptions of this process.")
SLOW_CONSUMERS = metrics.counter("rota_events_behind", "Subscriptions that the ring has overtaken.")


class SlowConsumer(Refused):
    code = "behind"


class EventPage(msgspec.Struct, frozen=True, eq=False):
    """The events of one stream message, or a `reset` for missing ones."""

    place: StreamPosition
    portions: list[EventBatch]
    size: int


class EventStream:
    """One per replica; `run` reads the stream."""

    def __init__(self, bus: Bus, clock: Clock | None = None, *, ring_bytes: int = RING_BYTES) -> None:
        self.bus = bus
        self.place: StreamPosition | None = None
        """Last position read from the stream; None before the first read."""
        self.clock = clock or SystemClock()
        self._ring_bytes = ring_bytes
        self._pages: deque[EventPage] = deque()
        self._bytes = 0
        self._first = 0
        """Number of the oldest page; numbers are never reused."""
        self._numbers: dict[tuple[str, int], int] = {}
        self._before_ring: StreamPosition | None = None
        """The ring has everything after this position."""
        self._changed = asyncio.Event()

    async def run(self, life: Lifecycle) -> None:
        async with self.bus.ordered_reader(EVENTS_STREAM) as reader, asyncio.TaskGroup() as tasks:
            read_task = tasks.create_task(self._read_stream(reader))
            life.ready()
            await life.until_draining()
            read_task.cancel()

    @asynccontextmanager
    async def subscribe(
        self, filter_: EventFilter, after: StreamPosition | None = None
    ) -> AsyncIterator[EventSubscription]:
        """Events from now on, or everything after a position."""
        await self._wait_until_ready()
        READERS.inc()
        try:
            yield EventSubscription(self, filter_, after)
        finally:
            READERS.dec()

    @property
    def next_page_number(self) -> int:
        """The number of the next page to be appended."""
        return self._first + len(self._pages)

    def pages_from(self, number: int) -> list[EventPage]:
        """Pages from `number` on, as many as one read returns."""
        if number < self._first:
            SLOW_CONSUMERS.inc()
            raise SlowConsumer("Events were not read fast enough: resume from the last event that you received.")
        pages: list[EventPage] = []
        events = 0
        for at in range(number - self._first, len(self._pages)):
            pages.append(self._pages[at])
            events += sum(batch.group.count for batch in pages[-1].portions)
            if events >= READ_EVENTS_MAX:
                break
        return pages

    def page_number_after(self, place: StreamPosition) -> int | None:
        """The number of the page to read after `place`; None when the ring does not have that position.

        It is the page of `place` itself when only a part of that page was read.
        """
        if (number := self._numbers.get((place.mark, place.seq))) is not None:
            return number if place.index is not None else number + 1
        if self._before_ring is not None and (place.mark, place.seq) == (self._before_ring.mark, self._before_ring.seq):
            return self._first if place.index is None else None
        return None

    async def wait_for_change(self, wait_s: float) -> None:
        changed = self._changed
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await changed.wait()

    async def _wait_until_ready(self) -> None:
        deadline_s = self.clock.monotonic() + READY_TIMEOUT_S
        while self.place is None:
            left_s = deadline_s - self.clock.monotonic()
            if left_s <= 0:
                raise NatsUnavailable("Events are unavailable, because NATS does not respond: try again later.")
            await self.wait_for_change(left_s)

    async def _read_stream(self, reader: OrderedReader) -> None:
        while True:
            read = await reader.read()
            if self.place is None and reader.mark:
                self.place = self._before_ring = StreamPosition(reader.mark, reader.seq)
                self._notify_readers()
            for each in read:
                self.ingest(each)
            if read:
                self._notify_readers()

    def ingest(self, read: StreamMessage | StreamGap) -> None:
        """Append the next message of the stream, or the gap in its place."""
        if isinstance(read, StreamMessage):
            self._append(self.decode_page(read.mark, read.seq, read.data))
            return
        GAPS.labels("missed").inc()
        log.warning("events_missed", stream=read.mark, seq=read.seq)
        place = StreamPosition(read.mark, read.seq)
        self._append(EventPage(place, [self.reset_marker(place, "missed")], PAGE_OVERHEAD_BYTES))

    def decode_page(self, mark: str, seq: int, data: bytes) -> EventPage:
        place = StreamPosition(mark, seq)
        try:
            groups = decode(EventMessage, data).groups
        except InvalidInput as error:
            GAPS.labels("unreadable").inc()
            log.warning("events_unreadable", seq=seq, reason=error.sentence)
            return EventPage(place, [self.reset_marker(place, "unreadable")], PAGE_OVERHEAD_BYTES)
        # Decoded events take more memory than their encoding.
        return EventPage(place, to_event_batches(mark, seq, groups), 2 * len(data) + PAGE_OVERHEAD_BYTES)

    def reset_marker(self, place: StreamPosition, because: str) -> EventBatch:
        return EventBatch(place, EventGroup(RESET_KIND, self.clock.now_ms(), facts={"because": because}))

    def _append(self, page: EventPage) -> None:
        self._numbers[page.place.mark, page.place.seq] = self.next_page_number
        self._pages.append(page)
        self._bytes += page.size
        self.place = page.place
        while self._pages and (self._bytes > self._ring_bytes or len(self._pages) > RING_PAGES):
            self._evict(self._pages.popleft())

    def _evict(self, page: EventPage) -> None:
        self._bytes -= page.size
        self._first += 1
        self._before_ring = page.place
        key = (page.place.mark, page.place.seq)
        if self._numbers.get(key, self._first) < self._first:
            del self._numbers[key]

    def _notify_readers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class EventSubscription:
    """The read position of one subscriber. Not safe for concurrent use."""

    def __init__(self, stream: EventStream, filter_: EventFilter, after: StreamPosition | None) -> None:
        assert stream.place is not None, "subscribe() waits for the first read"
        self.filter = filter_
        self.place = after or stream.place
        """Resume position: everything up to it was delivered or filtered out."""
        self._stream = stream
        self._next: int | None = stream.next_page_number if after is None else None
        """Number of the next page; None while the ring does not have it."""
        self._resumed = after

    async def read(self, wait_s: float) -> list[EventBatch]:
        """Matching events; waits for some and returns an empty list at the timeout. Raises `SlowConsumer`."""
        deadline_s = self._stream.clock.monotonic() + wait_s
        while True:
            if self._next is None:
                batches = await self._catch_up()
            else:
                pages = self._stream.pages_from(self._next)
                self._next += len(pages)
                batches = [batch for page in pages for batch in self._unread(page)]
                if not pages:
                    await self._stream.wait_for_change(deadline_s - self._stream.clock.monotonic())
            matching = [part for batch in batches if (part := self.filter.apply(batch)) is not None]
            if matching or self._stream.clock.monotonic() >= deadline_s:
                return matching

    def _unread(self, page: EventPage) -> list[EventBatch]:
        """The events of a page that were not delivered before, here or by another replica."""
        read, place = self._resumed, page.place
        if read is None or place.mark != read.mark or place.seq > read.seq:
            self._resumed, self.place = None, place
            return page.portions
        if place.seq < read.seq or read.index is None:
            return []
        self._resumed, self.place = None, place
        return [rest for batch in page.portions if (rest := batch.after(read.index)) is not None]

    async def _catch_up(self) -> list[EventBatch]:
        """Approach the ring from a position that it does not have, or find that the position is gone."""
        head = self._stream.place
        assert head is not None
        self._next = self._stream.page_number_after(self.place)
        if self._next is not None:
            return []
        if self.place.mark != head.mark:
            return self._reset("unknown")
        if self.place.seq > head.seq:
            return await self._wait_for_ring()
        return await self._read_stream(head)

    async def _wait_for_ring(self) -> list[EventBatch]:
        """The position is ahead of this replica, or does not belong to this stream."""
        state = await self._stream.bus.stream_state(EVENTS_STREAM)
        if state is None or state.mark != self.place.mark or state.last_seq < self.place.seq:
            return self._reset("unknown")
        self._next = self._stream.next_page_number
        return []

    async def _read_stream(self, head: StreamPosition) -> list[EventBatch]:
        """Some messages after the position; valid only if the stream's identity is unchanged after the read."""
        bus, place = self._stream.bus, self.place
        begin = place.seq + (place.index is None)
        pages: list[EventPage] = []
        for seq in range(begin, min(begin + CATCH_UP_MESSAGES_MAX, head.seq + 1)):
            stored = await bus.get_message(EVENTS_STREAM, seq)
            if stored is None:
                return self._reset("removed")
            pages.append(self._stream.decode_page(place.mark, seq, stored.data))
        state = await bus.stream_state(EVENTS_STREAM)
        if state is None or state.mark != place.mark:
            return self._reset("removed")
        return [batch for page in pages for batch in self._unread(page)]

    def _reset(self, because: str) -> list[EventBatch]:
        """The position is gone: emit a `reset` and continue from now."""
        assert self._stream.place is not None
        GAPS.labels(because).inc()
        self._next, self._resumed, self.place = self._stream.next_page_number, None, self._stream.place
        return [self._stream.reset_marker(self.place, because)]

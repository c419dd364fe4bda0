"""Following events in one replica: it reads the stream once, remembers the last of it, and any number read that.

    async with feed.subscribed(Wanted(kinds=("job",)), after=None) as reader:
        while True:
            for portion in await reader.read(wait_s=15):
                ...

What was read from the stream lies in a ring of pages, one per message, at most `RING_BYTES` of them. A reader is a
place in that ring and has no queue of its own: a thousand who do not read cost nothing, and one that the ring has left
behind is told so (`Behind`) and comes again. What holds:
- order, nothing twice, nothing left out: `rota.infra.nats.ordered_reader` for the ring; a reader goes from page to page;
- every gap that is known is told, as an event `reset` in its place: where the tail missed something, where a message
  cannot be read, and where a reader asks to go on from a place that nobody has any more;
- going on from any place that the ring or the stream still has. The stream is read message by message, at the pace of
  the reader, until the ring has the rest; its mark is looked at after each batch, before that is handed out;
- a place that this replica has not come to yet (another one was faster) is waited for.

If we die, readers go on elsewhere from the last event they have seen.
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
"""Beside its events, in bytes."""
READ_EVENTS_MAX: Final = 1000
"""Handed out at once, about: whoever reads slowly is not given more."""
CATCH_UP_MESSAGES_MAX: Final = 32
READY_TIMEOUT_S: Final = 5.0
"""How long a first reader waits for the stream."""

GAPS = metrics.counter("rota_events_missed", "Gaps in the events that were told, by why.", labels=("reason",))
READERS = metrics.gauge("rota_events_readers", "Who reads events of this process now.")
SLOW_CONSUMERS = metrics.counter("rota_events_behind", "Readers that the ring has left behind.")


class SlowConsumer(Refused):
    code = "behind"


class EventPage(msgspec.Struct, frozen=True, eq=False):
    """A message of the stream, or the word that some are missing."""

    place: StreamPosition
    portions: list[EventBatch]
    size: int


class EventStream:
    """One per replica; `run` keeps it reading."""

    def __init__(self, bus: Bus, clock: Clock | None = None, *, ring_bytes: int = RING_BYTES) -> None:
        self.bus = bus
        self.place: StreamPosition | None = None
        """Up to where the stream was read; None before the first look at it."""
        self.clock = clock or SystemClock()
        self._ring_bytes = ring_bytes
        self._pages: deque[EventPage] = deque()
        self._bytes = 0
        self._first = 0
        """The number of the oldest page; they are counted for ever."""
        self._numbers: dict[tuple[str, int], int] = {}
        self._behind: StreamPosition | None = None
        """The ring has all that comes after this."""
        self._changed = asyncio.Event()

    async def run(self, life: Lifecycle) -> None:
        async with self.bus.ordered_reader(EVENTS_STREAM) as tail, asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read_stream(tail))
            life.ready()
            await life.until_draining()
            reading.cancel()

    @asynccontextmanager
    async def subscribe(
        self, wanted: EventFilter, after: StreamPosition | None = None
    ) -> AsyncIterator[EventSubscription]:
        """Events from now on, or all that came after a place."""
        await self._wait_until_ready()
        READERS.inc()
        try:
            yield EventSubscription(self, wanted, after)
        finally:
            READERS.dec()

    @property
    def next_page_number(self) -> int:
        """The number that the next page will have."""
        return self._first + len(self._pages)

    def pages_from(self, number: int) -> list[EventPage]:
        """Those from a number on, as many as are handed out at once."""
        if number < self._first:
            SLOW_CONSUMERS.inc()
            raise SlowConsumer("More happened than was read in time: go on from the last event that was seen.")
        found: list[EventPage] = []
        events = 0
        for at in range(number - self._first, len(self._pages)):
            found.append(self._pages[at])
            events += sum(portion.group.count for portion in found[-1].portions)
            if events >= READ_EVENTS_MAX:
                break
        return found

    def page_number_after(self, place: StreamPosition) -> int | None:
        """The number of the page to read next by who has read up to `place`; None when the ring does not know it.

        It is the page of that place itself where only a part of it was read.
        """
        if (number := self._numbers.get((place.mark, place.seq))) is not None:
            return number if place.index is not None else number + 1
        if self._behind is not None and (place.mark, place.seq) == (self._behind.mark, self._behind.seq):
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
                raise NatsUnavailable("Events cannot be followed now, since NATS does not answer: try again later.")
            await self.wait_for_change(left_s)

    async def _read_stream(self, tail: OrderedReader) -> None:
        while True:
            read = await tail.read()
            if self.place is None and tail.mark:
                self.place = self._behind = StreamPosition(tail.mark, tail.seq)
                self._notify_readers()
            for each in read:
                self.ingest(each)
            if read:
                self._notify_readers()

    def ingest(self, read: StreamMessage | StreamGap) -> None:
        """The next of the stream."""
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
        # As objects they take some more than they did on the wire.
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
        self._behind = page.place
        key = (page.place.mark, page.place.seq)
        if self._numbers.get(key, self._first) < self._first:
            del self._numbers[key]

    def _notify_readers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class EventSubscription:
    """Somebody who follows. Not for two tasks."""

    def __init__(self, feed: EventStream, wanted: EventFilter, after: StreamPosition | None) -> None:
        assert feed.place is not None, "subscribed waits for it"
        self.wanted = wanted
        self.place = after or feed.place
        """Up to where everything was handed out, or is not wanted: to go on from."""
        self._feed = feed
        self._next: int | None = feed.next_page_number if after is None else None
        """The number of the page to read next; None while the ring does not have it."""
        self._resumed = after

    async def read(self, wait_s: float) -> list[EventBatch]:
        """What has come; waits for it, and returns nothing when nothing came. Raises `Behind`."""
        deadline_s = self._feed.clock.monotonic() + wait_s
        while True:
            if self._next is None:
                found = await self._catch_up()
            else:
                pages = self._feed.pages_from(self._next)
                self._next += len(pages)
                found = [portion for page in pages for portion in self._unread(page)]
                if not pages:
                    await self._feed.wait_for_change(deadline_s - self._feed.clock.monotonic())
            wanted = [kept for portion in found if (kept := self.wanted.apply(portion)) is not None]
            if wanted or self._feed.clock.monotonic() >= deadline_s:
                return wanted

    def _unread(self, page: EventPage) -> list[EventBatch]:
        """What of a page was not read before, here or elsewhere."""
        read, place = self._resumed, page.place
        if read is None or place.mark != read.mark or place.seq > read.seq:
            self._resumed, self.place = None, place
            return page.portions
        if place.seq < read.seq or read.index is None:
            return []
        self._resumed, self.place = None, place
        return [left for portion in page.portions if (left := portion.after(read.index)) is not None]

    async def _catch_up(self) -> list[EventBatch]:
        """Towards the ring, from a place that it does not have; or find out that nobody has it."""
        head = self._feed.place
        assert head is not None
        self._next = self._feed.page_number_after(self.place)
        if self._next is not None:
            return []
        if self.place.mark != head.mark:
            return self._reset("unknown")
        if self.place.seq > head.seq:
            return await self._wait_for_ring()
        return await self._read_stream(head)

    async def _wait_for_ring(self) -> list[EventBatch]:
        """Another replica was faster than this one, or the place is none of this stream."""
        state = await self._feed.bus.stream_state(EVENTS_STREAM)
        if state is None or state.mark != self.place.mark or state.last_seq < self.place.seq:
            return self._reset("unknown")
        self._next = self._feed.next_page_number
        return []

    async def _read_stream(self, head: StreamPosition) -> list[EventBatch]:
        """Some messages behind the place; they are of this stream if it is there still when they were read."""
        bus, place = self._feed.bus, self.place
        begin = place.seq + (place.index is None)
        pages: list[EventPage] = []
        for seq in range(begin, min(begin + CATCH_UP_MESSAGES_MAX, head.seq + 1)):
            stored = await bus.get_message(EVENTS_STREAM, seq)
            if stored is None:
                return self._reset("removed")
            pages.append(self._feed.decode_page(place.mark, seq, stored.data))
        state = await bus.stream_state(EVENTS_STREAM)
        if state is None or state.mark != place.mark:
            return self._reset("removed")
        return [portion for page in pages for portion in self._unread(page)]

    def _reset(self, because: str) -> list[EventBatch]:
        """What was asked for is not there: look anew, and go on from now."""
        assert self._feed.place is not None
        GAPS.labels(because).inc()
        self._next, self._resumed, self.place = self._feed.next_page_number, None, self._feed.place
        return [self._feed.reset_marker(self.place, because)]

"""Following events in one replica: it reads the stream once, remembers the last of it, and any number read that.

    async with feed.subscribed(Wanted(kinds=("job",)), after=None) as reader:
        while True:
            for portion in await reader.read(wait_s=15):
                ...

What was read from the stream lies in a ring of pages, one per message, at most `RING_BYTES` of them. A reader is a
place in that ring and has no queue of its own: a thousand who do not read cost nothing, and one that the ring has left
behind is told so (`Behind`) and comes again. What holds:
- order, nothing twice, nothing left out: `rota.infra.nats.tail` for the ring; a reader goes from page to page;
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
from rota.infra.nats import Bus, Missed, Tail, Tailed
from rota.infra.nats.declared import EVENTS
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.errors import InvalidInput, NatsUnavailable, Refused
from rota.model.events import RESET, Batch, Group, Place, Portion, Wanted, portions
from rota.model.messages import decode

log = structlog.get_logger(__name__)

RING_BYTES: Final = 16 * 1024 * 1024
RING_PAGES: Final = 8192
PAGE_COST: Final = 1024
"""Beside its events, in bytes."""
READ_EVENTS: Final = 1000
"""Handed out at once, about: whoever reads slowly is not given more."""
CATCH_UP: Final = 32
KNOWN_S: Final = 5.0
"""How long a first reader waits for the stream."""

MISSED = metrics.counter("rota_events_missed", "Gaps in the events that were told, by why.", labels=("reason",))
READERS = metrics.gauge("rota_events_readers", "Who reads events of this process now.")
BEHIND = metrics.counter("rota_events_behind", "Readers that the ring has left behind.")


class Behind(Refused):
    code = "behind"


class Page(msgspec.Struct, frozen=True, eq=False):
    """A message of the stream, or the word that some are missing."""

    place: Place
    portions: list[Portion]
    size: int


class Feed:
    """One per replica; `run` keeps it reading."""

    def __init__(self, bus: Bus, clock: Clock | None = None, *, ring_bytes: int = RING_BYTES) -> None:
        self.bus = bus
        self.place: Place | None = None
        """Up to where the stream was read; None before the first look at it."""
        self.clock = clock or SystemClock()
        self._ring_bytes = ring_bytes
        self._pages: deque[Page] = deque()
        self._bytes = 0
        self._first = 0
        """The number of the oldest page; they are counted for ever."""
        self._numbers: dict[tuple[str, int], int] = {}
        self._behind: Place | None = None
        """The ring has all that comes after this."""
        self._changed = asyncio.Event()

    async def run(self, life: Lifecycle) -> None:
        async with self.bus.tail(EVENTS) as tail, asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._follow(tail))
            life.ready()
            await life.until_draining()
            reading.cancel()

    @asynccontextmanager
    async def subscribed(self, wanted: Wanted, after: Place | None = None) -> AsyncIterator[Reader]:
        """Events from now on, or all that came after a place."""
        await self._known()
        READERS.inc()
        try:
            yield Reader(self, wanted, after)
        finally:
            READERS.dec()

    @property
    def end(self) -> int:
        """The number that the next page will have."""
        return self._first + len(self._pages)

    def pages(self, number: int) -> list[Page]:
        """Those from a number on, as many as are handed out at once."""
        if number < self._first:
            BEHIND.inc()
            raise Behind("More happened than was read in time: go on from the last event that was seen.")
        found: list[Page] = []
        events = 0
        for at in range(number - self._first, len(self._pages)):
            found.append(self._pages[at])
            events += sum(portion.group.count for portion in found[-1].portions)
            if events >= READ_EVENTS:
                break
        return found

    def number_after(self, place: Place) -> int | None:
        """The number of the page to read next by who has read up to `place`; None when the ring does not know it.

        It is the page of that place itself where only a part of it was read.
        """
        if (number := self._numbers.get((place.mark, place.seq))) is not None:
            return number if place.index is not None else number + 1
        if self._behind is not None and (place.mark, place.seq) == (self._behind.mark, self._behind.seq):
            return self._first if place.index is None else None
        return None

    async def until_changed(self, wait_s: float) -> None:
        changed = self._changed
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await changed.wait()

    async def _known(self) -> None:
        deadline_s = self.clock.monotonic() + KNOWN_S
        while self.place is None:
            left_s = deadline_s - self.clock.monotonic()
            if left_s <= 0:
                raise NatsUnavailable("Events cannot be followed now, since NATS does not answer: try again later.")
            await self.until_changed(left_s)

    async def _follow(self, tail: Tail) -> None:
        while True:
            read = await tail.read()
            if self.place is None and tail.mark:
                self.place = self._behind = Place(tail.mark, tail.seq)
                self._tell()
            for each in read:
                self.take(each)
            if read:
                self._tell()

    def take(self, read: Tailed | Missed) -> None:
        """The next of the stream."""
        if isinstance(read, Tailed):
            self._append(self.page(read.mark, read.seq, read.data))
            return
        MISSED.labels("missed").inc()
        log.warning("events_missed", stream=read.mark, seq=read.seq)
        place = Place(read.mark, read.seq)
        self._append(Page(place, [self.reset(place, "missed")], PAGE_COST))

    def page(self, mark: str, seq: int, data: bytes) -> Page:
        place = Place(mark, seq)
        try:
            groups = decode(Batch, data).groups
        except InvalidInput as error:
            MISSED.labels("unreadable").inc()
            log.warning("events_unreadable", seq=seq, reason=error.sentence)
            return Page(place, [self.reset(place, "unreadable")], PAGE_COST)
        # As objects they take some more than they did on the wire.
        return Page(place, portions(mark, seq, groups), 2 * len(data) + PAGE_COST)

    def reset(self, place: Place, because: str) -> Portion:
        return Portion(place, Group(RESET, self.clock.now_ms(), facts={"because": because}))

    def _append(self, page: Page) -> None:
        self._numbers[page.place.mark, page.place.seq] = self.end
        self._pages.append(page)
        self._bytes += page.size
        self.place = page.place
        while self._pages and (self._bytes > self._ring_bytes or len(self._pages) > RING_PAGES):
            self._forget(self._pages.popleft())

    def _forget(self, page: Page) -> None:
        self._bytes -= page.size
        self._first += 1
        self._behind = page.place
        key = (page.place.mark, page.place.seq)
        if self._numbers.get(key, self._first) < self._first:
            del self._numbers[key]

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Reader:
    """Somebody who follows. Not for two tasks."""

    def __init__(self, feed: Feed, wanted: Wanted, after: Place | None) -> None:
        assert feed.place is not None, "subscribed waits for it"
        self.wanted = wanted
        self.place = after or feed.place
        """Up to where everything was handed out, or is not wanted: to go on from."""
        self._feed = feed
        self._next: int | None = feed.end if after is None else None
        """The number of the page to read next; None while the ring does not have it."""
        self._resumed = after

    async def read(self, wait_s: float) -> list[Portion]:
        """What has come; waits for it, and returns nothing when nothing came. Raises `Behind`."""
        deadline_s = self._feed.clock.monotonic() + wait_s
        while True:
            if self._next is None:
                found = await self._catch_up()
            else:
                pages = self._feed.pages(self._next)
                self._next += len(pages)
                found = [portion for page in pages for portion in self._unread(page)]
                if not pages:
                    await self._feed.until_changed(deadline_s - self._feed.clock.monotonic())
            wanted = [kept for portion in found if (kept := self.wanted.of(portion)) is not None]
            if wanted or self._feed.clock.monotonic() >= deadline_s:
                return wanted

    def _unread(self, page: Page) -> list[Portion]:
        """What of a page was not read before, here or elsewhere."""
        read, place = self._resumed, page.place
        if read is None or place.mark != read.mark or place.seq > read.seq:
            self._resumed, self.place = None, place
            return page.portions
        if place.seq < read.seq or read.index is None:
            return []
        self._resumed, self.place = None, place
        return [left for portion in page.portions if (left := portion.after(read.index)) is not None]

    async def _catch_up(self) -> list[Portion]:
        """Towards the ring, from a place that it does not have; or find out that nobody has it."""
        head = self._feed.place
        assert head is not None
        self._next = self._feed.number_after(self.place)
        if self._next is not None:
            return []
        if self.place.mark != head.mark:
            return self._reset("unknown")
        if self.place.seq > head.seq:
            return await self._wait_for_ring()
        return await self._read_stream(head)

    async def _wait_for_ring(self) -> list[Portion]:
        """Another replica was faster than this one, or the place is none of this stream."""
        state = await self._feed.bus.state(EVENTS)
        if state is None or state.mark != self.place.mark or state.last_seq < self.place.seq:
            return self._reset("unknown")
        self._next = self._feed.end
        return []

    async def _read_stream(self, head: Place) -> list[Portion]:
        """Some messages behind the place; they are of this stream if it is there still when they were read."""
        bus, place = self._feed.bus, self.place
        begin = place.seq + (place.index is None)
        pages: list[Page] = []
        for seq in range(begin, min(begin + CATCH_UP, head.seq + 1)):
            stored = await bus.stored(EVENTS, seq)
            if stored is None:
                return self._reset("removed")
            pages.append(self._feed.page(place.mark, seq, stored.data))
        state = await bus.state(EVENTS)
        if state is None or state.mark != place.mark:
            return self._reset("removed")
        return [portion for page in pages for portion in self._unread(page)]

    def _reset(self, because: str) -> list[Portion]:
        """What was asked for is not there: look anew, and go on from now."""
        assert self._feed.place is not None
        MISSED.labels(because).inc()
        self._next, self._resumed, self.place = self._feed.end, None, self._feed.place
        return [self._feed.reset(self.place, because)]

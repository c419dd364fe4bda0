"""Histories as PostgreSQL has them, moment by moment, told to those who watch a job, or a run of a workflow.

    async with histories.watched(job) as watch:
        while not watch.ended:
            for number, moment in await watch.news(wait_s=15): ...

A history only grows, so a moment is named by its number, from 1. Whatever is told was read from PostgreSQL; events
(`rota.engine.events.subscriptions`) say no more than when to look. What is watched is looked at together: that which an event
named after `SETTLE_S`, all of it every `LOOK_S`, for events may be missing. So a thousand who watch cost two
statements, and a job of which no event came is seen `LOOK_S` later.

While PostgreSQL is away nothing is told; it goes on when it is back.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, Generic, Protocol, TypeVar
from uuid import UUID

import asyncpg
import msgspec
import structlog

from rota.engine.events.subscriptions import EventStream, SlowConsumer
from rota.engine.queries.jobs import JobHistoryEntry, job_history_entry
from rota.infra.postgres import Database, query
from rota.infra.service import Lifecycle
from rota.model.errors import NotFound, Unavailable
from rota.model.events import ID_BYTES, EventBatch, EventFilter, EventGroup

READ = query(__package__, "events_history")

log = structlog.get_logger(__name__)
DEBOUNCE_S: Final = 0.05
POLL_INTERVAL_S: Final = 2.0
BATCH: Final = 1000

M = TypeVar("M")


class HistoryEntrySource(Protocol[M]):
    """Whose histories they are."""

    kind: str
    """Of events that say when to look."""

    async def read(self, known: Mapping[UUID, Sequence[M]]) -> Mapping[UUID, Sequence[M]]:
        """All moments of these, of which some are known; those that there are not are left out."""
        ...

    def event_ids(self, group: EventGroup) -> bytes:
        """The ids that an event is about."""
        ...

    def is_last(self, moment: M) -> bool: ...

    def not_found(self, which: UUID) -> NotFound: ...


class JobHistorySource:
    kind = "job"

    def __init__(self, database: Database) -> None:
        self.database = database

    async def read(self, known: Mapping[UUID, Sequence[JobHistoryEntry]]) -> Mapping[UUID, Sequence[JobHistoryEntry]]:
        rows = await self.database.rows(READ, list(known))
        return {
            row["pk_job"]: [job_history_entry(*each) for each in msgspec.json.decode(row["history"])] for row in rows
        }

    def event_ids(self, group: EventGroup) -> bytes:
        return group.jobs

    def is_last(self, moment: JobHistoryEntry) -> bool:
        return moment.state.terminal

    def not_found(self, which: UUID) -> NotFound:
        return NotFound(f"There is no job {which}, or it is not kept any more.", job=str(which))


class HistoryWatch(Generic[M]):
    """What one who watches has seen."""

    def __init__(self, source: HistoryEntrySource[M], after: int) -> None:
        self.ended = False
        """Whether all was told, and no more will come."""
        self._source = source
        self._seen = after
        self._moments: Sequence[M] = ()
        self._changed = asyncio.Event()

    async def next_entries(self, wait_s: float) -> list[tuple[int, M]]:
        """Moments that were not told yet; waits for one, and returns nothing when there is none."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while len(self._moments) <= self._seen and not self._has_ended():
                    self._changed.clear()
                    await self._changed.wait()
        fresh = list(enumerate(self._moments[self._seen :], self._seen + 1))
        self._seen = max(self._seen, len(self._moments))
        self.ended = self._has_ended()
        return fresh

    def ends_with(self, number: int) -> bool:
        """Whether it has ended, and moment `number` was its last."""
        return self._has_ended() and number >= len(self._moments)

    def update(self, moments: Sequence[M]) -> None:
        if len(moments) > len(self._moments):
            self._moments = moments
            self._changed.set()

    def _has_ended(self) -> bool:
        return bool(self._moments) and self._source.is_last(self._moments[-1])


class HistoryWatcher(Generic[M]):
    """One per replica; `run` looks."""

    def __init__(self, source: HistoryEntrySource[M], feed: EventStream) -> None:
        self.source = source
        self.feed = feed
        self._watches: dict[UUID, set[HistoryWatch[M]]] = defaultdict(set)
        self._known: dict[UUID, Sequence[M]] = {}
        self._named: set[UUID] = set()
        self._some = asyncio.Event()

    @asynccontextmanager
    async def watch(self, which: UUID, after: int = 0) -> AsyncIterator[HistoryWatch[M]]:
        """From its moment number `after` on. Raises NotFound when nothing is known of it."""
        watch = HistoryWatch(self.source, after)
        self._watches[which].add(watch)
        try:
            if not await self.refresh([which]):
                raise self.source.not_found(which)
            yield watch
        finally:
            self._watches[which].discard(watch)
            if not self._watches[which]:
                del self._watches[which]
                self._known.pop(which, None)

    async def run(self, life: Lifecycle) -> None:
        async with asyncio.TaskGroup() as tasks:
            working = [
                tasks.create_task(work)
                for work in (self._consume_events(), self._refresh_changed(), self._refresh_all())
            ]
            life.ready()
            await life.until_draining()
            for task in working:
                task.cancel()

    async def refresh(self, which: Iterable[UUID]) -> int:
        """Read these, tell those who watch them, and say how many there are."""
        asked = list(which)
        found = 0
        for at in range(0, len(asked), BATCH):
            read = await self.source.read({each: self._known.get(each, ()) for each in asked[at : at + BATCH]})
            found += len(read)
            for each, moments in read.items():
                self._notify_watches(each, moments)
        return found

    def _notify_watches(self, which: UUID, moments: Sequence[M]) -> None:
        watches = self._watches.get(which, ())
        if watches and len(moments) >= len(self._known.get(which, ())):
            self._known[which] = moments
        for watch in watches:
            watch.update(moments)

    async def _consume_events(self) -> None:
        """For events that name what is watched."""
        while True:
            with suppress(SlowConsumer, Unavailable):
                async with self.feed.subscribe(EventFilter(kinds=(self.source.kind,))) as reader:
                    while True:
                        self._note_changed(await reader.read(POLL_INTERVAL_S))

    def _note_changed(self, portions: Sequence[EventBatch]) -> None:
        if not self._watches:
            return
        watched = {each.bytes: each for each in self._watches}
        for portion in portions:
            ids = self.source.event_ids(portion.group)
            for at in range(0, len(ids), ID_BYTES):
                if (each := watched.get(ids[at : at + ID_BYTES])) is not None:
                    self._named.add(each)
        if self._named:
            self._some.set()

    async def _refresh_changed(self) -> None:
        while True:
            await self._some.wait()
            await asyncio.sleep(DEBOUNCE_S)
            named, self._named = self._named, set()
            self._some.clear()
            await self._try_refresh(named)

    async def _refresh_all(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self._try_refresh(
                each for each, watches in self._watches.items() if not all(map(_has_ended, watches))
            )

    async def _try_refresh(self, which: Iterable[UUID]) -> None:
        try:
            await self.refresh(which)
        except (Unavailable, asyncpg.PostgresError) as away:
            log.info("histories_wait", reason=str(away))


def _has_ended(watch: HistoryWatch[M]) -> bool:
    return watch.ended

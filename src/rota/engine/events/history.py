"""Histories of jobs and workflow runs, pushed entry by entry to clients that watch them.

    async with histories.watch(job) as watch:
        while not watch.ended:
            for number, entry in await watch.next_entries(wait_s=15): ...

A history is append-only, so an entry is identified by its number, from 1. Entries always come from PostgreSQL; events
(`rota.engine.events.subscriptions`) only say when to read. All watched ids are read together: those named by an event
after `DEBOUNCE_S`, all of them every `POLL_INTERVAL_S`, because events may be missing. A thousand watchers thus cost
two statements, and a change without an event is seen `POLL_INTERVAL_S` later.

While PostgreSQL is unavailable watches pause; they continue when it is back.
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

from rota.api.jobs import JobHistoryEntry
from rota.engine.events.subscriptions import EventStream, SlowConsumer
from rota.engine.queries.jobs import job_history_entry
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
    """Reads the histories of one kind of subject."""

    kind: str
    """Kind of the events that announce a change."""

    async def read(self, known: Mapping[UUID, Sequence[M]]) -> Mapping[UUID, Sequence[M]]:
        """All entries of these ids, some of which are known already; missing ids are left out."""
        ...

    def event_ids(self, group: EventGroup) -> bytes:
        """The ids in an event."""
        ...

    def is_last(self, entry: M) -> bool: ...

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

    def is_last(self, entry: JobHistoryEntry) -> bool:
        return entry.state.terminal

    def not_found(self, which: UUID) -> NotFound:
        return NotFound(f"There is no job {which}, or it is not kept any more.", job=str(which))


class HistoryWatch(Generic[M]):
    """The read position of one watcher."""

    def __init__(self, source: HistoryEntrySource[M], after: int) -> None:
        self.ended = False
        """Whether all entries were delivered and none will follow."""
        self._source = source
        self._delivered = after
        self._entries: Sequence[M] = ()
        self._changed = asyncio.Event()

    async def next_entries(self, wait_s: float) -> list[tuple[int, M]]:
        """Entries not delivered yet; waits for one at most `wait_s`, then returns an empty list."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while len(self._entries) <= self._delivered and not self._has_ended():
                    self._changed.clear()
                    await self._changed.wait()
        fresh = list(enumerate(self._entries[self._delivered :], self._delivered + 1))
        self._delivered = max(self._delivered, len(self._entries))
        self.ended = self._has_ended()
        return fresh

    def ends_with(self, number: int) -> bool:
        """Whether the history has ended with entry `number`."""
        return self._has_ended() and number >= len(self._entries)

    def update(self, entries: Sequence[M]) -> None:
        if len(entries) > len(self._entries):
            self._entries = entries
            self._changed.set()

    def _has_ended(self) -> bool:
        return bool(self._entries) and self._source.is_last(self._entries[-1])


class HistoryWatcher(Generic[M]):
    """One per replica; `run` polls."""

    def __init__(self, source: HistoryEntrySource[M], stream: EventStream) -> None:
        self.source = source
        self.stream = stream
        self._watches: dict[UUID, set[HistoryWatch[M]]] = defaultdict(set)
        self._known: dict[UUID, Sequence[M]] = {}
        self._changed_ids: set[UUID] = set()
        self._has_changes = asyncio.Event()

    @asynccontextmanager
    async def watch(self, which: UUID, after: int = 0) -> AsyncIterator[HistoryWatch[M]]:
        """Watch the entries after number `after`. Raises NotFound for an unknown id."""
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
            loops = [
                tasks.create_task(loop)
                for loop in (self._consume_events(), self._refresh_changed(), self._refresh_all())
            ]
            life.ready()
            await life.until_draining()
            for task in loops:
                task.cancel()

    async def refresh(self, which: Iterable[UUID]) -> int:
        """Read these histories and notify their watchers; returns how many exist."""
        ids = list(which)
        found = 0
        for at in range(0, len(ids), BATCH):
            read = await self.source.read({each: self._known.get(each, ()) for each in ids[at : at + BATCH]})
            found += len(read)
            for each, entries in read.items():
                self._notify_watches(each, entries)
        return found

    def _notify_watches(self, which: UUID, entries: Sequence[M]) -> None:
        watches = self._watches.get(which, ())
        if watches and len(entries) >= len(self._known.get(which, ())):
            self._known[which] = entries
        for watch in watches:
            watch.update(entries)

    async def _consume_events(self) -> None:
        """Collect the watched ids that events name."""
        while True:
            with suppress(SlowConsumer, Unavailable):
                async with self.stream.subscribe(EventFilter(kinds=(self.source.kind,))) as subscription:
                    while True:
                        self._note_changed(await subscription.read(POLL_INTERVAL_S))

    def _note_changed(self, batches: Sequence[EventBatch]) -> None:
        if not self._watches:
            return
        watched = {each.bytes: each for each in self._watches}
        for batch in batches:
            ids = self.source.event_ids(batch.group)
            for at in range(0, len(ids), ID_BYTES):
                if (each := watched.get(ids[at : at + ID_BYTES])) is not None:
                    self._changed_ids.add(each)
        if self._changed_ids:
            self._has_changes.set()

    async def _refresh_changed(self) -> None:
        while True:
            await self._has_changes.wait()
            await asyncio.sleep(DEBOUNCE_S)
            changed_ids, self._changed_ids = self._changed_ids, set()
            self._has_changes.clear()
            await self._try_refresh(changed_ids)

    async def _refresh_all(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self._try_refresh(
                each for each, watches in self._watches.items() if not all(map(_has_ended, watches))
            )

    async def _try_refresh(self, which: Iterable[UUID]) -> None:
        try:
            await self.refresh(which)
        except (Unavailable, asyncpg.PostgresError) as error:
            log.info("history_refresh_failed", reason=str(error))


def _has_ended(watch: HistoryWatch[M]) -> bool:
    return watch.ended

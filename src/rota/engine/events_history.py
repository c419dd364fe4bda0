"""Histories as PostgreSQL has them, moment by moment, told to those who watch a job, or a run of a workflow.

    async with histories.watched(job) as watch:
        while not watch.ended:
            for number, moment in await watch.news(wait_s=15): ...

A history only grows, so a moment is named by its number, from 1. Whatever is told was read from PostgreSQL; events
(`rota.engine.events_feed`) say no more than when to look. What is watched is looked at together: that which an event
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

from rota.engine.events_feed import Behind, Feed
from rota.engine.jobs import Moment, moment_of
from rota.infra.postgres import Database, query
from rota.infra.service import Lifecycle
from rota.model.errors import NotFound, Unavailable
from rota.model.events import ID_BYTES, Group, Portion, Wanted

READ = query(__package__, "events_history")

log = structlog.get_logger(__name__)
SETTLE_S: Final = 0.05
LOOK_S: Final = 2.0
BATCH: Final = 1000

M = TypeVar("M")


class Source(Protocol[M]):
    """Whose histories they are."""

    kind: str
    """Of events that say when to look."""

    async def read(self, known: Mapping[UUID, Sequence[M]]) -> Mapping[UUID, Sequence[M]]:
        """All moments of these, of which some are known; those that there are not are left out."""
        ...

    def named(self, group: Group) -> bytes:
        """The ids that an event is about."""
        ...

    def is_last(self, moment: M) -> bool: ...

    def unknown(self, which: UUID) -> NotFound: ...


class OfJobs:
    kind = "job"

    def __init__(self, database: Database) -> None:
        self.database = database

    async def read(self, known: Mapping[UUID, Sequence[Moment]]) -> Mapping[UUID, Sequence[Moment]]:
        rows = await self.database.rows(READ, list(known))
        return {row["pk_job"]: [moment_of(*each) for each in msgspec.json.decode(row["history"])] for row in rows}

    def named(self, group: Group) -> bytes:
        return group.jobs

    def is_last(self, moment: Moment) -> bool:
        return moment.state.terminal

    def unknown(self, which: UUID) -> NotFound:
        return NotFound(f"There is no job {which}, or it is not kept any more.", job=str(which))


class Watched(Generic[M]):
    """What one who watches has seen."""

    def __init__(self, source: Source[M], after: int) -> None:
        self.ended = False
        """Whether all was told, and no more will come."""
        self._source = source
        self._seen = after
        self._moments: Sequence[M] = ()
        self._changed = asyncio.Event()

    async def news(self, wait_s: float) -> list[tuple[int, M]]:
        """Moments that were not told yet; waits for one, and returns nothing when there is none."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while len(self._moments) <= self._seen and not self._is_over():
                    self._changed.clear()
                    await self._changed.wait()
        fresh = list(enumerate(self._moments[self._seen :], self._seen + 1))
        self._seen = max(self._seen, len(self._moments))
        self.ended = self._is_over()
        return fresh

    def over_after(self, number: int) -> bool:
        """Whether it has ended, and moment `number` was its last."""
        return self._is_over() and number >= len(self._moments)

    def look(self, moments: Sequence[M]) -> None:
        if len(moments) > len(self._moments):
            self._moments = moments
            self._changed.set()

    def _is_over(self) -> bool:
        return bool(self._moments) and self._source.is_last(self._moments[-1])


class Histories(Generic[M]):
    """One per replica; `run` looks."""

    def __init__(self, source: Source[M], feed: Feed) -> None:
        self.source = source
        self.feed = feed
        self._watches: dict[UUID, set[Watched[M]]] = defaultdict(set)
        self._known: dict[UUID, Sequence[M]] = {}
        self._named: set[UUID] = set()
        self._some = asyncio.Event()

    @asynccontextmanager
    async def watched(self, which: UUID, after: int = 0) -> AsyncIterator[Watched[M]]:
        """From its moment number `after` on. Raises NotFound when nothing is known of it."""
        watch = Watched(self.source, after)
        self._watches[which].add(watch)
        try:
            if not await self.look([which]):
                raise self.source.unknown(which)
            yield watch
        finally:
            self._watches[which].discard(watch)
            if not self._watches[which]:
                del self._watches[which]
                self._known.pop(which, None)

    async def run(self, life: Lifecycle) -> None:
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(work) for work in (self._listen(), self._look_at_named(), self._look_at_all())]
            life.ready()
            await life.until_draining()
            for task in working:
                task.cancel()

    async def look(self, which: Iterable[UUID]) -> int:
        """Read these, tell those who watch them, and say how many there are."""
        asked = list(which)
        found = 0
        for at in range(0, len(asked), BATCH):
            read = await self.source.read({each: self._known.get(each, ()) for each in asked[at : at + BATCH]})
            found += len(read)
            for each, moments in read.items():
                self._tell(each, moments)
        return found

    def _tell(self, which: UUID, moments: Sequence[M]) -> None:
        watches = self._watches.get(which, ())
        if watches and len(moments) >= len(self._known.get(which, ())):
            self._known[which] = moments
        for watch in watches:
            watch.look(moments)

    async def _listen(self) -> None:
        """For events that name what is watched."""
        while True:
            with suppress(Behind, Unavailable):
                async with self.feed.subscribed(Wanted(kinds=(self.source.kind,))) as reader:
                    while True:
                        self._note(await reader.read(LOOK_S))

    def _note(self, portions: Sequence[Portion]) -> None:
        if not self._watches:
            return
        watched = {each.bytes: each for each in self._watches}
        for portion in portions:
            ids = self.source.named(portion.group)
            for at in range(0, len(ids), ID_BYTES):
                if (each := watched.get(ids[at : at + ID_BYTES])) is not None:
                    self._named.add(each)
        if self._named:
            self._some.set()

    async def _look_at_named(self) -> None:
        while True:
            await self._some.wait()
            await asyncio.sleep(SETTLE_S)
            named, self._named = self._named, set()
            self._some.clear()
            await self._try(named)

    async def _look_at_all(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._try(each for each, watches in self._watches.items() if not all(map(_is_over, watches)))

    async def _try(self, which: Iterable[UUID]) -> None:
        try:
            await self.look(which)
        except (Unavailable, asyncpg.PostgresError) as away:
            log.info("histories_wait", reason=str(away))


def _is_over(watch: Watched[M]) -> bool:
    return watch.ended

"""The moments of single jobs, exactly as PostgreSQL has them, told to those who watch a job.

    async with histories.watched(job) as watch:
        while not watch.ended:
            for number, moment in await watch.news(wait_s=15): ...

A history only grows, so a moment is named by its number, from 1. Whatever is told was read from PostgreSQL; events
(`rota.engine.events_feed`) say no more than when to look. Jobs that are watched are looked at together: those that an
event named after `SETTLE_S`, all of them every `LOOK_S`, for events may be missing. So a thousand who watch cost two
statements, and a job of which no event came is seen `LOOK_S` later.

While PostgreSQL is away nothing is told; it goes on when it is back.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import asyncpg
import msgspec
import structlog

from rota.engine.events_feed import Behind, Feed
from rota.engine.jobs import Moment, moment_of
from rota.infra.postgres import Database, query
from rota.infra.service import Lifecycle
from rota.model.errors import NotFound, Unavailable
from rota.model.events import ID_BYTES, Portion, Wanted
from rota.model.ids import JobId

READ = query(__package__, "events_history")

log = structlog.get_logger(__name__)
SETTLE_S: Final = 0.05
LOOK_S: Final = 2.0
BATCH: Final = 1000

Numbered = tuple[int, Moment]


class Watched:
    """What one who watches has seen of a job."""

    def __init__(self, job: JobId, after: int) -> None:
        self.job = job
        self.ended = False
        """Whether all was told, and no more will come."""
        self._seen = after
        self._moments: Sequence[Moment] = ()
        self._changed = asyncio.Event()

    async def news(self, wait_s: float) -> list[Numbered]:
        """Moments that were not told yet; waits for one, and returns nothing when there is none."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while len(self._moments) <= self._seen and not self._is_over():
                    self._changed.clear()
                    await self._changed.wait()
        fresh = list(enumerate(self._moments, 1))[self._seen :]
        self._seen = max(self._seen, len(self._moments))
        self.ended = self._is_over()
        return fresh

    def over_after(self, number: int) -> bool:
        """Whether the job has ended, and moment `number` was its last."""
        return self._is_over() and number >= len(self._moments)

    def look(self, moments: Sequence[Moment]) -> None:
        if len(moments) > len(self._moments):
            self._moments = moments
            self._changed.set()

    def _is_over(self) -> bool:
        return bool(self._moments) and self._moments[-1].state.terminal


class Histories:
    """One per replica; `run` looks."""

    def __init__(self, database: Database, feed: Feed) -> None:
        self.database = database
        self.feed = feed
        self._watches: dict[JobId, set[Watched]] = defaultdict(set)
        self._named: set[JobId] = set()
        self._some = asyncio.Event()

    @asynccontextmanager
    async def watched(self, job: JobId, after: int = 0) -> AsyncIterator[Watched]:
        """From its moment number `after` on. Raises NotFound when nothing is known of the job."""
        watch = Watched(job, after)
        self._watches[job].add(watch)
        try:
            if not await self.look([job]):
                raise NotFound(f"There is no job {job}, or it is not kept any more.", job=str(job))
            yield watch
        finally:
            self._watches[job].discard(watch)
            if not self._watches[job]:
                del self._watches[job]

    async def run(self, life: Lifecycle) -> None:
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(work) for work in (self._listen(), self._look_at_named(), self._look_at_all())]
            life.ready()
            await life.until_draining()
            for task in working:
                task.cancel()

    async def look(self, jobs: Iterable[JobId]) -> int:
        """Read these, tell those who watch them, and say how many there are."""
        asked = list(jobs)
        found = 0
        for at in range(0, len(asked), BATCH):
            rows = await self.database.rows(READ, asked[at : at + BATCH])
            found += len(rows)
            for row in rows:
                moments = [moment_of(*each) for each in msgspec.json.decode(row["history"])]
                for watch in self._watches.get(JobId(row["pk_job"]), ()):
                    watch.look(moments)
        return found

    async def _listen(self) -> None:
        """For events that name jobs which are watched."""
        while True:
            with suppress(Behind, Unavailable):
                async with self.feed.subscribed(Wanted(kinds=("job",))) as reader:
                    while True:
                        self._note(await reader.read(LOOK_S))

    def _note(self, portions: Sequence[Portion]) -> None:
        if not self._watches:
            return
        watched = {job.bytes: job for job in self._watches}
        for portion in portions:
            ids = portion.group.jobs
            for at in range(0, len(ids), ID_BYTES):
                if (job := watched.get(ids[at : at + ID_BYTES])) is not None:
                    self._named.add(job)
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
            await self._try(job for job, watches in self._watches.items() if not all(map(_is_over, watches)))

    async def _try(self, jobs: Iterable[JobId]) -> None:
        try:
            await self.look(jobs)
        except (Unavailable, asyncpg.PostgresError) as away:
            log.info("histories_wait", reason=str(away))


def _is_over(watch: Watched) -> bool:
    return watch.ended

"""Waits for jobs or runs to end: one shared poll of PostgreSQL for any number of waiters.

Jobs that this process ends are noticed immediately, without a statement; those of other replicas at the next poll. A
caller reads the state while it watches, so no end falls between the two. Nothing is stored for jobs without waiters.
While PostgreSQL is unavailable waiters keep waiting, each until its own timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final
from uuid import UUID

from rota.engine.completion.job_ends import JobEnd
from rota.engine.queries.jobs import JobQueries
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database
from rota.infra.service import Lifecycle
from rota.model.errors import PostgresUnavailable
from rota.model.ids import JobId

POLL_INTERVAL_S: Final = 0.1
MAX_BATCH: Final = 1000
"""Ids per statement."""
FindEnded = Callable[[Sequence[UUID]], Awaitable[Collection[UUID]]]
"""Returns which of these have ended or are no longer retained."""


class EndWatch:
    """One watched job."""

    def __init__(self, ended: asyncio.Event) -> None:
        self._ended = ended

    async def wait(self, within_s: float) -> None:
        """Returns when the job has ended or is gone, at the timeout, or when the server drains."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._ended.wait()


class EndWaiter:
    def __init__(self, find_ended: FindEnded, clock: Clock | None = None) -> None:
        self._find_ended = find_ended
        self._clock = clock or SystemClock()
        self._waiting: dict[UUID, set[asyncio.Event]] = {}
        self._has_waiters = asyncio.Event()
        self._draining = False

    @contextmanager
    def watching(self, job: UUID) -> Iterator[EndWatch]:
        """Notice the end from now on: read the state inside, and wait if it has not ended."""
        ended = asyncio.Event()
        self._waiting.setdefault(job, set()).add(ended)
        self._has_waiters.set()
        if self._draining:
            ended.set()
        try:
            yield EndWatch(ended)
        finally:
            self._remove_waiter(job, ended)

    def jobs_ended(self, ends: Sequence[JobEnd]) -> None:
        """For `CompletionPublisher.listeners`."""
        for end in ends:
            self._notify(end.job)

    async def run(self, life: Lifecycle) -> None:
        poll_task = asyncio.create_task(self._poll_loop(), name="watch")
        try:
            life.ready()
            await life.until_draining()
        finally:
            poll_task.cancel()
            await asyncio.wait([poll_task])
            self._draining = True
            for job in list(self._waiting):
                self._notify(job)

    async def _poll_loop(self) -> None:
        while True:
            await self._has_waiters.wait()
            await self._clock.sleep(POLL_INTERVAL_S)
            with suppress(PostgresUnavailable):
                await self.poll()
            if not self._waiting:
                self._has_waiters.clear()

    async def poll(self) -> None:
        ids = list(self._waiting)
        for first in range(0, len(ids), MAX_BATCH):
            batch = ids[first : first + MAX_BATCH]
            for job in await self._find_ended(batch):
                self._notify(job)

    def _notify(self, job: UUID) -> None:
        for ended in self._waiting.get(job, ()):
            ended.set()

    def _remove_waiter(self, job: UUID, ended: asyncio.Event) -> None:
        waiters = self._waiting[job]
        waiters.discard(ended)
        if not waiters:
            del self._waiting[job]


def ended_jobs_finder(database: Database) -> FindEnded:
    jobs = JobQueries(database)

    async def find_ended(ids: Sequence[UUID]) -> list[UUID]:
        states = await jobs.states([JobId(job) for job in ids])
        return [job for job in ids if (state := states.get(JobId(job))) is None or state.terminal]

    return find_ended

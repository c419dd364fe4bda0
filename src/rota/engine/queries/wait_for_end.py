"""Waiting for jobs or runs to end, for many who wait at once: one question to PostgreSQL for all of them, now and then.

Jobs that end by way of this process are known at once; those of other replicas at the next look. Nothing is kept for
whom nobody waits. While PostgreSQL is away those who wait go on waiting, each for as long as it said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Final
from uuid import UUID

from rota.engine.completion.finisher import JobEnd
from rota.engine.queries.jobs import JobQueries
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database
from rota.infra.service import Lifecycle
from rota.model.errors import PostgresUnavailable
from rota.model.ids import JobId

POLL_INTERVAL_S: Final = 0.1
MAX_BATCH: Final = 1000
"""Jobs that are asked about at once."""
FindEnded = Callable[[Sequence[UUID]], Awaitable[Collection[UUID]]]
"""Tells which of these have ended, or are not kept."""


class EndWaiter:
    def __init__(self, over: FindEnded, clock: Clock | None = None) -> None:
        self._find = over
        self._clock = clock or SystemClock()
        self._waiting: dict[UUID, set[asyncio.Event]] = {}
        self._some = asyncio.Event()
        self._over = False

    async def wait_until_ended(self, job: UUID, within_s: float) -> None:
        """Returns when it has ended or is not kept, when the time is over, or when the server is ending."""
        told = asyncio.Event()
        self._waiting.setdefault(job, set()).add(told)
        self._some.set()
        try:
            if not self._over:
                with suppress(TimeoutError):
                    async with asyncio.timeout(within_s):
                        await told.wait()
        finally:
            self._remove_waiter(job, told)

    def jobs_ended(self, ends: Sequence[JobEnd]) -> None:
        """For `Finisher.listeners`."""
        for end in ends:
            self._notify(end.job)

    async def run(self, life: Lifecycle) -> None:
        looking = asyncio.create_task(self._poll_loop(), name="watch")
        try:
            life.ready()
            await life.until_draining()
        finally:
            looking.cancel()
            await asyncio.wait([looking])
            self._over = True
            for job in list(self._waiting):
                self._notify(job)

    async def _poll_loop(self) -> None:
        while True:
            await self._some.wait()
            with suppress(PostgresUnavailable):
                await self.poll()
            if not self._waiting:
                self._some.clear()
            await self._clock.sleep(POLL_INTERVAL_S)

    async def poll(self) -> None:
        asked = list(self._waiting)
        for first in range(0, len(asked), MAX_BATCH):
            some = asked[first : first + MAX_BATCH]
            for job in await self._find(some):
                self._notify(job)

    def _notify(self, job: UUID) -> None:
        for told in self._waiting.get(job, ()):
            told.set()

    def _remove_waiter(self, job: UUID, told: asyncio.Event) -> None:
        left = self._waiting[job]
        left.discard(told)
        if not left:
            del self._waiting[job]


def ended_jobs_finder(database: Database) -> FindEnded:
    jobs = JobQueries(database)

    async def over(asked: Sequence[UUID]) -> list[UUID]:
        states = await jobs.states([JobId(job) for job in asked])
        return [job for job in asked if (state := states.get(JobId(job))) is None or state.terminal]

    return over

"""Jobs at their own cap: their frames are parked so that the lane proceeds, and unparked when capacity is released.

State here is a hint; PostgreSQL is authoritative and is polled. Unparking too many frames costs a booking that is
refused and parked again; unparking too few is corrected by the next poll.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from uuid import UUID

from rota.infra.postgres import Database, query
from rota.model.errors import PostgresUnavailable
from rota.queue import Queue

PARKED = query(__package__, "jobs_parked")


class ParkedJobs:
    def __init__(self, database: Database, queue: Queue) -> None:
        self.database = database
        self.queue = queue
        self._capacity: dict[UUID, int] = {}
        """By parked job: how many bookings fit again."""
        self._parked: dict[UUID, int] = {}
        """Jobs believed to be at their own cap, and how many of their frames share a booking in series."""
        self._unparked: dict[UUID, int] = {}
        """By parked job: for how many bookings frames were unparked last."""

    def add(self, job: UUID, series_length: int = 1) -> None:
        self._parked[job] = series_length

    def frames_released(self, jobs: Mapping[UUID, int]) -> None:
        """These jobs released so many bookings each."""
        if self._parked:
            for job in self._parked.keys() & jobs.keys():
                self._capacity[job] = self._capacity.get(job, 0) + jobs[job]

    def slots_of(self, jobs: Iterable[UUID]) -> int | None:
        """How many slots the unparked frames of these jobs are for; None: one of them is not at its cap."""
        slots = 0
        for job in jobs:
            if (unparked := self._unparked.get(job)) is None:
                return None
            slots += unparked
        return slots

    async def unpark(self) -> None:
        """Unpark as many frames of each job as run on the bookings that were released."""
        capacity, self._capacity = self._capacity, {}
        for job, slots in capacity.items():
            try:
                if await self.queue.unpark(job, slots * self._parked.get(job, 1)):
                    self._unparked[job] = slots
                else:
                    self._parked.pop(job, None)
                    self._unparked.pop(job, None)
            except PostgresUnavailable:
                self._capacity[job] = slots

    async def refresh(self) -> None:
        """Load jobs that other replicas parked, or whose release was missed."""
        for row in await self.database.rows(PARKED):
            self._parked.setdefault(row["pk_job"], 1)
            if row["room"] > 0:
                self._capacity[row["pk_job"]] = row["room"]

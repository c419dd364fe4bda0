"""Jobs at their own cap: their frames are parked so that the lane proceeds, and unparked when capacity is released.

State here is a hint; PostgreSQL is authoritative and is polled. Unparking too many frames costs a booking that is
refused and parked again; unparking too few is corrected by the next poll.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        """By parked job: how many frames fit again."""
        self._parked: set[UUID] = set()
        """Jobs believed to be at their own cap."""

    def add(self, job: UUID) -> None:
        self._parked.add(job)

    def frames_released(self, jobs: Mapping[UUID, int]) -> None:
        """These jobs released the bookings of so many frames each."""
        if self._parked:
            for job in self._parked.intersection(jobs):
                self._capacity[job] = self._capacity.get(job, 0) + jobs[job]

    async def unpark(self) -> None:
        """Unpark as many frames of each job as were released."""
        capacity, self._capacity = self._capacity, {}
        for job, most in capacity.items():
            try:
                if not await self.queue.unpark(job, most):
                    self._parked.discard(job)
            except PostgresUnavailable:
                self._capacity[job] = most

    async def refresh(self) -> None:
        """Load jobs that other replicas parked, or whose release was missed."""
        for row in await self.database.rows(PARKED):
            self._parked.add(row["pk_job"])
            if row["room"] > 0:
                self._capacity[row["pk_job"]] = row["room"]

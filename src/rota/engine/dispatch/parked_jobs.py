"""Jobs at a cap of their own: their frames are put aside, so that the lane moves on, and come back as room is made.

What is remembered here is a hint: PostgreSQL knows what is parked, and is asked while anything is. Unparking too much
costs a booking that is refused and parked again; unparking too little is made up by the next look.
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
        self._room: dict[UUID, int] = {}
        """Of parked jobs: for how many frames there is room again."""
        self._parked: set[UUID] = set()
        """Jobs at their own cap, as far as we know."""

    def add(self, job: UUID) -> None:
        self._parked.add(job)

    def frames_released(self, jobs: Mapping[UUID, int]) -> None:
        """So many frames of these jobs have given back what they held."""
        if self._parked:
            for job in self._parked.intersection(jobs):
                self._room[job] = self._room.get(job, 0) + jobs[job]

    async def unpark(self) -> None:
        """Frames of jobs that were at their cap, as many as were released."""
        room, self._room = self._room, {}
        for job, most in room.items():
            try:
                if not await self.queue.unpark(job, most):
                    self._parked.discard(job)
            except PostgresUnavailable:
                self._room[job] = most

    async def refresh(self) -> None:
        """Those that others parked, or that were released before we knew."""
        for row in await self.database.rows(PARKED):
            self._parked.add(row["pk_job"])
            if row["room"] > 0:
                self._room[row["pk_job"]] = row["room"]

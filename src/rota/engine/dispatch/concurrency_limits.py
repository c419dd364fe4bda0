"""Limits the number of concurrent jobs per show.

The limit of a job is the lower of `int_max_jobs` of its show (-1: unlimited) and `max_concurrent_jobs` of the policy
decision that admitted it.

One statement admits a job, under a lock of the show, when its first frame is about to be booked. The job counts until
it ends (rows of `rota.job_slot`; ended jobs are ignored there, so finishing a job costs nothing extra). Jobs over the
limit are parked, so that admitted jobs behind them in the lane proceed: a retry of a running job must not wait behind
a job that waits for that running job to end. They say `tenant_limit` while they are parked, not longer: what keeps an
unparked job waiting is something else (a full pool, another quota).

The set of limited shows is polled, and a limit change sends a notification; other shows cost no query. A round in
progress may miss a new limit. A policy limit counts exactly the jobs that are subject to one; other jobs of the show
count once a dispatcher knows of the limit, or once they are observed running.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rota.infra.postgres import Database, query
from rota.model.ids import JobId, ShowId

ADMIT_JOBS = query(__package__, "tenant_let_in")
CLEAR_REASONS = query(__package__, "tenant_limit_passed")


class ConcurrencyLimiter:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.limited: frozenset[ShowId] = frozenset()
        """Shows with a limit, as of the last refresh."""
        self._slot_freed = False

    async def refresh(self, limited: Iterable[ShowId]) -> None:
        """These shows have a limit, as PostgreSQL has it."""
        self.limited = frozenset(limited)
        if self.limited:
            await self.database.run(CLEAR_REASONS)

    def add_limited(self, show: ShowId) -> None:
        """A policy decision with a limit on concurrent jobs admitted a job of this show."""
        self.limited |= {show}

    async def admit(self, show: ShowId, jobs: Sequence[JobId]) -> set[JobId]:
        """Jobs that may run, in the given order; the others get the reason `tenant_limit`."""
        return set(await self.database.value(ADMIT_JOBS, show, list(dict.fromkeys(jobs))))

    def frames_released(self, show: ShowId) -> None:
        """Frames of the show have ended, so a job may have ended too."""
        if show in self.limited:
            self._slot_freed = True

    def take_slot_freed(self) -> bool:
        """Whether a job may have ended since the last call."""
        freed, self._slot_freed = self._slot_freed, False
        return freed

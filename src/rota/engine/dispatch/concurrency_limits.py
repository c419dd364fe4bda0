"""How many jobs of a show run at once: `int_max_jobs` of the show, -1 for as many as there are; and for jobs that were
let in by a policy that says so, `max_concurrent_jobs` of their word. The lower of both holds for a job.

A job is let in when its first frame is about to be booked, by one statement under a lock of the show, and counts until
it ends (rows of `rota.job_slot`; what has ended is passed over there, so ending a job costs nothing more). Jobs that
are not let in are parked, so that those behind them in a lane that were let in go on: a retry of a running job must not
wait behind a job that waits for that very job to end.

Which shows have a limit is looked up now and then and told when it changes; for all others nothing is asked. A limit
that was set a moment ago may be missed by a round that is under way. Under a limit of a policy those jobs are counted
exactly that come under one; jobs of the show that do not count from when a dispatcher has heard of the limit, or they
are seen to run.
"""

from __future__ import annotations

from collections.abc import Sequence

from rota.infra.postgres import Database, query
from rota.model.ids import JobId, ShowId

LIMITED_SHOWS = query(__package__, "tenant_limited")
ADMIT_JOBS = query(__package__, "tenant_let_in")


class ConcurrencyLimiter:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.limited: frozenset[ShowId] = frozenset()
        """Shows that have a limit, as far as we know."""
        self._left = False

    async def refresh(self) -> None:
        self.limited = frozenset(ShowId(row["pk_show"]) for row in await self.database.rows(LIMITED_SHOWS))

    def add_limited(self, show: ShowId) -> None:
        """A job of it was let in by a policy that limits how many run at once."""
        self.limited |= {show}

    async def admit(self, show: ShowId, jobs: Sequence[JobId]) -> set[JobId]:
        """Those that may run, the first first; the others say `tenant_limit` from here on."""
        return set(await self.database.value(ADMIT_JOBS, show, list(dict.fromkeys(jobs))))

    def frames_released(self, show: ShowId) -> None:
        """Frames of the show have ended, and perhaps a job."""
        if show in self.limited:
            self._left = True

    def take_slot_freed(self) -> bool:
        """Whether somebody may have left since we last asked."""
        left, self._left = self._left, False
        return left

"""Statistics that follow the size of tables, and bookings that are removed soon; one leader does both.

PostgreSQL keeps the plan of a repeated statement until the statistics of a table change. A plan that was made for an
almost empty table reads all of it, and goes on doing so when the table has grown: a backlog of 10,000 jobs made each
end of frames 40 ms slower. Autovacuum would renew the statistics up to a minute later. Here a table that has grown to
several times its size is analysed within seconds, and every session plans its statements again.

The tables of the queue's ring are left out: their statements have a fixed plan.

Each frame that runs has a row in `rota.proc` until it ends. Several statements a second read all of them, with the rows
of frames that ended since the last vacuum. Autovacuum comes once a minute; at 20,000 ends a second more than a million
dead rows are read until then. Here they are removed within seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import structlog

from rota.infra.lease import LeaderLoop, LeaderStep, Lease, Leases
from rota.infra.postgres import Database, query

GROWN = query(__package__, "tables_grown")
WAL_WRITTEN = query(__package__, "wal_written")
ANALYZE = query(__package__, "table_analyze")
DEAD_PROCS = query(__package__, "procs_dead")
VACUUM_PROCS = query(__package__, "procs_vacuum")

log = structlog.get_logger(__name__)

LEASE: Final = "rota:engine:statistics"
INTERVAL_S: Final = 2.0
GROWTH: Final = 4
"""Analysed when a table has this many times the rows of its statistics,"""
ROWS_MIN: Final = 1000
"""and this many more: reading fewer costs little."""
WAL_BYTES_MIN: Final = 64 * 1024
"""Fewer cannot have made so many rows."""
COUNTED_WITHIN_S: Final = 10.0
"""PostgreSQL counts rows so much later at most."""
RETRY_INTERVAL_S: Final = 60.0
"""For a table that is locked, or that this role may not analyse."""
DEAD_ROWS_MIN: Final = 50_000
"""Reading fewer costs less than removing them."""


class TableMaintenance(LeaderLoop):
    def __init__(self, database: Database, leases: Leases) -> None:
        super().__init__(leases, LEASE, kind="statistics")
        self.database = database
        self._failed_at: dict[str, float] = {}
        self._wal_bytes = 0
        self._written_at_s = float("-inf")
        self._dead_left = 0
        """By the last vacuum: a long transaction may still see them."""

    def begin_term(self, _lease: Lease) -> Sequence[LeaderStep]:
        return [LeaderStep("maintain", INTERVAL_S, self._maintain_if_written)]

    def on_step_failed(self, step: str, error: Exception) -> None:
        log.info("table_maintenance_deferred", step=step, reason=str(error))

    async def _maintain_if_written(self) -> None:
        """Looking at every table costs more than an idle server should."""
        written, now = int(await self.database.value(WAL_WRITTEN)), self.leases.clock.monotonic()
        if not 0 <= written - self._wal_bytes < WAL_BYTES_MIN:  # another server may have written less
            self._wal_bytes, self._written_at_s = written, now
        if self._failed_at or now - self._written_at_s < COUNTED_WITHIN_S + INTERVAL_S:
            await self.analyze_grown()
            await self.vacuum_procs()

    async def analyze_grown(self) -> list[str]:
        """Analyse tables that have grown; returns their names. No fence: another leader may do it at the same time."""
        now = self.leases.clock.monotonic()
        self._failed_at = {name: at for name, at in self._failed_at.items() if now - at < RETRY_INTERVAL_S}
        grown = [name for name in await self._grown() if name not in self._failed_at]
        for name in grown:
            await self.database.run(ANALYZE, name)
        if grown:
            self._failed_at |= dict.fromkeys(set(grown).intersection(await self._grown()), now)
            log.info("tables_analyzed", tables=grown, failed=[name for name in grown if name in self._failed_at])
        return grown

    async def vacuum_procs(self) -> bool:
        """Remove the bookings of ended frames from the table if they are many; returns whether it was tried."""
        dead = int(await self.database.value(DEAD_PROCS))
        if dead < max(DEAD_ROWS_MIN, 2 * self._dead_left):
            return False
        await self.database.run(VACUUM_PROCS)
        self._dead_left = int(await self.database.value(DEAD_PROCS))
        return True

    async def _grown(self) -> list[str]:
        return [row["name"] for row in await self.database.rows(GROWN, GROWTH, ROWS_MIN)]

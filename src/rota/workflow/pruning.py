"""What has ended is forgotten after `retention.finished_jobs`, in small parts under the lease of whoever leads.

A run goes with its history, its values and whatever timers are left, when the run that it belongs to has ended as long
ago; while anything is recorded to undo it, it stays. A saga goes when it has been rolled back, completely or not; one
that is open or rolls back never does. Of definitions the latest versions stay, and those that runs name.
"""

from __future__ import annotations

from typing import Final

from rota.infra import faults
from rota.infra.lease import Lease, Leases
from rota.infra.postgres import Database, Query, query
from rota.infra.telemetry import metrics
from rota.model.settings.lifecycle import Retention

SAGAS = query(__package__, "prune_sagas")
RUNS = query(__package__, "prune_runs")
VERSIONS = query(__package__, "prune_versions")

BATCH: Final = 500
BATCHES_MAX: Final = 100
"""Of one kind in one pass; the rest is for the next."""
PRUNED = metrics.counter("rota_workflow_pruned", "What was forgotten of workflows, by kind.", labels=("kind",))


class Pruning:
    def __init__(self, database: Database, leases: Leases, retention: Retention | None = None) -> None:
        self.database = database
        self.leases = leases
        self.kept_s = (retention or Retention()).finished_jobs

    async def prune(self, lease: Lease) -> int:
        """All that is due, as far as one pass goes; how much."""
        return sum((await self.each(lease)).values())

    async def each(self, lease: Lease, *, batch: int = BATCH) -> dict[str, int]:
        """The same by kind. Sagas first, since they keep their runs, and these their definitions."""
        steps = {"sagas": SAGAS, "runs": RUNS, "versions": VERSIONS}
        return {kind: await self._in_batches(lease, kind, forget, batch) for kind, forget in steps.items()}

    async def _in_batches(self, lease: Lease, kind: str, forget: Query, batch: int) -> int:
        gone = 0
        for _ in range(BATCHES_MAX):
            async with self.database.transaction() as tx:
                await self.leases.guard(tx, lease)
                number = int(await tx.value(forget, self.kept_s, batch))
                faults.at("workflow.before_pruned")
            faults.reply("workflow.prune")
            gone += number
            if number < batch:
                break
        PRUNED.labels(kind).inc(gone)
        return gone

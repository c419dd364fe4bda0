"""What has ended is forgotten after `retention.finished_jobs`, in small parts under the lease of whoever leads.

A run goes with its history, its values and whatever timers are left, when the run that it belongs to has ended as long
ago; while anything is recorded to undo it, it stays. A saga goes when it has been rolled back, completely or not; one
that is open or rolls back never does. Of definitions the latest versions stay, and those that runs name.
"""

from __future__ import annotations

from typing import Final

from rota.infra import failpoints
from rota.infra.lease import Lease, Leases
from rota.infra.postgres import Database, Query, query
from rota.infra.telemetry import metrics
from rota.model.settings.lifecycle import RetentionSettings

SAGAS = query(__package__, "prune_sagas")
RUNS = query(__package__, "prune_runs")
VERSIONS = query(__package__, "prune_versions")

BATCH: Final = 500
BATCHES_MAX: Final = 100
"""Of one kind in one pass; the rest is for the next."""
PRUNED = metrics.counter("rota_workflow_pruned", "What was forgotten of workflows, by kind.", labels=("kind",))


class WorkflowPruner:
    def __init__(self, database: Database, leases: Leases, retention: RetentionSettings | None = None) -> None:
        self.database = database
        self.leases = leases
        self.kept_s = (retention or RetentionSettings()).finished_jobs

    async def prune(self, lease: Lease) -> int:
        """All that is due, as far as one pass goes; how much."""
        return sum((await self.prune_by_kind(lease)).values())

    async def prune_by_kind(self, lease: Lease, *, batch: int = BATCH) -> dict[str, int]:
        """The same by kind. Sagas first, since they keep their runs, and these their definitions."""
        steps = {"sagas": SAGAS, "runs": RUNS, "versions": VERSIONS}
        return {kind: await self._prune_kind(lease, kind, forget, batch) for kind, forget in steps.items()}

    async def _prune_kind(self, lease: Lease, kind: str, forget: Query, batch: int) -> int:
        gone = 0
        for _ in range(BATCHES_MAX):
            async with self.database.transaction() as tx:
                await self.leases.guard(tx, lease)
                number = int(await tx.value(forget, self.kept_s, batch))
                failpoints.hit("workflow.before_pruned")
            failpoints.after_send("workflow.prune")
            gone += number
            if number < batch:
                break
        PRUNED.labels(kind).inc(gone)
        return gone

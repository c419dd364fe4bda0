"""Deletes ended runs, sagas and versions after `retention.finished_jobs`, in small batches under the leader's lease.

A run is deleted with its history, its values and its remaining timers, when its root run has ended as long ago; it
stays while a compensation of it is recorded. A saga is deleted after its rollback, complete or not; an open saga, or
one that rolls back, never is. The latest version of a definition stays, and so do versions that runs use.
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
"""Per kind and pass; the next pass does the rest."""
PRUNED = metrics.counter("rota_workflow_pruned", "Deleted objects of workflows, by kind.", labels=("kind",))


class WorkflowPruner:
    def __init__(self, database: Database, leases: Leases, retention: RetentionSettings | None = None) -> None:
        self.database = database
        self.leases = leases
        self.retention_s = (retention or RetentionSettings()).finished_jobs

    async def prune(self, lease: Lease) -> int:
        """Delete everything due, within the limits of one pass; returns how much."""
        return sum((await self.prune_by_kind(lease)).values())

    async def prune_by_kind(self, lease: Lease, *, batch: int = BATCH) -> dict[str, int]:
        """The same by kind. Sagas first: they keep their runs, and runs keep their definitions."""
        steps = {"sagas": SAGAS, "runs": RUNS, "versions": VERSIONS}
        return {kind: await self._prune_kind(lease, kind, statement, batch) for kind, statement in steps.items()}

    async def _prune_kind(self, lease: Lease, kind: str, statement: Query, batch: int) -> int:
        deleted = 0
        for _ in range(BATCHES_MAX):
            async with self.database.transaction() as tx:
                await self.leases.guard(tx, lease)
                number = int(await tx.value(statement, self.retention_s, batch))
                failpoints.hit("workflow.before_pruned")
            failpoints.after_send("workflow.prune")
            deleted += number
            if number < batch:
                break
        PRUNED.labels(kind).inc(deleted)
        return deleted

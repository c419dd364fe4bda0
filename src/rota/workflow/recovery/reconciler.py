"""Safety net of workflows: one leader, under a fenced lease, repairs stuck runs and deletes expired ones.

A pass every `workflow.poll_interval`; the lease lasts twice as long, as in the seed, and is renewed. Every write checks
it, so a leader that was paused beyond its lease writes nothing. The next pass does what one pass leaves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from rota.infra.lease import Leadership, Lease, Leases
from rota.infra.postgres.failures import FAILURES
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.errors import LeaseLost, PostgresUnavailable, RotaError, StaleFence
from rota.model.settings.lifecycle import RetentionSettings
from rota.workflow.executor import RunExecutor
from rota.workflow.recovery.retention import WorkflowPruner
from rota.workflow.recovery.stuck_runs import StuckRunRepair

LEASE: Final = "rota:workflow-engine:reconciler:default"
log = structlog.get_logger(__name__)
STEP_FAILURES = metrics.counter("rota_workflow_net_failures", "Reconciler steps that failed.", labels=("reason",))


class WorkflowReconciler:
    def __init__(self, leases: Leases, advancer: RunExecutor, retention: RetentionSettings | None = None) -> None:
        self.repair = StuckRunRepair(leases, advancer)
        self.pruner = WorkflowPruner(advancer.database, leases, retention)
        self._every_s = advancer.workflow.poll_interval
        self._clock = leases.clock
        self._leadership = Leadership(
            leases, LEASE, self.lead, kind="workflow_reconciler", ttl_s=2 * advancer.workflow.poll_interval
        )

    async def run(self, life: Lifecycle) -> None:
        life.ready()
        await self._leadership.serve(life)

    async def lead(self, lease: Lease) -> None:
        """Runs until cancelled."""
        while True:
            await self.run_once(lease)
            await self._clock.sleep(self._every_s)

    async def run_once(self, lease: Lease) -> int:
        """One pass; returns the number of runs and sagas repaired."""
        repaired = await self._run_step(self.repair.repair_runs, lease) + await self._run_step(
            self.repair.repair_sagas, lease
        )
        await self._run_step(self.pruner.prune, lease)
        return repaired

    async def _run_step(self, step: Callable[[Lease], Awaitable[int]], lease: Lease) -> int:
        """A failed step does not stop the others; the next pass repeats it."""
        try:
            return await step(lease)
        except (PostgresUnavailable, LeaseLost, StaleFence):
            raise
        except (RotaError, OSError, *FAILURES) as error:
            reason = error.code if isinstance(error, RotaError) else type(error).__name__
            STEP_FAILURES.labels(reason).inc()
            log.warning("workflow_reconcile_failed", reason=reason, because=str(error)[:200])
            return 0

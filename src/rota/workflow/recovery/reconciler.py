"""The net below workflows: one replica, under a fenced lease, mends what waits in vain and forgets what ended long ago.

A pass every `workflow.poll_interval`; the lease lasts twice as long, as in the seed, and is renewed. Every write checks
it, so a leader that was paused past its time writes nothing. What one pass does not get to the next one does.
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
STEP_FAILURES = metrics.counter("rota_workflow_net_failures", "Steps of the net that failed.", labels=("reason",))


class WorkflowReconciler:
    def __init__(self, leases: Leases, advancer: RunExecutor, retention: RetentionSettings | None = None) -> None:
        self.mending = StuckRunRepair(leases, advancer)
        self.pruning = WorkflowPruner(advancer.database, leases, retention)
        self._every_s = advancer.workflow.poll_interval
        self._clock = leases.clock
        self._leadership = Leadership(
            leases, LEASE, self.lead, kind="workflow_reconciler", ttl_s=2 * advancer.workflow.poll_interval
        )

    async def run(self, life: Lifecycle) -> None:
        life.ready()
        await self._leadership.serve(life)

    async def lead(self, lease: Lease) -> None:
        """Until cancelled."""
        while True:
            await self.run_once(lease)
            await self._clock.sleep(self._every_s)

    async def run_once(self, lease: Lease) -> int:
        """One pass; how many runs and sagas were mended."""
        mended = await self._run_step(self.mending.repair_runs, lease) + await self._run_step(
            self.mending.repair_sagas, lease
        )
        await self._run_step(self.pruning.prune, lease)
        return mended

    async def _run_step(self, step: Callable[[Lease], Awaitable[int]], lease: Lease) -> int:
        """Whatever becomes of one, the others are done; it is tried again by the next pass."""
        try:
            return await step(lease)
        except (PostgresUnavailable, LeaseLost, StaleFence):
            raise
        except (RotaError, OSError, *FAILURES) as error:
            reason = error.code if isinstance(error, RotaError) else type(error).__name__
            STEP_FAILURES.labels(reason).inc()
            log.warning("net_not_spread", reason=reason, because=str(error)[:200])
            return 0

"""Safety net of workflows: one leader, under a fenced lease, repairs stuck runs and deletes expired ones.

A pass every `workflow.poll_interval`; the lease lasts twice as long, as in the seed, and is renewed. Every write checks
it, so a leader that was paused beyond its lease writes nothing. The next pass does what one pass leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import structlog

from rota.infra.lease import LeaderLoop, LeaderStep, Lease, Leases
from rota.infra.postgres.failures import FAILURES
from rota.infra.service.supervisor import error_kind
from rota.infra.telemetry import metrics
from rota.model.errors import RotaError
from rota.model.settings.lifecycle import RetentionSettings
from rota.workflow.executor import RunExecutor
from rota.workflow.recovery.retention import WorkflowPruner
from rota.workflow.recovery.stuck_runs import StuckRunRepair

LEASE: Final = "rota:workflow-engine:reconciler:default"
log = structlog.get_logger(__name__)
STEP_FAILURES = metrics.counter("rota_workflow_net_failures", "Reconciler steps that failed.", labels=("reason",))


class WorkflowReconciler(LeaderLoop):
    def __init__(self, leases: Leases, advancer: RunExecutor, retention: RetentionSettings | None = None) -> None:
        self._every_s = advancer.workflow.poll_interval
        super().__init__(
            leases, LEASE, kind="workflow_reconciler", ttl_s=2 * self._every_s, retried=(RotaError, *FAILURES)
        )
        self.repair = StuckRunRepair(leases, advancer)
        self.pruner = WorkflowPruner(advancer.database, leases, retention)

    def begin_term(self, lease: Lease) -> Sequence[LeaderStep]:
        return [
            LeaderStep("repair_runs", self._every_s, partial(self.repair.repair_runs, lease)),
            LeaderStep("repair_sagas", self._every_s, partial(self.repair.repair_sagas, lease)),
            LeaderStep("prune", self._every_s, partial(self.pruner.prune, lease)),
        ]

    def on_step_failed(self, step: str, error: Exception) -> None:
        reason = error_kind(error)
        STEP_FAILURES.labels(reason).inc()
        log.warning("workflow_reconcile_failed", step=step, reason=reason, because=str(error)[:200])

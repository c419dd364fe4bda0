"""Workflows without workers, with the Redis mirror and the reconciler, both stepped by the test."""

import json

from rota.infra.lease import Lease, Leases
from rota.model.settings.lifecycle import DelayTimersSettings, RetentionSettings, WorkflowSettings
from rota.workflow.notifier import UnpublishedRuns
from rota.workflow.recovery.reconciler import LEASE, WorkflowReconciler
from rota.workflow.redis_mirror.publisher import MirrorPublisher
from rota.workflow.redis_mirror.reconciler import LEASE as POLLER
from rota.workflow.redis_mirror.reconciler import MirrorReconciler
from rota.workflow.redis_mirror.sagas import SagaMirror
from rota.workflow.redis_mirror.timers import TimerMirror
from tests.support.leader_steps import run_steps
from tests.support.queue import sql
from tests.support.workflows import WorkflowHarness

TIMERS = "rota:wf:delay:timers"
POLLING = Lease(POLLER, "workflow_poller", 1, "somebody", 10.0)
DELETE_INBOX_EVENT = sql("DELETE FROM rota.workflow_news WHERE pk_job = $1::uuid")


class MirrorOnly(UnpublishedRuns):
    """Publishes to the Redis mirror alone."""

    mirror = None

    async def runs_advanced(self, done):
        self.mirror.runs_advanced(done)

    def sagas_changed(self, sagas):
        self.mirror.sagas_changed(sagas)


class RecoveryHarness(WorkflowHarness):
    def __init__(self, database, redis=None, clock=None, *, run_lock_s=30.0, lease_s=30.0, holder="net"):
        notifier = MirrorOnly() if redis is not None else UnpublishedRuns()
        super().__init__(database, clock, notifier)
        self.redis = redis
        self.lease_s, self.holder = lease_s, holder
        self.leases = Leases(database)
        self.advancer.workflow = WorkflowSettings(poll_interval=5.0, run_lock_ttl=run_lock_s)
        self.reconciler = WorkflowReconciler(self.leases, self.advancer, RetentionSettings())
        if redis is not None:
            self._show(database, redis)
            notifier.mirror = self.mirror

    def _show(self, database, redis):
        self.index = TimerMirror(database, redis, self.commands.definitions)
        self.stacks = SagaMirror(database, redis, 120.0)
        self.mirror = MirrorPublisher(self.index, self.stacks)
        self.poller = MirrorReconciler(self.leases, self.index, self.stacks, self.sagas, DelayTimersSettings())

    async def shown(self):
        return {name.decode().split(":", 1)[1] for name in await self.redis.zrange(TIMERS, 0, -1)}

    async def stack(self, saga=None):
        entries = await self.redis.lrange(f"saga:{saga or self.run}:stack", 0, -1)
        return [(entry["step"], entry["state"], entry["topic"]) for entry in map(json.loads, entries)]

    async def lead(self):
        """The lease of the reconciler, or None; the same holder gets the same lease."""
        attempt = await self.leases.acquire([LEASE], kind="workflow_reconciler", ttl_s=self.lease_s, holder=self.holder)
        return next(iter(attempt.granted), None)

    async def repair(self):
        """One reconciler pass and the resulting advances; returns the number of repairs."""
        results = await run_steps(self.reconciler, await self.lead())
        await self.advance()
        return sum(results.get(name, 0) for name in ("repair_runs", "repair_sagas"))

    async def prune(self, batch=2):
        return await self.reconciler.pruner.prune_by_kind(await self.lead(), batch=batch)

    async def keep(self):
        """The periodic steps of a replica's services."""
        yield self.advance
        yield self.mirror.flush
        yield lambda: run_steps(self.poller, POLLING, "fill")
        yield lambda: run_steps(self.poller, POLLING, "clean")
        yield self.repair

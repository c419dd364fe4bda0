"""The agent scheduler service: the cycle loop under a member lease, and an orderly shutdown.

Everything runs under one member lease (`rota.agents.membership`); losing it cancels everything here.

Shutdown: no new runs; bodies are cancelled; their runs end as CANCELLED and due immediately (spread by
`jitter.shutdown-seconds`), in PostgreSQL and then in Redis; background tasks stop; then the lease is released. Every
wait is bounded. A crash in the middle is equivalent to a crash before.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final

import structlog
from redis.asyncio import Redis

from rota.agents.acquisition import Acquisition, CycleResult
from rota.agents.circuit_breakers import Breakers
from rota.agents.completion import FLUSH_DELAY_S, RunCompleter
from rota.agents.concurrency_permits import PermitPool
from rota.agents.events import AgentEventPublisher, PublishEvent
from rota.agents.health import CRON_INTERVAL_MS, CycleSnapshot, Health
from rota.agents.lease_watchdog import STUCK_EXIT_STATUS
from rota.agents.membership import AgentMembership
from rota.agents.metrics import set_pool_gauges
from rota.agents.poll_interval import PollPacer
from rota.agents.recovery.reconciler import AgentReconciler
from rota.agents.recovery.zombies_and_orphans import TAKEOVER_GRACE_S, Orphans, StaleWorkingEntries, Successors, Zombies
from rota.agents.redis_index.index import SCRIPTS, AgentIndex
from rota.agents.registry import AgentRegistry, DeclaredAgent
from rota.agents.repository import AgentRepository
from rota.agents.run_claims import RunClaimer
from rota.agents.run_starter import RunStarter
from rota.agents.running import ActiveRun, ActiveRuns
from rota.infra import failpoints
from rota.infra.lease import LeaderLoop, LeaderStep, Lease, Leases
from rota.infra.postgres import Database
from rota.infra.redis import RedisKeys, RedisServerTime, translate_errors
from rota.infra.service import Lifecycle
from rota.infra.service.periodic import EXPECTED_ERRORS, PeriodicTask, report_failure
from rota.infra.telemetry import metrics
from rota.model.errors import LeaseLost
from rota.model.failure_classes import ClassifyHook
from rota.model.schedules import IntervalSchedule
from rota.model.settings import Settings
from rota.model.settings.agents import AgentReconcileSettings, OrphanCleanupSettings, ZombieCleanupSettings

log = structlog.get_logger(__name__)

TAKEOVER_INTERVAL_S: Final = 2.0
STOP_TIMEOUT_S: Final = 10.0
"""How long cancelled bodies may take to end on shutdown."""
LEASE_LOST_STOP_TIMEOUT_S: Final = TAKEOVER_GRACE_S - 0.5
"""The same after a lost lease: less than the takeover grace."""
FINAL_FLUSH_TIMEOUT_S: Final = 5.0
SAMPLE_SIZE: Final = 50
LISTEN_TIMEOUT_S: Final = 60.0
CHANNEL: Final = "rota_agents"
CLEANUP_LEASE: Final = "agents:cleanup"

CYCLE_DURATION = metrics.histogram("rota_agents_run_cycle_time_seconds", "Duration of a cycle.", labels=("success",))


class AgentScheduler:
    """`Service("agents", AgentScheduler(...).run)`. `declared` is called at every refresh, because agents may change.

    `publish_event` publishes events of runs, `hook` classifies their failures.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        redis: Redis,
        declared: Callable[[], Awaitable[Iterable[DeclaredAgent]]],
        membership: AgentMembership,
        publish_event: PublishEvent,
        hook: ClassifyHook | None = None,
    ) -> None:
        options = settings.redis.scheduler
        self.options = options
        self.membership = membership
        self.clock = membership.clock
        self.leases = membership.leases
        self.redis = redis
        self.database = database
        self.repository = AgentRepository(database, self.leases.owner)
        self.registry = AgentRegistry(settings.redis.agent, (), options.interval_ms)
        changed = asyncio.Event()
        self.permits = PermitPool(settings.redis.agent.max_concurrent_agents, changed.set)
        self.pace = PollPacer(self.clock, self.permits, changed, options.interval_ms / 1000)
        self.event_publisher = AgentEventPublisher(publish_event, self.leases.owner)
        self.completer = RunCompleter(
            self.repository,
            self.index_of,
            options,
            self.clock,
            random.random,
            self.pace.on_due_time,
            self.event_publisher.runs_ended,
        )
        self.runs = ActiveRuns(self.clock, self.completer.add, hook, membership.lease_until)
        self.zombies = Zombies(self.runs, options.zombie_cleanup, self.clock)
        self.successors = Successors(self.repository, self.index_of, self.registry, self.event_publisher.runs_lost)
        self.stale_entries = StaleWorkingEntries(self.repository, self.index_of, self.registry)
        self.orphans = Orphans(self.repository, self.index_of, self.registry, options.orphan_cleanup, self.clock)
        self.breakers = Breakers(options.circuit_breaker, self.clock)
        self.health = Health(options.health_summary_period_seconds, len(SCRIPTS))
        time = RedisServerTime(redis, self.clock, options.time_cache_duration_ms / 1000)
        self.reconciler = AgentReconciler(
            self.repository, self.registry, self.index_of, declared, time, options, self.clock
        )
        starter = RunStarter(self.completer, options.failure_backoff, self._start_run)
        claimer = RunClaimer(
            self.permits,
            self.repository,
            self.index_of,
            self.completer,
            starter,
            self.clock,
            in_batches=options.batch_operations.enabled,
        )
        self.acquisition = Acquisition(
            self.registry, self.permits, self.index_of, claimer, options.batch_operations, self.clock
        )
        self.orphan_cleanup = OrphanCleanup(self.leases, options.orphan_cleanup, self._sweep_orphans_as_leader)
        self.cycles = 0
        self._keys = RedisKeys(options.keys.prefix, options.keys.hash_tag)
        self._indexes: dict[str, AgentIndex] = {}

    def index_of(self, group: str) -> AgentIndex:
        if group not in self._indexes:
            names = self.options.keys
            self._indexes[group] = AgentIndex(
                self.redis, self._keys.agent_keys(group, names.waiting_set, names.working_set)
            )
        return self._indexes[group]

    async def run(self, life: Lifecycle) -> None:
        if not self.options.enabled:
            life.ready()
            await life.until_draining()
        while not life.draining:
            await self.reconciler.load_agents()
            try:
                async with self.membership.join(self.registry.crowd) as lease:
                    await self._serve_membership(life, lease)
            except LeaseLost as lost:
                log.warning("agents_lease_lost", discarded=self.completer.discard_unrecorded(), because=lost.sentence)

    async def _serve_membership(self, life: Lifecycle, lease: Lease) -> None:
        """One membership. However it ends, no body outlives it."""
        await self.reconciler.declare_new()
        with self.membership.watched_loop(lambda: len(self.runs) > 0):
            await self._run_tasks(life, lease)

    async def _run_tasks(self, life: Lifecycle, lease: Lease) -> None:
        async with asyncio.TaskGroup() as tasks:
            periodic = self._periodic_tasks(lease)
            for each in periodic:
                each.start(tasks)
            helpers = [tasks.create_task(self._flush_completions(lease)), tasks.create_task(self._listen_for_changes())]
            if self.options.orphan_cleanup.enabled and not self.options.orphan_cleanup.force_all_pods:
                helpers.append(tasks.create_task(self.orphan_cleanup.leadership.run()))
            try:
                life.ready()
                log.info("agents_started", type=self.options.type, agents=len(self.registry.agents), member=lease.name)
                await self._cycle_loop(life, lease)
            finally:
                await self._shut_down(lease, STOP_TIMEOUT_S if life.draining else LEASE_LOST_STOP_TIMEOUT_S)
            await asyncio.gather(*(each.stop() for each in periodic), self.orphan_cleanup.task.wait_idle())
            for helper in helpers:
                helper.cancel()

    def _periodic_tasks(self, lease: Lease) -> list[PeriodicTask]:
        """Background tasks, and how long each may take on shutdown."""
        options = self.options
        zombies, orphans, reconcile = options.zombie_cleanup, options.orphan_cleanup, options.reconcile

        async def refresh() -> None:
            async with self.breakers.redis.call():
                await self.reconciler.refresh(lease)
                self.health.orphans += await self.stale_entries.sweep()
                await self._sample_overlaps()

        periodic = [
            _limited_task("reconcile", options.refresh_period_seconds, refresh, reconcile),
            PeriodicTask("heirs", TAKEOVER_INTERVAL_S, lambda: self._take_over(lease)),
            PeriodicTask("quarantine", 1.0, self._quarantine_stuck),
        ]
        if zombies.enabled:
            periodic.append(_limited_task("zombie", zombies.interval_ms / 1000, self._sweep_zombies, zombies))
        if orphans.enabled and orphans.force_all_pods:
            sweep = partial(self._sweep_orphans, lease, self.registry.owns)
            periodic.append(_limited_task("orphan", orphans.interval_ms / 1000, sweep, orphans))
        return periodic

    async def _cycle_loop(self, life: Lifecycle, lease: Lease) -> None:
        draining = asyncio.create_task(life.until_draining(), name="agents.draining")
        draining.add_done_callback(lambda _task: self.pace.wake())
        try:
            while not life.draining:
                began_at = self.pace.begin_cycle()
                result = await self._run_cycle(lease)
                self.cycles += 1
                await self.pace.wait_for_next_cycle(result, began_at, steady=self.breakers.closed)
        finally:
            draining.cancel()

    async def _run_cycle(self, lease: Lease) -> CycleResult | None:
        """The result of a cycle; None if it failed."""
        slots, began_at = self.permits.free, self.clock.monotonic()
        result: CycleResult | None = None
        try:
            async with self.breakers.acquisition.call(), self.breakers.redis.call():
                result = await self.acquisition.run_cycle(lease)
        except Exception as error:  # noqa: BLE001 - a failed cycle must not end the loop
            report_failure("cycle", error)
        CYCLE_DURATION.labels("true" if result else "false").observe(self.clock.monotonic() - began_at)
        self.health.update(self._snapshot(result or CycleResult(), slots), self.clock.monotonic())
        set_pool_gauges(self.redis)
        return result

    def _snapshot(self, result: CycleResult, slots: int) -> CycleSnapshot:
        schedules = [each.spec.schedule for each in self.registry.agents.values()]
        recurring = [each.interval_ms for each in schedules if isinstance(each, IntervalSchedule)]
        others = [CRON_INTERVAL_MS] if len(recurring) < len(schedules) else []
        stuck = len(self.runs.stuck)
        return CycleSnapshot(
            seen=result,
            registered=len(schedules),
            active=len(self.runs) - stuck,
            stuck=stuck,
            permits_most=self.permits.most,
            permits_free=self.permits.free,
            permits_held=self.permits.held,
            slots=slots,
            completions=self.completer.pending_count,
            redis_closed=self.breakers.redis_closed,
            shortest_ms=min([*recurring, *others], default=0),
            recurring_ms=min(recurring, default=0),
        )

    async def _sample_overlaps(self) -> None:
        """Check for agents in both sets, which no script of ours leaves behind."""
        found = [await self.index_of(group).sample(SAMPLE_SIZE) for group in self.registry.groups]
        self.health.set_overlap_sample(sum(each.count for each in found), sum(each.overlaps for each in found))

    def _start_run(self, run: ActiveRun, declared: DeclaredAgent) -> None:
        self.runs.start(run, declared.body, self.zombies.stop_after_s(run.spec))
        self.event_publisher.run_started(run)

    async def _flush_completions(self, lease: Lease) -> None:
        """Write ends of runs, batched unless one is urgent; failures are retried indefinitely."""
        while True:
            await self.completer.has_pending.wait()
            await _wait_at_most(self.completer.urgent, FLUSH_DELAY_S)
            try:
                await self.completer.flush_to_postgres(lease)
                async with self.breakers.redis.call():
                    await self.completer.flush_to_redis()
            except Exception as error:  # noqa: BLE001 - nothing is lost: retried after a pause
                report_failure("endings", error)
                await asyncio.sleep(self.options.interval_ms / 1000)

    async def _listen_for_changes(self) -> None:
        """Reload agents and poll after a change or trigger notification, and at least every `LISTEN_TIMEOUT_S`."""
        while True:
            try:
                async with self.database.listen(CHANNEL) as notifications:
                    while True:
                        await notifications.next(LISTEN_TIMEOUT_S)
                        await self.reconciler.load_agents()
                        self.pace.wake()
            except EXPECTED_ERRORS as error:
                report_failure("listen", error)
            await asyncio.sleep(self.options.interval_ms / 1000)

    async def _take_over(self, lease: Lease) -> None:
        if released := await self.successors.take_over(lease):
            self.health.orphans += released
            log.warning("agent_runs_taken_over", agents=released)
            self.pace.wake()

    async def _quarantine_stuck(self) -> None:
        for run in self.runs.quarantine():
            self.event_publisher.run_quarantined(run)
        for run in [run for run in self.runs.stuck if not run.shown]:
            await self.repository.quarantine(run.name, run.number, stuck=True)
            run.shown = True

    async def _sweep_zombies(self) -> None:
        self.health.zombies += len(self.zombies.sweep())

    async def _sweep_orphans(self, lease: Lease, mine: Callable[[str], bool] = lambda _name: True) -> None:
        self.health.orphans += await self.orphans.sweep(lease, mine)

    async def _sweep_orphans_as_leader(self, lease: Lease) -> None:
        key = self._keys.agents_leader(self.options.keys.cleanup_leader_key)
        with translate_errors(self.redis):
            await self.redis.set(key, self.leases.owner, px=self.options.orphan_cleanup.leadership_ttl_ms)
        await self._sweep_orphans(lease)

    async def _shut_down(self, lease: Lease, timeout_s: float) -> None:
        """Stop bodies first, then record their ends. No body runs when this returns."""
        try:
            await self.runs.close(timeout_s)
        finally:
            if self.runs.by_name:
                # Also on another cancellation: the lease must not be released while a body runs.
                log.critical("agents_ignore_cancellation", agents=sorted(self.runs.by_name))
                self.membership.abandon(STUCK_EXIT_STATUS)
        failpoints.hit("agents.after_close")
        try:
            async with asyncio.timeout(FINAL_FLUSH_TIMEOUT_S):
                await self.completer.flush_to_postgres(lease)
                await self.completer.flush_to_redis()
        except EXPECTED_ERRORS as error:
            report_failure("shutdown", error)


class OrphanCleanup(LeaderLoop):
    """Runs `sweep` on the member that leads. A pass that hangs is cancelled; one that fails is reported."""

    def __init__(
        self, leases: Leases, options: OrphanCleanupSettings, sweep: Callable[[Lease], Awaitable[None]]
    ) -> None:
        super().__init__(leases, CLEANUP_LEASE, kind="agents_cleanup", ttl_s=options.leadership_ttl_ms / 1000)
        self._interval_s = options.interval_ms / 1000
        self._sweep = sweep
        self._lease: Lease | None = None
        self.task = _limited_task("orphan", self._interval_s, self._sweep_as_leader, options)

    def begin_term(self, lease: Lease) -> Sequence[LeaderStep]:
        self._lease = lease
        return [LeaderStep("orphan", self._interval_s, self.task.run_once)]

    async def _sweep_as_leader(self) -> None:
        assert self._lease is not None, "only the leader sweeps"
        await self._sweep(self._lease)


def _limited_task(
    name: str,
    period_s: float,
    work: Callable[[], Awaitable[object]],
    limits: OrphanCleanupSettings | ZombieCleanupSettings | AgentReconcileSettings,
) -> PeriodicTask:
    return PeriodicTask(
        name,
        period_s,
        work,
        budget_ms=limits.run_budget_ms,
        patience_s=limits.executor_shutdown_await_ms / 1000,
        force_s=limits.executor_shutdown_force_await_ms / 1000,
    )


async def _wait_at_most(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return

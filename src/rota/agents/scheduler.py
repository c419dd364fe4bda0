"""The service that runs agents: a lease, a loop under it, and an end in order.

All of it happens under one member lease (`rota.infra.lease`): it is renewed by heartbeat, every run in PostgreSQL names
it, and losing it cancels everything here. A body that ignores even that takes the process with it (`abandon`), since
its agent is run by somebody else from then on. After a lost lease the next one begins anew, as another member.

Shutdown: nothing new is taken; bodies are cancelled; their runs end as CANCELLED and due at once (spread by
`jitter.shutdown-seconds`), in PostgreSQL and then in Redis; what works beside the loop ends; then the lease is given
back. Every wait is bounded. If we die in the middle of it, it is as if we had died before.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import structlog
from redis.asyncio import Redis

from rota.agents.acquisition import Acquisition, Seen
from rota.agents.breakers import Breakers
from rota.agents.cleanup import GONE_S, Heirs, Orphans, Stranded, Zombies
from rota.agents.endings import SOON_S, Endings
from rota.agents.gauges import show_pool
from rota.agents.health import CRON_INTERVAL_MS, Health, Tick
from rota.agents.leash import STUCK_STATUS, LoopGuard
from rota.agents.pacing import Pace
from rota.agents.periodic import EXPECTED, Periodic, tell_failure
from rota.agents.permits import Permits
from rota.agents.reconcile import Reconciler
from rota.agents.records import MEMBER, Records
from rota.agents.registry import Declared, Registry
from rota.agents.runs import Run, Runs
from rota.agents.sets import SCRIPTS, Sets
from rota.agents.telling import Tell, Telling
from rota.infra import faults
from rota.infra.clock import Clock, SystemClock
from rota.infra.lease import Hold, Leadership, Lease, Leases
from rota.infra.postgres import Database
from rota.infra.redis import Keys, ServerTime, guard
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.errors import LeaseLost
from rota.model.failures import Hook
from rota.model.schedule import Every
from rota.model.settings import Settings

log = structlog.get_logger(__name__)

LEASE_S: Final = 10.0
HEIRS_S: Final = 2.0
STOP_S: Final = 10.0
"""How long cancelled bodies may take to end when the process does."""
LOST_STOP_S: Final = GONE_S - 0.5
"""And when the lease is lost: less than whoever takes over waits."""
GIVE_BACK_S: Final = 5.0
SAMPLE: Final = 50
LISTEN_S: Final = 60.0
CHANNEL: Final = "rota_agents"
LEADER: Final = "agents:cleanup"

CYCLES = metrics.histogram("rota_agents_run_cycle_time_seconds", "Duration of a cycle.", labels=("success",))


class Agents:
    """`Service("agents", Agents(...).run)`. `declared` is asked at every refresh, for it may change.

    Members of one `crowd` share agents out among themselves; without a name it is those that declare the same ones.
    `tell` hears of runs as events.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        redis: Redis,
        declared: Callable[[], Awaitable[Iterable[Declared]]],
        *,
        leases: Leases | None = None,
        clock: Clock | None = None,
        hook: Hook | None = None,
        crowd: str = "",
        lease_s: float = LEASE_S,
        abandon: Callable[[int], object] = os._exit,
        tell: Tell | None = None,
    ) -> None:
        wanted = settings.redis.scheduler
        self.wanted = wanted
        self.clock = clock or SystemClock()
        self.leases = leases or Leases(database)
        self.redis = redis
        self.database = database
        self.records = Records(database, self.leases.owner)
        self.registry = Registry(settings.redis.agent, (), wanted.interval_ms)
        self.permits = Permits(settings.redis.agent.max_concurrent_agents)
        self.pace = Pace(self.clock, self.permits, wanted.interval_ms / 1000)
        self.permits.freed = self.pace.freed
        self.telling = Telling(tell, self.leases.owner)
        self.endings = Endings(
            self.records, self.sets, wanted, self.clock, random.random, self.pace.due, self.telling.ended
        )
        self.runs = Runs(self.clock, self.endings.add, hook, self.lease_until)
        self.zombies = Zombies(self.runs, wanted.zombie_cleanup, self.clock)
        self.heirs = Heirs(self.records, self.sets, self.registry, self.telling.lost)
        self.stranded = Stranded(self.records, self.sets, self.registry)
        self.orphans = Orphans(self.records, self.sets, self.registry, wanted.orphan_cleanup, self.clock)
        self.breakers = Breakers(wanted.circuit_breaker, self.clock)
        self.health = Health(wanted.health_summary_period_seconds, len(SCRIPTS))
        time = ServerTime(redis, self.clock, wanted.time_cache_duration_ms / 1000)
        self.reconciler = Reconciler(self.records, self.registry, self.sets, declared, time, wanted, self.clock)
        self.acquisition = Acquisition(
            self.registry, self.permits, self.records, self.sets, self.endings, wanted, self.clock, self._start
        )
        self._leading = self._sweeping(self._nothing)
        self.cycles = 0
        self._lease_s = lease_s
        self._crowd = crowd
        self._hold: Hold | None = None
        self._abandon = abandon
        self._keys = Keys(wanted.keys.prefix, wanted.keys.hash_tag)
        self._sets: dict[str, Sets] = {}

    def sets(self, group: str) -> Sets:
        if group not in self._sets:
            names = self.wanted.keys
            self._sets[group] = Sets(self.redis, self._keys.of_agents(group, names.waiting_set, names.working_set))
        return self._sets[group]

    def lease_until(self) -> float:
        """Until when nobody else runs our agents, by the monotonic clock of this machine."""
        return self._hold.believed_until if self._hold is not None else 0.0

    async def run(self, life: Lifecycle) -> None:
        if not self.wanted.enabled:
            life.ready()
            await life.until_draining()
        while not life.draining:
            await self.reconciler.load()
            crowd = self._crowd or self.registry.crowd
            name = f"{MEMBER}{crowd}:{self.leases.owner}:{secrets.token_hex(4)}"
            self._hold = self.leases.hold(name, kind="agents", ttl_s=self._lease_s)
            try:
                async with self._hold as lease:
                    await self._live(life, lease)
            except LeaseLost as lost:
                log.warning("agents_lease_lost", given_up=self.endings.give_up(), because=lost.sentence)

    async def _live(self, life: Lifecycle, lease: Lease) -> None:
        """One membership. However it ends, no body outlives it."""
        await self.reconciler.announce()
        loop = asyncio.get_running_loop()
        watch = LoopGuard(loop, self.clock, self.lease_until, lambda: len(self.runs) > 0, self._abandon)
        watch.start()
        try:
            await self._tasks(life, lease)
        finally:
            watch.stop()

    async def _tasks(self, life: Lifecycle, lease: Lease) -> None:
        async with asyncio.TaskGroup() as tasks:
            beside = self._beside(lease)
            for each in beside:
                each.start(tasks)
            helpers = [tasks.create_task(self._flushing(lease)), tasks.create_task(self._listening())]
            if self.wanted.orphan_cleanup.enabled and not self.wanted.orphan_cleanup.force_all_pods:
                helpers.append(tasks.create_task(self._leadership().run()))
            try:
                life.ready()
                log.info("agents_started", type=self.wanted.type, agents=len(self.registry.agents), member=lease.name)
                await self._loop(life, lease)
            finally:
                await self._end(lease, STOP_S if life.draining else LOST_STOP_S)
            await asyncio.gather(*(each.stop() for each in beside), self._leading.rest())
            for helper in helpers:
                helper.cancel()

    def _beside(self, lease: Lease) -> list[Periodic]:
        """What is done beside the loop, and how long each may take when we stop."""
        wanted = self.wanted
        zombies, orphans, reconcile = wanted.zombie_cleanup, wanted.orphan_cleanup, wanted.reconcile

        async def refresh() -> None:
            async with self.breakers.redis.call():
                await self.reconciler.refresh(lease)
                self.health.orphans += await self.stranded.sweep()
                await self._sample()

        beside = [
            Periodic(
                "reconcile",
                wanted.refresh_period_seconds,
                refresh,
                budget_ms=reconcile.run_budget_ms,
                patience_s=reconcile.executor_shutdown_await_ms / 1000,
                force_s=reconcile.executor_shutdown_force_await_ms / 1000,
            ),
            Periodic("heirs", HEIRS_S, lambda: self._inherit(lease)),
            Periodic("quarantine", 1.0, self._quarantine),
        ]
        if zombies.enabled:
            beside.append(
                Periodic(
                    "zombie",
                    zombies.interval_ms / 1000,
                    self._sweep_zombies,
                    budget_ms=zombies.run_budget_ms,
                    patience_s=zombies.executor_shutdown_await_ms / 1000,
                    force_s=zombies.executor_shutdown_force_await_ms / 1000,
                )
            )
        if orphans.enabled and orphans.force_all_pods:
            beside.append(self._sweeping(lambda: self._sweep_orphans(lease, self.registry.owns)))
        return beside

    def _sweeping(self, work: Callable[[], Awaitable[None]]) -> Periodic:
        wanted = self.wanted.orphan_cleanup
        return Periodic(
            "orphan",
            wanted.interval_ms / 1000,
            work,
            budget_ms=wanted.run_budget_ms,
            patience_s=wanted.executor_shutdown_await_ms / 1000,
            force_s=wanted.executor_shutdown_force_await_ms / 1000,
        )

    async def _loop(self, life: Lifecycle, lease: Lease) -> None:
        draining = asyncio.create_task(life.until_draining(), name="agents.draining")
        draining.add_done_callback(lambda _task: self.pace.nudge())
        try:
            while not life.draining:
                began_at = self.pace.begin()
                seen = await self._cycle(lease)
                self.cycles += 1
                await self.pace.until_next(seen, began_at, steady=self.breakers.closed)
        finally:
            draining.cancel()

    async def _cycle(self, lease: Lease) -> Seen | None:
        """What it saw; None if it failed."""
        slots, began_at = self.permits.free, self.clock.monotonic()
        seen: Seen | None = None
        try:
            async with self.breakers.acquisition.call(), self.breakers.redis.call():
                seen = await self.acquisition.cycle(lease)
        except Exception as error:  # noqa: BLE001 - the loop lives, whatever a cycle dies of
            tell_failure("cycle", error)
        CYCLES.labels("true" if seen else "false").observe(self.clock.monotonic() - began_at)
        self.health.note(self._tick(seen or Seen(), slots), self.clock.monotonic())
        show_pool(self.redis)
        return seen

    def _tick(self, seen: Seen, slots: int) -> Tick:
        schedules = [each.spec.schedule for each in self.registry.agents.values()]
        recurring = [each.interval_ms for each in schedules if isinstance(each, Every)]
        others = [CRON_INTERVAL_MS] if len(recurring) < len(schedules) else []
        stuck = len(self.runs.stuck)
        return Tick(
            seen=seen,
            registered=len(schedules),
            active=len(self.runs) - stuck,
            stuck=stuck,
            permits_most=self.permits.most,
            permits_free=self.permits.free,
            permits_held=self.permits.held,
            slots=slots,
            completions=self.endings.waiting,
            redis_closed=self.breakers.redis_closed,
            shortest_ms=min([*recurring, *others], default=0),
            recurring_ms=min(recurring, default=0),
        )

    async def _sample(self) -> None:
        """Whether agents are in both sets, which no script of ours leaves behind."""
        found = [await self.sets(group).sample(SAMPLE) for group in self.registry.groups]
        self.health.sampled(sum(each.count for each in found), sum(each.overlaps for each in found))

    def _start(self, run: Run, declared: Declared) -> None:
        self.runs.start(run, declared.body, self.zombies.dead_man_s(run.spec))
        self.telling.begun(run)

    async def _flushing(self, lease: Lease) -> None:
        """Ends of runs, a few at a time unless one is urgent; what fails is tried again, for ever."""
        while True:
            await self.endings.some.wait()
            await _either(self.endings.hurry, SOON_S)
            try:
                await self.endings.record(lease)
                async with self.breakers.redis.call():
                    await self.endings.move()
            except Exception as error:  # noqa: BLE001 - nothing of it is lost, and the next try may do better
                tell_failure("endings", error)
                await asyncio.sleep(self.wanted.interval_ms / 1000)

    async def _listening(self) -> None:
        """Somebody has changed or triggered an agent, or may have."""
        while True:
            try:
                async with self.database.listen(CHANNEL) as news:
                    while True:
                        await news.next(LISTEN_S)
                        await self.reconciler.load()
                        self.pace.nudge()
            except EXPECTED as error:
                tell_failure("listen", error)
            await asyncio.sleep(self.wanted.interval_ms / 1000)

    async def _inherit(self, lease: Lease) -> None:
        if given_back := await self.heirs.inherit(lease):
            self.health.orphans += given_back
            log.warning("agents_inherited", agents=given_back)
            self.pace.nudge()

    async def _quarantine(self) -> None:
        for run in self.runs.quarantine():
            self.telling.quarantined(run)
        for run in [run for run in self.runs.stuck if not run.shown]:
            await self.records.quarantine(run.name, run.number, stuck=True)
            run.shown = True

    async def _sweep_zombies(self) -> None:
        self.health.zombies += len(self.zombies.sweep())

    async def _sweep_orphans(self, lease: Lease, mine: Callable[[str], bool] = lambda _name: True) -> None:
        self.health.orphans += await self.orphans.sweep(lease, mine)

    async def _nothing(self) -> None:
        """What one does that does not lead."""

    def _leadership(self) -> Leadership:
        wanted = self.wanted.orphan_cleanup
        return Leadership(self.leases, LEADER, self._lead, kind="agents_cleanup", ttl_s=wanted.leadership_ttl_ms / 1000)

    async def _lead(self, lease: Lease) -> None:
        wanted = self.wanted.orphan_cleanup
        key = self._keys.agents_leader(self.wanted.keys.cleanup_leader_key)

        async def sweep() -> None:
            with guard(self.redis):
                await self.redis.set(key, self.leases.owner, px=wanted.leadership_ttl_ms)
            await self._sweep_orphans(lease)

        self._leading = self._sweeping(sweep)
        while True:
            await self._leading.once()
            await self.clock.sleep(wanted.interval_ms / 1000)

    async def _end(self, lease: Lease, patience_s: float) -> None:
        """Bodies first, then what is known of them. No body is left when this returns."""
        try:
            await self.runs.close(patience_s)
        finally:
            if self.runs.by_name:
                # Also when we are cancelled once more: the lease must not be given back while a body runs.
                log.critical("agents_ignore_cancellation", agents=sorted(self.runs.by_name))
                self._abandon(STUCK_STATUS)
        faults.at("agents.after_close")
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await self.endings.record(lease)
                await self.endings.move()
        except EXPECTED as error:
            tell_failure("shutdown", error)


async def _either(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return

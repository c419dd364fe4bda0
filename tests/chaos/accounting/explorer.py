"""Runs one ledger schedule from its seed: a world, its processes, Redis faults, then recovery."""

import random
from collections import Counter
from uuid import UUID

from rota.accounting.audit import audit
from rota.accounting.ledger import BookingGroup, Charge
from rota.accounting.live import ledger, limits, reconcile, release_publisher, seeding
from rota.accounting.maintenance import AccountingMaintenance
from rota.accounting.service import AccountingService
from rota.infra.lease import Leases
from rota.infra.redis import RedisKeys
from rota.model.quota import Resource
from rota.model.settings.accounting import AccountingSettings
from tests.chaos.accounting.invariants import InvariantChecker, InvariantViolated, require
from tests.chaos.accounting.observed import LedgerObserver
from tests.chaos.accounting.world import CASTS, EMPTY, FAR, SHOW, Actor, World, booking, fault_policy, plan_redis_faults
from tests.support.harness.interleavings import Priorities, Schedule, Step, Stretches, walk

MAINTENANCE_ROUNDS_MAX = 4
ANOTHER_RUN = "0" * 40


def scripts():
    return (
        ledger.BOOK,
        limits.WRITE_LIMITS,
        release_publisher.RELEASE,
        reconcile.COUNT,
        reconcile.SETTLE,
        seeding.SEED,
    )


class RedisFaults:
    """Redis faults at given steps: a flush, or a restore of an older state under another run id."""

    def __init__(self, client, events):
        self.client = client
        self.events = events
        self.kept = []

    async def inject(self, schedule, checker, number):
        """Inject the faults that are due before this step."""
        for event in [event for at, event in self.events if at == number]:
            schedule.steps.append(Step("redis fault", event, "redis"))
            await getattr(self, event)()
            await checker.check("redis", external=True)

    async def keep(self):
        keys = sorted(await self.client.keys("*"))
        self.kept = [(key, await self.client.dump(key)) for key in keys]

    async def flush(self):
        await self.client.flushdb()

    async def older(self):
        await self.client.flushdb()
        for key, held in self.kept:
            await self.client.restore(key, 0, held)
            if key.startswith(b"acct:show:"):
                await self.client.hset(key, "run", ANOTHER_RUN)


class Explorer:
    """Holds the state that schedules share; `run` runs one schedule."""

    def __init__(self, database, client, connection):
        self.database = database
        self.client = client
        self.connection = connection
        self.reached = Counter()
        self.names = {}
        self.steps = 0

    async def load(self):
        """Load the current scripts; steps are named by script digest."""
        for script in scripts():
            await self.client.script_load(script.text)
            self.names[script.sha] = script.name

    async def run(self, seed, *, cast=None, redis_faults=None, pick=None, bad_turns=None):
        """Run the schedule of `seed`; `InvariantViolated` lists all steps. `redis_faults`: (step, event) pairs."""
        rng = random.Random(seed)
        world = World.make(rng, managed=rng.random() < 0.9)
        cast = cast or rng.choice(CASTS)
        await self._make(world, rng)
        observer = LedgerObserver(self.connection, self.client, world.show)
        checker = InvariantChecker(observer, random.Random(seed + 1))
        schedule = Schedule(
            rng,
            pick or self._pick(rng),
            bad_turns=rng.choice([0, 1, 2, 4]) if bad_turns is None else bad_turns,
            bad=fault_policy(rng, cast),
            blocked=observer.blocked,
            describe=self._describe,
        )
        await checker.begin()
        self._start(schedule, world, checker, rng, cast)
        events = RedisFaults(self.client, redis_faults if redis_faults is not None else plan_redis_faults(rng, cast))

        async def before(number):
            await events.inject(schedule, checker, number)

        async def after(step, process):
            await checker.check(step.store)
            words, process.last_script = process.last_script, None
            await checker.repeated(words)

        try:
            await schedule.run(before, after)
            await self._recover(world, checker)
        except Exception as error:
            steps = "\n".join(f"  {number:3} {step}" for number, step in enumerate(schedule.steps))
            raise InvariantViolated(f"seed {seed} ({cast.__name__}): {error!r}\n{steps}") from error
        self.steps += len(schedule.steps)
        return schedule.steps

    async def _make(self, world, rng):
        text = EMPTY + ";".join(text.format(*given) for text, given in world.script(rng))
        await self.connection.execute(text)
        await self.client.flushdb()
        accounting = self._accounting()
        if world.managed and rng.random() < 0.9:
            await seeding.seed(accounting.live, world.show)
        if rng.random() < 0.6:
            await accounting.book(world.show, booking(world, rng, 112))

    def _accounting(self):
        return AccountingService(self.database, self.client, RedisKeys())

    def _pick(self, rng):
        return rng.choice([walk, walk, Stretches(), Priorities(rng, rng.randint(2, 4))])

    def _start(self, schedule, world, checker, rng, cast):
        for name, operations in cast(world, rng).items():
            own = random.Random(rng.random())
            without_redis = name.startswith("redisless ")
            actor = Actor(world, checker, own, self.database, self.client, self.names, without_redis=without_redis)
            schedule.start(name, lambda process, actor=actor, operations=operations: actor.bind(process).do(operations))

    def _describe(self, what, found):
        """A summary of the reply to a step; also counts it in `reached`."""
        words = what.split(" ")
        if words[0] in self.names.values():
            reply = found[0].decode()
        elif words[0] == "proc_insert":
            reply = " ".join(sorted({row["why"] for row in found}))
        else:
            reply = ""
        for each in reply.split(" "):
            if each:
                self.reached[words[0], each] += 1
        return reply

    async def _recover(self, world, checker):
        """All processes have ended: the next maintenance rounds must repair everything."""
        accounting = self._accounting()
        maintenance = AccountingMaintenance(
            accounting, Leases(self.database), AccountingSettings(), grace_s=0.0, rest=0.0
        )
        for _ in range(MAINTENANCE_ROUNDS_MAX):
            if await maintenance.all_seeded():
                break
            await maintenance.seed_lagging_shows()
        await checker.check(external=True)
        await maintenance.reseed_limits()
        if checker.postgres.managed:
            require(
                await reconcile.reconcile_show(accounting.live, world.show, grace_s=0.0),
                "A3 the reconciliation ended early",
            )
            await accounting.transactional.refresh_managed_tables(world.show)
        await checker.at_rest()
        if checker.rng.random() < 0.3:
            found = await audit(accounting, await accounting.admin.show(SHOW))
            require(found.ok, "audit", [line for line in found.lines if line.problem], found.seeded)
        await self._capacity_is_usable(accounting, world, checker)

    async def _capacity_is_usable(self, accounting, world, checker):
        """A booking that fits must succeed: no fault may leave the show refused or capacity unused."""
        layer = next(iter(world.layers))
        charge = Charge(world.pools[0], world.folders[0], world.layers[layer], layer, world.depts[0], 1)
        names = [
            f"{word}:{id_}"
            for word, id_ in zip(
                ("sub", "folder", "job", "layer", "point"),
                (charge.alloc, charge.folder, charge.job, charge.layer, charge.dept),
                strict=True,
            )
        ]
        caps = [
            (checker.postgres.cap(name, Resource.CORES), checker.postgres.sums[name, Resource.CORES]) for name in names
        ]
        fits = all(cap is None or used + 1 <= cap for cap, used in caps)
        [outcome] = await accounting.book(world.show, [BookingGroup(charge, UUID(int=1), [FAR])])
        require(bool(outcome.booked) == fits, "capacity", outcome, caps)
        await checker.check()

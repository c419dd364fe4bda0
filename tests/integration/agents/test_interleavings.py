"""T1, T2 and F1 in orders that are chosen: two replicas take one agent step by step, while something goes wrong.

Each replica looks, acquires, begins, ends and tells Redis. In between, as far as a case has it: Redis is emptied and
filled again, a replica is paused past its lease, another inherits. All orders of two replicas alone are tried, and a
fixed sample of the others.
"""

import random
from itertools import combinations
from secrets import token_hex

import pytest

from rota.agents.redis_index.index import AgentClaim, FinishedRun
from rota.agents.repository import AgentBeginRequest, AgentBeginStatus, AgentRepository, AgentRunEnd
from rota.infra.lease import Leases
from rota.model.agents import AgentOutcome, AgentSpec, NextRun
from rota.model.errors import StaleFence
from rota.model.schedules import IntervalSchedule
from tests.support.agents import HOUR_MS, RUNNING, history, in_sets, now_ms, row, sets_of
from tests.support.queue import sql

SPEC = AgentSpec(name="a", schedule=IntervalSchedule(HOUR_MS))
CLEAN = sql("DELETE FROM rota.agent")
EXPIRE = sql("UPDATE rota.lease SET expires_at = clock_timestamp() - interval '1 h' WHERE name = $1")
STEPS = 5


class Replica:
    """One replica, a step at a time. A step that has nothing to do is none."""

    def __init__(self, world, name, lease):
        self.world = world
        self.name = name
        self.records = AgentRepository(world.database, name)
        self.sets = sets_of(world.redis)
        self.lease = lease
        self.lives = True
        self.seen = self.claim = self.begun = self.ended = None
        self.steps = iter((self.look, self.acquire, self.begin, self.end, self.tell))

    async def step(self):
        await next(self.steps)()

    async def look(self):
        self.seen = (await self.sets.ready(1)).candidates

    async def acquire(self):
        if self.seen:
            [run] = await self.records.allocate_run_numbers(1)
            self.at_ms, ours = await self.sets.acquire(self.lease.fence, [AgentClaim(self.seen[0], run, HOUR_MS)])
            self.claim = ours[0] if ours else None

    async def begin(self):
        if self.claim is None:
            return
        asked = [AgentBeginRequest("a", self.claim.run, HOUR_MS)]
        try:
            [told] = await self.records.begin(self.lease, self.at_ms, asked)
        except StaleFence:
            assert not self.lives, "refused although its lease runs"
            return
        assert self.lives, "F1: begun without a lease"
        if told.verdict is AgentBeginStatus.BEGUN:
            assert self.at_ms >= told.due_ms, "T1: begun before it was due"
            self.world.enter(self)
            self.begun = told
        else:
            self.ended = FinishedRun(
                "a", self.claim.run, told.due_ms if told.verdict is AgentBeginStatus.EARLY else None
            )

    async def end(self):
        if self.begun is None:
            return
        plan = NextRun(self.at_ms + HOUR_MS, self.at_ms + HOUR_MS)
        ended = AgentRunEnd(name="a", run=self.begun.run, outcome=AgentOutcome.SUCCEEDED, took_ms=1, plan=plan)
        try:
            planned = await self.records.end(self.lease, [ended])
        except StaleFence:
            assert not self.lives, "refused although its lease runs"
            return
        assert self.lives, "F1: ended without a lease"
        self.world.leave(self)
        [over] = planned
        self.ended = FinishedRun(over.name, over.run, over.due_ms, add=True)

    async def tell(self):
        if self.ended is not None:
            await self.sets.finish([self.ended])


class World:
    def __init__(self, database, redis):
        self.database = database
        self.redis = redis
        self.inside = []

    async def begin(self):
        await self.redis.flushdb()
        await self.database.run(CLEAN)
        self.leases = Leases(self.database, "test")
        self.records = AgentRepository(self.database, "world")
        self.due_ms = now_ms() - 1000
        await self.records.declare([SPEC], self.due_ms, [0])
        self.replicas = [await self._replica(name) for name in ("one", "two")]
        self.heir = await self._replica("heir")
        await self.repopulate()

    async def _replica(self, name):
        tried = await self.leases.acquire([f"agents:member:x:{name}:{token_hex(6)}"], kind="agents", ttl_s=600)
        return Replica(self, name, tried.granted[0])

    def enter(self, replica):
        others = [each.name for each in self.inside if each is not replica and each.lives]
        assert not others, f"T2: {replica.name} begins beside {others}"
        self.inside.append(replica)

    def leave(self, replica):
        self.inside.remove(replica)

    async def one(self):
        await self.replicas[0].step()

    async def two(self):
        await self.replicas[1].step()

    async def flush(self):
        await self.redis.flushdb()

    async def repopulate(self):
        await sets_of(self.redis).repopulate(await self.records.idle(["a"]))

    async def pause(self):
        """The first is paused, and wakes up when its lease is long over."""
        await self.database.run(EXPIRE, self.replicas[0].lease.name)
        self.replicas[0].lives = False

    async def inherit(self):
        seized = await self.heir.records.seize(self.heir.lease, 0.0, 10)
        await sets_of(self.redis).finish([FinishedRun(each.name, each.run, each.due_ms, add=True) for each in seized])

    async def check(self):
        """A due time is used up once, or is still there; nobody is in two sets, and what is missing is found."""
        await self.inherit()
        await self.repopulate()
        assert await self.database.rows(RUNNING) == []
        done = [run for run in await history(self.database, "a") if run["outcome"] == "SUCCEEDED"]
        kept = await row(self.database, "a")
        assert len(done) <= 1, "T1: one due time, two runs"
        assert kept["due_ms"] == (self.due_ms if not done else done[0]["started_ms"] + HOUR_MS)
        assert len(await in_sets(self.redis, "a")) <= 1


async def play(database, redis, orders):
    ran = 0
    for order in orders:
        world = World(database, redis)
        await world.begin()
        try:
            for step in order:
                await getattr(world, step)()
            await world.check()
        except AssertionError as wrong:
            raise AssertionError(f"{wrong}, in the order {' '.join(order)}") from wrong
        ran += sum(run["outcome"] == "SUCCEEDED" for run in await history(database, "a"))
    return ran


def two_alone():
    """Every order of two replicas."""
    for places in combinations(range(2 * STEPS), STEPS):
        yield ["one" if place in places else "two" for place in range(2 * STEPS)]


def sampled(steps, count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        order = ["one"] * STEPS + ["two"] * STEPS + list(steps)
        rng.shuffle(order)
        yield order


async def test_in_every_order_of_two_replicas_a_due_time_is_run_once(database, redis):
    orders = list(two_alone())
    assert await play(database, redis, orders) == len(orders) == 252


@pytest.mark.parametrize(
    "steps",
    [
        ("flush", "repopulate"),
        ("flush", "repopulate", "repopulate"),
        ("pause", "inherit"),
        ("pause", "inherit", "repopulate"),
        ("pause", "flush", "inherit", "repopulate"),
    ],
    ids="-".join,
)
async def test_whatever_goes_wrong_in_between_nothing_is_run_twice_early_or_lost(database, redis, steps):
    assert await play(database, redis, sampled(steps, 200, seed=7)) > 0

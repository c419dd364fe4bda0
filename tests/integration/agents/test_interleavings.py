"""T1, T2 and F1 in chosen orders: two replicas take one agent step by step, while faults occur.

Each replica scans, acquires, begins, ends and updates Redis. In between, depending on the case: Redis is flushed and
refilled, a replica is paused past its lease, a successor takes over. All orders of two replicas alone are tried, and a
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
    """One replica, a step at a time. A step with nothing to do is a no-op."""

    def __init__(self, world, name, lease):
        self.world = world
        self.name = name
        self.records = AgentRepository(world.database, name)
        self.sets = sets_of(world.redis)
        self.lease = lease
        self.is_alive = True
        self.seen = self.claim = self.begun = self.ended = None
        self.steps = iter((self.scan, self.acquire, self.begin, self.end, self.update_redis))

    async def step(self):
        await next(self.steps)()

    async def scan(self):
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
            [result] = await self.records.begin(self.lease, self.at_ms, asked)
        except StaleFence:
            assert not self.is_alive, "refused although its lease is valid"
            return
        assert self.is_alive, "F1: begun without a lease"
        if result.verdict is AgentBeginStatus.BEGUN:
            assert self.at_ms >= result.due_ms, "T1: begun before it was due"
            self.world.enter(self)
            self.begun = result
        else:
            self.ended = FinishedRun(
                "a", self.claim.run, result.due_ms if result.verdict is AgentBeginStatus.EARLY else None
            )

    async def end(self):
        if self.begun is None:
            return
        plan = NextRun(self.at_ms + HOUR_MS, self.at_ms + HOUR_MS)
        ended = AgentRunEnd(name="a", run=self.begun.run, outcome=AgentOutcome.SUCCEEDED, took_ms=1, plan=plan)
        try:
            planned = await self.records.end(self.lease, [ended])
        except StaleFence:
            assert not self.is_alive, "refused although its lease is valid"
            return
        assert self.is_alive, "F1: ended without a lease"
        self.world.leave(self)
        [over] = planned
        self.ended = FinishedRun(over.name, over.run, over.due_ms, add=True)

    async def update_redis(self):
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
        self.successor = await self._replica("successor")
        await self.repopulate()

    async def _replica(self, name):
        tried = await self.leases.acquire([f"agents:member:x:{name}:{token_hex(6)}"], kind="agents", ttl_s=600)
        return Replica(self, name, tried.granted[0])

    def enter(self, replica):
        others = [each.name for each in self.inside if each is not replica and each.is_alive]
        assert not others, f"T2: {replica.name} overlaps {others}"
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
        """The first replica is paused, and resumes long after its lease expired."""
        await self.database.run(EXPIRE, self.replicas[0].lease.name)
        self.replicas[0].is_alive = False

    async def take_over(self):
        seized = await self.successor.records.seize(self.successor.lease, 0.0, 10)
        await sets_of(self.redis).finish([FinishedRun(each.name, each.run, each.due_ms, add=True) for each in seized])

    async def check(self):
        """A due time is used once or still there; no agent is in two sets, and a missing one is restored."""
        await self.take_over()
        await self.repopulate()
        assert await self.database.rows(RUNNING) == []
        done = [run for run in await history(self.database, "a") if run["outcome"] == "SUCCEEDED"]
        kept = await row(self.database, "a")
        assert len(done) <= 1, "T1: one due time, two runs"
        assert kept["due_ms"] == (self.due_ms if not done else done[0]["started_ms"] + HOUR_MS)
        assert len(await in_sets(self.redis, "a")) <= 1


async def run_orders(database, redis, orders):
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


def orders_of_two():
    """Every order of two replicas."""
    for places in combinations(range(2 * STEPS), STEPS):
        yield ["one" if place in places else "two" for place in range(2 * STEPS)]


def sampled(steps, count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        order = ["one"] * STEPS + ["two"] * STEPS + list(steps)
        rng.shuffle(order)
        yield order


async def test_every_order_of_two_replicas_runs_a_due_time_once(database, redis):
    orders = list(orders_of_two())
    assert await run_orders(database, redis, orders) == len(orders) == 252


@pytest.mark.parametrize(
    "steps",
    [
        ("flush", "repopulate"),
        ("flush", "repopulate", "repopulate"),
        ("pause", "take_over"),
        ("pause", "take_over", "repopulate"),
        ("pause", "flush", "take_over", "repopulate"),
    ],
    ids="-".join,
)
async def test_faults_in_between_cause_no_duplicate_early_or_lost_run(database, redis, steps):
    assert await run_orders(database, redis, sampled(steps, 200, seed=7)) > 0

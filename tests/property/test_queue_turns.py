"""Jobs of one queue in virtual time: PostgreSQL decides whose frame is next whenever a slot becomes free."""

from collections import Counter
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rota.queue import Queue
from tests.support.harness.effort import effort
from tests.support.queue import EMPTY, Dispatcher, entry, sql

CLEAR = [sql(statement) for statement in EMPTY.split("; ")]
SHARDS = 4
LONG_S = 600.0
SHORT_S = 5.0
TAU_S = 10.0
"""Bounded slowdown: runs that are shorter count as this long."""
PASSED_MAX_S = 5.0
LOCK_SHARDS = sql("""
SELECT pg_advisory_xact_lock(1903519025, rota.queue_lane('film', 5::smallint, shard))
FROM generate_series(0, $1::integer - 1) AS shard""")
SET_ARRIVAL = sql("""
UPDATE rota.ready_entries SET enqueued_at = timestamptz '2000-01-01' + make_interval(secs => $1)
WHERE enqueued_at > '2020-01-01'""")
SET_TURNS = sql("""
UPDATE rota.queue_returned r
SET returned_at = timestamptz '2000-01-01' + make_interval(secs => $1) + u.number * interval '1 us'
FROM (SELECT lane_id, first_seq, row_number() OVER (ORDER BY returned_at) AS number FROM rota.queue_returned
      WHERE returned_at > '2020-01-01') AS u
WHERE (r.lane_id, r.first_seq) = (u.lane_id, u.first_seq)""")


class QueueInTime:
    """One queue and the slots of a farm; a slot that becomes free claims the next frame."""

    def __init__(self, database, dispatcher, slots):
        self.database = database
        self.queue = Queue(database)
        self.dispatcher = dispatcher
        self.free = slots
        self.now_s = 0.0
        self.runs_s = {}
        self.came_s = {}
        self.began_s = {}
        self.started = Counter()
        self._events = []
        self._numbers = count()

    async def submit(self, *jobs, shard=0):
        """Jobs as number of frames and seconds that each of them runs. Producers hold the shards before this one."""
        entries = [entry(frames=frames) for frames, _ in jobs]
        for each, (_, runs_s) in zip(entries, jobs, strict=True):
            self.runs_s[each.job], self.came_s[each.job] = runs_s, self.now_s
        async with self.database.transaction() as tx:
            await tx.rows(LOCK_SHARDS, shard)
            await self.queue.enqueue(entries)
        await self.database.run(SET_ARRIVAL, self.now_s)
        return [each.job for each in entries]

    def at(self, at_s, step):
        heappush(self._events, (at_s, next(self._numbers), step))

    async def run_until(self, at_s):
        await self.fill()
        while self._events and self._events[0][0] <= at_s:
            self.now_s, _, step = heappop(self._events)
            await step()
            while self._events and self._events[0][0] == self.now_s:
                await heappop(self._events)[2]()
            await self.fill()
        self.now_s = at_s

    async def fill(self, first_s=lambda runs_s: runs_s):
        for piece in await self.dispatcher.pieces(self.free) if self.free else ():
            self.began_s.setdefault(piece.job, self.now_s)
            for _ in piece.frames:
                self.free -= 1
                self.started[piece.job] += 1
                self.at(self.now_s + first_s(self.runs_s[piece.job]), self._end)
        await self.database.run(SET_TURNS, self.now_s)

    async def _end(self):
        self.free += 1

    def slowdown(self, job):
        runs_s = self.runs_s[job]
        return max(1.0, (self.began_s.get(job, inf) - self.came_s[job] + runs_s) / max(runs_s, TAU_S))


@settings(
    max_examples=effort(4, 200),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    longs=st.integers(1, 2),
    came_s=st.lists(st.floats(20.0, 80.0), min_size=1, max_size=20),
    seed=st.integers(0, 1 << 32),
)
async def test_short_job_behind_long_ones_of_its_queue_has_a_bounded_slowdown(database, longs, came_s, seed):
    """All 128 slots run frames of 600 s, of which one ends every 5 s or so, and thousands more of these wait."""
    farm, chance = await opened(database, slots=128), Random(seed)
    await farm.submit(*((2_000, LONG_S) for _ in range(longs)))
    slots = count()
    await farm.fill(first_s=lambda runs_s: (next(slots) + chance.random()) * runs_s / 128)
    short = []

    async def submit_short():
        short.extend(await farm.submit((1, SHORT_S)))

    for at_s in came_s:
        farm.at(at_s, submit_short)
    await farm.run_until(160.0)
    slowdowns = [farm.slowdown(job) for job in short]
    assert len(slowdowns) == len(came_s)
    assert max(slowdowns) <= 5


@pytest.mark.parametrize(("slots", "runs_s"), [(4, 1.0), (16, 8.0), (100, 8.0)])
@pytest.mark.parametrize("seed", range(effort(2, 60)))
async def test_no_job_is_passed_for_long_by_one_of_its_queue_that_came_later(database, slots, runs_s, seed):
    """Producers that meet others fill another shard; all slots become free at once. The frames of a job keep their
    order, so its first one counts."""
    farm, chance = await opened(database, slots=slots), Random(seed)
    await farm.submit((slots, runs_s))

    def submit_to(shard, frames):
        async def submit():
            await farm.submit((frames, runs_s), shard=shard)

        return submit

    for _ in range(40):
        shard, frames = chance.choice([0, 0, 0, 0, 1, 2, 3]), chance.choice([1, 1, 1, 1, 1, 5, 70])
        farm.at(chance.uniform(0.0, 40.0), submit_to(shard, frames))
    await farm.run_until(10_000.0)
    assert farm.began_s.keys() == farm.came_s.keys()
    passed = [
        f"came at {came_s:.1f} and began at {farm.began_s[job]:.1f}, passed by {later_s:.1f}, {farm.began_s[later]:.1f}"
        for job, came_s in farm.came_s.items()
        for later, later_s in farm.came_s.items()
        if later_s > came_s + PASSED_MAX_S and farm.began_s[later] < farm.began_s[job] - PASSED_MAX_S
    ]
    assert passed == []


async def opened(database, slots):
    async with database.transaction() as tx:
        for statement in CLEAR:
            await tx.run(statement)
    farm = QueueInTime(database, await Dispatcher(database).enlisted(ttl_s=600.0), slots)
    await farm.queue.ensure_queue("film", shards=SHARDS)
    return farm

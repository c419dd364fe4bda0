"""The agent scripts behave like a model of two dictionaries for any order of calls."""

import time

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from rota.agents.redis_index.index import AgentClaim, AgentIndex, DueAgent, FinishedRun
from rota.infra.redis import RedisKeys
from tests.property.agents_model import Model

NAMES = [f"a{number}" for number in range(3)]
OWNER = 7
HOUR_MS = 3_600_000

names = st.sampled_from(NAMES)
runs = st.integers(1, 3)
hours = st.sampled_from([-2, -1, 1])
"""Due one or two hours ago, or in an hour: small clock differences do not matter."""
steps = st.lists(
    st.one_of(
        st.tuples(st.just("repopulate"), names, hours),
        st.tuples(st.just("acquire"), names, runs, st.booleans()),
        st.tuples(st.just("finish"), names, runs, hours | st.none(), st.booleans()),
        st.tuples(st.just("forget"), names, st.booleans()),
        st.tuples(st.just("see"), names),
    ),
    min_size=12,
    max_size=40,
)


class ScriptDriver:
    def __init__(self, client, now_ms):
        self.sets = AgentIndex(client, RedisKeys().agent_keys())
        self.client = client
        self.now_ms = now_ms
        self.model = Model()
        self.seen = {}

    async def run(self, calls):
        for what, name, *rest in calls:
            await getattr(self, what)(name, *rest)
            await self.compare()

    async def repopulate(self, name, hour):
        await self.sets.repopulate([(name, self._ms(hour))])
        self.model.repopulate(name, self._ms(hour))

    async def see(self, name):
        """Remember its score, due or not, for a later acquire that may then be stale."""
        score = await self.client.zscore(self.sets.keys.waiting, name)
        if score is not None:
            self.seen[name] = round(score * 1_000_000)

    async def acquire(self, name, run, fresh):
        if fresh:
            await self.see(name)
        seen_us = self.seen.get(name, 1)
        score = await self.client.zscore(self.sets.keys.waiting, name)
        unchanged = score is not None and round(score * 1_000_000) == seen_us
        now_ms, ours = await self.sets.acquire(OWNER, [AgentClaim(DueAgent(name, seen_us), run, 1000)])
        assert bool(ours) == self.model.acquire(name, unchanged, run, now_ms)

    async def finish(self, name, run, hour, add):
        due_ms = None if hour is None else self._ms(hour)
        await self.sets.finish([FinishedRun(name, run, due_ms, add)])
        self.model.finish(name, run, due_ms, add)

    async def forget(self, name, everywhere):
        await self.sets.forget([name], everywhere=everywhere)
        if name in self.model.waiting:
            self.model.leave(name)
        if everywhere:
            self.model.working.pop(name, None)

    async def compare(self):
        ready = await self.sets.ready(200)
        assert [each.name for each in ready.candidates] == self.model.due(ready.now_ms)
        assert ready.count == len(ready.candidates)
        later = [due_ms for due_ms in self.model.waiting.values() if due_ms > ready.now_ms]
        assert ready.next_ms == min(later, default=0)
        _, entries = await self.sets.running()
        assert {each.name: each.run for each in entries} == self.model.working
        assert all(each.owner == OWNER for each in entries)
        assert await self.client.hlen(self.sets.keys.runs) == len(self.model.working)
        waiting = await self.client.zrange(self.sets.keys.waiting, 0, -1)
        assert {name.decode() for name in waiting} == set(self.model.waiting)
        assert not set(self.model.waiting) & set(self.model.working)

    def _ms(self, hour):
        return self.now_ms + hour * HOUR_MS


@given(steps)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_agent_scripts_match_the_model(redis_url, calls):
    async with Redis.from_url(redis_url) as client:
        await client.flushdb()
        await ScriptDriver(client, int(time.time() * 1000)).run(calls)

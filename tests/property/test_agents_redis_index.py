"""The scripts of agents do what a model of two dictionaries does, whatever the order of calls."""

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
"""A due time an hour or two ago, or in an hour: the clock of the server does not matter then."""
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


class Story:
    def __init__(self, client, now_ms):
        self.sets = AgentIndex(client, RedisKeys().agent_keys())
        self.client = client
        self.now_ms = now_ms
        self.model = Model()
        self.seen = {}

    async def play(self, story):
        for what, name, *rest in story:
            await getattr(self, what)(name, *rest)
            await self.compare()

    async def repopulate(self, name, hour):
        await self.sets.repopulate([(name, self._ms(hour))])
        self.model.repopulate(name, self._ms(hour))

    async def see(self, name):
        """Remember how it waits, due or not, to ask for it later with what may be old news by then."""
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
        look = await self.sets.ready(200)
        assert [each.name for each in look.candidates] == self.model.due(look.now_ms)
        assert look.count == len(look.candidates)
        later = [due_ms for due_ms in self.model.waiting.values() if due_ms > look.now_ms]
        assert look.next_ms == min(later, default=0)
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
async def test_the_scripts_do_what_the_model_does(redis_url, story):
    async with Redis.from_url(redis_url) as client:
        await client.flushdb()
        await Story(client, int(time.time() * 1000)).play(story)

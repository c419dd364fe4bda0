"""Properties of the circuit breaker for all event sequences, and equality of its Lua and Python state machines."""

import itertools
from collections import Counter
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rota.infra.breaker.machine import STEP, _script_args
from rota.infra.redis import RedisKeys
from rota.model.circuit_breaker import (
    BreakerConfig,
    BreakerEvent,
    BreakerPhase,
    BreakerState,
    CallPermitted,
    CallRejected,
    ConsecutiveFailures,
    ProbesByCount,
    ProbesByDuration,
    WindowedFailures,
    step,
)
from tests.support.harness.effort import effort

NAMES = itertools.count()
START_MS = 1_700_000_000_000

SPANS = (1, 50, 100)

small = st.integers(1, 3)
spans = st.sampled_from(SPANS)
countings = st.builds(ConsecutiveFailures, small) | st.builds(WindowedFailures, small, spans)


@st.composite
def by_count(draw):
    probes = draw(small)
    return ProbesByCount(probes, draw(st.integers(1, probes)), draw(spans))


all_rules = st.builds(
    BreakerConfig, counting=countings, open_ms=spans, probing=by_count() | st.builds(ProbesByDuration, spans)
)
seeds = st.integers(0, 2**32)


class BreakerScenario:
    """Drives the pure state machine; chooses events and times near the edges of its current state."""

    def __init__(self, rules, seed, now_ms=START_MS):
        self.rules = rules
        self.state = BreakerState()
        self.now_ms = now_ms
        self._random = Random(seed)
        self._permits = [0]

    def steps(self, count):
        for _ in range(count):
            event = self._random.choices(list(BreakerEvent), weights=(45, 20, 25, 5, 5))[0]
            generation = 0 if event in (BreakerEvent.ALLOW, BreakerEvent.PEEK) else self._permit()
            self.now_ms += self._move_ms()
            self.state, verdict = step(self.rules, self.state, event, generation, self.now_ms)
            if isinstance(verdict, CallPermitted):
                self._permits.append(verdict.generation)
            yield event, generation, verdict

    def _permit(self):
        newest = self._random.random() < 0.8
        return self._permits[-1] if newest else self._random.choice(self._permits[-6:])

    def _move_ms(self):
        kind = self._random.choices(["stay", "tick", "edge", "back"], weights=(60, 15, 20, 5))[0]
        if kind == "edge":
            return max(0, self._edge_ms() - self.now_ms + self._random.choice([-1, 0, 0, 1]))
        return {"stay": 0, "tick": 1, "back": -self._random.choice([1, 30, 500])}[kind]

    def _edge_ms(self):
        """The time at which time alone changes the state."""
        if self.state.failed_at_ms:
            return self.state.failed_at_ms[0] + self.rules.counting.window_ms
        return self.state.until_ms


async def stored_state(client, key):
    raw = {name.decode(): value.decode() for name, value in (await client.hgetall(key)).items()}
    if not raw:
        return BreakerState()
    failed_at = tuple(int(at) for at in raw.pop("failed_at_ms").split(",") if at)
    return BreakerState(
        BreakerPhase(raw.pop("phase")), failed_at_ms=failed_at, **{name: int(value) for name, value in raw.items()}
    )


@settings(max_examples=effort(50, 150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rules=all_rules, seed=seeds)
async def test_breaker_script_equals_the_pure_state_machine(redis, rules, seed):
    keys, name = RedisKeys(), f"story-{next(NAMES)}"
    args = {"counter": keys.breaker_failures(name), "record": keys.breaker_state(name), **_script_args(rules)}
    scenario = BreakerScenario(rules, seed)
    for event, generation, expected in scenario.steps(60):
        verdict = await STEP(redis, event=event, generation=generation, at_ms=scenario.now_ms, **args)
        assert verdict == expected
    assert await stored_state(redis, keys.breaker_state(name)) == scenario.state
    # The window mirror expires by the clock of the server, which this test does not control.
    if isinstance(rules.counting, ConsecutiveFailures):
        assert int(await redis.get(keys.breaker_failures(name)) or 0) == scenario.state.failures


@given(rules=all_rules, seed=seeds, length=st.integers(0, 60))
def test_breaker_in_any_state_permits_a_call_after_its_retry_time(rules, seed, length):
    scenario = BreakerScenario(rules, seed)
    list(scenario.steps(length))
    state, verdict = step(rules, scenario.state, BreakerEvent.ALLOW, 0, scenario.now_ms)
    if isinstance(verdict, CallRejected):
        assert 1 <= verdict.retry_ms <= max(SPANS)
        state, verdict = step(rules, state, BreakerEvent.ALLOW, 0, scenario.now_ms + verdict.retry_ms)
    assert isinstance(verdict, CallPermitted)


@given(rules=st.builds(BreakerConfig, counting=countings, open_ms=spans, probing=by_count()), seed=seeds)
def test_breaker_permits_no_more_probes_than_its_cap_per_generation(rules, seed):
    scenario = BreakerScenario(rules, seed)
    granted, returned = Counter(), Counter()
    for event, generation, verdict in scenario.steps(60):
        if isinstance(verdict, CallPermitted) and verdict.phase is BreakerPhase.HALF_OPEN:
            granted[verdict.generation] += 1
        elif event is BreakerEvent.CANCEL:
            returned[generation] += 1
        assert all(granted[one] - returned[one] <= rules.probing.probes_max for one in granted)


@given(rules=all_rules, seed=seeds)
def test_breaker_generation_grows_with_every_phase_change(rules, seed):
    scenario = BreakerScenario(rules, seed)
    before = scenario.state
    for _ in scenario.steps(60):
        assert scenario.state.generation >= before.generation
        assert (scenario.state.phase is before.phase) or (scenario.state.generation > before.generation)
        before = scenario.state


def test_breaker_scenarios_reach_every_transition():
    seen = Counter()
    rules = BreakerConfig(
        counting=ConsecutiveFailures(2), open_ms=50, probing=ProbesByCount(2, successes=2, lost_after_ms=50)
    )
    for seed in range(20):
        for _, _, verdict in BreakerScenario(rules, seed).steps(60):
            seen[verdict.was, verdict.phase] += 1
    assert {pair for pair in seen if pair[0] is not pair[1]} == {
        (BreakerPhase.CLOSED, BreakerPhase.OPEN),
        (BreakerPhase.OPEN, BreakerPhase.HALF_OPEN),
        (BreakerPhase.HALF_OPEN, BreakerPhase.OPEN),
        (BreakerPhase.HALF_OPEN, BreakerPhase.CLOSED),
    }

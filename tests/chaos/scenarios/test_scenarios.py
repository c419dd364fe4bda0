"""A cluster that is used and disturbed as a seed says, with every invariant checked and every answer compared.

    CHAOS_SEED=7 pytest -n 0 -k short_scenario tests/chaos/scenarios
    SOAK_SEEDS=1-24 SOAK_S=300 pytest -n 0 -m soak --burn 2 tests/chaos/scenarios

The first is the short run of `make test` with another seed, the second runs each seed for five minutes beside two busy
cores. SOAK_FAULTS=no leaves the faults out; SOAK_TRACE=folder keeps what the tables held before each violation.

A failure prints the violations and the faults of the plan, which follow from the seed.
"""

import os
from dataclasses import replace

import pytest

from tests.chaos.pipeline.deployment import Farm
from tests.chaos.scenarios import scenario
from tests.chaos.scenarios.plan import long_plan, short_plan
from tests.support.harness.durations import slowdown

SEED = int(os.environ.get("CHAOS_SEED", "1"))


def seeds(text):
    """`7`, `1-24` or `3,5,9-12`."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@pytest.fixture
async def farm(private_stack, tmp_path, proxy):
    stack = await private_stack("postgres", "redis", "nats")
    async with Farm(stack, tmp_path, proxy) as farm:
        await scenario.prepare(farm)
        yield farm


def test_plan_follows_from_its_seed():
    assert long_plan(7, 300) == long_plan(7, 300)
    assert long_plan(7, 300).faults != long_plan(8, 300).faults
    assert {each.kind for seed in range(24) for each in long_plan(seed, 300).faults} >= {"roll", "storm", "disk_full"}


@pytest.mark.slow("runs a cluster under faults")
@pytest.mark.timeout(300)
async def test_short_scenario_keeps_every_invariant_and_tells_the_truth(farm):
    # The suite keeps the machine busy; the soak runs with the limits as they are.
    outcome = await scenario.run(farm, short_plan(SEED), slowdown=slowdown)
    assert not outcome.found, str(outcome)
    assert outcome.watch.looks["answers"] > 100 / slowdown(), "too little was compared"
    assert len(outcome.history.runs) > 50


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", seeds(os.environ.get("SOAK_SEEDS", os.environ.get("SOAK_SEED", "1"))))
async def test_soak_scenario(farm, seed, capsys):
    plan = long_plan(seed, float(os.environ.get("SOAK_S", "1800")))
    if os.environ.get("SOAK_FAULTS") == "no":
        plan = replace(plan, faults=plan.faults[:1])
    outcome = await scenario.run(farm, plan)
    with capsys.disabled():
        print(f"\nsoak scenario: {outcome}")
    assert not outcome.found, str(outcome)

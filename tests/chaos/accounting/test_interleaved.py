"""The ledger invariants under controlled interleavings.

One await is released at a time, in an order given by a seed; after every step the invariants are checked
(`invariants.py`). A failure names its seed: SCHEDULE_SEED=123 replays that schedule.
"""

import os

import asyncpg
import pytest

from tests.chaos.accounting.explorer import Explorer
from tests.chaos.accounting.invariants import InvariantViolated
from tests.chaos.accounting.mutants import MUTANTS, SERIES_MUTANTS, Mutant, applied
from tests.chaos.accounting.world import series
from tests.support.harness.effort import effort

# Many short schedules in sequence; a script flush by another test would add steps to them.
pytestmark = [pytest.mark.timeout(300), pytest.mark.keeps_scripts]


SCHEDULES = effort(60, 120)
SERIES_SCHEDULES = effort(40, 200)
MUTANT_SCHEDULES = 120
SOAK_SCHEDULES = 20_000
REACHED = {
    ("book", "apart"),
    ("book", "unseeded"),
    ("limits", "missed"),
    ("limits", "uncounted"),
    ("limits", "unseeded"),
    ("proc_insert", "already"),
    ("proc_insert", "not_managed"),
    ("proc_insert", "stale_fence"),
    ("proc_insert", "tombstoned"),
    ("recount", "lost"),
    ("release", "limited"),
    ("release", "stale"),
    ("seed", "newer"),
    ("settle", "lost"),
}


@pytest.fixture
async def connection(database_url):
    connection = await asyncpg.connect(database_url)
    await connection.execute("SET search_path = rota, public")
    yield connection
    await connection.close()


@pytest.fixture
async def explorer(database, redis, connection, monkeypatch):
    monkeypatch.setattr("rota.accounting.maintenance.TOMBSTONES_MAX", 1)
    monkeypatch.setattr("rota.accounting.service.SEEDED_ELSEWHERE_WITHIN_S", 0.5)  # that process may have died
    made = Explorer(database, redis, connection)
    await made.load()
    return made


async def run_schedules(explorer, schedules, cast=None):
    for seed in schedules:
        await explorer.run(seed, cast=cast)


def seeds(number):
    one = os.environ.get("SCHEDULE_SEED")
    return [int(one)] if one else range(number)


async def test_random_interleavings_keep_ledger_invariants(explorer):
    await run_schedules(explorer, seeds(SCHEDULES))
    if "SCHEDULE_SEED" not in os.environ:
        assert set(explorer.reached) >= REACHED, "the schedules must reach all of these replies"


async def test_random_interleavings_of_frames_in_series_keep_ledger_invariants(explorer):
    await run_schedules(explorer, seeds(SERIES_SCHEDULES), series)


@pytest.mark.parametrize("mutant", SERIES_MUTANTS, ids=lambda mutant: mutant.rule)
async def test_schedules_with_series_detect_each_mutant(explorer, connection, mutant):
    async with applied(mutant, connection):
        with pytest.raises(InvariantViolated):
            await run_schedules(explorer, (mutant.seed, *range(MUTANT_SCHEDULES)), series)


async def test_redis_flush_before_any_step_keeps_ledger_invariants(explorer):
    steps = await explorer.run(3)
    for number in range(len(steps)):
        await explorer.run(3, redis_faults=((number, "flush"),))


async def test_same_seed_replays_the_same_schedule(explorer):
    for seed in seeds(8):
        first, again = [[str(step) for step in await explorer.run(seed)] for _ in range(2)]
        assert first == again


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
async def test_explorer_detects_each_mutant(explorer, connection, mutant):
    async with applied(mutant, connection):
        await explorer.load()
        with pytest.raises(InvariantViolated):
            await run_schedules(explorer, (mutant.seed, *range(MUTANT_SCHEDULES)))


async def test_script_whitespace_change_breaks_nothing(explorer, connection):
    whitespace_change = Mutant("none", script="*", was="local SPAN = 128", now="local SPAN  = 128")
    async with applied(whitespace_change, connection):
        await explorer.load()
        await run_schedules(explorer, range(8))


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_soak_random_interleavings_keep_ledger_invariants(explorer):
    await run_schedules(explorer, seeds(int(os.environ.get("SCHEDULES", SOAK_SCHEDULES))))

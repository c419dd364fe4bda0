"""The invariants of the books under controlled interleavings.

One await is released at a time, in an order that follows from a seed; after every step the rules are checked
(`books_rules`). A failure names its seed: SCHEDULE_SEED=123 plays that story again.
"""

import os

import asyncpg
import pytest

from tests.chaos.accounting.explorer import Explorer
from tests.chaos.accounting.invariants import Broken
from tests.chaos.accounting.mutants import MUTANTS, Mutant, applied
from tests.support.harness.effort import effort

# Many small stories, one after the other; a script that is forgotten meanwhile would add steps to them.
pytestmark = [pytest.mark.timeout(300), pytest.mark.keeps_scripts]


SCHEDULES = effort(60, 120)
MUTANT_SCHEDULES = 120
LONG = 20_000
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
    made = Explorer(database, redis, connection)
    await made.load()
    return made


async def walk(explorer, schedules):
    for seed in schedules:
        await explorer.run(seed)


def seeds(number):
    one = os.environ.get("SCHEDULE_SEED")
    return [int(one)] if one else range(number)


async def test_no_order_of_steps_breaks_the_books(explorer):
    await walk(explorer, seeds(SCHEDULES))
    if "SCHEDULE_SEED" not in os.environ:
        assert set(explorer.reached) >= REACHED, "these stories say nothing about what they never reached"


async def test_redis_may_be_emptied_before_any_step(explorer):
    steps = await explorer.run(3)
    for number in range(len(steps)):
        await explorer.run(3, weather=((number, "flush"),))


async def test_the_same_seed_is_the_same_story(explorer):
    for seed in seeds(8):
        first, again = [[str(step) for step in await explorer.run(seed)] for _ in range(2)]
        assert first == again


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
async def test_the_explorer_notices_when_a_rule_is_taken_away(explorer, connection, mutant):
    async with applied(mutant, connection):
        await explorer.load()
        with pytest.raises(Broken):
            await walk(explorer, (mutant.seed, *range(MUTANT_SCHEDULES)))


async def test_scripts_that_differ_in_their_words_alone_break_nothing(explorer, connection):
    other_words = Mutant("none", script="*", was="local SPAN = 128", now="local SPAN  = 128")
    async with applied(other_words, connection):
        await explorer.load()
        await walk(explorer, range(8))


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_no_order_of_steps_breaks_the_books_in_a_long_walk(explorer):
    await walk(explorer, seeds(int(os.environ.get("SCHEDULES", LONG))))

"""The whole pipeline as real processes, two servers and three workers, while everything that can fail does.

A run is replayed by its seed: `SOAK_SEED=7 SOAK_S=600 make soak ARGS="-k pipeline"`, or CHAOS_SEED for the short one.
What failed is in the message: the list of what befell the farm, and what was found wrong in its history.
"""

import asyncio
import os
import random

import pytest

from tests.chaos.pipeline.deployment import Farm
from tests.chaos.pipeline.faults import Befaller, at_random, one_of_each
from tests.chaos.pipeline.history import doubles, faults

SEED = int(os.environ.get("CHAOS_SEED", "3"))

ALWAYS = ("a lost worker", "a retry", "an emptied Redis", "a wiped JetStream", "a double run", "a poison message")
ALWAYS += ("books of Redis beside the procs",)
"""What even a short run comes to."""


@pytest.fixture
async def farm(private_stack, tmp_path, proxy):
    stack = await private_stack("postgres", "redis", "nats")
    async with Farm(stack, tmp_path, proxy) as farm:
        await farm.show("film", burst=10, size=5)
        await farm.show("short", burst=20, size=10)
        await farm.show("plain", burst=8, size=4, managed=False)
        await farm.keep_commits()
        await farm.start()
        yield farm


def some_job(farm, chance):
    """A job of the mix: mostly ones that succeed, and of every other kind some."""
    show = chance.choice(["film", "film", "short", "plain"])
    tries = chance.choice([1, 60, 60])
    give = {"show": show, "tries": tries}
    match chance.randrange(12):
        case 0:
            return farm.submit("boom", ends=("FAILED",), **give)
        case 1:
            return farm.submit("flaky", 2, layer={"retries": {"most": 3, "first_s": 0.1}}, **give)
        case 2:
            return farm.submit("value", chance.randrange(100), frames=3, **give)
        case 3:
            return farm.submit("crunch", 0.05, frames=2, **give)
        case 4:
            return farm.submit("nap", 0.2, frames=6, max_cores=2, **give)
        case 5 | 6:
            return farm.submit("nap", chance.choice([0.01, 0.5, 2.0]), frames=chance.randint(1, 8), **give)
        case 7:
            return farm.submit("noop", frames=chance.randint(20, 200), **give)
        case 8:
            return poisoned(farm, chance)
    return farm.submit("noop", **give)


async def poisoned(farm, chance):
    await farm.poisoner.poison(chance)
    await farm.submit_on_bus("noop", frames=2)


async def submit_until(farm, ended, seed, pause_s):
    chance = random.Random(seed)
    async with asyncio.TaskGroup() as tasks:
        while not ended.is_set():
            tasks.create_task(some_job(farm, chance))
            await asyncio.sleep(pause_s)


async def live_through(farm, befalls, seed, *, pause_s=0.15, quiet_s=90.0):
    """Submit while it befalls the farm, let it come to rest, and look at what has happened."""
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(submit_until(farm, ended, seed, pause_s))
        await Befaller(farm).run(befalls)
        ended.set()
    for actor in (*farm.servers, *farm.workers):
        assert actor.alive, f"{actor.name} ended by itself: {actor.log.read_text()[-2000:]}"
    await farm.quiet(within_s=quiet_s)
    return await farm.history()


def told(befalls, found):
    return "\n".join([*map(str, found[:20]), "what befell the farm:", *map(str, befalls)])


@pytest.mark.slow("a farm under faults for a while")
@pytest.mark.timeout(240)
async def test_nothing_is_lost_doubled_or_over_its_cap_whatever_befalls_the_farm(farm):
    befalls = one_of_each(SEED)
    history = await live_through(farm, befalls, SEED)
    found = faults(history)
    assert not found, told(befalls, found)
    assert len(history.runs) > 200
    assert sum(map(len, history.commits)) > 1000, "the order of commits was not seen"
    for what, reached in reached_by(farm, history).items():
        if what in ALWAYS:
            assert reached, f"this run never came to {what}"


def reached_by(farm, history):
    """The rare paths, and how often they were taken."""
    return {
        "a retry": sum(end.state == "RETRIED" and end.code != "worker_lost" for end in history.ends),
        "a lost worker": farm.logged("worker_lost"),
        "a frame of a lost worker": sum(end.code == "worker_lost" for end in history.ends),
        "a late report": farm.metric("rota_frames_late"),
        "a dispatch that was lost": farm.logged("frames_unheld"),
        "an emptied Redis": farm.logged("show_seeded"),
        "a wiped JetStream": farm.wipes,
        "a poison message": len(history.letters),
        "books of Redis beside the procs": sum(bool(kept.standing) for kept in history.kept),
        "a consumer made anew": farm.logged("consumer_restored"),
        "a dead dispatcher's claims": farm.logged("queue_owner_deleted"),
        "a deposed leader": farm.logged("leader_deposed") + farm.logged("leader_postgres_unavailable"),
        "a submit without an answer": sum(not submit.jobs for submit in history.submits),
        "a double run": doubles(history),
    }


@pytest.mark.soak
@pytest.mark.timeout(7200)
async def test_soak_pipeline_under_faults(farm, capsys):
    seconds, seed = float(os.environ.get("SOAK_S", "300")), int(os.environ.get("SOAK_SEED", "1"))
    befalls = at_random(seed, seconds)
    history = await live_through(farm, befalls, seed, quiet_s=180)
    found, reached = faults(history), reached_by(farm, history)
    with capsys.disabled():
        print(
            f"\nsoak pipeline_under_faults: seed {seed}, {seconds:.0f} s, {len(befalls)} faults, "
            f"{len(history.submits)} submits, {len(history.runs):,} runs, {len(history.commits):,} commits, {reached}"
        )
    assert not found, told(befalls, found)
    assert all(reached.values()), f"this run never came to {[what for what, n in reached.items() if not n]}"

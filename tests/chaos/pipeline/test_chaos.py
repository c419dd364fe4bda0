"""The whole pipeline as real processes, two servers and three workers, under injected faults.

A seed replays a run: `SOAK_SEED=7 SOAK_S=600 make soak ARGS="-k pipeline"`, or CHAOS_SEED for the short run.
A failure prints the injected faults and the violations found in the history.
"""

import asyncio
import os
import random

import pytest

from tests.chaos.pipeline.deployment import Farm
from tests.chaos.pipeline.faults import FaultInjector, at_random, one_of_each
from tests.chaos.pipeline.history import Booked, repeated_starts, violations

SEED = int(os.environ.get("CHAOS_SEED", "3"))

ALWAYS = ("lost worker", "retry", "flushed Redis", "wiped JetStream", "repeated run", "poison message")
ALWAYS += ("Redis sample with procs",)
"""Rare paths that even a short run must reach."""


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


def submit_random_job(farm, rng):
    """A random job: most succeed, the others fail, retry, or wait for caps."""
    show = rng.choice(["film", "film", "short", "plain"])
    tries = rng.choice([1, 60, 60])
    give = {"show": show, "tries": tries}
    match rng.randrange(12):
        case 0:
            return farm.submit("boom", ends=("FAILED",), **give)
        case 1:
            return farm.submit("flaky", 2, layer={"retries": {"most": 3, "first_s": 0.1}}, **give)
        case 2:
            return farm.submit("value", rng.randrange(100), frames=3, **give)
        case 3:
            return farm.submit("crunch", 0.05, frames=2, **give)
        case 4:
            return farm.submit("nap", 0.2, frames=6, max_cores=2, **give)
        case 5 | 6:
            return farm.submit("nap", rng.choice([0.01, 0.5, 2.0]), frames=rng.randint(1, 8), **give)
        case 7:
            return farm.submit("noop", frames=rng.randint(20, 200), **give)
        case 8:
            return submit_poison(farm, rng)
    return farm.submit("noop", **give)


async def submit_poison(farm, rng):
    await farm.poisoner.poison(rng)
    await farm.submit_on_bus("noop", frames=2)


async def submit_until(farm, ended, seed, pause_s):
    rng = random.Random(seed)
    async with asyncio.TaskGroup() as tasks:
        while not ended.is_set():
            tasks.create_task(submit_random_job(farm, rng))
            await asyncio.sleep(pause_s)


async def run_under_faults(farm, injected, seed, *, pause_s=0.15, idle_s=90.0):
    """Submit jobs while faults are injected, wait until the cluster is idle, and return the history."""
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(submit_until(farm, ended, seed, pause_s))
        await FaultInjector(farm).run(injected)
        ended.set()
    for actor in (*farm.servers, *farm.workers):
        assert actor.alive, f"{actor.name} exited unexpectedly: {actor.log.read_text()[-2000:]}"
    await farm.quiet(within_s=idle_s)
    return await farm.history()


def report(injected, found):
    return "\n".join([*map(str, found[:20]), "injected faults:", *map(str, injected)])


@pytest.mark.slow("runs a cluster under faults")
@pytest.mark.timeout(240)
async def test_pipeline_under_faults_loses_duplicates_and_overbooks_nothing(farm):
    injected = one_of_each(SEED)
    history = await run_under_faults(farm, injected, SEED)
    found = violations(history)
    assert not found, report(injected, found)
    assert len(history.runs) > 200
    assert not unrecorded(history), "the commits that booked these tokens were not recorded"
    for what, reached in reached_by(farm, history).items():
        if what in ALWAYS:
            assert reached, f"this run never reached: {what}"


def unrecorded(history):
    """Tokens that ran, but for which A1 saw no booking."""
    booked = {change.token for commit in history.commits for change in commit if isinstance(change, Booked)}
    return {run.token for run in history.runs} - booked


def reached_by(farm, history):
    """Rare paths and how often the run took them."""
    return {
        "retry": sum(end.state == "RETRIED" and end.code != "worker_lost" for end in history.ends),
        "lost worker": farm.logged("worker_lost"),
        "frame of a lost worker": sum(end.code == "worker_lost" for end in history.ends),
        "late report": farm.metric("rota_frames_late"),
        "lost assignment": farm.logged("frames_unheld"),
        "flushed Redis": farm.logged("show_seeded"),
        "wiped JetStream": farm.wipes,
        "poison message": len(history.dead_letters),
        "Redis sample with procs": sum(bool(sample.procs) for sample in history.ledger_samples),
        "restored consumer": farm.logged("consumer_restored"),
        "claims of a dead dispatcher": farm.logged("queue_owner_deleted"),
        "deposed leader": farm.logged("leader_deposed") + farm.logged("leader_postgres_unavailable"),
        "submission without acknowledgement": sum(not submit.jobs for submit in history.submits),
        "repeated run": repeated_starts(history),
    }


@pytest.mark.soak
@pytest.mark.timeout(7200)
async def test_soak_pipeline_under_faults(farm, capsys):
    seconds, seed = float(os.environ.get("SOAK_S", "300")), int(os.environ.get("SOAK_SEED", "1"))
    injected = at_random(seed, seconds)
    history = await run_under_faults(farm, injected, seed, idle_s=180)
    found, reached = violations(history), reached_by(farm, history)
    with capsys.disabled():
        print(
            f"\nsoak pipeline_under_faults: seed {seed}, {seconds:.0f} s, {len(injected)} faults, "
            f"{len(history.submits)} submits, {len(history.runs):,} runs, {len(history.commits):,} commits, {reached}"
        )
    assert not found, report(injected, found)
    assert all(reached.values()), f"this run never reached: {[what for what, n in reached.items() if not n]}"

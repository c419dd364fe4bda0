"""Kill -9 and a lost reply at every named place of engine, placement and worker: whoever comes next ends it all.

One farm for all places. Servers are armed by twos, so that each dies beside one that works; what they leave behind is
taken up by the next two, and in the end by one that nothing befalls.
"""

import asyncio
import itertools
from pathlib import Path

import pytest

import rota
from rota.infra import faults as places
from tests.chaos.pipeline_farm import Farm
from tests.chaos.pipeline_hand import Later
from tests.chaos.pipeline_history import Submit, faults
from tests.ground.queues import sql
from tests.ground.waiting import until

BY_HAND = {
    "submit.before_statement": "submit",
    "submit.statement": "submit",
    "submit.before_admit": "admit",
    "submit.admit": "admit",
    "ender.after_mark": "cancel",
    "ender.before_commit": "cancel",
    "placement.after_routing_before_audit": "route",
}
"""Places that a server comes to only when somebody asks for it."""


NOT_HERE = {
    "reopen.after_purge": "somebody takes dead letters up again",
    "upkeep.after_day_made_before_commit": "a new day",
    "upkeep.after_carry_before_commit": "a day past its retention",
    "upkeep.after_drop_before_commit": "a day past its retention",
}
"""Places of one transaction each that no job comes to, and when they are: killed there, nothing has happened."""
FEW = 25
LIVE = sql("SELECT count(*) FROM rota.job")
BOOKED = sql("SELECT count(*) FROM rota.proc WHERE pk_job = $1::uuid")


def named_in(*rooms):
    """Every place in the source of these rooms, as (kind, name)."""
    texts = [path.read_text() for room in rooms for path in sorted((Path(rota.__file__).parent / room).rglob("*.py"))]
    return [(found[1], found[2]) for text in texts for found in places._CALL.finditer(text)]


KINDS = {name: kind for kind, name in named_in("engine", "placement", "worker")}
SERVER = [place for place in named_in("engine", "placement") if place[1] not in {*BY_HAND, *NOT_HERE}]
WORKER = named_in("worker")


def names(kind, given):
    return [name for each, name in given if each == kind]


@pytest.fixture
async def farm(private_stack, tmp_path, proxy):
    stack = await private_stack("postgres", "redis", "nats")
    async with Farm(stack, tmp_path, proxy, links=False) as farm:
        await farm.show("film", burst=12)
        await farm.keep_commits()
        await farm.start(servers=0, workers=2)
        yield farm


async def feed(farm):
    """Jobs of every kind, for ever: so that whoever is armed comes to its place."""
    for number in itertools.count():
        await until(lambda: _are_few(farm), within_s=120, what="room for more jobs")
        await farm.submit("noop", frames=5)
        await farm.submit("value", number)
        await farm.submit("flaky", 1, layer={"retries": {"most": 3, "first_s": 0.1}})
        await farm.submit("nap", 0.02, frames=4, max_cores=2)
        await farm.submit("boom", ends=("FAILED",))
        await farm.submit("noop", gate=Later())
        await farm.submit_on_bus("noop", frames=2)
        await asyncio.sleep(0.1)


async def _are_few(farm):
    return await farm.database.value(LIVE) < FEW


async def server(farm, name, **arm):
    often = {"ROTA_REGISTRY_SNAPSHOT_INTERVAL": "1s", "ROTA_REGISTRY_SNAPSHOT_LOCK_TTL": "1s"}
    await farm.add_server(name, heartbeat_s=0.5, **often, **arm)
    return farm.servers[-1]


def test_every_place_is_one_of_a_server_of_a_worker_or_visited_by_hand():
    assert len(SERVER) > 8
    assert WORKER
    known = {name for _, name in named_in("engine", "placement", "worker")}
    assert {*BY_HAND, *NOT_HERE} <= known, "a place that is gone"


@pytest.mark.timeout(240)
async def test_whoever_is_killed_at_any_named_place_loses_nothing(farm, spawn):
    feeding = asyncio.create_task(feed(farm))
    try:
        await _kill_servers(farm)
        last = await server(farm, "last", LOST_REPLY_AT=",".join(names("reply", SERVER)))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_kill_workers(farm))
            for place, what in BY_HAND.items():
                tasks.create_task(_by_hand(farm, spawn, place, what))
    finally:
        feeding.cancel()
        await asyncio.wait([feeding])
    await farm.quiet(within_s=60)
    assert last.alive, "a lost reply ended a server"
    history = await farm.history()
    found = faults(history)
    assert not found, "\n".join(map(str, found[:20]))
    assert "The reply at dispatch.publish was dropped" in last.said(), "it never came to this place"
    assert all(worker.alive for worker in farm.workers if "armed" not in worker.name), "a lost reply ended a worker"


async def _kill_servers(farm):
    number = itertools.count()
    todo = names("at", SERVER)
    for two in (todo[at : at + 2] for at in range(0, len(todo), 2)):
        armed = [await server(farm, f"armed{next(number)}", CRASH_AT=place) for place in two]
        for place, each in zip(two, armed, strict=True):
            status = await each.wait(40)
            assert status == places.CRASHED, f"{place}: {status}, {each.said()[-1500:]}"


async def _kill_workers(farm):
    for number, place in enumerate(names("at", WORKER)):
        worker = await farm.add_worker(f"armed_worker{number}", CRASH_AT=f"{place}:3")
        status = await worker.wait(40)
        assert status == places.CRASHED, f"{place}: {status}, {worker.said()[-1500:]}"
    await farm.add_worker("deaf_worker", LOST_REPLY_AT=",".join(names("reply", WORKER)))


async def _by_hand(farm, spawn, place, what):
    submit = Submit(f"by hand at {place}", 3)
    about = await _about(farm, what, submit)
    armed = {"CRASH_AT" if KINDS[place] == "at" else "LOST_REPLY_AT": place}
    first = await _hand(farm, spawn, what, about, armed)
    if KINDS[place] == "at":
        assert await first.wait(40) == places.CRASHED, f"{place}: {await first.errors()}"
    else:
        assert await first.line(40) == "lost", place
    again = await _hand(farm, spawn, what, about, {})
    job = await again.line(40)
    if what in ("submit", "admit"):
        submit.jobs.append(job)


async def _about(farm, what, submit):
    match what:
        case "cancel":
            job = await farm.submit("nap", 600, frames=3, ends=("CANCELLED",), priority=8)
            await until(lambda: farm.database.value(BOOKED, job), within_s=30, what="a job to cancel")
            return job
        case "route":
            return "*"
    farm.submits.append(submit)
    return submit.key


async def _hand(farm, spawn, what, about, armed):
    env = {"DATABASE": farm.urls["postgres"], "NATS": farm.urls["nats"], **armed}
    return await spawn("tests.chaos.pipeline_hand", what, about, env=env)

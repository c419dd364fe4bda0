"""Kill -9 and a lost reply at every named place of engine, placement and worker: whoever comes next ends it all.

One farm for all places, and two servers at a time. Each is armed with its share of the places, dies at the first one it
comes to and is started again for the rest, beside the other one or alone. What all of them leave behind is ended by a
last one, which loses every reply once while workers and others die around it.
"""

import asyncio
import json
from pathlib import Path

import pytest

import rota
from rota.infra import failpoints as places
from tests.chaos.pipeline import actions as pipeline_actions
from tests.chaos.pipeline.deployment import ROOT, SOON_S, Farm
from tests.chaos.pipeline.history import Submit, faults
from tests.support.queue import sql
from tests.support.waiting import until

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


ELSEWHERE = {
    "reopen.after_purge": "tests/integration/engine/resubmission/test_resubmitter.py",
    "upkeep.after_caps_before_commit": "tests/integration/engine/recovery/test_retention.py",
    "upkeep.after_day_made_before_commit": "tests/integration/engine/recovery/test_retention.py",
    "upkeep.after_carry_before_commit": "tests/integration/engine/recovery/test_retention.py",
    "upkeep.after_drop_before_commit": "tests/integration/engine/recovery/test_retention.py",
    "approvals.before_commit": "tests/integration/engine/admission/test_approvals_races.py",
    "approvals.commit": "tests/integration/engine/admission/test_approvals_races.py",
    "approvals.before_expiry_commit": "tests/integration/engine/admission/test_approvals_races.py",
    "gate.after_word": "tests/integration/engine/admission/test_gate_paused.py",
    "outputs.after_claim": "tests/integration/engine/outputs/test_killed.py",
    "outputs.after_look": "tests/integration/engine/outputs/test_killed.py",
    "outputs.before_commit": "tests/integration/engine/outputs/test_killed.py",
    "outputs.after_commit": "tests/integration/engine/outputs/test_killed.py",
    "outputs.after_redacted": "tests/integration/engine/outputs/test_killed.py",
    "outputs.after_stop": "tests/integration/engine/outputs/test_killed.py",
    "outputs.before_release_commit": "tests/integration/engine/outputs/test_killed.py",
}
"""Places of one transaction each that no job comes to, and who dies there."""
LONG_S = 90.0
"""A bound for what takes a second or two: whoever is armed comes to its place, wherever this runs."""
LIVE = sql("SELECT count(*) FROM rota.job WHERE pk_job = ANY($1::uuid[])")
BOOKED = sql("SELECT count(*) FROM rota.proc WHERE pk_job = $1::uuid")


def named_in(*rooms):
    """Every place in the source of these rooms, as (kind, name)."""
    texts = [path.read_text() for room in rooms for path in sorted((Path(rota.__file__).parent / room).rglob("*.py"))]
    return [(found[1], found[2]) for text in texts for found in places._FAILPOINT_CALL.finditer(text)]


KINDS = {name: kind for kind, name in named_in("engine", "placement", "worker")}
SERVER = [place for place in named_in("engine", "placement") if place[1] not in {*BY_HAND, *ELSEWHERE}]
WORKER = named_in("worker")


def names(kind, given):
    return [name for each, name in given if each == kind]


@pytest.fixture
async def farm(private_stack, tmp_path, proxy):
    stack = await private_stack("postgres", "redis", "nats")
    async with Farm(stack, tmp_path, proxy, links=False) as farm:
        await farm.show("film", burst=12)
        await farm.show("short", burst=100)
        await farm.keep_commits()
        await farm.start(servers=0, workers=2, slots=64)
        yield farm


async def fed(farm, end):
    """The outcome of `end`, with jobs of every kind on their way until then: so that whoever is armed gets there."""
    ending = asyncio.ensure_future(end)
    while not ending.done():
        jobs = asyncio.create_task(_some_jobs(farm))
        await asyncio.wait({ending, jobs}, return_when=asyncio.FIRST_COMPLETED)
        await jobs
    return await ending


async def _some_jobs(farm):
    """Until they have ended, or are stuck with somebody who died."""
    film, short = {"show": "film"}, {"show": "short"}
    jobs = [
        await farm.submit("noop", frames=5, **film),
        await farm.submit("nap", 0.02, frames=4, max_cores=2, **film),
        await farm.submit("noop", frames=2, **short),
        await farm.submit("value", 7, **short),
        await farm.submit("flaky", 1, layer={"retries": {"most": 3, "first_s": 0.1}}, **short),
        await farm.submit("boom", ends=("FAILED",), **short),
        await farm.submit("noop", gate=pipeline_actions.Later(), **short),
    ]
    jobs += [await farm.submit("noop", after=tuple(filter(None, jobs[2:4])), **short)]
    await farm.submit_on_bus("noop", frames=2)

    async def have_ended():
        return await farm.database.value(LIVE, jobs) == 0

    try:
        await until(have_ended, within_s=1.0, every_s=SOON_S)
    except AssertionError:
        return


async def server(farm, name, **arm):
    soon = {"REGISTRY_SNAPSHOT_INTERVAL": "1s", "REGISTRY_SNAPSHOT_LOCK_TTL": "1s", "NATS_JOB_ACK_WAIT": "5s"}
    return await farm.add_server(name, heartbeat_s=0.5, **{f"ROTA_{key}": time for key, time in soon.items()}, **arm)


def came_to(actor, event):
    """Places that it said it failed at."""
    lines = [json.loads(line) for line in actor.said().splitlines() if f'"{event}"' in line]
    return [line["place"] for line in lines]


def test_every_place_is_visited_here_or_by_the_test_that_is_named():
    assert len(SERVER) > 8
    assert WORKER
    for place, test in ELSEWHERE.items():
        assert f'"{place}' in (ROOT / test).read_text(), f"nobody dies at {place}"
    known = {name for _, name in named_in("engine", "placement", "worker")}
    assert known == {name for _, name in [*SERVER, *WORKER]} | {*BY_HAND, *ELSEWHERE}, "a place that is gone"


@pytest.mark.slow("a process dies at each of some thirty places")
@pytest.mark.timeout(300)
async def test_whoever_is_killed_at_any_named_place_loses_nothing(farm, spawn):
    async with asyncio.TaskGroup() as tasks:
        for number in range(2):
            tasks.create_task(_kill_server(farm, f"armed{number}", number))
    last = await server(farm, "last", LOST_REPLY_AT=",".join(names("after_send", SERVER)))
    deaf = await farm.add_worker("deaf_worker", LOST_REPLY_AT=",".join(names("after_send", WORKER)))
    async with asyncio.TaskGroup() as tasks:
        replies = {last: names("after_send", SERVER), deaf: names("after_send", WORKER)}
        tasks.create_task(fed(farm, _replies_lost(replies)))
        for number, place in enumerate(names("hit", WORKER)):
            tasks.create_task(_kill_worker(farm, f"armed_worker{number}", place))
        for place, what in BY_HAND.items():
            tasks.create_task(_by_hand(farm, spawn, place, what))
    await farm.quiet(within_s=LONG_S)
    found = faults(await farm.history())
    assert not found, "\n".join(map(str, found[:20]))
    assert last.alive, "a lost reply ended a server"
    assert all(worker.alive for worker in farm.workers if "armed" not in worker.name), "a lost reply ended a worker"


async def _replies_lost(wanted):
    def all_lost():
        return all(set(came_to(actor, "failpoint_lost_reply")) == set(replies) for actor, replies in wanted.items())

    await until(all_lost, within_s=LONG_S, what=f"a lost reply at each of {[*wanted.values()]}", every_s=SOON_S)


async def _kill_server(farm, name, number):
    """First where reports are in hand, which come again half a minute later; until then it dies everywhere else."""
    reports = [place for place in names("hit", SERVER) if place.startswith(("finish.", "results."))]
    others = [place for place in names("hit", SERVER) if place not in reports]
    armed = None
    for todo in (reports[number::2], others[number::2]):
        while left := [place for place in todo if armed is None or place not in came_to(armed, "failpoint_crash")]:
            arm = {"CRASH_AT": ",".join(left)}
            armed = await (server(farm, name, **arm) if armed is None else armed.start(**arm))
            assert await fed(farm, armed.wait(LONG_S)) == places.CRASH_EXIT_STATUS, f"{name}: {armed.said()[-1500:]}"
            assert set(came_to(armed, "failpoint_crash")).intersection(left), f"{name}: {armed.said()[-1500:]}"


async def _kill_worker(farm, name, place):
    armed = await farm.add_worker(name, CRASH_AT=f"{place}:3")
    status = await fed(farm, armed.wait(LONG_S))
    assert status == places.CRASH_EXIT_STATUS, f"{place}: {status}, {armed.said()[-1500:]}"


async def _by_hand(farm, spawn, place, what):
    submit = Submit(f"by hand at {place}", 3)
    about = await _about(farm, what, submit)
    env = {"DATABASE": farm.urls["postgres"], "NATS": farm.urls["nats"]}
    arm = {"CRASH_AT" if KINDS[place] == "hit" else "LOST_REPLY_AT": place}
    first = await spawn("tests.chaos.pipeline.actions", what, about, env=env | arm)
    if KINDS[place] == "hit":
        assert await first.wait(LONG_S) == places.CRASH_EXIT_STATUS, f"{place}: {await first.errors()}"
    else:
        assert await first.line(LONG_S) == "lost", place
    job = await pipeline_actions.WORK[what](farm.database, farm.bus, about)
    if what in ("submit", "admit"):
        submit.jobs.append(str(job))


async def _about(farm, what, submit):
    match what:
        case "cancel":
            job = await farm.submit("nap", 600, frames=3, ends=("CANCELLED",), priority=8)
            await until(lambda: farm.database.value(BOOKED, job), within_s=LONG_S, what="a job to cancel")
            return job
        case "route":
            return "*"
    farm.submits.append(submit)
    return submit.key

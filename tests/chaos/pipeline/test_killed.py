"""SIGKILL and a lost reply at every failpoint of engine, placement and worker; the remaining processes recover.

One cluster serves all failpoints. Two servers run at a time, each armed with half of them: a server crashes at the
first one it reaches and restarts with the rest. A last server then finishes all work; it loses the reply at each
`after_send` failpoint once, while workers and clients crash around it.
"""

import asyncio
import json
from pathlib import Path

import pytest

import rota
from rota.infra import failpoints
from tests.chaos.pipeline import actions as pipeline_actions
from tests.chaos.pipeline.deployment import POLL_S, ROOT, Farm
from tests.chaos.pipeline.history import Submit, violations
from tests.support.queue import sql
from tests.support.waiting import until

CLIENT_ACTIONS = {
    "submit.before_statement": "submit",
    "submit.statement": "submit",
    "submit.before_admit": "admit",
    "submit.admit": "admit",
    "ender.after_mark": "cancel",
    "ender.before_commit": "cancel",
    "placement.after_routing_before_audit": "route",
}
"""Failpoints reached only by client requests, and the action that reaches each."""


TESTED_ELSEWHERE = {
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
"""Failpoints that no job of this test reaches, and the test that covers each."""
FAILPOINT_TIMEOUT_S = 90.0
"""Generous bound for slow machines; reaching a failpoint normally takes a second or two."""
LIVE = sql("SELECT count(*) FROM rota.job WHERE pk_job = ANY($1::uuid[])")
BOOKED = sql("SELECT count(*) FROM rota.proc WHERE pk_job = $1::uuid")


def failpoints_in(*packages):
    """Every failpoint in the source of these packages, as (kind, name)."""
    texts = [
        path.read_text()
        for package in packages
        for path in sorted((Path(rota.__file__).parent / package).rglob("*.py"))
    ]
    return [(found[1], found[2]) for text in texts for found in failpoints._FAILPOINT_CALL.finditer(text)]


KINDS = {name: kind for kind, name in failpoints_in("engine", "placement", "worker")}
SERVER = [
    failpoint
    for failpoint in failpoints_in("engine", "placement")
    if failpoint[1] not in {*CLIENT_ACTIONS, *TESTED_ELSEWHERE}
]
WORKER = failpoints_in("worker")


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


async def with_load(farm, end):
    """The result of `end`; submits jobs of every kind until then, so that armed processes reach their failpoints."""
    ending = asyncio.ensure_future(end)
    while not ending.done():
        jobs = asyncio.create_task(_some_jobs(farm))
        await asyncio.wait({ending, jobs}, return_when=asyncio.FIRST_COMPLETED)
        await jobs
    return await ending


async def _some_jobs(farm):
    """Submit jobs and wait until they have ended or a crash blocks them."""
    film, short = {"show": "film"}, {"show": "short"}
    jobs = [
        await farm.submit("noop", frames=5, **film),
        await farm.submit("nap", 0.02, frames=4, max_cores=2, **film),
        await farm.submit("noop", frames=2, **short),
        await farm.submit("nap", 0.001, frames=60, max_cores=1, **short),
        # Of a sync task, which gets the frames of a series one by one.
        await farm.submit("crunch", 0.001, frames=30, max_cores=1, **short),
        # Longer than frames of this work usually are, so that their series is handed back.
        await farm.submit("nap", 0.25, frames=4, max_cores=1, **short),
        await farm.submit("value", 7, **short),
        await farm.submit("flaky", 1, layer={"retries": {"most": 3, "first_s": 0.1}}, **short),
        await farm.submit("boom", ends=("FAILED",), **short),
        await farm.submit("noop", gate=pipeline_actions.DeferredGate(), **short),
    ]
    jobs += [await farm.submit("noop", after=tuple(filter(None, jobs[2:4])), **short)]
    await farm.submit_on_bus("noop", frames=2)

    async def have_ended():
        return await farm.database.value(LIVE, jobs) == 0

    try:
        await until(have_ended, within_s=1.0, every_s=POLL_S)
    except AssertionError:
        return


async def server(farm, name, **arm):
    soon = {"REGISTRY_SNAPSHOT_INTERVAL": "1s", "REGISTRY_SNAPSHOT_LOCK_TTL": "1s"}
    return await farm.add_server(name, heartbeat_s=0.5, **{f"ROTA_{key}": time for key, time in soon.items()}, **arm)


def failpoints_reached(actor, event):
    """Failpoints named in its log."""
    lines = [json.loads(line) for line in actor.all_logs().splitlines() if f'"{event}"' in line]
    return [line["place"] for line in lines]


def test_every_failpoint_is_covered_here_or_by_the_named_test():
    assert len(SERVER) > 8
    assert WORKER
    for failpoint, test in TESTED_ELSEWHERE.items():
        assert f'"{failpoint}' in (ROOT / test).read_text(), f"no test covers {failpoint}"
    known = {name for _, name in failpoints_in("engine", "placement", "worker")}
    assert known == {name for _, name in [*SERVER, *WORKER]} | {*CLIENT_ACTIONS, *TESTED_ELSEWHERE}, (
        "unknown or removed failpoint"
    )


@pytest.mark.slow("a process crashes at each of some thirty failpoints")
@pytest.mark.timeout(300)
async def test_crash_or_lost_reply_at_any_failpoint_loses_nothing(farm, spawn):
    async with asyncio.TaskGroup() as tasks:
        for number in range(2):
            tasks.create_task(_kill_server(farm, f"armed{number}", number))
    last = await server(farm, "last", LOST_REPLY_AT=",".join(names("after_send", SERVER)))
    lossy_worker = await farm.add_worker("lossy_worker", LOST_REPLY_AT=",".join(names("after_send", WORKER)))
    async with asyncio.TaskGroup() as tasks:
        replies = {last: names("after_send", SERVER), lossy_worker: names("after_send", WORKER)}
        tasks.create_task(with_load(farm, _until_replies_lost(replies)))
        for number, failpoint in enumerate(names("hit", WORKER)):
            tasks.create_task(_kill_worker(farm, f"armed_worker{number}", failpoint))
        for failpoint, action in CLIENT_ACTIONS.items():
            tasks.create_task(_run_client_action(farm, spawn, failpoint, action))
    await farm.quiet(within_s=FAILPOINT_TIMEOUT_S)
    found = violations(await farm.history())
    assert not found, "\n".join(map(str, found[:20]))
    assert last.alive, "a lost reply must not stop a server"
    assert all(worker.alive for worker in farm.workers if "armed" not in worker.name), (
        "a lost reply must not stop a worker"
    )


async def _until_replies_lost(expected):
    def all_lost():
        return all(
            set(failpoints_reached(actor, "failpoint_lost_reply")) == set(replies)
            for actor, replies in expected.items()
        )

    await until(
        all_lost, within_s=FAILPOINT_TIMEOUT_S, what=f"a lost reply at each of {[*expected.values()]}", every_s=POLL_S
    )


async def _kill_server(farm, name, number):
    """Crash first while handling reports, whose redelivery takes 30 s; meanwhile crash at the other failpoints."""
    reports = [failpoint for failpoint in names("hit", SERVER) if failpoint.startswith(("finish.", "results."))]
    others = [failpoint for failpoint in names("hit", SERVER) if failpoint not in reports]
    armed = None
    for todo in (reports[number::2], others[number::2]):
        while left := [
            failpoint
            for failpoint in todo
            if armed is None or failpoint not in failpoints_reached(armed, "failpoint_crash")
        ]:
            arm = {"CRASH_AT": ",".join(left)}
            armed = await (server(farm, name, **arm) if armed is None else armed.start(**arm))
            assert await with_load(farm, armed.wait(FAILPOINT_TIMEOUT_S)) == failpoints.CRASH_EXIT_STATUS, (
                f"{name}: {armed.all_logs()[-1500:]}"
            )
            assert set(failpoints_reached(armed, "failpoint_crash")).intersection(left), (
                f"{name}: {armed.all_logs()[-1500:]}"
            )


async def _kill_worker(farm, name, failpoint):
    armed = await farm.add_worker(name, CRASH_AT=f"{failpoint}:3")
    try:
        status = await with_load(farm, armed.wait(FAILPOINT_TIMEOUT_S))
    except TimeoutError as error:
        raise AssertionError(f"no third visit of {failpoint}: {armed.all_logs()[-1500:]}") from error
    assert status == failpoints.CRASH_EXIT_STATUS, f"{failpoint}: {status}, {armed.all_logs()[-1500:]}"


async def _run_client_action(farm, spawn, failpoint, action):
    submit = Submit(f"client action at {failpoint}", 3)
    argument = await _argument(farm, action, submit)
    env = {"DATABASE": farm.urls["postgres"], "NATS": farm.urls["nats"]}
    arm = {"CRASH_AT" if KINDS[failpoint] == "hit" else "LOST_REPLY_AT": failpoint}
    first = await spawn("tests.chaos.pipeline.actions", action, argument, env=env | arm)
    if KINDS[failpoint] == "hit":
        assert await first.wait(FAILPOINT_TIMEOUT_S) == failpoints.CRASH_EXIT_STATUS, (
            f"{failpoint}: {await first.errors()}"
        )
    else:
        assert await first.line(FAILPOINT_TIMEOUT_S) == "lost", failpoint
    job = await pipeline_actions.ACTIONS[action](farm.database, farm.bus, argument)
    if action in ("submit", "admit"):
        submit.jobs.append(str(job))


async def _argument(farm, action, submit):
    match action:
        case "cancel":
            job = await farm.submit("nap", 600, frames=3, ends=("CANCELLED",), priority=8)
            await until(lambda: farm.database.value(BOOKED, job), within_s=FAILPOINT_TIMEOUT_S, what="a job to cancel")
            return job
        case "route":
            return "*"
    farm.submits.append(submit)
    return submit.key

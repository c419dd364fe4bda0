"""T1 and F1: kill -9, pauses and lost replies at each failpoint of advancing, wrong clocks, long outages."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rota.infra import failpoints
from rota.model.workflows.spec import StepSpec
from rota.testing.clock import MovableClock
from tests.support.jobs import a_show, task
from tests.support.queue import sessions_over, sql
from tests.support.waiting import until
from tests.support.workflows import INBOX_SIZE, WorkflowHarness, end_job

DAY_S = 86_400.0
FLOW = (
    StepSpec(id="a", task="noop"),
    StepSpec(id="wait", type="delay", delay_sec=3600, depends_on=("a",)),
    StepSpec(id="b", task="noop", depends_on=("a",)),
    StepSpec(id="c", task="noop", depends_on=("wait", "b")),
)
FAILPOINTS = [
    (kind, name)
    for kind, name in failpoints.declared_failpoints()
    if name.startswith("workflow.") and name.split(".")[1] in ("after_take", "before_commit", "advance")
]
END_SESSIONS = sql("""
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND state = 'idle in transaction' AND pid <> pg_backend_pid()""")


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.fixture
async def harness(database):
    await a_show(database)
    return WorkflowHarness(database)


@pytest.mark.parametrize(("kind", "place"), FAILPOINTS, ids=[name for _, name in FAILPOINTS])
@pytest.mark.parametrize("what", ["inbox", "timer"])
async def test_crash_or_lost_reply_advances_a_run_once(spawn, database_url, harness, kind, place, what):
    await harness.start(*FLOW)
    await harness.end("a")
    if what == "timer":
        await harness.advance()
        await harness.end("b")
        await harness.advance()
        await harness.pass_time(3600)
    arm = {"CRASH_AT" if kind == "hit" else "LOST_REPLY_AT": place}
    client = await spawn("tests.integration.workflow.workflow_client", env={"URL": database_url, **arm})
    status = await client.wait()
    assert status == (failpoints.CRASH_EXIT_STATUS if kind == "hit" else 0), await client.errors()

    await sessions_over(harness.database)
    if kind == "hit":
        assert await harness.advance() == 1
    assert await harness.advance() == 0
    if what == "inbox":
        assert await harness.jobs() == ["a", "b"]
        assert await harness.timers() == [(1, 1)]
        await harness.end("b")
        await harness.advance()
        await harness.pass_time(3600)
        await harness.advance()
    assert await harness.jobs() == ["a", "b", "c"]
    assert await harness.timers() == []
    await harness.end("c")
    await harness.advance()
    assert set((await harness.states()).values()) == {"SUCCEEDED"}
    events = await harness.timeline()
    assert len(events) == len(set(events)) == 10, "nothing happened twice"


def test_every_advance_failpoint_is_covered():
    assert {name for _, name in FAILPOINTS} == {"workflow.after_take", "workflow.before_commit", "workflow.advance"}


@pytest.mark.parametrize("idle_s", [60, 0.2])
async def test_paused_advancer_blocks_others_briefly_and_then_writes_nothing(
    spawn, database_url, database, harness, idle_s
):
    await harness.start(*FLOW)
    await harness.end("a")
    env = {"URL": database_url, "PAUSE_AT": "workflow.before_commit", "IDLE_S": str(idle_s)}
    client = await spawn("tests.integration.workflow.workflow_client", env=env)
    await until(lambda: is_stopped(client.pid), what="the pause of the client in its transaction")
    if idle_s == 60:
        assert await harness.advance() == 0, "the paused process holds the lock"
        await database.run(END_SESSIONS)
    assert await until(harness.advance, what="the end of the paused session") == 1
    client.resume()
    assert await client.wait() == 0, await client.errors()
    assert await harness.jobs() == ["a", "b"]
    assert await database.value(INBOX_SIZE) == 0
    assert (await harness.states())["b"] == "RUNNING"


async def test_wrong_local_clock_fires_timers_on_time(database):
    await a_show(database)
    fast = WorkflowHarness(database, MovableClock(datetime(2040, 1, 1, tzinfo=UTC)))
    await fast.start(StepSpec(id="wait", type="delay", delay_sec=60))
    assert await fast.advance() == 0
    slow = WorkflowHarness(database, MovableClock(datetime(1999, 1, 1, tzinfo=UTC)))
    slow.run = fast.run
    await slow.pass_time(59)
    assert await slow.advance() == 0
    await slow.pass_time(1)
    assert await slow.advance() == 1
    assert await slow.states() == {"": "SUCCEEDED", "wait": "SUCCEEDED"}


async def test_long_outage_loses_no_timer_and_fires_each_once(harness):
    runs = [await harness.start(*FLOW) for _ in range(3)]
    for run in runs:
        await harness.end("a", run=run)
    await harness.advance()
    await harness.pass_time(40 * DAY_S)
    assert await harness.advance() == 3
    for run in runs:
        assert (await harness.timeline(run)).count(("wait", "succeeded")) == 1
        assert await harness.timers(run) == []


async def test_runs_of_one_definition_are_independent(harness):
    one, two = await harness.start(*FLOW), await harness.start(*FLOW)
    await harness.end("a", "FAILED", run=one)
    await harness.end("a", run=two)
    await harness.advance()
    assert (await harness.states(one))[""] == "FAILED"
    assert await harness.states(two) == {
        "": "RUNNING",
        "a": "SUCCEEDED",
        "wait": "RUNNING",
        "b": "RUNNING",
        "c": "WAITING",
    }


async def test_job_that_only_names_a_run_does_not_complete_its_step(harness, database):
    run = await harness.start(*FLOW)
    [outside_job] = await harness.submitter.submit(
        [
            task(workflow_id=str(run)),
        ]
    )
    await end_job(database, outside_job.job, "FAILED")
    await harness.advance()
    assert (await harness.states())["a"] == "RUNNING"
    assert await database.value(INBOX_SIZE) == 0


async def test_concurrent_advances_advance_once(harness, database):
    await harness.start(*FLOW)
    await harness.end("a")
    others = [WorkflowHarness(database) for _ in range(4)]
    advanced = await asyncio.gather(*(each.advance() for each in others))
    assert sum(advanced) == 1
    assert await harness.jobs() == ["a", "b"]

"""Two running replicas: the Redis mirror, its refill, timers that fire once, and the reconciler."""

import pytest

from rota.model.settings.lifecycle import DelayTimersSettings, WorkflowSettings
from rota.model.workflows.spec import StepSpec, WorkflowSpec
from rota.workflow.run_queries import RunQueries
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until
from tests.support.workflow_recovery import TIMERS

QUICK = WorkflowSettings(
    poll_interval=1.0, delay=DelayTimersSettings(poll_interval=0.1, lock_ttl=2.0, cleanup_interval=0.2)
)
DELETE_TIMER = sql("DELETE FROM rota.workflow_timer WHERE pk_run = $1::uuid")
MAKE_DUE = sql("UPDATE rota.workflow_timer SET ts_due = now()")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, workflow=QUICK) as farm:
        await farm.server()
        await farm.show()
        yield farm


async def test_redis_mirror_is_refilled_after_flush_and_lost_timer_is_restored(farm, redis):
    commands, queries = farm.replica.workflows, RunQueries(farm.database)
    wait = StepSpec(id="wait", type="delay", delay_sec=3600)
    await commands.declare(WorkflowSpec(name="flow", show="film", steps=(wait,)), "ann")
    runs = [(await commands.start("film", "flow", actor="ann")).run for _ in range(3)]

    async def is_mirrored(of):
        return set(await redis.zrange(TIMERS, 0, -1)) == {f"flow:{run}:wait:1".encode() for run in of}

    await until(lambda: is_mirrored(runs), what="the mirror of all timers")
    await redis.flushdb()
    await redis.zadd(TIMERS, {"flow:nobody": 1.0})
    await farm.database.run(DELETE_TIMER, runs[0])
    await until(lambda: is_mirrored(runs), what="the refilled mirror with the lost timer and without stale entries")
    await farm.database.run(MAKE_DUE)

    async def ended():
        return all([(await queries.get(run)).state == "SUCCEEDED" for run in runs])

    await until(ended, what="the end of all runs")
    await until(lambda: is_mirrored([]), what="an empty mirror")
    for run in runs:
        history = [moment.happened.what for moment in await queries.timeline(run) if moment.happened.step == "wait"]
        assert history == ["began", "succeeded"]

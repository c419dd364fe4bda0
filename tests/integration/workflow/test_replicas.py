"""Two replicas as they run: what Redis shows, what it shows again, timers that fire once, and the net."""

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
LOSE = sql("DELETE FROM rota.workflow_timer WHERE pk_run = $1::uuid")
SOON = sql("UPDATE rota.workflow_timer SET ts_due = now()")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, workflow=QUICK) as farm:
        await farm.server()
        await farm.show()
        yield farm


async def test_redis_shows_timers_again_after_a_flush_and_a_lost_timer_is_found(farm, redis):
    desk, looking = farm.replica.workflows, RunQueries(farm.database)
    wait = StepSpec(id="wait", type="delay", delay_sec=3600)
    await desk.declare(WorkflowSpec(name="flow", show="film", steps=(wait,)), "ann")
    runs = [(await desk.start("film", "flow", actor="ann")).run for _ in range(3)]

    async def shown(of):
        return set(await redis.zrange(TIMERS, 0, -1)) == {f"flow:{run}:wait:1".encode() for run in of}

    await until(lambda: shown(runs), what="timers to be shown")
    await redis.flushdb()
    await redis.zadd(TIMERS, {"flow:nobody": 1.0})
    await farm.database.run(LOSE, runs[0])
    await until(lambda: shown(runs), what="timers, that which was lost too, to be shown again, and nothing else")
    await farm.database.run(SOON)

    async def ended():
        return all([(await looking.get(run)).state == "SUCCEEDED" for run in runs])

    await until(ended, what="all to have ended")
    await until(lambda: shown([]), what="no timer to be shown")
    for run in runs:
        told = [moment.happened.what for moment in await looking.timeline(run) if moment.happened.step == "wait"]
        assert told == ["began", "succeeded"]

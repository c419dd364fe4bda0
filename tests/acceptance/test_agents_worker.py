"""`rota worker APP` runs the agents of its app, unless it is told not to or does not know where they are decided."""

import signal

import pytest

from tests.integration.worker.worker_support import serving
from tests.support.agents import RUNNING, history, row
from tests.support.waiting import until

APP = "tests.support.agent_tasks:app"


@pytest.fixture
async def server(nats_url, bus_prefix):
    async with serving(nats_url, bus_prefix) as running:
        yield running


@pytest.fixture
def rota_worker(spawn, server, nats_url, bus_prefix, database_url, redis_url):
    async def start(*words, **env):
        given = {"ROTA_NATS_URL": nats_url, "ROTA_NATS_PREFIX": bus_prefix, "ROTA_LOG_FORMAT": "json"}
        given |= {"ROTA_POSTGRES_URL": database_url, "ROTA_REDIS_URL": redis_url}
        given |= {"ROTA_REDIS_AGENT_ENABLED_PATTERN": "fine|on_the_loop|garbage"}
        process = await spawn("rota.cli", "worker", APP, "--name", "w1", *words, env={**given, **env})
        await until(lambda: server.workers and server.beats(), within_s=20, what="its first heartbeat")
        return process

    return start


async def test_agents_of_every_kind_run_and_end_with_the_worker(rota_worker, database):
    process = await rota_worker()
    for name in ("fine", "on_the_loop", "garbage"):
        [run] = await until(lambda name=name: history(database, name), within_s=30, what=f"a run of {name}")
        assert (run["outcome"], run["replica"]) == ("SUCCEEDED", "w1")
    process.send(signal.SIGTERM)
    assert await process.wait(30) == 0
    assert await row(database, "told") is None, "the pattern keeps the others out"
    assert await database.rows(RUNNING) == []


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (["--no-agents"], {}, ""),
        ([], {"ROTA_REDIS_SCHEDULER_ENABLED": "false"}, ""),
        ([], {"ROTA_POSTGRES_URL": ""}, "do not run here: set postgres.url and redis.url"),
    ],
)
async def test_a_worker_without_agents_runs_frames_alone(rota_worker, database, tmp_path, words, env, said):
    process = await rota_worker(*words, **env, ROTA_LOCAL_DATA_DIR=str(tmp_path))
    assert await row(database, "fine") is None
    process.send(signal.SIGTERM)
    assert await process.wait(30) == 0
    assert said in await process.errors()

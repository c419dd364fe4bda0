"""`rota worker APP` runs the agents of its app unless they are disabled or no PostgreSQL is configured."""

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
    async def start(*args, **env):
        settings = {"ROTA_NATS_URL": nats_url, "ROTA_NATS_PREFIX": bus_prefix, "ROTA_LOG_FORMAT": "json"}
        settings |= {"ROTA_POSTGRES_URL": database_url, "ROTA_REDIS_URL": redis_url}
        settings |= {"ROTA_REDIS_AGENT_ENABLED_PATTERN": "fine|on_the_loop|garbage"}
        process = await spawn("rota.cli", "worker", APP, "--name", "w1", *args, env={**settings, **env})
        await until(lambda: server.workers and server.beats(), within_s=20, what="the first heartbeat")
        return process

    return start


async def test_worker_runs_sync_and_async_agents_until_sigterm(rota_worker, database):
    process = await rota_worker()
    for name in ("fine", "on_the_loop", "garbage"):
        [run] = await until(lambda name=name: history(database, name), within_s=30, what=f"a run of {name}")
        assert (run["outcome"], run["replica"]) == ("SUCCEEDED", "w1")
    process.send(signal.SIGTERM)
    assert await process.wait(30) == 0
    assert await row(database, "told") is None, "an agent outside the enabled pattern must not be registered"
    assert await database.rows(RUNNING) == []


@pytest.mark.parametrize(
    ("args", "env", "message"),
    [
        (["--no-agents"], {}, ""),
        ([], {"ROTA_REDIS_SCHEDULER_ENABLED": "false"}, ""),
        ([], {"ROTA_POSTGRES_URL": ""}, "do not run here: set postgres.url and redis.url"),
    ],
)
async def test_worker_with_agents_disabled_runs_no_agent(rota_worker, database, tmp_path, args, env, message):
    process = await rota_worker(*args, **env, ROTA_LOCAL_DATA_DIR=str(tmp_path))
    assert await row(database, "fine") is None
    process.send(signal.SIGTERM)
    assert await process.wait(30) == 0
    assert message in await process.errors()

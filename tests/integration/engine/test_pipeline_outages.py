"""The pipeline while Redis is unavailable or a table is locked: it waits with a reason, and goes on by itself."""

import asyncpg
import msgspec
import pytest

from rota.infra.postgres import failures
from rota.infra.service import ServiceState
from rota.model.settings import Settings
from tests.support.replica_and_worker import Farm, hanging, seen
from tests.support.waiting import until


@pytest.fixture
async def cluster(database_url, private_redis, nats_url, bus_prefix):
    redis = await private_redis()
    async with Farm(database_url, redis.url, nats_url, bus_prefix) as cluster:
        cluster.redis = redis
        await cluster.show("film")
        await cluster.show("plain", managed=False)
        await cluster.worker(slots=20)
        yield cluster
        await cluster.quiet()


def reasons(cluster):
    return cluster.replica.engine.dispatcher.pending_queues.frames_by_reason()


async def test_redis_outage_blocks_only_managed_shows_until_it_is_back(cluster):
    await cluster.redis.kill()
    managed = await cluster.submit("note", frames=5, show="film")
    await until(lambda: "books_unavailable" in reasons(cluster), what="the wait reason")
    for _ in range(3):
        plain = await cluster.submit("noop", frames=20, show="plain")
        assert await cluster.ended(plain, within_s=20) == "SUCCEEDED"
    assert "note" not in seen, "it was booked without the ledger"
    await cluster.redis.restart()
    assert await cluster.ended(managed, within_s=30) == "SUCCEEDED"
    assert sorted(seen["note"]) == [(frame, 1) for frame in range(5)]


async def test_frames_running_when_redis_fails_end_without_it(cluster):
    gate = hanging("x")
    managed = await cluster.submit("hang", "x", frames=3, show="film")
    await cluster.running("x", 3)
    await cluster.redis.kill()
    gate.set()
    assert await cluster.ended(managed, within_s=20) == "SUCCEEDED"
    await cluster.redis.restart()
    again = await cluster.submit("noop", frames=100, show="film")
    assert await cluster.ended(again, within_s=30) == "SUCCEEDED"


@pytest.mark.parametrize("table", ["rota.queue_returned", "rota.proc", "rota.job", "rota.show", "rota.worker"])
async def test_lock_timeout_of_any_statement_ends_no_service(
    database_url, redis_url, nats_url, bus_prefix, table, monkeypatch
):
    """As a VACUUM FULL or an ALTER TABLE would: longer than a service may crash."""
    timeouts, not_now = [], failures._not_now

    def counted(error, target):
        timeouts.append(error)
        return not_now(error, target)

    monkeypatch.setattr(failures, "_not_now", counted)
    postgres = msgspec.structs.replace(Settings().postgres, lock_timeout=0.05)
    async with Farm(database_url, redis_url, nats_url, bus_prefix, postgres=postgres) as farm:
        await farm.show()
        await farm.worker(slots=4)
        gate = hanging("x")
        job = await farm.submit("hang", "x", frames=12)
        await farm.running("x", 4)
        other = await asyncpg.connect(database_url)
        async with other.transaction():
            await other.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            gate.set()
            await until(lambda: len(timeouts) > 20, within_s=30, what="many lock timeouts")
        await other.close()
        assert await farm.ended(job, within_s=30) == "SUCCEEDED"
        services = {each.name: each.state for each in farm.replica.supervisor.services}
        assert {name: state for name, state in services.items() if state is ServiceState.FAILED} == {}
        await farm.quiet()

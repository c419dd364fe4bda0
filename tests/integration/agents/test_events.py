"""Agent runs as events: short runs by their end, longer ones also by their start; also lost and stuck runs."""

import pytest

from rota.agents import running as runs_module
from rota.model.access import Role
from rota.server import services
from tests.support.agents import HOUR_MS, Pod, RunRecorder, every, history
from tests.support.api import Api
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until

EXPIRE = sql("UPDATE rota.lease SET expires_at = clock_timestamp() - interval '1 h', holder = 'other' WHERE name = $1")


class RecordedEvents:
    def __init__(self):
        self.events = []

    def __call__(self, kind, **facts):
        self.events.append((kind, facts))

    def of(self, name):
        return [kind for kind, facts in self.events if facts["agent"] == name]

    def facts(self, kind):
        return next(facts for each, facts in self.events if each == kind)


@pytest.fixture
def seen():
    return RunRecorder()


@pytest.fixture
def recorded():
    return RecordedEvents()


async def test_short_run_emits_one_event_and_a_longer_one_two(database, redis, seen, recorded):
    bad = seen.failing(ConnectionError("no route"))
    agents = {"short": every(HOUR_MS, seen.quick), "long": every(HOUR_MS, seen.hang), "bad": every(HOUR_MS, bad)}
    async with Pod(database, redis, publish_event=recorded, **agents):
        await until(lambda: recorded.of("short") and recorded.of("bad") and recorded.of("long"))
        assert recorded.of("long") == ["agent.started"]
        seen.gates["long"].set()
        await until(lambda: len(recorded.of("long")) == 2)
    assert recorded.of("short") == ["agent.succeeded"]
    assert recorded.of("long") == ["agent.started", "agent.succeeded"]
    assert recorded.facts("agent.failed")["failure"] == "TRANSIENT"
    started = recorded.facts("agent.started")
    [run] = await history(database, "long")
    assert (started["run"], started["replica"]) == (run["run"], "pod")
    assert recorded.facts("agent.succeeded")["took_ms"] >= 0


async def test_runs_stopped_by_shutdown_are_emitted_as_cancelled(database, redis, seen, recorded):
    async with Pod(database, redis, publish_event=recorded, held=every(HOUR_MS, seen.hang)):
        await until(lambda: seen.count("held"))
    assert recorded.of("held")[-1] == "agent.cancelled"


async def test_run_of_a_dead_replica_is_emitted_as_lost_by_its_successor(database, redis, seen, recorded):
    async with Pod(database, redis, publish_event=recorded, lease_s=1.0, held=every(HOUR_MS, seen.hang)) as pod:
        await until(lambda: seen.count("held") == 1)
        [first] = await pod.agents.repository.members()
        await database.run(EXPIRE, first)
        await until(lambda: "agent.lost" in recorded.of("held"), within_s=15)
    assert recorded.of("held").count("agent.lost") == 1


async def test_run_that_cannot_be_stopped_is_emitted_once(database, redis, seen, recorded, monkeypatch):
    monkeypatch.setattr(runs_module, "STOP_GRACE_S", 0.05)
    settings = {"scheduler__zombie_cleanup__threshold_ms": 20}
    async with Pod(
        database, redis, settings=settings, publish_event=recorded, stuck=every(50, seen.stubborn, timeout_ms=50)
    ):
        await until(lambda: "agent.quarantined" in recorded.of("stuck"))
        seen.gates["stuck"].set()
        await until(lambda: "agent.timeout" in recorded.of("stuck"))
    assert recorded.of("stuck").count("agent.quarantined") == 1


async def test_agent_events_reach_api_subscribers(database_url, redis_url, redis, nats_url, bus_prefix, seen):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm, Api(farm) as api:
        viewer = await api.client(Role.VIEWER)
        async with viewer.stream("GET", "/events", params={"kind": "agent.succeeded"}) as answer:
            assert answer.status_code == 200
            emit = farm.replica.engine.event_publisher.emit
            async with Pod(farm.database, redis, publish_event=emit, beat=every(HOUR_MS, seen.quick)):
                async for line in answer.aiter_lines():
                    if line.startswith("data:"):
                        assert '"agent":"beat"' in line
                        break

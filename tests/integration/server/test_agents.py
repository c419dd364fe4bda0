"""Agents over HTTP: read, paused, triggered and backfilled by keys of every role, and published as events."""

import pytest

from rota.model.access import Role
from rota.server import services
from tests.support.agents import HOUR_MS, Pod, RunRecorder, every, history
from tests.support.api import Api, problem
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until

AUDIT = sql("SELECT actor, action FROM rota.audit WHERE target = 'agent:aws/sync' ORDER BY seq")
SYNC = {"agent": "aws/sync"}
PAST = {"since": "2026-01-01T00:00:00Z", "until": "2026-01-01T03:00:00Z"}


@pytest.fixture
async def api(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm, Api(farm) as api:
        yield api


@pytest.fixture
async def agents(api, redis):
    """Three agents that have run; one has a slash in its name."""
    seen, database = RunRecorder(), api.farm.database
    made = {name: every(HOUR_MS, seen.quick) for name in ("aws/sync", "other", "poll")}
    async with Pod(database, redis, **made) as pod:
        for name in made:
            await until(lambda name=name: history(database, name))
        yield pod


async def test_agents_are_listed_in_pages_and_shown_with_history(api, agents):
    viewer = await api.client(Role.VIEWER)
    first = (await viewer.get("/agents", params={"limit": 2})).json()
    assert [each["name"] for each in first["items"]] == ["aws/sync", "other"]
    rest = (await viewer.get("/agents", params={"limit": 2, "after": first["next"]})).json()
    assert ([each["name"] for each in rest["items"]], rest["next"]) == (["poll"], None)
    one = (await viewer.get("/agents/show", params=SYNC)).json()
    assert (one["state"], one["runs"], one["schedule"]) == ("WAITING", 1, "every 1h")
    [run] = (await viewer.get("/agents/history", params=SYNC)).json()["items"]
    assert (run["outcome"], run["replica"]) == ("SUCCEEDED", "pod")
    health = (await viewer.get("/agents/health")).json()
    assert (health["health"], health["agents"]) == ("HEALTHY", {"WAITING": 3})


async def test_operator_changes_agents_and_each_change_is_audited(api, agents):
    operator = await api.client(Role.OPERATOR)

    async def post(what, **more):
        return (await operator.post(f"/agents/{what}", params=SYNC, **more)).json()

    assert await post("pause") == {"name": "aws/sync", "changed": True}
    assert await post("pause") == {"name": "aws/sync", "changed": False}
    assert (await post("backfill", json=PAST))["runs"] == 3
    assert await post("backfill/stop") == {"name": "aws/sync", "changed": True}
    assert await post("resume") == {"name": "aws/sync", "changed": True}
    assert await post("trigger") == {"name": "aws/sync", "queued": False}
    await until(lambda: _has_run(api.farm.database, "aws/sync", 2))
    problem(await operator.delete("/agents", params=SYNC), 403, "forbidden")
    done = [tuple(each.values()) for each in await api.farm.database.rows(AUDIT)]
    assert [action for _, action in done] == [
        f"agent.{what}" for what in ("pause", "backfill", "backfill_stop", "resume", "trigger")
    ]
    assert len({actor for actor, _ in done}) == 1
    assert "k1" in done[0][0]


async def _has_run(database, name, times):
    return len(await history(database, name)) >= times


async def test_admin_removes_agent(api, agents):
    admin = await api.client(Role.ADMIN)
    assert (await admin.delete("/agents", params=SYNC)).json() == {"name": "aws/sync", "changed": True}
    assert "no agent 'aws/sync'" in problem(await admin.get("/agents/show", params=SYNC), 404, "not_found")


@pytest.mark.parametrize("what", ["pause", "resume", "trigger", "backfill/stop"])
async def test_viewer_or_single_show_key_cannot_change_agents(api, what):
    await api.farm.show("film")
    for client in (await api.client(Role.VIEWER), await api.client((Role.ADMIN, "film"))):
        problem(await client.post(f"/agents/{what}", params=SYNC), 403, "forbidden")
    problem(await (await api.client((Role.VIEWER, "film"))).get("/agents"), 403, "forbidden")


async def test_invalid_agent_requests_are_refused(api, agents):
    operator = await api.client(Role.OPERATOR)
    problem(await operator.post("/agents/pause"), 400, "invalid_input")
    problem(await operator.post("/agents/pause", params={"agent": "x" * 300}), 400, "invalid_input")
    problem(await operator.post("/agents/pause", params={"agent": "nobody"}), 404, "not_found")
    for past in ({}, {**PAST, "until": "soon"}, {**PAST, "since": "2026-01-01T00:00:00"}, {**PAST, "more": 1}):
        problem(await operator.post("/agents/backfill", params=SYNC, json=past), 400, "invalid_input")


async def test_agent_changes_are_published_as_events(api, agents):
    operator, viewer = await api.client(Role.OPERATOR), await api.client(Role.VIEWER)
    async with viewer.stream("GET", "/events", params={"kind": "agent"}) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        assert (await operator.post("/agents/pause", params=SYNC)).json()["changed"]
        async for line in lines:
            if line.startswith("data:") and "agent.pause" in line:
                assert "agent:aws/sync" in line
                break

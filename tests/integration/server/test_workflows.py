"""Workflows over HTTP: declared, started, read and changed by keys of every role."""

import asyncio

import pytest

from rota import Rota
from rota.model.access import Role
from rota.model.settings.lifecycle import PolicySettings
from rota.server import services
from tests.support.api import Api, problem
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging
from tests.support.waiting import until

FLOW = {
    "name": "flow",
    "show": "film",
    "inputs": {"n": 2},
    "steps": [
        {"id": "a", "task": "square", "args": ["${input.n}"], "compensate": {"topic": "undo", "task": "noop"}},
        {"id": "b", "task": "boom", "depends_on": ["a"]},
    ],
}


@pytest.fixture
async def api(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm, Api(farm) as api:
        await farm.show()
        await farm.show("other", pool="elsewhere")
        await farm.worker()
        yield api


async def ended(client, run):
    async def over():
        found = (await client.get(f"/runs/{run}")).json()
        return found if found["ended_at"] else None

    return await until(over, what=f"the end of run {run}")


async def test_run_is_started_read_rerun_and_rolled_back(api):
    client = await api.client(Role.OPERATOR)
    declared = await client.post("/workflows", json=FLOW)
    assert (declared.status_code, declared.json()) == (201, {"workflow": "flow", "version": 1, "changed": True})
    assert (await client.post("/workflows", json=FLOW)).json()["changed"] is False
    [line] = (await client.get("/workflows")).json()["items"]
    assert (line["name"], line["version"], line["steps"]) == ("flow", 1, 2)

    started = (await client.post("/workflows/film/flow/runs", json={"input": {"n": 5}, "key": "k"})).json()
    again = (await client.post("/workflows/film/flow/runs", json={"input": {"n": 5}, "key": "k"})).json()
    assert (again["run"], again["already"]) == (started["run"], True)
    run = await ended(client, started["run"])
    assert (run["state"], run["input"], run["steps"][0]["output"]) == ("FAILED", {"n": 5}, 25)
    assert [each["state"] for each in run["steps"]] == ["SUCCEEDED", "FAILED"]
    body = (await client.get(f"/runs/{run['id']}/timeline")).json()["items"]
    assert [each["happened"]["what"] for each in body][-1] == "failed"
    saga = (await client.get(f"/runs/{run['id']}/saga")).json()
    assert (saga["state"], [entry["step"] for entry in saga["entries"]]) == ("open", ["a"])

    assert (await client.post(f"/runs/{run['id']}/rollback")).json() == {"run": run["id"], "entries": 1}

    async def undone():
        return (await client.get(f"/runs/{run['id']}/saga")).json()["state"] == "rolled_back"

    await until(undone, what="the rollback")
    rerun = (await client.post(f"/runs/{run['id']}/rerun", json={"step": "b"})).json()
    assert (await ended(client, rerun["run"]))["state"] == "FAILED"
    found = (await client.get("/runs", params={"state": "failed", "workflow": "flow", "limit": 1})).json()
    assert ([each["id"] for each in found["items"]], found["next"]) == ([rerun["run"]], rerun["run"])
    rest = (await client.get("/runs", params={"after": found["next"]})).json()
    assert [each["id"] for each in rest["items"]] == [run["id"]]


async def test_run_is_paused_resumed_and_cancelled(api):
    hanging("x")
    client = await api.client(Role.SUBMITTER)
    flow = {"name": "slow", "show": "film", "steps": [{"id": "a", "task": "hang", "args": ["x"]}]}
    await client.post("/workflows", json=flow)
    run = (await client.post("/workflows/film/slow/runs", json={})).json()["run"]
    assert (await client.post(f"/runs/{run}/pause")).json() == {"run": run, "state": "PAUSED", "changed": True}
    assert (await client.post(f"/runs/{run}/resume")).json()["state"] == "RUNNING"
    assert (await client.post(f"/runs/{run}/cancel")).json()["changed"] is True
    assert (await ended(client, run))["state"] == "CANCELLED"
    assert (await client.post(f"/runs/{run}/cancel")).json()["changed"] is False


SHIP = {
    "name": "ship",
    "show": "film",
    "steps": [
        {"id": "ok", "type": "approval", "approval": {"text": "Ship ${input.cut}?"}, "input": {"cut": "${input.cut}"}},
        {"id": "go", "task": "square", "args": [3], "depends_on": ["ok"]},
    ],
}


async def test_step_approved_by_another_operator_lets_the_run_continue(api):
    sam, ann = await api.client(Role.SUBMITTER), await api.client(Role.OPERATOR)
    other_show_client = await api.client((Role.OPERATOR, "other"))
    await sam.post("/workflows", json=SHIP)
    run = (await sam.post("/workflows/film/ship/runs", json={"input": {"cut": 7}})).json()["run"]
    assert (await sam.get(f"/runs/{run}")).json()["state"] == "WAITING"
    [listed] = (await ann.get("/approvals", params={"kind": "step"})).json()["items"]
    assert (listed["subject"], listed["title"], listed["principal"]) == (f"{run}:ok", "Ship 7?", "k1")
    shown = (await ann.get(f"/approvals/{run}:ok")).json()
    assert (shown["job"], shown["approval"]) == (None, listed)
    body = {"run": run, "workflow": "ship", "version": 1, "step": "ok", "started_by": "k1"}
    assert shown["step"] == {**body, "text": "Ship 7?", "input": {"cut": 7}, "run_input": {"cut": 7}}

    explained = (await sam.get(f"/runs/{run}/explain")).json()
    assert [cause["code"] for cause in explained["reasons"]] == ["approval_required"]
    assert "1 of the operators of film must approve it; approvals so far: 0." in explained["sentence"]

    problem(await sam.post(f"/approvals/{run}:ok/approve", json={}), 403, "self_approval_denied")
    problem(await other_show_client.post(f"/approvals/{run}:ok/approve", json={}), 404, "not_found")
    async with Rota(api.farm.replica.listen_url, key=await api.key(Role.OPERATOR)) as app:
        assert (await app.approvals.step(listed["id"])).text == "Ship 7?"
        assert (await app.approvals.approve(f"{run}:ok", "fine")).approval.state == "granted"
    found = await ended(sam, run)
    assert (found["state"], found["steps"][0]["output"]["votes"][0]["comment"]) == ("SUCCEEDED", "fine")


async def test_long_poll_returns_when_the_run_ends(api):
    gate = hanging("x")
    client = await api.client(Role.SUBMITTER)
    flow = {"name": "slow", "show": "film", "steps": [{"id": "a", "task": "hang", "args": ["x"]}]}
    await client.post("/workflows", json=flow)
    run = (await client.post("/workflows/film/slow/runs", json={})).json()["run"]
    assert (await client.get(f"/runs/{run}", params={"wait": 0.1})).json()["state"] == "RUNNING"
    polling = asyncio.create_task(client.get(f"/runs/{run}", params={"wait": 30}))
    await api.farm.running("x")
    gate.set()
    assert (await polling).json()["state"] == "SUCCEEDED"


async def test_dry_run_starts_nothing(api):
    client = await api.client((Role.SUBMITTER, "film"))
    await client.post("/workflows", json=FLOW)
    viewer, other_show_client = await api.client((Role.VIEWER, "film")), await api.client((Role.VIEWER, "other"))
    body = (await viewer.post("/workflows/film/flow/dry-run", json={"input": {"n": 7}})).json()
    gate = {"verdict": "allow", "reason": None, "because": None, "complete": True}
    steps = [
        {"id": "a", "type": "job", "after": [], "gate": gate},
        {"id": "b", "type": "job", "after": ["a"], "gate": gate},
    ]
    assert body == {"workflow": "flow", "input": {"n": 7}, "steps": steps}
    problem(await viewer.post("/workflows/film/flow/dry-run", json={"input": {"m": 7}}), 400, "invalid_input")
    problem(await other_show_client.post("/workflows/film/flow/dry-run", json={}), 403, "forbidden")
    assert (await client.get("/runs")).json()["items"] == []


POLICY = """
rules:
  - {id: risky, match: {topics: [danger]}, decision: deny, reason: nothing is deleted here}
  - {id: costly, when: frames > 2, decision: require_approval, reason: many frames are expensive}
  - {id: busy, match: {topics: [limited]}, decision: throttle, velocity: {max_requests: 1, window: 1min, key: tenant}}
  - {id: mine, when: principal == "k1" && workflow_id != "", decision: allow}
"""
POLICED = {
    "name": "policed",
    "show": "film",
    "inputs": {"items": [1, 2]},
    "steps": [
        {"id": "plain", "task": "noop", "topic": "job.plain"},
        {"id": "risky", "task": "noop", "topic": "danger", "args": ["${steps.plain.output}"], "depends_on": ["plain"]},
        {"id": "each", "task": "noop", "topic": "job.each", "for_each": "${input.items}", "args": ["${item}"]},
        {"id": "limited", "task": "noop", "topic": "limited"},
        {"id": "wait", "type": "delay", "delay_sec": 1},
    ],
}
WRITTEN = sql("""
SELECT (SELECT count(*) FROM rota.job) + (SELECT count(*) FROM rota.workflow_run)
     + (SELECT count(*) FROM rota.outbox) + (SELECT count(*) FROM rota.policy_word)""")


async def test_dry_run_asks_the_policy_about_each_step_and_records_nothing(
    database_url, redis_url, nats_url, bus_prefix, redis, tmp_path
):
    (tmp_path / "policy.yaml").write_text(POLICY)
    policy = PolicySettings(file=str(tmp_path / "policy.yaml"))
    farm = Farm(database_url, redis_url, nats_url, bus_prefix, faces=services, policy=policy)
    async with farm, Api(farm) as api:
        await farm.show()
        client = await api.client((Role.SUBMITTER, "film"))
        await client.post("/workflows", json=POLICED)
        before = await farm.database.value(WRITTEN)
        for items, each in (([1, 2], "allow"), ([1, 2, 3], "require_approval"), ([], None)):
            answer = await client.post("/workflows/film/policed/dry-run", json={"input": {"items": items}})
            gates = {step["id"]: step["gate"] for step in answer.json()["steps"]}
            assert (gates["each"] and gates["each"]["verdict"], gates["wait"]) == (each, None)
        allowed = {"verdict": "allow", "reason": None, "because": None, "complete": True}
        denied = {"verdict": "deny", "reason": "safety_denied", "because": "rule risky: nothing is deleted here"}
        assert gates["plain"] == allowed
        assert gates["risky"] == {**denied, "complete": False}
        assert gates["limited"] == {**allowed, "because": "unless the velocity limit busy is reached"}
        assert await farm.database.value(WRITTEN) == before
        assert await redis.keys("rota:velocity:*") == []


async def test_key_sees_and_changes_only_runs_of_its_shows(api):
    submitter = await api.client((Role.SUBMITTER, "film"))
    await submitter.post("/workflows", json=FLOW)
    run = (await submitter.post("/workflows/film/flow/runs", json={})).json()["run"]
    other_show_client = await api.client((Role.OPERATOR, "other"))
    assert (await other_show_client.get("/workflows")).json()["items"] == []
    assert (await other_show_client.get("/runs")).json()["items"] == []
    for path in (f"/runs/{run}", *(f"/runs/{run}/{what}" for what in ("timeline", "saga", "explain"))):
        problem(await other_show_client.get(path), 404, "not_found")
    problem(await other_show_client.post(f"/runs/{run}/cancel"), 404, "not_found")
    problem(await other_show_client.post("/workflows", json=FLOW), 403, "forbidden")
    problem(await other_show_client.post("/workflows/film/flow/runs", json={}), 403, "forbidden")
    problem(await submitter.post(f"/runs/{run}/rollback"), 403, "forbidden")
    urgent = {**FLOW, "steps": [{"id": "a", "task": "noop", "priority": 9}]}
    problem(await submitter.post("/workflows", json=urgent), 403, "forbidden")
    await ended(submitter, run)


async def test_invalid_workflow_requests_are_refused(api):
    client = await api.client(Role.OPERATOR)
    cycle = {**FLOW, "steps": [{"id": "a", "task": "noop", "depends_on": ["a"]}]}
    problem(await client.post("/workflows", json=cycle), 400, "invalid_input")
    problem(await client.post("/workflows/film/none/runs", json={}), 404, "not_found")
    await client.post("/workflows", json=FLOW)
    problem(await client.post("/workflows/film/flow/runs", json={"input": {"m": 1}}), 400, "invalid_input")
    problem(await client.get("/runs", params={"state": "happy"}), 400, "invalid_input")
    problem(await client.get("/runs/nonsense"), 400, "invalid_input")


async def test_out_of_range_version_is_not_found(api):
    client = await api.client((Role.SUBMITTER, "film"))
    await client.post("/workflows", json=FLOW)
    for version in (-1, 2**31, -(10**18), 10**18):
        problem(await client.post("/workflows/film/flow/runs", json={"version": version}), 404, "not_found")

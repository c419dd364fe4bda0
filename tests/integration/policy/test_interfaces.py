"""A policy file in a running cluster: what it decides, and what operators ask over HTTP."""

import asyncpg
import psycopg
import pytest

from rota.engine.submission.submitter import submit_on_async, submit_on_sync
from rota.model.access import Role
from rota.model.jobs.submission import LayerSpec, Submission
from rota.model.settings.lifecycle import PolicySettings
from rota.policy.loader import snapshot_id
from rota.server import services
from tests.support.api import Api, problem
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until

AUDIT = sql("SELECT actor, action FROM rota.audit WHERE action = 'policy.reload'")
TEXT = """
rules:
  - {id: risky, match: {risk_tags: [destructive]}, decision: deny, reason: nothing is deleted here}
  - {id: small, when: frames <= 10, decision: allow}
"""
TIGHTER = TEXT.replace("frames <= 10", "frames <= 2")
CASES = """
cases:
  - {name: small ones run, job: {show: film, topic: t, frames: 3}, expect: allow, rule: small}
  - {submission: {show: film, layers: [{task: noop}], risk_tags: [destructive]}, expect: deny, rule: risky}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture
async def api(database_url, redis_url, nats_url, bus_prefix, path):
    more = {"faces": services, "policy": PolicySettings(file=str(path))}
    async with Farm(database_url, redis_url, nats_url, bus_prefix, **more) as cluster, Api(cluster) as api:
        await cluster.show()
        await cluster.worker()
        yield api
        await cluster.quiet()


@pytest.fixture
async def operator(api):
    return await api.client(Role.OPERATOR)


async def submitted(api, frames=1, **more):
    given = Submission(show="film", layers=(LayerSpec(task="noop", frames=frames),), **more)
    [one] = await api.farm.replica.engine.submitter.submit([given])
    return one.job, await api.farm.ended(one.job)


async def test_jobs_end_as_the_policy_file_decides_and_name_the_rule(api, operator):
    allowed, denied, default = (
        await submitted(api),
        await submitted(api, risk_tags=("destructive",)),
        await submitted(api, 11),
    )
    assert [state for _, state in (allowed, denied, default)] == ["SUCCEEDED", "DENIED", "DENIED"]
    reply = (await operator.get(f"/jobs/{denied[0]}")).json()
    assert (reply["policy"]["rule"], reply["policy"]["snapshot"]) == ("risky", snapshot_id(TEXT))


@pytest.mark.parametrize("where", ["own", "transaction", "connection", "sync"])
async def test_submitter_without_policy_settings_is_still_subject_to_the_policy(api, where, database_url):
    """An application whose own settings name no policy."""
    unaware = api.farm.submitter
    given = [
        Submission(show="film", layers=(LayerSpec(task="noop"),), risk_tags=tags) for tags in ((), ("destructive",))
    ]
    match where:
        case "own":
            jobs = await unaware.submit(given)
        case "transaction":
            async with api.farm.database.transaction() as tx:
                jobs = await unaware.submit(given, on=tx)
        case "connection":
            connection = await asyncpg.connect(database_url)
            async with connection.transaction():
                jobs = await submit_on_async(connection, given)
            await connection.close()
        case "sync":
            with psycopg.connect(database_url) as connection:
                jobs = submit_on_sync(connection, given)
    assert [one.state for one in jobs] == ["PENDING"] * 2
    assert [await api.farm.ended(one.job) for one in jobs] == ["SUCCEEDED", "DENIED"]


async def test_idempotency_key_of_a_deferred_submission_is_kept(api):
    given = Submission(show="film", layers=(LayerSpec(task="noop"),), idempotency_key="once")
    [first], [again] = await api.farm.submitter.submit([given]), await api.farm.submitter.submit([given])
    assert (again.job, again.already) == (first.job, True)
    await api.farm.ended(first.job)


async def test_job_is_explained_by_the_current_and_by_another_policy(api, operator):
    job, _ = await submitted(api, 5)
    reply = (await operator.post("/policy/explain", json={"job": str(job)})).json()
    assert (reply["word"]["says"], reply["word"]["rule"], reply["was"]["rule"]) == ("ALLOW", "small", "small")
    assert [(each["rule"], each["fate"], each["why"]) for each in reply["findings"]] == [
        ("risky", "unmet", "risk_tags"),
        ("small", "decided", ""),
    ]
    reply = (await operator.post("/policy/explain", json={"job": str(job), "policy": TIGHTER})).json()
    assert (reply["word"]["says"], reply["word"]["rule"]) == ("DENY", "")
    job = {"show": "film", "layers": [{"task": "noop"}], "risk_tags": ["destructive"]}
    reply = (await operator.post("/policy/explain", json={"submission": job})).json()
    assert (reply["word"]["says"], reply["word"]["reason"]) == ("DENY", "nothing is deleted here")
    problem(await operator.post("/policy/explain", json={}), 400, "invalid_input")
    unknown_job = "00000000-0000-7000-8000-000000000000"
    problem(await operator.post("/policy/explain", json={"job": unknown_job}), 404, "not_found")


async def test_simulation_reports_changed_decisions_of_past_jobs(api, operator):
    for frames in (1, 1, 5):
        await submitted(api, frames)
    gone, _ = await submitted(api, 20)
    reply = (await operator.post("/policy/simulate", json={"policy": TIGHTER, "hours": 1})).json()
    assert (reply["jobs"], reply["changed"], reply["is_all"]) == (4, 1, True)
    [change] = reply["changes"]
    assert (change["was"], change["would"], change["rule"], change["jobs"]) == ("ALLOW", "DENY", "", 1)
    reply = (await operator.post("/policy/simulate", json={"policy": "default_decision: allow"})).json()
    assert ([change["example"] for change in reply["changes"]], reply["says"]) == ([str(gone)], {"ALLOW": 4})
    reply = (await operator.post("/policy/simulate", json={"policy": TIGHTER, "limit": 2})).json()
    assert (reply["jobs"], reply["is_all"]) == (2, False)
    for wrong in ({"policy": "ruls: []"}, {"policy": TEXT, "hours": 0}, {"policy": TEXT, "limit": 0}):
        problem(await operator.post("/policy/simulate", json=wrong), 400, "invalid_input")


async def test_policy_text_is_validated_and_tested_on_cases(operator):
    reply = (await operator.post("/policy/check", json={"policy": TEXT})).json()
    assert (reply["rules"], reply["default"], reply["snapshot"]) == (2, "DENY", snapshot_id(TEXT))
    wrong = await operator.post("/policy/check", json={"policy": TEXT.replace("decision", "decison")})
    assert problem(wrong, 400, "invalid_input").startswith("policy:3: a rule has no 'decison'")
    reply = (await operator.post("/policy/test", json={"policy": TEXT, "cases": CASES})).json()
    assert (reply["passed"], reply["failed"]) == (2, 0)
    reply = (await operator.post("/policy/test", json={"policy": TIGHTER, "cases": CASES})).json()
    assert (reply["cases"][0]["name"], reply["cases"][0]["said"], reply["failed"]) == ("small ones run", "DENY", 1)


async def test_admin_reload_makes_every_server_read_the_file(api, operator, path):
    other = await api.farm.server()
    path.write_text(TIGHTER)
    problem(await operator.post("/policy/reload"), 403, "forbidden")
    admin = await api.client(Role.ADMIN)
    assert (await admin.post("/policy/reload")).json() == {"changed": True, "snapshot": snapshot_id(TIGHTER)}
    await until(lambda: other.kernel.snapshots.current.snapshot == snapshot_id(TIGHTER))
    assert (await submitted(api, 5))[1] == "DENIED"
    reply = (await operator.get("/policy/snapshots")).json()["items"]
    assert [each["id"] for each in reply] == [snapshot_id(TIGHTER), snapshot_id(TEXT)]
    path.write_text("rules: 3")
    assert problem(await admin.post("/policy/reload"), 400, "invalid_input").startswith(f"{path}:1: rules must be")
    assert len(await api.farm.database.rows(AUDIT)) == 1

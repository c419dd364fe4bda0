"""Approvals over HTTP and the SDK: visibility, who may decide, and the events published."""

import pytest

from rota import Rota, runtime
from rota.model.access import Role
from rota.model.policy.decision import ApprovalTerms, PolicyEffect, Remediation
from rota.server import services
from tests.support.api import Api, a_job, problem
from tests.support.kernels import Table, decision
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until


@pytest.fixture
def kernel(monkeypatch):
    kernel = Table(default=decision(PolicyEffect.REQUIRE_APPROVAL, "money", reason="money moves"))
    monkeypatch.setattr(runtime, "build_policy_kernel", lambda *_: kernel)
    return kernel


@pytest.fixture
async def api(kernel, database_url, redis_url, nats_url, bus_prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm, Api(farm) as api:
        await farm.show()
        await farm.show("other")
        yield api


async def submitted(client, api, **more):
    """A job that waits for an approval."""
    job = (await client.post("/jobs", json=a_job(**more))).json()["job"]

    async def waits():
        return (await client.get(f"/jobs/{job}")).json()["state"] == "APPROVAL_REQUIRED"

    await until(waits, what="a job that waits for an approval")
    return job


async def test_job_approved_by_another_operator_runs(api, kernel):
    await api.farm.worker()
    sam, ann = await api.client(Role.SUBMITTER), await api.client(Role.OPERATOR)
    job = await submitted(sam, api, layer={"input": {"args": [7], "kwargs": {}}})
    [listed] = (await ann.get("/approvals")).json()["items"]
    assert (listed["subject"], listed["rule"], listed["principal"], listed["agreed"]) == (job, "money", "k1", 0)
    shown = (await ann.get(f"/approvals/{job}")).json()
    assert shown["approval"] == listed
    assert shown["job"]["layers"][0]["work"]["task"] == "noop"
    assert shown["job"]["policy"]["rule"] == "money"
    [why] = [each for each in (await sam.get(f"/jobs/{job}/explain")).json()["reasons"] if each["tier"] == "blocked"]
    assert (
        "1 of the operators of film must approve it; approvals so far: 0 (rule money: money moves)" in why["sentence"]
    )
    decision = (await ann.post(f"/approvals/{job}/approve", json={"reason": "fine"})).json()
    assert (decision["changed"], decision["approval"]["state"], decision["approval"]["votes"][0]["reason"]) == (
        True,
        "granted",
        "fine",
    )
    assert (await ann.post(f"/approvals/{listed['id']}/approve", json={})).json()["changed"] is False
    assert (await sam.get(f"/jobs/{job}", params={"wait": 20})).json()["state"] == "SUCCEEDED"


async def test_unauthorized_approval_is_refused_with_its_code(api, kernel):
    kernel.decisions["named"] = decision(PolicyEffect.REQUIRE_APPROVAL, approval=ApprovalTerms(approvers=("boss",)))
    boss = await api.client(Role.OPERATOR)
    other = await api.client((Role.OPERATOR, "other"))
    viewer = await api.client(Role.VIEWER)
    job = await submitted(boss, api)
    problem(await boss.post(f"/approvals/{job}/approve", json={}), 403, "self_approval_denied")
    problem(await boss.post(f"/approvals/{job}/reject", json={}), 403, "self_approval_denied")
    problem(await viewer.post(f"/approvals/{job}/approve", json={}), 403, "forbidden")
    problem(await other.post(f"/approvals/{job}/approve", json={}), 404, "not_found")
    problem(await other.get(f"/approvals/{job}"), 404, "not_found")
    assert (await other.get("/approvals")).json()["items"] == []
    ann = await api.client(Role.OPERATOR)
    named = await submitted(ann, api, topic="named")
    problem(await (await api.client(Role.OPERATOR)).post(f"/approvals/{named}/approve", json={}), 403, "forbidden")
    problem(await ann.post(f"/approvals/{job}/approve", json={"reason": "x" * 2000}), 400, "invalid_input")
    assert (await ann.post(f"/approvals/{job}/reject", json={"reason": "no"})).json()["approval"]["state"] == "rejected"
    problem(await viewer.post(f"/approvals/{job}/approve", json={}), 403, "forbidden")
    problem(await ann.post(f"/approvals/{job}/approve", json={}), 409, "approval_already_resolved")
    assert (await ann.get(f"/jobs/{job}")).json()["reason"] == "approval_rejected"


async def test_reserved_labels_are_refused(api):
    client = await api.client(Role.ADMIN)
    for label in ("approval_granted", "retry_of"):
        sentence = problem(await client.post("/jobs", json=a_job(labels={label: "true"})), 400, "invalid_input")
        assert label in sentence
    bulk = '{"show": "film", "layers": [{"task": "noop"}], "labels": {"approval_by": "me"}}'
    problem(await client.post("/jobs/bulk", content=bulk), 400, "invalid_input")


async def test_approval_request_and_decision_are_published_as_events(api, kernel):
    sam, ann = await api.client(Role.SUBMITTER), await api.client(Role.OPERATOR)
    kinds = []
    async with ann.stream("GET", "/events", params={"kind": "approval"}) as stream:
        lines = stream.aiter_lines()
        job = await submitted(sam, api)
        await ann.post(f"/approvals/{job}/approve", json={})
        async for line in lines:
            if line.startswith("event: approval"):
                kinds.append(line.removeprefix("event: "))
            if len(kinds) == 2:
                break
    assert kinds == ["approval.requested", "approval.granted"]


async def test_sdk_lists_and_decides_approvals(api, kernel):
    sam = await api.client(Role.SUBMITTER)
    one, two = await submitted(sam, api), await submitted(sam, api)
    async with Rota(api.farm.replica.listen_url, key=await api.key(Role.OPERATOR)) as app:
        assert [each.subject for each in await app.approvals.list()] == [one, two]
        assert (await app.approvals.get(one)).rule == "money"
        assert (await app.approvals.approve(one, "ok")).approval.state == "granted"
        assert (await app.approvals.reject(two)).changed is True
        assert [each.subject for each in await app.approvals.list(state="rejected")] == [two]


async def test_denied_job_is_resubmitted_with_the_suggested_remediation(api, kernel):
    await api.farm.worker()
    remedy = Remediation(
        id="safe",
        summary="use the sandbox",
        replacement_topic="default",
        add_labels={"sandbox": "yes"},
        remove_labels=("x",),
    )
    kernel.decisions["danger"] = decision(PolicyEffect.DENY, "no_danger", reason="too risky", remediations=(remedy,))
    kernel.decisions["default"] = decision(PolicyEffect.ALLOW)
    sam = await api.client(Role.SUBMITTER)
    job = (await sam.post("/jobs", json=a_job(topic="danger", labels={"x": "1", "y": "2"}))).json()["job"]
    done = (await sam.get(f"/jobs/{job}", params={"wait": 20})).json()
    assert (done["state"], done["policy"]["rule"], done["policy"]["remediations"][0]["id"]) == (
        "DENIED",
        "no_danger",
        "safe",
    )
    sentence = (await sam.get(f"/jobs/{job}/explain")).json()["sentence"]
    assert "Denied by rule no_danger of snapshot cafe01: too risky." in sentence
    assert f"use the sandbox: `rota job remediate {job} --as safe`" in sentence
    problem(await sam.post(f"/jobs/{job}/remediate", json={"remediation": "other"}), 400, "invalid_input")
    made = (await sam.post(f"/jobs/{job}/remediate", json={})).json()
    ended = (await sam.get(f"/jobs/{made['job']}", params={"wait": 20})).json()
    assert (ended["state"], ended["topic"]) == ("SUCCEEDED", "default")
    assert ended["labels"] == {"y": "2", "sandbox": "yes", "remediation_of": job, "remediation_id": "safe"}
    assert ended["details"]["parent_job_id"] == job
    problem(await sam.post(f"/jobs/{made['job']}/remediate", json={}), 400, "invalid_input")


async def test_initiator_of_run_or_dead_letter_retry_cannot_approve_its_jobs(api, kernel):
    ann, bob = await api.client(Role.OPERATOR), await api.client(Role.OPERATOR)
    inner = {"name": "inner", "show": "film", "steps": [{"id": "a", "task": "noop", "topic": "approval"}]}
    outer = {"name": "outer", "show": "film", "steps": [{"id": "b", "type": "workflow", "workflow": "inner"}]}
    for flow in (inner, outer):
        assert (await ann.post("/workflows", json=flow)).status_code == 201
    assert (await ann.post("/workflows/film/outer/runs", json={})).status_code == 201
    job = await pending_job(bob)
    problem(await ann.post(f"/approvals/{job}/approve", json={}), 403, "self_approval_denied")
    assert (await bob.post(f"/approvals/{job}/reject", json={})).json()["changed"]
    again = (await bob.post("/dlq/retry", json={"job": job})).json()["jobs"]
    assert len(again) == 1
    job = await pending_job(bob)
    problem(await bob.post(f"/approvals/{job}/approve", json={}), 403, "self_approval_denied")
    assert (await ann.post(f"/approvals/{job}/approve", json={})).json()["approval"]["state"] == "granted"


async def pending_job(client):
    """The one job that waits for an approval."""

    async def pending():
        return (await client.get("/approvals")).json()["items"]

    [one] = await until(pending, what="an approval request")
    return one["subject"]

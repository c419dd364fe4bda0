"""Approval commands: reads by PostgreSQL, votes over HTTP as the principal of a key."""

import json

import pytest

from rota import runtime
from rota.model.access import Role
from rota.model.policy.decision import PolicyEffect, Remediation
from rota.model.workflows.approval_steps import ApprovalSpec
from rota.model.workflows.spec import StepSpec
from rota.server import services
from tests.integration.engine.admission.approvals_support import Desk
from tests.support.api import Api
from tests.support.commands import Terminal
from tests.support.kernels import Table, decision
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until
from tests.support.workflows import WorkflowHarness


@pytest.fixture
def kernel(monkeypatch):
    kernel = Table()
    monkeypatch.setattr(runtime, "build_policy_kernel", lambda *_: kernel)
    return kernel


@pytest.fixture
async def api(kernel, database_url, redis_url, nats_url, bus_prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm, Api(farm) as api:
        await farm.show()
        yield api


@pytest.fixture
async def cli(api, monkeypatch, capsys, database_url):
    """With the key of an operator, bob."""
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    monkeypatch.setenv("ROTA_API_URL", api.farm.replica.listen_url)
    monkeypatch.setenv("ROTA_API_KEY", await api.key(Role.OPERATOR, name="bob"))
    return Terminal(monkeypatch, capsys)


@pytest.fixture
async def approvals(api, kernel):
    return Desk(api.farm.database, kernel)


async def test_pending_approval_is_listed_shown_and_approved(cli, approvals):
    assert (await cli("approvals list")).out == "Nothing waits for an approval.\n"
    [job] = await approvals.submit("approval", value={"amount": 7}, principal="sam", env={"TOKEN": "s3cret-value"})
    listed = (await cli("approvals list")).out
    assert "0 of 1" in listed
    assert "sam" in listed
    shown = (await cli(f"approvals show {job}")).out
    assert "required by rule require_approval of snapshot cafe01: money moves" in shown
    assert '"amount":7' in shown
    assert "s3cret-value" not in shown
    assert (await cli(f"approvals approve {job} -m fine")).out == (
        f"Approved: job {job} continues after another policy decision.\n"
    )
    assert "Nothing changed" in (await cli(f"approvals approve {job}")).out
    data = json.loads((await cli(f"approvals show {job} -o json")).out)
    assert (data["approval"]["state"], data["approval"]["votes"][0]["voter"]) == ("granted", "bob")
    await approvals.go_on(job)
    assert (await approvals.state(job))[0] == "SCHEDULED"
    assert "require_approval" in (await cli(f"job show {job}")).out


async def test_rejected_job_is_denied_and_explain_names_the_voter(cli, approvals):
    [job] = await approvals.submit("two")
    assert "1 of 2 have approved" in (await cli(f"approvals approve {job}")).out
    [other] = await approvals.submit("approval")
    assert (await cli(f"approvals reject {other} --reason no")).out == f"Rejected: job {other} is denied.\n"
    assert await approvals.state(other) == ("DENIED", "approval_rejected")
    assert "rejected by key:bob:" in (await cli(f"explain {other}")).out
    assert "rejected" in (await cli("approvals list --state rejected")).out


async def test_submitter_cannot_approve_own_job(cli, approvals):
    [job] = await approvals.submit("approval", principal="bob")
    result = await cli(f"approvals approve {job}")
    assert result.status != 0
    assert "cannot approve it" in result.err


async def test_without_an_api_nothing_is_voted(cli, approvals, monkeypatch):
    [job] = await approvals.submit("approval", principal="sam")
    for name in ("ROTA_API_URL", "ROTA_API_KEY"):
        monkeypatch.delenv(name)
    for command in ("approve", "reject"):
        result = await cli(f"approvals {command} {job}")
        assert (result.status, "set ROTA_API_URL and ROTA_API_KEY" in result.err) == (2, True)
    assert (await approvals.of(job)).state == "pending"


async def test_approval_step_is_shown_and_approved(cli, approvals, database):
    harness = WorkflowHarness(database)
    step = StepSpec(id="ok", type="approval", approval=ApprovalSpec(text="Ship ${input.cut}?"), input={"to": "web"})
    run = await harness.start(step, given={"cut": 7, "password": "s3cret-value"})
    assert "step Ship 7?" in (await cli("approvals list")).out
    shown = (await cli(f"approvals show {run}:ok")).out
    assert f"Ship 7?\n  step ok of run {run} (flow, version 1)" in shown
    assert '"to":"web"' in shown
    assert "s3cret-value" not in shown
    assert "required by its workflow" in shown
    assert "started by ann" in shown
    assert f"`rota approvals show {run}:ok`" in (await cli(f"workflow show {run}")).out
    assert (await cli(f"approvals approve {run}:ok -m fine")).out == f"Approved: step {run}:ok continues.\n"

    async def succeeded():
        return (await harness.states())["ok"] == "SUCCEEDED"

    await until(succeeded, what="the server to advance the run")
    await harness.start(given={"cut": 8})
    assert (await cli(f"approvals reject {harness.run}:ok")).out == f"Rejected: step {harness.run}:ok is denied.\n"


async def test_invalid_approval_arguments_print_an_error(cli, approvals):
    assert "is not a valid state of an approval" in (await cli("approvals list --state odd")).err
    assert "There is no approval of" in (await cli("approvals show nobody")).err


async def test_denied_job_is_remediated_as_a_new_job(cli, approvals):
    remediation = Remediation(id="safe", replacement_topic="allow")
    approvals.kernel.decisions["danger"] = decision(PolicyEffect.DENY, "danger", remediations=(remediation,))
    [job] = await approvals.submit("danger")
    made = json.loads((await cli(f"job remediate {job} -o json")).out)
    assert made["remediation_of"] == str(job)
    assert "was not denied" in (await cli(f"job remediate {made['job']}")).err

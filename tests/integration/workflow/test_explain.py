"""Explain names what a run waits for: once that has happened, the run continues."""

import json
import re

import pytest

from rota.engine.explain.explainer import Explainer
from rota.engine.recovery.reconciler import LEASE
from rota.infra.lease import Leases
from rota.model.errors import NotFound
from rota.model.ids import RunId, uuid7
from rota.model.jobs.submission import Compensation
from rota.model.workflows.approval_steps import ApprovalSpec
from rota.model.workflows.spec import ParallelSpec, StepSpec
from rota.workflow.explain import RunExplainer
from tests.integration.engine.admission.approvals_support import BOB, EVE
from tests.integration.workflow.test_approvals import ApprovalHarness
from tests.support.commands import Terminal
from tests.support.jobs import a_show
from tests.support.queue import sql
from tests.support.workflows import end_job

AFTER = StepSpec(id="z", task="noop", depends_on=("a",))
UNDO = Compensation(topic="undo", task="undo")
RUNNING_COMPENSATION = sql("SELECT pk_undo FROM rota.saga_entry WHERE state = 'running'")


class Explaining(ApprovalHarness):
    async def explained(self, run=None):
        return await RunExplainer(Explainer(self.database)).explain(RunId(run or self.run))

    async def waits(self, run=None):
        """Codes of its reasons, without those of the whole installation."""
        return [cause.code.value for cause in (await self.explained(run)).reasons if cause.code != "no_server"]

    async def goes_on(self):
        """Advance the run; whether its last step was started."""
        await self.advance()
        return (await self.states())["z"] == "RUNNING"


@pytest.fixture
async def harness(database):
    await a_show(database)
    return Explaining(database)


async def test_explain_delay_names_its_end(harness):
    await harness.start(StepSpec(id="a", type="delay", delay_sec=3600), AFTER)
    explanation = await harness.explained()
    [cause, server] = explanation.reasons
    assert (cause.code, cause.step, cause.tier, explanation.sentence) == ("deferred", "a", "blocked", cause.sentence)
    assert re.fullmatch(r"Step a waits until \d{4}-.* UTC, for 60 min more\.", cause.sentence)
    assert f"`rota workflow cancel {harness.run}`" in cause.remedy
    assert server.code == "no_server"
    assert cause.next_at == (await harness.output("a")).due_at
    await harness.pass_time(3600)
    assert (await harness.waits())[0] == "news_waiting"
    assert await harness.goes_on()


async def test_explain_approval_names_approvers_and_votes(harness):
    spec = ApprovalSpec(text="Go?", quorum=2, approvers=("bob", "eve", "ann"), expires_s=3 * 86_400)
    await harness.start(StepSpec(id="a", type="approval", approval=spec), AFTER)
    await harness.people.approve(f"{harness.run}:a", BOB)
    [cause, _] = (await harness.explained()).reasons
    who = "2 of bob, eve, ann must approve it within 3 d, else it is denied; approvals so far: 1 (bob)."
    assert (cause.code, cause.sentence) == ("approval_required", f"Step a waits for approval: {who}")
    approval = await harness.people.of(f"{harness.run}:a")
    assert (cause.waits_for, cause.next_at) == (approval.id, approval.expires_at)
    [typed] = re.findall(r"`rota approvals approve (\S+)`", cause.remedy)
    await harness.people.approve(typed, EVE)
    assert (await harness.waits())[0] == "news_waiting"
    assert await harness.goes_on()


async def test_explain_job_step_includes_the_job_explanation(harness):
    await harness.start(StepSpec(id="a", task="noop", topic="nowhere"), AFTER)
    explanation = await harness.explained()
    [job] = explanation.jobs
    assert (job.job, job.reasons[0].code) == (await harness.job("a"), "no_pool_mapping")
    assert explanation.reasons[0].code == "waiting_on_job"
    assert explanation.sentence == f"Step a waits for job {job.job}: {job.sentence}"
    await harness.end("a")
    explanation = await harness.explained()
    assert explanation.reasons[0].code == "news_waiting"
    assert "It has ended as SUCCEEDED" in explanation.reasons[1].sentence
    assert await harness.goes_on()


async def test_explain_nested_run_includes_what_it_waits_for(harness):
    await harness.declare(StepSpec(id="inner", type="delay", delay_sec=60), name="child")
    await harness.start(StepSpec(id="a", type="workflow", workflow="child"), AFTER)
    child = await harness.job("a")
    explanation = await harness.explained()
    assert [(each.code, each.run, each.step) for each in explanation.reasons[:2]] == [
        ("waiting_on_run", harness.run, "a"),
        ("deferred", child, "inner"),
    ]
    assert explanation.sentence.startswith(f"Step a waits for run {child}: Step inner waits until")
    await harness.pass_time(60)
    assert await harness.goes_on()


async def test_explain_paused_run_names_who_paused_it(harness):
    await harness.start(StepSpec(id="a", task="noop"), AFTER)
    await harness.commands.pause(harness.run, "eve")
    await harness.end("a")
    await harness.advance()
    [cause, _] = (await harness.explained()).reasons
    assert cause.code == "run_paused"
    assert re.fullmatch(r"It is paused by eve since [-0-9: ]+: no further step starts\.", cause.sentence)
    assert cause.remedy == f"`rota workflow resume {harness.run}` lets steps begin again."
    assert not await harness.goes_on()
    await harness.commands.resume(harness.run, "eve")
    assert await harness.goes_on()


async def test_explain_ending_run_names_steps_still_stopping(harness):
    await harness.start(StepSpec(id="a", task="noop"), StepSpec(id="b", task="noop"))
    await harness.end("a", "FAILED", code="exception", error="no luck")
    await harness.advance()
    explanation = await harness.explained()
    assert explanation.reasons[0].code == "ending"
    assert explanation.sentence.startswith(
        "It is being ended (Step a: no luck); step b is being stopped, and waits for job"
    )
    await harness.end("b", "CANCELLED")
    await harness.advance()
    assert (await harness.explained()).sentence == "It has ended as FAILED: Step a: no luck."


async def test_run_that_fails_while_paused_is_explained_as_ending(harness):
    await harness.start(StepSpec(id="a", task="noop"), StepSpec(id="b", task="noop"))
    await harness.commands.pause(harness.run, "eve")
    await harness.end("a", "FAILED", code="exception", error="no luck")
    await harness.advance()
    assert (await harness.states())[""] == "RUNNING"
    assert await harness.waits() == ["ending"]


async def test_explain_compensation_names_progress_failures_and_retry_command(harness, database):
    steps = [StepSpec(id=name, task="noop", compensate=UNDO) for name in ("x", "y")]
    bad = StepSpec(id="bad", task="noop", depends_on=("x", "y"))
    await harness.start(*steps, bad, rollback_on=["failed"])
    await harness.end("x")
    await harness.end("y")
    await harness.advance()
    await harness.end("bad", "FAILED", code="exception", error="no luck")
    await harness.advance()
    for name, state, then in (("y", "FAILED", "Not undone: step y"), ("x", "SUCCEEDED", "")):
        explanation = await harness.explained()
        undo = await database.value(RUNNING_COMPENSATION)
        assert [cause.code for cause in explanation.reasons[:1]] == ["compensating"]
        assert f"its jobs are being undone: step {name} by job {undo}" in explanation.sentence
        assert (explanation.reasons[0].waits_for, explanation.jobs[0].job) == (undo, undo)
        await end_compensation(harness, undo, state)
        if then:
            assert then in (await harness.explained()).sentence
    explanation = await harness.explained()
    assert (explanation.state, explanation.reasons) == ("FAILED", ())
    assert "Its jobs were undone in part. Not undone: step y (still no luck)." in explanation.sentence
    [typed] = re.findall(r"`rota workflow rollback (\S+)` retries", explanation.sentence)
    assert await harness.commands.roll_back(RunId(harness.run), "ann") == 1, typed
    await harness.advance()
    await end_compensation(harness, await database.value(RUNNING_COMPENSATION), "SUCCEEDED")
    assert (await harness.explained()).sentence.endswith("Its jobs were undone.")


async def end_compensation(harness, job, state):
    failed = {"code": "exception", "error": "still no luck"} if state == "FAILED" else {}
    await end_job(harness.database, job, state, **failed)
    await harness.advance()


async def test_explain_any_parallel_lists_every_pending_member(harness):
    members = (StepSpec(id="a", task="noop"), StepSpec(id="b", type="delay", delay_sec=60))
    await harness.start(
        *members, StepSpec(id="any", type="parallel", parallel=ParallelSpec(steps=("a", "b"), need="any"))
    )
    assert await harness.waits() == ["waiting_on_job", "deferred"]


async def test_explain_omits_no_server_while_a_server_is_up(harness, database):
    await harness.start(StepSpec(id="a", type="delay", delay_sec=60), AFTER)
    assert [each.code for each in (await harness.explained()).reasons] == ["deferred", "no_server"]
    async with Leases(database).hold(LEASE, kind="recovery", ttl_s=60):
        assert [each.code for each in (await harness.explained()).reasons] == ["deferred"]


async def test_explain_unknown_run_is_not_found(harness):
    with pytest.raises(NotFound):
        await harness.explained(uuid7(1, bytes(10)))


async def test_explain_command_prints_text_and_json(harness, monkeypatch, capsys, tmp_path, database_url):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    typed = Terminal(monkeypatch, capsys)
    await harness.start(StepSpec(id="a", task="noop", topic="nowhere"), AFTER)
    out = (await typed(f"explain {harness.run}")).out
    job = await harness.job("a")
    assert f"flow {harness.run}: RUNNING\n  waiting_on_job: Step a waits for job {job}" in out
    assert "  no_pool_mapping:" in out
    assert json.loads((await typed(f"explain {harness.run} -o json")).out)["reasons"][0]["code"] == "waiting_on_job"
    assert "no_pool_mapping" in (await typed(f"explain {job}")).out
    await harness.commands.cancel(harness.run, "ann")
    await harness.end("a", "CANCELLED")
    await harness.advance()
    assert (
        f"flow {harness.run}: CANCELLED\n  It has ended as CANCELLED: Cancelled by ann."
        in (await typed(f"explain {harness.run}")).out
    )

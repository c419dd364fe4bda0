"""Approval steps: requested with the run, decided once, withdrawn with the run, also when processes crash."""

import asyncio

import msgspec
import pytest

from rota.infra import failpoints
from rota.model.errors import (
    ApprovalNotActionable,
    ApprovalResolved,
    ApprovalStale,
    Forbidden,
    InvalidInput,
    SelfApprovalDenied,
)
from rota.model.workflows.approval_steps import ApprovalSpec
from rota.model.workflows.spec import ParallelSpec, StepSpec
from tests.integration.engine.admission.approvals_support import ANN, BOB, DUE, EVE, Desk, person
from tests.integration.workflow.test_killed import is_stopped
from tests.support.jobs import a_show
from tests.support.queue import sessions_over, sql
from tests.support.waiting import until
from tests.support.workflows import INBOX_SIZE, WorkflowHarness

STATES = sql("SELECT subject, state FROM rota.approval ORDER BY ts_requested")
TAMPER = sql("UPDATE rota.workflow_value SET value = $1::bytea")
AUDITED = sql("SELECT action FROM rota.audit WHERE action LIKE 'approval.%' ORDER BY seq")
CANCEL = sql("""
INSERT INTO rota.workflow_news (kind, workflow_id, pk_show)
SELECT 'cancel', r.pk_run::text, r.pk_show FROM rota.workflow_run r""")


def ship(text="Ship ${steps.render.output}?", **more):
    given = {name: more.pop(name) for name in ("quorum", "expires_s", "approvers") if name in more}
    more.setdefault("depends_on", ("render",))
    return StepSpec(id="ok", type="approval", approval=ApprovalSpec(text=text, **given), **more)


FLOW = (StepSpec(id="render", task="noop"), ship(), StepSpec(id="publish", task="noop", depends_on=("ok",)))


class ApprovalHarness(WorkflowHarness):
    """A workflow harness with approvers; ann starts the runs."""

    def __init__(self, database):
        super().__init__(database)
        self.people = Desk(database)
        self.people.approver.subjects["step"] = self.advancer.advancing.approving

    async def start_waiting(self, *steps, **more):
        """Start a run whose first step returns `cut 7`; it waits for an approval."""
        await self.start(*(steps or FLOW), **more)
        await self.end("render", value="cut 7")
        await self.advance()
        return f"{self.run}:ok"

    async def approvals(self):
        return [row["state"] for row in await self.database.rows(STATES)]

    async def output(self, step="ok"):
        found = await self.queries.get(self.run)
        return next(each for each in found.steps if each.id == step)


@pytest.fixture
async def harness(database):
    await a_show(database)
    return ApprovalHarness(database)


async def test_run_waits_for_quorum_and_outputs_the_votes(harness, database):
    subject = await harness.start_waiting(
        FLOW[0], ship(quorum=2, input={"cut": "${steps.render.output}"}), FLOW[2], inputs={"n": 1}
    )
    assert await harness.states() == {"": "WAITING", "render": "SUCCEEDED", "ok": "RUNNING", "publish": "WAITING"}
    approval = await harness.people.of(subject)
    assert (approval.kind, approval.title, approval.principal, approval.quorum) == ("step", "Ship cut 7?", "ann", 2)
    assert approval.id == await harness.job("ok")
    shown = await harness.advancer.advancing.approving.step_approval_view(approval)
    assert (shown.run, shown.step, shown.text) == (harness.run, "ok", "Ship cut 7?")
    assert (shown.input, shown.run_input, shown.started_by) == ({"cut": "cut 7"}, {"n": 1}, "ann")

    with pytest.raises(SelfApprovalDenied):
        await harness.people.approve(subject, ANN)
    with pytest.raises(Forbidden):
        await harness.people.approve(subject, person("kim", is_operator=False))
    assert (await harness.people.approve(subject, BOB, "looks good")).approval.state == "pending"
    assert await harness.advance() == 0
    assert (await harness.people.approve(subject, EVE)).approval.state == "granted"
    assert (await harness.people.approve(subject, EVE)).changed is False
    assert await harness.advance() == 1
    assert await harness.jobs() == ["publish", "render"]
    step = await harness.output()
    assert (step.state, step.output["by"]) == ("SUCCEEDED", ["bob", "eve"])
    assert [vote["comment"] for vote in step.output["votes"]] == ["looks good", ""]
    assert step.output["at"] == step.output["votes"][-1]["at"]
    assert [row["action"] for row in await database.rows(AUDITED)] == ["approval.vote", "approval.granted"]


async def test_rejection_denies_the_step_and_the_run(harness):
    subject = await harness.start_waiting()
    await harness.people.reject(subject, BOB, "wrong cut")
    await harness.advance()
    assert await harness.states() == {"": "DENIED", "render": "SUCCEEDED", "ok": "DENIED", "publish": "CANCELLED"}
    assert (await harness.output()).reason == "Rejected by bob: wrong cut."


async def test_expired_approval_denies_the_step(harness, database):
    await harness.start_waiting(
        FLOW[0], ship(expires_s=3600, on_error="mend"), FLOW[2], StepSpec(id="mend", task="noop")
    )
    await database.run(DUE)
    assert await harness.people.approver.expire() == 1
    await harness.advance()
    assert (await harness.output()).reason == "Not enough people approved it in time: 0 of 1 did."
    assert (await harness.states())["mend"] == "RUNNING"
    await harness.end("mend")
    await harness.advance()
    assert (await harness.states())["publish"] == "RUNNING", "the error handler lets the run continue"


async def test_step_deadline_withdraws_the_approval_request(harness):
    subject = await harness.start_waiting(FLOW[0], ship(deadline_s=60))
    await harness.pass_time(60)
    await harness.advance()
    assert await harness.states() == {"": "TIMEOUT", "render": "SUCCEEDED", "ok": "TIMEOUT"}
    assert await harness.approvals() == ["closed"]
    with pytest.raises(ApprovalResolved, match="closed"):
        await harness.people.approve(subject, BOB)


async def test_cancel_withdraws_the_request_and_late_votes_are_refused(harness, database):
    subject = await harness.start_waiting()
    await harness.commands.cancel(harness.run, "ann")
    assert await harness.states() == {"": "CANCELLED", "render": "SUCCEEDED", "ok": "CANCELLED", "publish": "CANCELLED"}
    assert await harness.approvals() == ["closed"]
    for decide in (harness.people.approve, harness.people.reject):
        with pytest.raises(ApprovalResolved, match="closed"):
            await decide(subject, BOB)
    assert await database.value(INBOX_SIZE) == 0


async def test_vote_on_run_with_pending_cancel_is_refused(harness, database):
    subject = await harness.start_waiting()
    await database.run(CANCEL)
    with pytest.raises(ApprovalNotActionable):
        await harness.people.approve(subject, BOB)
    await harness.advance()
    assert (await harness.states())[""] == "CANCELLED"
    assert await harness.approvals() == ["closed"]


async def test_cancel_after_unprocessed_grant_cancels_the_run(harness, database):
    subject = await harness.start_waiting()
    await harness.people.approve(subject, BOB)
    await harness.commands.cancel(harness.run, "ann")
    await harness.advance()
    assert await harness.states() == {"": "CANCELLED", "render": "SUCCEEDED", "ok": "CANCELLED", "publish": "CANCELLED"}
    assert await harness.approvals() == ["granted"]
    assert await database.value(INBOX_SIZE) == 0


async def test_rerun_requests_approval_again(harness):
    subject = await harness.start_waiting()
    await harness.people.reject(subject, BOB)
    await harness.advance()
    again = (await harness.commands.rerun(harness.run, "ok", "eve")).run
    assert await harness.approvals() == ["rejected", "pending"]
    with pytest.raises(SelfApprovalDenied):
        await harness.people.approve(f"{again}:ok", EVE)
    await harness.people.approve(f"{again}:ok", BOB)
    await harness.advance()
    assert (await harness.states(again))["publish"] == "RUNNING"


async def test_granted_approval_in_any_parallel_withdraws_the_others(harness):
    steps = [StepSpec(id=name, type="approval", approval=ApprovalSpec(text=name)) for name in ("x", "y")]
    await harness.start(
        *steps, StepSpec(id="any", type="parallel", parallel=ParallelSpec(steps=("x", "y"), need="any"))
    )
    assert (await harness.states())[""] == "WAITING"
    await harness.people.approve(f"{harness.run}:x", BOB)
    await harness.advance()
    assert await harness.states() == {"": "SUCCEEDED", "x": "SUCCEEDED", "y": "CANCELLED", "any": "SUCCEEDED"}
    assert sorted(await harness.approvals()) == ["closed", "granted"]


async def test_approval_of_tampered_input_is_refused_as_stale(harness, database):
    subject = await harness.start_waiting()
    await database.run(TAMPER, msgspec.msgpack.encode("cut 8"))
    with pytest.raises(ApprovalStale):
        await harness.people.approve(subject, BOB)
    await harness.people.reject(subject, BOB)
    await harness.advance()
    assert (await harness.states())["ok"] == "DENIED"


async def test_approval_hash_ignores_unrelated_step_outputs(harness):
    """The hash covers the values that the step names, not those that other steps return meanwhile."""
    subject = await harness.start_waiting(*FLOW, StepSpec(id="side", task="noop"))
    assert (await harness.states())[""] == "RUNNING", "another step still runs"
    await harness.end("side", value=[1, 2])
    await harness.advance()
    await harness.people.approve(subject, BOB)
    await harness.advance()
    assert (await harness.states())["publish"] == "RUNNING"


async def test_paused_run_takes_the_vote_and_continues_when_resumed(harness):
    subject = await harness.start_waiting()
    await harness.commands.pause(harness.run, "ann")
    await harness.people.approve(subject, BOB)
    await harness.advance()
    assert await harness.states() == {"": "PAUSED", "render": "SUCCEEDED", "ok": "SUCCEEDED", "publish": "WAITING"}
    await harness.commands.resume(harness.run, "ann")
    assert (await harness.states())["publish"] == "RUNNING"


async def test_unresolvable_approval_text_fails_the_step(harness):
    await harness.start_waiting(FLOW[0], ship("Ship ${steps.render.output.nothing}?"))
    assert (await harness.states())["ok"] == "FAILED"
    assert await harness.approvals() == []


async def test_concurrent_decisions_of_two_replicas_take_effect_once(harness, database):
    for _ in range(6):
        subject = await harness.start_waiting()
        other = ApprovalHarness(database)
        calls = (
            harness.people.approve(subject, BOB),
            other.people.reject(subject, EVE),
            other.advance(),
            harness.advance(),
        )
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [each for each in results if isinstance(each, BaseException)]
        assert [type(each) for each in refused] == [ApprovalResolved]
        await harness.advance()
        states = await harness.states()
        assert (states["ok"], states["publish"]) in {("SUCCEEDED", "RUNNING"), ("DENIED", "CANCELLED")}
        assert (states["ok"] == "SUCCEEDED") == ((await harness.approvals())[-1] == "granted")


ORPHANED = sql("""
SELECT count(*) FROM rota.approval a WHERE a.state = 'pending' AND NOT EXISTS (
  SELECT FROM rota.workflow_run r WHERE a.subject LIKE r.pk_run::text || ':%' AND r.state = 'WAITING')""")
REQUEST_FAULTS = [
    ("CRASH_AT", "workflow.after_ask"),
    ("CRASH_AT", "workflow.before_commit"),
    ("LOST_REPLY_AT", "workflow.advance"),
]
VOTE_FAULTS = [("CRASH_AT", "approvals.after_vote"), ("CRASH_AT", "approvals.before_commit")]
VOTE_FAULTS += [("LOST_REPLY_AT", "approvals.commit")]
PROCESS_FAULTS = [("CRASH_AT", "workflow.after_take"), ("CRASH_AT", "workflow.before_commit"), REQUEST_FAULTS[2]]
CLIENT = "tests.integration.workflow.approvals_client"


async def run_faulty_client(spawn, database, database_url, fault, place, **env):
    """Run a client that crashes or loses a reply, and wait for its session to end."""
    client = await spawn(CLIENT, env={"URL": database_url, fault: place, **env})
    status = await client.wait()
    assert status == (failpoints.CRASH_EXIT_STATUS if fault == "CRASH_AT" else 0), await client.errors()
    await sessions_over(database)


@pytest.mark.parametrize(("fault", "place"), REQUEST_FAULTS, ids=[place for _, place in REQUEST_FAULTS])
async def test_crash_while_requesting_approval_requests_it_once(harness, database, spawn, database_url, fault, place):
    await harness.start(*FLOW)
    await harness.end("render", value="cut 7")
    await run_faulty_client(spawn, database, database_url, fault, place)
    assert await database.value(ORPHANED) == 0
    await harness.advance()
    assert await harness.approvals() == ["pending"]
    assert (await harness.timeline()).count(("ok", "began")) == 1
    await harness.people.approve(f"{harness.run}:ok", BOB)
    await harness.advance()
    assert (await harness.states())["publish"] == "RUNNING"


@pytest.mark.parametrize(
    ("fault", "place"), [*VOTE_FAULTS, *PROCESS_FAULTS], ids=[place for _, place in [*VOTE_FAULTS, *PROCESS_FAULTS]]
)
async def test_crash_during_vote_or_its_processing_applies_the_vote_once(
    harness, database, spawn, database_url, fault, place
):
    subject = await harness.start_waiting()
    env = {"VOTE": subject} if place.startswith("approvals.") else {}
    if not env:
        await harness.people.approve(subject, BOB)
    await run_faulty_client(spawn, database, database_url, fault, place, **env)
    assert await database.value(ORPHANED) == 0
    assert (await harness.people.approve(subject, BOB)).approval.state == "granted"
    await harness.advance()
    assert await database.value(INBOX_SIZE) == 0
    assert (await harness.timeline()).count(("ok", "succeeded")) == 1
    assert await harness.jobs() == ["publish", "render"]


async def test_process_paused_while_requesting_approval_writes_nothing_on_resume(harness, spawn, database_url):
    await harness.start(*FLOW)
    await harness.end("render", value="cut 7")
    env = {"URL": database_url, "PAUSE_AT": "workflow.after_ask", "IDLE_S": "1"}
    client = await spawn(CLIENT, env=env)
    await until(lambda: is_stopped(client.pid), what="the pause of the client in its transaction")
    assert await until(harness.advance, what="the end of the paused session") == 1
    approval = await harness.people.of(f"{harness.run}:ok")
    client.resume()
    assert await client.wait() == 0, await client.errors()
    assert await harness.approvals() == ["pending"]
    assert await harness.job("ok") == approval.id


async def test_process_paused_during_vote_records_nothing_on_resume(harness, spawn, database_url):
    subject = await harness.start_waiting()
    env = {"URL": database_url, "PAUSE_AT": "approvals.before_commit", "IDLE_S": "1", "VOTE": subject}
    client = await spawn(CLIENT, env=env)
    await until(lambda: is_stopped(client.pid), what="the pause of the client in its vote")
    assert (await harness.people.reject(subject, EVE, "too late for bob")).approval.state == "rejected"
    client.resume()
    assert await client.wait() == 0, await client.errors()
    await harness.advance()
    assert (await harness.output()).reason == "Rejected by eve: too late for bob."
    assert [vote.voter for vote in (await harness.people.of(subject)).votes] == ["eve"]


@pytest.mark.parametrize(
    ("wrong", "because"),
    [
        ({"text": " "}, "has no question for its approvers"),
        ({"quorum": 0}, "quorum"),
        ({"quorum": 2, "approvers": ("ann", "ann")}, "names 1 approvers"),
        ({"expires_s": -1}, "expires_s"),
        ({"approvers": ("",)}, "not a valid key name"),
        ({"text": "${steps.publish.output}"}, "may not have ended"),
    ],
)
async def test_unsatisfiable_approval_spec_is_refused(harness, wrong, because):
    with pytest.raises(InvalidInput, match=because):
        await harness.declare(FLOW[0], ship(**wrong), FLOW[2])

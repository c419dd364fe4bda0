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
from tests.support.workflows import NEWS, Room

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


class ApprovalHarness(Room):
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
        found = await self.looking.get(self.run)
        return next(each for each in found.steps if each.id == step)


@pytest.fixture
async def room(database):
    await a_show(database)
    return ApprovalHarness(database)


async def test_run_waits_for_quorum_and_outputs_the_votes(room, database):
    subject = await room.start_waiting(
        FLOW[0], ship(quorum=2, input={"cut": "${steps.render.output}"}), FLOW[2], inputs={"n": 1}
    )
    assert await room.states() == {"": "WAITING", "render": "SUCCEEDED", "ok": "RUNNING", "publish": "WAITING"}
    approval = await room.people.of(subject)
    assert (approval.kind, approval.title, approval.principal, approval.quorum) == ("step", "Ship cut 7?", "ann", 2)
    assert approval.id == await room.job("ok")
    shown = await room.advancer.advancing.approving.step_approval_view(approval)
    assert (shown.run, shown.step, shown.text) == (room.run, "ok", "Ship cut 7?")
    assert (shown.input, shown.run_input, shown.started_by) == ({"cut": "cut 7"}, {"n": 1}, "ann")

    with pytest.raises(SelfApprovalDenied):
        await room.people.approve(subject, ANN)
    with pytest.raises(Forbidden):
        await room.people.approve(subject, person("kim", is_operator=False))
    assert (await room.people.approve(subject, BOB, "looks good")).approval.state == "pending"
    assert await room.advance() == 0
    assert (await room.people.approve(subject, EVE)).approval.state == "granted"
    assert (await room.people.approve(subject, EVE)).changed is False
    assert await room.advance() == 1
    assert await room.jobs() == ["publish", "render"]
    step = await room.output()
    assert (step.state, step.output["by"]) == ("SUCCEEDED", ["bob", "eve"])
    assert [vote["comment"] for vote in step.output["votes"]] == ["looks good", ""]
    assert step.output["at"] == step.output["votes"][-1]["at"]
    assert [row["action"] for row in await database.rows(AUDITED)] == ["approval.vote", "approval.granted"]


async def test_rejection_denies_the_step_and_the_run(room):
    subject = await room.start_waiting()
    await room.people.reject(subject, BOB, "wrong cut")
    await room.advance()
    assert await room.states() == {"": "DENIED", "render": "SUCCEEDED", "ok": "DENIED", "publish": "CANCELLED"}
    assert (await room.output()).reason == "Rejected by bob: wrong cut."


async def test_expired_approval_denies_the_step(room, database):
    await room.start_waiting(FLOW[0], ship(expires_s=3600, on_error="mend"), FLOW[2], StepSpec(id="mend", task="noop"))
    await database.run(DUE)
    assert await room.people.approver.expire() == 1
    await room.advance()
    assert (await room.output()).reason == "Not enough people approved it in time: 0 of 1 did."
    assert (await room.states())["mend"] == "RUNNING"
    await room.end("mend")
    await room.advance()
    assert (await room.states())["publish"] == "RUNNING", "the error handler lets the run continue"


async def test_step_deadline_withdraws_the_approval_request(room):
    subject = await room.start_waiting(FLOW[0], ship(deadline_s=60))
    await room.pass_time(60)
    await room.advance()
    assert await room.states() == {"": "TIMEOUT", "render": "SUCCEEDED", "ok": "TIMEOUT"}
    assert await room.approvals() == ["closed"]
    with pytest.raises(ApprovalResolved, match="closed"):
        await room.people.approve(subject, BOB)


async def test_cancel_withdraws_the_request_and_late_votes_are_refused(room, database):
    subject = await room.start_waiting()
    await room.desk.cancel(room.run, "ann")
    assert await room.states() == {"": "CANCELLED", "render": "SUCCEEDED", "ok": "CANCELLED", "publish": "CANCELLED"}
    assert await room.approvals() == ["closed"]
    for decide in (room.people.approve, room.people.reject):
        with pytest.raises(ApprovalResolved, match="closed"):
            await decide(subject, BOB)
    assert await database.value(NEWS) == 0


async def test_vote_on_run_with_pending_cancel_is_refused(room, database):
    subject = await room.start_waiting()
    await database.run(CANCEL)
    with pytest.raises(ApprovalNotActionable):
        await room.people.approve(subject, BOB)
    await room.advance()
    assert (await room.states())[""] == "CANCELLED"
    assert await room.approvals() == ["closed"]


async def test_cancel_after_unprocessed_grant_cancels_the_run(room, database):
    subject = await room.start_waiting()
    await room.people.approve(subject, BOB)
    await room.desk.cancel(room.run, "ann")
    await room.advance()
    assert await room.states() == {"": "CANCELLED", "render": "SUCCEEDED", "ok": "CANCELLED", "publish": "CANCELLED"}
    assert await room.approvals() == ["granted"]
    assert await database.value(NEWS) == 0


async def test_rerun_requests_approval_again(room):
    subject = await room.start_waiting()
    await room.people.reject(subject, BOB)
    await room.advance()
    again = (await room.desk.rerun(room.run, "ok", "eve")).run
    assert await room.approvals() == ["rejected", "pending"]
    with pytest.raises(SelfApprovalDenied):
        await room.people.approve(f"{again}:ok", EVE)
    await room.people.approve(f"{again}:ok", BOB)
    await room.advance()
    assert (await room.states(again))["publish"] == "RUNNING"


async def test_granted_approval_in_any_parallel_withdraws_the_others(room):
    steps = [StepSpec(id=name, type="approval", approval=ApprovalSpec(text=name)) for name in ("x", "y")]
    await room.start(*steps, StepSpec(id="any", type="parallel", parallel=ParallelSpec(steps=("x", "y"), need="any")))
    assert (await room.states())[""] == "WAITING"
    await room.people.approve(f"{room.run}:x", BOB)
    await room.advance()
    assert await room.states() == {"": "SUCCEEDED", "x": "SUCCEEDED", "y": "CANCELLED", "any": "SUCCEEDED"}
    assert sorted(await room.approvals()) == ["closed", "granted"]


async def test_approval_of_tampered_input_is_refused_as_stale(room, database):
    subject = await room.start_waiting()
    await database.run(TAMPER, msgspec.msgpack.encode("cut 8"))
    with pytest.raises(ApprovalStale):
        await room.people.approve(subject, BOB)
    await room.people.reject(subject, BOB)
    await room.advance()
    assert (await room.states())["ok"] == "DENIED"


async def test_approval_hash_ignores_unrelated_step_outputs(room):
    """The hash covers the values that the step names, not those that other steps return meanwhile."""
    subject = await room.start_waiting(*FLOW, StepSpec(id="side", task="noop"))
    assert (await room.states())[""] == "RUNNING", "another step still runs"
    await room.end("side", value=[1, 2])
    await room.advance()
    await room.people.approve(subject, BOB)
    await room.advance()
    assert (await room.states())["publish"] == "RUNNING"


async def test_paused_run_takes_the_vote_and_continues_when_resumed(room):
    subject = await room.start_waiting()
    await room.desk.pause(room.run, "ann")
    await room.people.approve(subject, BOB)
    await room.advance()
    assert await room.states() == {"": "PAUSED", "render": "SUCCEEDED", "ok": "SUCCEEDED", "publish": "WAITING"}
    await room.desk.resume(room.run, "ann")
    assert (await room.states())["publish"] == "RUNNING"


async def test_unresolvable_approval_text_fails_the_step(room):
    await room.start_waiting(FLOW[0], ship("Ship ${steps.render.output.nothing}?"))
    assert (await room.states())["ok"] == "FAILED"
    assert await room.approvals() == []


async def test_concurrent_decisions_of_two_replicas_take_effect_once(room, database):
    for _ in range(6):
        subject = await room.start_waiting()
        other = ApprovalHarness(database)
        calls = (room.people.approve(subject, BOB), other.people.reject(subject, EVE), other.advance(), room.advance())
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [each for each in results if isinstance(each, BaseException)]
        assert [type(each) for each in refused] == [ApprovalResolved]
        await room.advance()
        states = await room.states()
        assert (states["ok"], states["publish"]) in {("SUCCEEDED", "RUNNING"), ("DENIED", "CANCELLED")}
        assert (states["ok"] == "SUCCEEDED") == ((await room.approvals())[-1] == "granted")


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
async def test_crash_while_requesting_approval_requests_it_once(room, database, spawn, database_url, fault, place):
    await room.start(*FLOW)
    await room.end("render", value="cut 7")
    await run_faulty_client(spawn, database, database_url, fault, place)
    assert await database.value(ORPHANED) == 0
    await room.advance()
    assert await room.approvals() == ["pending"]
    assert (await room.told()).count(("ok", "began")) == 1
    await room.people.approve(f"{room.run}:ok", BOB)
    await room.advance()
    assert (await room.states())["publish"] == "RUNNING"


@pytest.mark.parametrize(
    ("fault", "place"), [*VOTE_FAULTS, *PROCESS_FAULTS], ids=[place for _, place in [*VOTE_FAULTS, *PROCESS_FAULTS]]
)
async def test_crash_during_vote_or_its_processing_applies_the_vote_once(
    room, database, spawn, database_url, fault, place
):
    subject = await room.start_waiting()
    env = {"VOTE": subject} if place.startswith("approvals.") else {}
    if not env:
        await room.people.approve(subject, BOB)
    await run_faulty_client(spawn, database, database_url, fault, place, **env)
    assert await database.value(ORPHANED) == 0
    assert (await room.people.approve(subject, BOB)).approval.state == "granted"
    await room.advance()
    assert await database.value(NEWS) == 0
    assert (await room.told()).count(("ok", "succeeded")) == 1
    assert await room.jobs() == ["publish", "render"]


async def test_process_paused_while_requesting_approval_writes_nothing_on_resume(room, spawn, database_url):
    await room.start(*FLOW)
    await room.end("render", value="cut 7")
    env = {"URL": database_url, "PAUSE_AT": "workflow.after_ask", "IDLE_S": "1"}
    client = await spawn(CLIENT, env=env)
    await until(lambda: is_stopped(client.pid), what="the pause of the client in its transaction")
    assert await until(room.advance, what="the end of the paused session") == 1
    approval = await room.people.of(f"{room.run}:ok")
    client.resume()
    assert await client.wait() == 0, await client.errors()
    assert await room.approvals() == ["pending"]
    assert await room.job("ok") == approval.id


async def test_process_paused_during_vote_records_nothing_on_resume(room, spawn, database_url):
    subject = await room.start_waiting()
    env = {"URL": database_url, "PAUSE_AT": "approvals.before_commit", "IDLE_S": "1", "VOTE": subject}
    client = await spawn(CLIENT, env=env)
    await until(lambda: is_stopped(client.pid), what="the pause of the client in its vote")
    assert (await room.people.reject(subject, EVE, "too late for bob")).approval.state == "rejected"
    client.resume()
    assert await client.wait() == 0, await client.errors()
    await room.advance()
    assert (await room.output()).reason == "Rejected by eve: too late for bob."
    assert [vote.voter for vote in (await room.people.of(subject)).votes] == ["eve"]


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
async def test_unsatisfiable_approval_spec_is_refused(room, wrong, because):
    with pytest.raises(InvalidInput, match=because):
        await room.declare(FLOW[0], ship(**wrong), FLOW[2])

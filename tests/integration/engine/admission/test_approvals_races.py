"""Approving, cancelling, expiring and reloading at once, in every order; and kill -9 at every place in between."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from rota.engine.completion.canceller import request_cancellation
from rota.infra import failpoints
from rota.model.errors import ApprovalNotActionable, ApprovalResolved
from rota.queue import DeadLetterFilter, Queue
from tests.integration.engine.admission import approvals_client
from tests.integration.engine.admission.approvals_support import ANN, BOB, DUE, STATES, Desk
from tests.support.jobs import a_show, task
from tests.support.kernels import TABLE
from tests.support.queue import agreed, sessions_over, sql
from tests.support.waiting import until

BLOCKED = sql("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
TORN = sql("""
SELECT (SELECT count(*) FROM rota.job j WHERE state = 'APPROVAL_REQUIRED' AND NOT EXISTS (
          SELECT FROM rota.approval a WHERE a.kind = 'job' AND a.subject = j.pk_job::text AND a.state = 'pending'))
     + (SELECT count(*) FROM rota.approval a WHERE a.state = 'pending' AND NOT EXISTS (
          SELECT FROM rota.job j WHERE j.pk_job::text = a.subject AND j.state = 'APPROVAL_REQUIRED'))
     + (SELECT count(*) FROM rota.job j WHERE state = 'SCHEDULED' AND word IS NULL)
     + (SELECT count(*) FROM rota.job j WHERE state = 'SCHEDULED' AND topic <> 'allow' AND NOT EXISTS (
          SELECT FROM rota.approval a WHERE a.subject = j.pk_job::text AND a.state = 'granted'))
     + (SELECT count(*) FROM rota.approval a WHERE a.state = 'granted' AND a.quorum > (
          SELECT count(*) FROM rota.approval_vote v WHERE v.pk_approval = a.pk_approval AND v.agrees))
""")


@pytest.fixture
async def desk(database):
    await a_show(database)
    return Desk(database)


@asynccontextmanager
async def first(desk, call, then, database):
    """`call` goes first and stops before its commit; `then` comes and waits for it; both end. Yields the tasks."""
    stopped, go_on = asyncio.Event(), asyncio.Event()
    real = desk.approver.approvals.get

    async def get(approval, *, on=None):
        found = await real(approval, on=on)
        if on is not None and found.state != "pending":
            stopped.set()
            await go_on.wait()
        return found

    desk.approver.approvals.get = get
    one = asyncio.create_task(call)
    await asyncio.wait_for(stopped.wait(), 20)
    desk.approver.approvals.get = real
    two = asyncio.create_task(then)
    await until(lambda: database.value(BLOCKED), what="the second to wait for the first")
    go_on.set()
    await asyncio.wait([one, two])
    yield one, two


async def test_a_cancel_that_comes_while_somebody_approves_wins_at_the_gate(desk, database):
    [job] = await desk.submit("approval")
    async with first(desk, desk.approve(job), request_cancellation(database, job, "eve"), database) as (
        approved,
        cancelled,
    ):
        assert (approved.result().approval.state, cancelled.result()) == ("granted", True)
    await desk.go_on(job)
    assert (await desk.state(job))[0] == "PENDING"
    assert await database.value(sql("SELECT ends_as FROM rota.job")) == "CANCELLED"
    assert await database.value(sql("SELECT count(*) FROM rota.ready_entries")) == 0


async def test_an_approval_that_comes_while_somebody_cancels_is_refused(desk, database):
    [job] = await desk.submit("approval")
    async with database.transaction() as tx:
        await tx.run(sql("UPDATE rota.job SET ends_as = 'CANCELLED'"))
        approving = asyncio.create_task(desk.approve(job))
        await until(lambda: database.value(BLOCKED), what="the approval to wait")
    with pytest.raises(ApprovalNotActionable):
        await approving


def finds_due(desk, monkeypatch):
    """As if the time of all that is pending passed just now, after those who vote have looked."""

    async def due(most):
        return [each.id for each in await desk.approver.approvals.list(most=most)]

    monkeypatch.setattr(desk.approver.approvals, "overdue", due)


async def test_what_expires_while_somebody_approves_was_approved(desk, database, monkeypatch):
    [job] = await desk.submit("approval")
    other = Desk(database, desk.kernel)
    finds_due(other, monkeypatch)
    async with first(desk, desk.approve(job), other.approver.expire(), database) as (approved, expired):
        assert (approved.result().approval.state, expired.result()) == ("granted", 0)
    await desk.go_on(job)
    assert (await desk.state(job))[0] == "SCHEDULED"


async def test_an_approval_that_comes_while_it_expires_is_too_late(desk, database):
    [job] = await desk.submit("approval")
    await database.run(DUE)
    other = Desk(database, desk.kernel)
    async with first(desk, desk.approver.expire(), other.approve(job), database) as (expired, approved):
        assert expired.result() == 1
        assert isinstance(approved.exception(), ApprovalResolved)
    assert await desk.state(job) == ("DENIED", "approval_expired")


async def test_of_two_last_votes_at_once_one_grants_and_both_are_told_so(desk, database):
    [job] = await desk.submit("approval")
    other = Desk(database, desk.kernel)
    async with first(desk, desk.approve(job, ANN), other.approve(job, BOB), database) as (one, two):
        assert (one.result().changed, two.result().changed) == (True, False)
        assert two.result().approval.state == "granted"
    assert await database.value(sql("SELECT count(*) FROM rota.outbox")) == 2, "its submission, and one grant"


async def test_a_refusal_that_comes_while_somebody_approves_is_too_late(desk, database):
    [job] = await desk.submit("approval")
    other = Desk(database, desk.kernel)
    async with first(desk, desk.approve(job, ANN), other.reject(job, BOB), database) as (one, two):
        assert one.result().approval.state == "granted"
        assert isinstance(two.exception(), ApprovalResolved)


async def test_a_policy_that_is_reloaded_between_the_grant_and_the_gate_decides(desk, database):
    [job] = await desk.submit("approval")

    async def reload():
        desk.kernel.said["approval"] = TABLE["deny"]

    await desk.approve(job)
    desk.kernel.pause = reload
    await desk.go_on(job)
    assert (await desk.state(job))[0] == "DENIED"


async def test_at_the_same_time_in_any_order_one_end_and_no_torn_rows(desk, database, monkeypatch):
    """Many jobs, each approved, rejected, cancelled and let expire at once by two replicas."""
    jobs = await desk.submit(*(["approval"] * 12))
    other = Desk(database, desk.kernel)
    finds_due(desk, monkeypatch)
    finds_due(other, monkeypatch)
    calls = [each for job in jobs for each in (desk.approve(job, ANN), other.reject(job, BOB), other.approve(job, BOB))]
    calls += [desk.approver.expire(), other.approver.expire()]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(each) for each in outcomes if isinstance(each, BaseException)} <= {
        ApprovalResolved,
        ApprovalNotActionable,
    }
    await asyncio.gather(desk.go_on(*jobs), other.go_on(*jobs[::-1]))
    assert await database.value(TORN) == 0
    by_state = [row["state"] for row in await database.rows(STATES)]
    assert set(by_state) <= {"SCHEDULED", "DENIED"}
    granted = await database.value(sql("SELECT count(*) FROM rota.approval WHERE state = 'granted'"))
    assert by_state.count("SCHEDULED") == granted
    assert await Queue(database).dead_letters.count(DeadLetterFilter()) == 12 - granted
    assert sum(counts["waiting"] for counts in (await agreed(database)).values()) == granted


PLACES = [
    *(("CRASH_AT", f"gatekeeper.{name}") for name in ("after_decision", "before_commit", "before_commit:2")),
    ("CRASH_AT", "approvals.after_vote"),
    ("CRASH_AT", "approvals.before_commit"),
    ("CRASH_AT", "approvals.before_commit:2"),
    ("CRASH_AT", "approvals.before_expiry_commit"),
    ("LOST_REPLY_AT", "approvals.commit"),
    ("LOST_REPLY_AT", "approvals.commit:3"),
    ("CRASH_AT", "audit.after_append:2"),
]


@pytest.mark.parametrize(("fault", "place"), PLACES, ids=[place for _, place in PLACES])
async def test_dying_anywhere_leaves_approvals_pending_or_carried_out(
    desk, database, database_url, spawn, fault, place
):
    await desk.submitter.submit([task(topic=topic) for topic in ("allow", "approval", "two", "soon")])
    client = await spawn("tests.integration.engine.admission.approvals_client", env={"URL": database_url, fault: place})
    status = await client.wait()
    assert status == (failpoints.CRASH_EXIT_STATUS if fault == "CRASH_AT" else 0), await client.errors()
    await sessions_over(database)
    assert await database.value(TORN) == 0
    await approvals_client.work(desk)
    assert await database.value(TORN) == 0
    by_topic = {row["topic"]: (row["state"], row["reason"]) for row in await database.rows(BY_TOPIC)}
    assert by_topic == {
        "allow": ("SCHEDULED", None),
        "approval": ("SCHEDULED", None),
        "two": ("DENIED", "approval_rejected"),
        "soon": ("DENIED", "approval_expired"),
    }
    assert await Queue(database).dead_letters.count(DeadLetterFilter()) == 2


def test_every_place_of_approvals_is_visited():
    named = {name for _, name in failpoints.declared_failpoints() if name.startswith(("approvals.", "gatekeeper."))}
    assert named - {place.partition(":")[0] for _, place in PLACES} == {"gatekeeper.after_commit_before_ack"}


BY_TOPIC = sql("""
SELECT topic, state, reason FROM rota.job UNION ALL SELECT topic, state, reason FROM rota.job_done""")

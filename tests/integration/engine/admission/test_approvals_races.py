"""Races between approve, reject, cancel, expire and policy reload; and crashes at every failpoint."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from rota.engine.completion.canceller import request_cancellation
from rota.infra import failpoints
from rota.model.errors import ApprovalNotActionable, ApprovalResolved, PrincipalDisabled
from rota.model.identity.principals import PrincipalKind
from rota.queue import DeadLetterFilter, Queue
from rota.server.access import PrincipalStore
from tests.integration.engine.admission import approvals_client
from tests.integration.engine.admission.approvals_support import ANN, BOB, DUE, STATES, Desk
from tests.support.jobs import a_show, task
from tests.support.kernels import TABLE
from tests.support.queue import agreed, sessions_over, sql
from tests.support.waiting import until

BLOCKED = sql("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
INCONSISTENT_ROWS = sql("""
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
async def replica(database):
    await a_show(database)
    return Desk(database)


@asynccontextmanager
async def racing(replica, call, then, database):
    """Run `call` up to its commit, start `then` so that it waits for the lock, finish both; yields the tasks."""
    stopped, go_on = asyncio.Event(), asyncio.Event()
    real = replica.approver.approvals.get

    async def get(approval, *, on=None):
        found = await real(approval, on=on)
        if on is not None and found.state != "pending":
            stopped.set()
            await go_on.wait()
        return found

    replica.approver.approvals.get = get
    one = asyncio.create_task(call)
    await asyncio.wait_for(stopped.wait(), 20)
    replica.approver.approvals.get = real
    two = asyncio.create_task(then)
    await until(lambda: database.value(BLOCKED), what="the second call to wait for the first")
    go_on.set()
    await asyncio.wait([one, two])
    yield one, two


async def test_cancel_during_approve_wins_at_the_gate(replica, database):
    [job] = await replica.submit("approval")
    async with racing(replica, replica.approve(job), request_cancellation(database, job, "eve"), database) as (
        approved,
        cancelled,
    ):
        assert (approved.result().approval.state, cancelled.result()) == ("granted", True)
    await replica.go_on(job)
    assert (await replica.state(job))[0] == "PENDING"
    assert await database.value(sql("SELECT ends_as FROM rota.job")) == "CANCELLED"
    assert await database.value(sql("SELECT count(*) FROM rota.ready_entries")) == 0


async def test_approve_during_cancel_is_refused(replica, database):
    [job] = await replica.submit("approval")
    async with database.transaction() as tx:
        await tx.run(sql("UPDATE rota.job SET ends_as = 'CANCELLED'"))
        approving = asyncio.create_task(replica.approve(job))
        await until(lambda: database.value(BLOCKED), what="the approval to wait")
    with pytest.raises(ApprovalNotActionable):
        await approving


async def test_vote_during_disabling_of_the_voter_is_refused(replica, database):
    principals = PrincipalStore(database)
    await principals.create(ANN.principal.name, PrincipalKind.PERSON, actor="x")
    [job] = await replica.submit("approval")
    async with database.transaction() as tx:
        await tx.run(sql("UPDATE rota.principal SET ts_disabled = now()"))
        voting = asyncio.create_task(replica.approve(job, ANN))
        await until(lambda: database.value(BLOCKED), what="the vote waiting for the principal")
    with pytest.raises(PrincipalDisabled):
        await voting
    assert ((await replica.of(job)).votes, (await replica.of(job)).state) == ((), "pending")


async def test_disabling_during_a_vote_waits_and_the_vote_counts(replica, database):
    principals = PrincipalStore(database)
    await principals.create(ANN.principal.name, PrincipalKind.PERSON, actor="x")
    [job] = await replica.submit("approval")
    disabling = principals.disable(ANN.principal.name, actor="x")
    async with racing(replica, replica.approve(job, ANN), disabling, database) as (voted, disabled):
        assert (voted.result().approval.state, disabled.result()[1]) == ("granted", True)
    [other] = await replica.submit("approval")
    with pytest.raises(PrincipalDisabled):
        await replica.approve(other, ANN)


def make_all_overdue(replica, monkeypatch):
    """Make every pending approval overdue, as if it expired after the voters had read it."""

    async def due(most):
        return [each.id for each in await replica.approver.approvals.list(most=most)]

    monkeypatch.setattr(replica.approver.approvals, "overdue", due)


async def test_expiry_during_approve_leaves_the_approval_granted(replica, database, monkeypatch):
    [job] = await replica.submit("approval")
    other = Desk(database, replica.kernel)
    make_all_overdue(other, monkeypatch)
    async with racing(replica, replica.approve(job), other.approver.expire(), database) as (approved, expired):
        assert (approved.result().approval.state, expired.result()) == ("granted", 0)
    await replica.go_on(job)
    assert (await replica.state(job))[0] == "SCHEDULED"


async def test_approve_during_expiry_is_refused(replica, database):
    [job] = await replica.submit("approval")
    await database.run(DUE)
    other = Desk(database, replica.kernel)
    async with racing(replica, replica.approver.expire(), other.approve(job), database) as (expired, approved):
        assert expired.result() == 1
        assert isinstance(approved.exception(), ApprovalResolved)
    assert await replica.state(job) == ("DENIED", "approval_expired")


async def test_concurrent_final_votes_grant_once_and_both_see_granted(replica, database):
    [job] = await replica.submit("approval")
    other = Desk(database, replica.kernel)
    async with racing(replica, replica.approve(job, ANN), other.approve(job, BOB), database) as (one, two):
        assert (one.result().changed, two.result().changed) == (True, False)
        assert two.result().approval.state == "granted"
    assert await database.value(sql("SELECT count(*) FROM rota.outbox")) == 2, (
        "one message for the submission, one for the grant"
    )


async def test_reject_during_approve_is_refused(replica, database):
    [job] = await replica.submit("approval")
    other = Desk(database, replica.kernel)
    async with racing(replica, replica.approve(job, ANN), other.reject(job, BOB), database) as (one, two):
        assert one.result().approval.state == "granted"
        assert isinstance(two.exception(), ApprovalResolved)


async def test_policy_reloaded_between_grant_and_gate_decides(replica, database):
    [job] = await replica.submit("approval")

    async def reload():
        replica.kernel.decisions["approval"] = TABLE["deny"]

    await replica.approve(job)
    replica.kernel.pause = reload
    await replica.go_on(job)
    assert (await replica.state(job))[0] == "DENIED"


async def test_concurrent_approve_reject_and_expire_end_each_job_once(replica, database, monkeypatch):
    """Two replicas approve, reject and expire many jobs concurrently."""
    jobs = await replica.submit(*(["approval"] * 12))
    other = Desk(database, replica.kernel)
    make_all_overdue(replica, monkeypatch)
    make_all_overdue(other, monkeypatch)
    calls = [
        each for job in jobs for each in (replica.approve(job, ANN), other.reject(job, BOB), other.approve(job, BOB))
    ]
    calls += [replica.approver.expire(), other.approver.expire()]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(each) for each in outcomes if isinstance(each, BaseException)} <= {
        ApprovalResolved,
        ApprovalNotActionable,
    }
    await asyncio.gather(replica.go_on(*jobs), other.go_on(*jobs[::-1]))
    assert await database.value(INCONSISTENT_ROWS) == 0
    by_state = [row["state"] for row in await database.rows(STATES)]
    assert set(by_state) <= {"SCHEDULED", "DENIED"}
    granted = await database.value(sql("SELECT count(*) FROM rota.approval WHERE state = 'granted'"))
    assert by_state.count("SCHEDULED") == granted
    assert await Queue(database).dead_letters.count(DeadLetterFilter()) == 12 - granted
    assert sum(counts["waiting"] for counts in (await agreed(database)).values()) == granted


FAILPOINTS = [
    *(("CRASH_AT", f"gatekeeper.{name}") for name in ("after_decision", "before_commit", "before_commit:2")),
    ("CRASH_AT", "approvals.after_vote"),
    ("CRASH_AT", "approvals.before_commit"),
    ("CRASH_AT", "approvals.before_commit:2"),
    ("CRASH_AT", "approvals.before_expiry_commit"),
    ("LOST_REPLY_AT", "approvals.commit"),
    ("LOST_REPLY_AT", "approvals.commit:3"),
    ("CRASH_AT", "audit.after_append:2"),
]


@pytest.mark.parametrize(("fault", "failpoint"), FAILPOINTS, ids=[failpoint for _, failpoint in FAILPOINTS])
async def test_crash_or_lost_reply_leaves_approvals_pending_or_applied(
    replica, database, database_url, spawn, fault, failpoint
):
    await replica.submitter.submit([task(topic=topic) for topic in ("allow", "approval", "two", "soon")])
    client = await spawn(
        "tests.integration.engine.admission.approvals_client", env={"URL": database_url, fault: failpoint}
    )
    status = await client.wait()
    assert status == (failpoints.CRASH_EXIT_STATUS if fault == "CRASH_AT" else 0), await client.errors()
    await sessions_over(database)
    assert await database.value(INCONSISTENT_ROWS) == 0
    await approvals_client.work(replica)
    assert await database.value(INCONSISTENT_ROWS) == 0
    by_topic = {row["topic"]: (row["state"], row["reason"]) for row in await database.rows(BY_TOPIC)}
    assert by_topic == {
        "allow": ("SCHEDULED", None),
        "approval": ("SCHEDULED", None),
        "two": ("DENIED", "approval_rejected"),
        "soon": ("DENIED", "approval_expired"),
    }
    assert await Queue(database).dead_letters.count(DeadLetterFilter()) == 2


def test_every_approval_failpoint_is_covered():
    named = {name for _, name in failpoints.declared_failpoints() if name.startswith(("approvals.", "gatekeeper."))}
    assert named - {failpoint.partition(":")[0] for _, failpoint in FAILPOINTS} == {
        "gatekeeper.after_commit_before_ack"
    }


BY_TOPIC = sql("""
SELECT topic, state, reason FROM rota.job UNION ALL SELECT topic, state, reason FROM rota.job_done""")

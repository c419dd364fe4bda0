"""Approvals: quorum, expiry, no self-approval, and only the approved input runs."""

import asyncio
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from rota.engine.completion.canceller import request_cancellation
from rota.engine.completion.job_ends import COUNT_ENDS, finish_jobs
from rota.infra.audit.query import newest_entries
from rota.model.approvals import ApprovalRequest
from rota.model.errors import ApprovalNotActionable, ApprovalResolved, ApprovalStale, Forbidden, SelfApprovalDenied
from rota.model.policy.decision import ApprovalTerms, PolicyEffect
from rota.policy.approvals import FORGET
from rota.queue import DeadLetterFilter, Queue
from tests.integration.engine.admission.approvals_support import ANN, BOB, DUE, EVE, Desk, person
from tests.support.jobs import a_show
from tests.support.kernels import TABLE, decision
from tests.support.queue import agreed, sql
from tests.support.waiting import until

TAMPERED = sql("UPDATE rota.layer SET input = '\\x2a'")
BLOCKED = sql("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
COUNTS_BY_STATE = sql("SELECT state, count(*) AS n FROM rota.approval GROUP BY 1")


@pytest.fixture
async def replica(database):
    await a_show(database)
    return Desk(database)


async def waiting(database):
    return sum(counts["waiting"] for counts in (await agreed(database)).values())


async def dead_letters(database):
    return [(each.reason, each.error) for each in await Queue(database).dead_letters.find(DeadLetterFilter())]


async def test_held_job_is_admitted_by_the_gate_after_approval(replica, database):
    events = replica.events
    [job] = await replica.submit("approval", principal="sam")
    asked = await replica.of(job)
    assert (asked.rule, asked.reason, asked.principal, asked.quorum) == ("require_approval", "money moves", "sam", 1)
    assert await replica.state(job) == ("APPROVAL_REQUIRED", "approval_required")
    result = await replica.approve(job, ANN, "looks good")
    assert (result.changed, result.approval.state) == (True, "granted")
    assert await replica.state(job) == ("PENDING", "approved")
    assert await waiting(database) == 0, "only the gate may admit it"
    await replica.go_on(job)
    assert (await replica.state(job), await waiting(database)) == (("SCHEDULED", None), 1)
    assert events == [(str(job), "requested"), (str(job), "granted")]
    acts = [(each.action, each.actor) for each in await newest_entries(database, most=10)]
    assert acts[:3] == [
        ("policy.approved", "policy"),
        ("approval.granted", ANN.audited),
        ("policy.require_approval", "policy"),
    ]


async def test_each_held_job_gets_its_own_approval_request(replica, database):
    jobs = await replica.submit(*(["approval"] * 20))
    assert {(await replica.of(job)).state for job in jobs} == {"pending"}
    assert len(await replica.approver.approvals.list(most=100)) == 20


@pytest.mark.parametrize("named", [{"principal": "ann"}, {"actor_id": "ann"}])
async def test_submitter_cannot_vote_on_own_job(replica, named):
    [job] = await replica.submit("approval", **named)
    for call in (replica.approve, replica.reject):
        with pytest.raises(SelfApprovalDenied) as refused:
            await call(job, ANN)
        assert refused.value.code == "self_approval_denied"
    assert (await replica.of(job)).votes == ()
    assert (await replica.approve(job, BOB)).approval.state == "granted"


@pytest.mark.parametrize("claimed", ["cli:ann", "bus:ann", "sql:unknown"])
async def test_job_that_no_key_submitted_can_only_be_rejected(replica, claimed):
    [job] = await replica.submit("approval", principal=claimed)
    for who in (ANN, BOB):
        with pytest.raises(SelfApprovalDenied, match=f"{claimed} submitted this without a key"):
            await replica.approve(job, who)
    assert (await replica.of(job)).votes == ()
    assert (await replica.reject(job, ANN)).approval.state == "rejected"


async def test_user_of_the_operating_system_cannot_vote(replica):
    [job] = await replica.submit("approval", principal="sam")
    for call in (replica.approve, replica.reject):
        with pytest.raises(Forbidden, match="cli:ann is not a principal"):
            await call(job, person("cli:ann"))
    assert (await replica.of(job)).state == "pending"


async def test_quorum_of_two_requires_two_distinct_voters(replica):
    [job] = await replica.submit("two")
    assert (await replica.approve(job, ANN)).approval.state == "pending"
    again = await replica.approve(job, ANN)
    assert (again.changed, again.approval.state, again.approval.agreed) == (False, "pending", 1)
    assert await replica.state(job) == ("APPROVAL_REQUIRED", "approval_required")
    assert (await replica.approve(job, BOB)).approval.state == "granted"
    await replica.go_on(job)
    assert (await replica.state(job))[0] == "SCHEDULED"


async def test_approval_with_named_approvers_forbids_everyone_else(replica):
    replica.kernel.decisions["named"] = decision(
        PolicyEffect.REQUIRE_APPROVAL, approval=ApprovalTerms(approvers=("bob",))
    )
    [job] = await replica.submit("named")
    with pytest.raises(Forbidden):
        await replica.approve(job, ANN)
    assert (await replica.approve(job, person("bob", is_operator=False))).approval.state == "granted"


async def test_approval_without_named_approvers_requires_the_operator_role(replica):
    [job] = await replica.submit("approval")
    with pytest.raises(Forbidden):
        await replica.approve(job, person("kid", is_operator=False))


async def test_rejection_denies_the_job_and_records_the_voter_in_a_dead_letter(replica, database):
    [job] = await replica.submit("two", layer={"frames": 3})
    await replica.approve(job, ANN)
    result = await replica.reject(job, EVE, "not today")
    assert result.approval.state == "rejected"
    assert await replica.state(job) == ("DENIED", "approval_rejected")
    assert await dead_letters(database) == [("approval_rejected", f"rejected by {EVE.audited}: not today")]
    with pytest.raises(ApprovalResolved):
        await replica.approve(job, BOB)
    assert (await replica.reject(job, EVE)).changed is False


async def test_approving_a_granted_approval_changes_nothing(replica):
    [job] = await replica.submit("approval")
    await replica.approve(job, ANN)
    for who in (ANN, BOB):
        result = await replica.approve(job, who)
        assert (result.changed, result.approval.state, result.approval.agreed) == (False, "granted", 1)
    with pytest.raises(ApprovalResolved):
        await replica.reject(job, BOB)


async def test_expired_approval_denies_the_job(replica, database):
    replica.kernel.decisions["soon"] = decision(
        PolicyEffect.REQUIRE_APPROVAL, "soon", approval=ApprovalTerms(expires_s=60.0)
    )
    soon, later = await replica.submit("soon", "approval")
    assert await replica.approver.expire() == 0, "it has not expired yet"
    left = (await replica.of(soon)).expires_at - (await replica.of(soon)).requested_at
    assert round(left.total_seconds()) == 60
    assert (await replica.of(later)).expires_at is None
    await database.run(sql("UPDATE rota.approval SET ts_expires = clock_timestamp() WHERE subject = $1"), str(soon))
    assert await replica.approver.expire() == 1
    assert await replica.state(soon) == ("DENIED", "approval_expired")
    assert (await replica.state(later))[0] == "APPROVAL_REQUIRED"
    assert await dead_letters(database) == [("approval_expired", "not approved in time")]
    with pytest.raises(ApprovalResolved):
        await replica.approve(soon)


async def test_cancelled_job_closes_its_approval(replica, database):
    [job] = await replica.submit("approval")
    await request_cancellation(database, job, "ann")
    with pytest.raises(ApprovalNotActionable):
        await replica.approve(job)
    await finish_cancelled(database, job)
    assert (await replica.of(job)).state == "closed"
    with pytest.raises(ApprovalResolved):
        await replica.approve(job)
    assert (await replica.state(job))[0] == "CANCELLED"


async def finish_cancelled(database, job):
    """Finish a cancelled job as the leader does."""
    async with database.transaction() as tx:
        rows = await tx.rows(sql("SELECT pk_layer, frames FROM rota.layer WHERE pk_job = $1"), job)
        layers = {row["pk_layer"]: row["frames"] for row in rows}
        await finish_jobs(tx, await tx.value(COUNT_ENDS, list(layers), list(layers.values()), "CANCELLED", 0))


async def test_granted_job_is_decided_by_the_policy_at_admission_time(replica, database):
    """The policy may have changed since the grant: deny, allow, or require a different approval."""
    denied, allowed, more, other = await replica.submit("approval", "approval", "approval", "approval")
    for job in (denied, allowed, more, other):
        await replica.approve(job, ANN)
    for job, now in (
        (denied, TABLE["deny"]),
        (allowed, TABLE["allow"]),
        (more, decision(PolicyEffect.REQUIRE_APPROVAL, "require_approval", approval=ApprovalTerms(quorum=2))),
        (other, decision(PolicyEffect.REQUIRE_APPROVAL, "another")),
    ):
        replica.kernel.decisions["approval"] = now
        await replica.go_on(job)
    states = {job: (await replica.state(job))[0] for job in (denied, allowed, more, other)}
    assert states == {denied: "DENIED", allowed: "SCHEDULED", more: "APPROVAL_REQUIRED", other: "APPROVAL_REQUIRED"}
    assert [(await replica.of(job)).state for job in (more, other)] == ["pending", "pending"]
    hashes = await database.rows(sql("SELECT DISTINCT hash FROM rota.approval WHERE subject = $1"), str(more))
    assert len(hashes) == 1, "the hash is fixed by the first request"
    replica.kernel.decisions["approval"] = decision(PolicyEffect.REQUIRE_APPROVAL, "another")
    await replica.approve(other, ANN)
    await replica.go_on(other)
    assert (await replica.state(other))[0] == "SCHEDULED"


async def test_approving_a_job_whose_stored_input_changed_is_refused_as_stale(replica, database):
    [job] = await replica.submit("approval", value=1)
    await database.run(TAMPERED)
    with pytest.raises(ApprovalStale) as refused:
        await replica.approve(job)
    assert refused.value.code == "approval_stale_request"
    assert (await replica.reject(job, ANN, "odd")).approval.state == "rejected"


async def test_job_changed_after_its_approval_is_denied_as_stale(replica, database):
    [job] = await replica.submit("approval", value=1)
    pinned = (await replica.of(job)).hash
    await replica.approve(job)
    await database.run(TAMPERED)
    await replica.go_on(job)
    assert await replica.state(job) == ("DENIED", "approval_stale_request")
    assert (await replica.of(job)).hash == pinned
    assert await waiting(database) == 0


async def test_approved_job_whose_hash_cannot_be_computed_stays_pending(replica, database, monkeypatch):
    [job] = await replica.submit("approval")
    await replica.approve(job)

    def unreadable(*_):
        raise OSError("cannot read")

    monkeypatch.setattr("rota.engine.admission.approval_requests.job_hash", unreadable)
    await replica.go_on(job)
    assert await replica.state(job) == ("PENDING", "policy_unavailable")
    monkeypatch.undo()
    await replica.go_on(job)
    assert (await replica.state(job))[0] == "SCHEDULED"


async def test_replayer_resumes_granted_jobs_and_skips_pending_approvals(replica, database):
    granted, waits = await replica.submit("approval", "approval")
    await replica.approve(granted)
    await database.run(sql("UPDATE rota.job SET state = 'APPROVAL_REQUIRED'"))
    await database.run(sql("UPDATE rota.job SET ts_updated = ts_updated - interval '1 h'"))
    assert await replica.replayer.replay() == 1
    assert (await replica.state(waits))[0] == "APPROVAL_REQUIRED"
    await replica.go_on(granted, waits)
    assert ((await replica.state(granted))[0], (await replica.state(waits))[0]) == ("SCHEDULED", "APPROVAL_REQUIRED")


async def test_admitted_job_keeps_the_decision_that_required_approval(replica, database):
    """The stored decision is the one that required the approval."""
    [job] = await replica.submit("approval")
    await replica.approve(job)
    await replica.go_on(job)
    stored = await database.value(sql("SELECT w.told FROM rota.job JOIN rota.policy_word w USING (word)"))
    assert msgspec.msgpack.decode(stored)["rule"] == "require_approval"


async def test_second_job_after_an_approved_one_needs_its_own_approval(replica, database):
    [job] = await replica.submit("approval")
    await replica.approve(job)
    await replica.go_on(job)
    [other] = await replica.submit("approval")
    assert (await replica.state(other))[0] == "APPROVAL_REQUIRED"


async def test_approval_is_found_by_its_id_and_by_its_job(replica):
    [job] = await replica.submit("approval")
    found = await replica.of(job)
    assert await replica.approver.find(str(found.id)) == found


async def test_vote_after_expiry_is_refused_before_the_leader_expires_the_approval(replica, database):
    [job] = await replica.submit("soon")
    await database.run(DUE)
    for call in (replica.approve, replica.reject):
        with pytest.raises(ApprovalResolved, match="expired at"):
            await call(job)
    assert ((await replica.of(job)).votes, (await replica.state(job))[0]) == ((), "APPROVAL_REQUIRED")
    assert await replica.approver.expire() == 1
    assert await replica.state(job) == ("DENIED", "approval_expired")


async def test_approval_that_expires_during_cancellation_is_closed(replica, database):
    [job] = await replica.submit("approval")
    await request_cancellation(database, job, "ann")
    await database.run(DUE)
    assert await replica.approver.expire() == 0
    assert (await replica.of(job)).state == "closed"
    assert await dead_letters(database) == []


async def test_retention_deletes_old_approvals_with_their_votes(replica, database):
    kept, gone = await replica.submit("approval", "approval")
    await replica.approve(gone)
    await replica.approve(kept)
    await database.run(
        sql("UPDATE rota.approval SET ts_decided = ts_decided - interval '9 d' WHERE subject = $1"), str(gone)
    )
    assert await database.run(FORGET, datetime.now(UTC) - timedelta(days=1), 100) == 1
    assert {row["state"]: row["n"] for row in await database.rows(COUNTS_BY_STATE)} == {"granted": 1}
    assert await database.value(sql("SELECT count(*) FROM rota.approval_vote")) == 1


class Steps:
    """Stands in for the workflow package as an approval subject."""

    def __init__(self):
        self.decided_as = []

    async def lock(self, _tx, _subject):
        return b"h" * 32

    async def apply_decision(self, _tx, approval, state, why):
        self.decided_as.append((approval.subject, state, why))


def synchronize_votes(approvals, database):
    """Hold each vote until the other has voted or waits for a lock."""
    real, voted = approvals.vote, []

    async def vote(*args, **more):
        counted = await real(*args, **more)
        voted.append(counted)

        async def other():
            return len(voted) == 2 or await database.value(BLOCKED)

        await until(other, what="the other vote")
        return counted

    approvals.vote = vote


async def request_step_approval(replica, database, **more):
    show = await database.value(sql("SELECT pk_show FROM rota.show"))
    fields = {"subject": "run-7/publish", "show": show, "hash": b"h" * 32, "title": "publish", **more}
    async with database.transaction() as tx:
        return await replica.approver.approvals.request(tx, [ApprovalRequest(kind="step", **fields)])


async def test_workflow_step_approval_with_concurrent_votes_is_granted_once(replica, database):
    steps = replica.approver.subjects["step"] = Steps()
    [asked] = await request_step_approval(replica, database, terms=ApprovalTerms(quorum=2), principal="sam")
    assert await request_step_approval(replica, database) == [], "a request is already pending"
    synchronize_votes(replica.approver.approvals, database)
    result = await asyncio.gather(*(replica.approver.approve(asked, who) for who in (ANN, BOB)))
    assert sorted(one.approval.state for one in result) == ["granted", "pending"], "each call sees the earlier votes"
    assert [(subject, state) for subject, state, _ in steps.decided_as] == [("run-7/publish", "granted")]
    assert (await replica.approver.find("run-7/publish")).state == "granted"
    with pytest.raises(SelfApprovalDenied):
        await replica.approver.approve(asked, person("sam"))


async def test_second_approval_of_a_subject_keeps_the_hash_of_the_first(replica, database):
    replica.approver.subjects["step"] = Steps()
    [first] = await request_step_approval(replica, database)
    await replica.approver.approve(first, ANN)
    [second] = await request_step_approval(replica, database, hash=b"x" * 32)
    assert second.hash == first.hash == b"h" * 32

"""People approve what they saw: by enough of them, in time, not by who submitted it, and nothing else runs for it."""

import asyncio
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from rota.engine.completion.canceller import request_cancellation
from rota.engine.completion.finisher import COUNT_ENDS, finish_jobs
from rota.infra.audit.query import newest_entries
from rota.model.approvals import ApprovalRequest
from rota.model.errors import ApprovalNotActionable, ApprovalResolved, ApprovalStale, Forbidden, SelfApprovalDenied
from rota.model.policy.decision import ApprovalTerms, PolicyEffect
from rota.policy.approvals import FORGET
from rota.queue import DeadLetterFilter, Queue
from tests.integration.engine.admission.approvals_support import ANN, BOB, DUE, EVE, Desk, person
from tests.support.jobs import a_show
from tests.support.kernels import TABLE, word
from tests.support.queue import agreed, sql
from tests.support.waiting import until

TAMPERED = sql("UPDATE rota.layer SET input = '\\x2a'")
BLOCKED = sql("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
LOOK = sql("SELECT state, count(*) AS n FROM rota.approval GROUP BY 1")


@pytest.fixture
async def desk(database):
    await a_show(database)
    return Desk(database)


async def waiting(database):
    return sum(counts["waiting"] for counts in (await agreed(database)).values())


async def letters(database):
    return [(each.reason, each.error) for each in await Queue(database).dead_letters.find(DeadLetterFilter())]


async def test_a_job_waits_until_somebody_approves_it_and_then_is_let_in_by_the_gate(desk, database):
    told = []
    desk.gatekeeper.approval_requests.on_requested = lambda asked: told.extend(
        (each.subject, "requested") for each in asked
    )
    desk.approver.on_decided = lambda each: told.append((each.subject, each.state))
    [job] = await desk.submit("approval", principal="sam")
    asked = await desk.of(job)
    assert (asked.rule, asked.reason, asked.principal, asked.quorum) == ("require_approval", "money moves", "sam", 1)
    assert await desk.state(job) == ("APPROVAL_REQUIRED", "approval_required")
    said = await desk.approve(job, ANN, "looks good")
    assert (said.changed, said.approval.state) == (True, "granted")
    assert await desk.state(job) == ("PENDING", "approved")
    assert await waiting(database) == 0, "it is for the gate to let it in"
    await desk.go_on(job)
    assert (await desk.state(job), await waiting(database)) == (("SCHEDULED", None), 1)
    assert told == [(str(job), "requested"), (str(job), "granted")]
    acts = [(each.action, each.actor) for each in await newest_entries(database, most=10)]
    assert acts[:3] == [
        ("policy.approved", "policy"),
        ("approval.granted", ANN.audited),
        ("policy.require_approval", "policy"),
    ]


async def test_many_jobs_are_asked_about_at_once_each_by_its_own_approval(desk, database):
    jobs = await desk.submit(*(["approval"] * 20))
    assert {(await desk.of(job)).state for job in jobs} == {"pending"}
    assert len(await desk.approver.approvals.list(most=100)) == 20


@pytest.mark.parametrize("named", [{"principal": "ann"}, {"actor_id": "ann"}])
async def test_whoever_submits_does_not_approve(desk, named):
    [job] = await desk.submit("approval", **named)
    for call in (desk.approve, desk.reject):
        with pytest.raises(SelfApprovalDenied) as refused:
            await call(job, ANN)
        assert refused.value.code == "self_approval_denied"
    assert (await desk.of(job)).votes == ()
    assert (await desk.approve(job, BOB)).approval.state == "granted"


async def test_two_must_agree_where_two_are_asked_for_and_nobody_counts_twice(desk):
    [job] = await desk.submit("two")
    assert (await desk.approve(job, ANN)).approval.state == "pending"
    again = await desk.approve(job, ANN)
    assert (again.changed, again.approval.state, again.approval.agreed) == (False, "pending", 1)
    assert await desk.state(job) == ("APPROVAL_REQUIRED", "approval_required")
    assert (await desk.approve(job, BOB)).approval.state == "granted"
    await desk.go_on(job)
    assert (await desk.state(job))[0] == "SCHEDULED"


async def test_where_approvers_are_named_they_alone_may(desk):
    desk.kernel.said["named"] = word(PolicyEffect.REQUIRE_APPROVAL, approval=ApprovalTerms(approvers=("bob",)))
    [job] = await desk.submit("named")
    with pytest.raises(Forbidden):
        await desk.approve(job, ANN)
    assert (await desk.approve(job, person("bob", is_operator=False))).approval.state == "granted"


async def test_without_names_approving_is_for_operators(desk):
    [job] = await desk.submit("approval")
    with pytest.raises(Forbidden):
        await desk.approve(job, person("kid", is_operator=False))


async def test_a_refusal_denies_the_job_with_a_letter_that_says_by_whom(desk, database):
    [job] = await desk.submit("two", layer={"frames": 3})
    await desk.approve(job, ANN)
    said = await desk.reject(job, EVE, "not today")
    assert said.approval.state == "rejected"
    assert await desk.state(job) == ("DENIED", "approval_rejected")
    assert await letters(database) == [("approval_rejected", f"rejected by {EVE.audited}: not today")]
    with pytest.raises(ApprovalResolved):
        await desk.approve(job, BOB)
    assert (await desk.reject(job, EVE)).changed is False


async def test_approving_what_is_approved_changes_nothing(desk):
    [job] = await desk.submit("approval")
    await desk.approve(job, ANN)
    for who in (ANN, BOB):
        said = await desk.approve(job, who)
        assert (said.changed, said.approval.state, said.approval.agreed) == (False, "granted", 1)
    with pytest.raises(ApprovalResolved):
        await desk.reject(job, BOB)


async def test_what_nobody_approves_in_time_is_denied(desk, database):
    desk.kernel.said["soon"] = word(PolicyEffect.REQUIRE_APPROVAL, "soon", approval=ApprovalTerms(expires_s=60.0))
    soon, later = await desk.submit("soon", "approval")
    assert await desk.approver.expire() == 0, "not before its time"
    left = (await desk.of(soon)).expires_at - (await desk.of(soon)).requested_at
    assert round(left.total_seconds()) == 60
    assert (await desk.of(later)).expires_at is None
    await database.run(sql("UPDATE rota.approval SET ts_expires = clock_timestamp() WHERE subject = $1"), str(soon))
    assert await desk.approver.expire() == 1
    assert await desk.state(soon) == ("DENIED", "approval_expired")
    assert (await desk.state(later))[0] == "APPROVAL_REQUIRED"
    assert await letters(database) == [("approval_expired", "not approved in time")]
    with pytest.raises(ApprovalResolved):
        await desk.approve(soon)


async def test_a_job_that_is_cancelled_waits_for_nobody(desk, database):
    [job] = await desk.submit("approval")
    await request_cancellation(database, job, "ann")
    with pytest.raises(ApprovalNotActionable):
        await desk.approve(job)
    await ended(database, job)
    assert (await desk.of(job)).state == "closed"
    with pytest.raises(ApprovalResolved):
        await desk.approve(job)
    assert (await desk.state(job))[0] == "CANCELLED"


async def ended(database, job):
    """As the leader does with what is being ended."""
    async with database.transaction() as tx:
        rows = await tx.rows(sql("SELECT pk_layer, frames FROM rota.layer WHERE pk_job = $1"), job)
        layers = {row["pk_layer"]: row["frames"] for row in rows}
        await finish_jobs(tx, await tx.value(COUNT_ENDS, list(layers), list(layers.values()), "CANCELLED", 0))


async def test_a_grant_is_used_under_the_policy_of_then(desk, database):
    """Drift: it may deny, allow, or ask for something else meanwhile."""
    denied, allowed, more, other = await desk.submit("approval", "approval", "approval", "approval")
    for job in (denied, allowed, more, other):
        await desk.approve(job, ANN)
    for job, now in (
        (denied, TABLE["deny"]),
        (allowed, TABLE["allow"]),
        (more, word(PolicyEffect.REQUIRE_APPROVAL, "require_approval", approval=ApprovalTerms(quorum=2))),
        (other, word(PolicyEffect.REQUIRE_APPROVAL, "another")),
    ):
        desk.kernel.said["approval"] = now
        await desk.go_on(job)
    states = {job: (await desk.state(job))[0] for job in (denied, allowed, more, other)}
    assert states == {denied: "DENIED", allowed: "SCHEDULED", more: "APPROVAL_REQUIRED", other: "APPROVAL_REQUIRED"}
    assert [(await desk.of(job)).state for job in (more, other)] == ["pending", "pending"]
    hashes = await database.rows(sql("SELECT DISTINCT hash FROM rota.approval WHERE subject = $1"), str(more))
    assert len(hashes) == 1, "pinned when it was first asked for"
    desk.kernel.said["approval"] = word(PolicyEffect.REQUIRE_APPROVAL, "another")
    await desk.approve(other, ANN)
    await desk.go_on(other)
    assert (await desk.state(other))[0] == "SCHEDULED"


async def test_what_was_changed_where_it_is_stored_is_not_approved(desk, database):
    [job] = await desk.submit("approval", value=1)
    await database.run(TAMPERED)
    with pytest.raises(ApprovalStale) as refused:
        await desk.approve(job)
    assert refused.value.code == "approval_stale_request"
    assert (await desk.reject(job, ANN, "odd")).approval.state == "rejected"


async def test_what_was_changed_after_it_was_approved_does_not_run(desk, database):
    [job] = await desk.submit("approval", value=1)
    pinned = (await desk.of(job)).hash
    await desk.approve(job)
    await database.run(TAMPERED)
    await desk.go_on(job)
    assert await desk.state(job) == ("DENIED", "approval_stale_request")
    assert (await desk.of(job)).hash == pinned
    assert await waiting(database) == 0


async def test_without_its_hash_nothing_is_let_in(desk, database, monkeypatch):
    [job] = await desk.submit("approval")
    await desk.approve(job)

    def unreadable(*_):
        raise OSError("cannot read")

    monkeypatch.setattr("rota.engine.admission.approval_requests.job_hash", unreadable)
    await desk.go_on(job)
    assert await desk.state(job) == ("PENDING", "policy_unavailable")
    monkeypatch.undo()
    await desk.go_on(job)
    assert (await desk.state(job))[0] == "SCHEDULED"


async def test_a_grant_that_nobody_acted_on_is_taken_up_and_what_waits_is_not(desk, database):
    granted, waits = await desk.submit("approval", "approval")
    await desk.approve(granted)
    await database.run(sql("UPDATE rota.job SET state = 'APPROVAL_REQUIRED'"))
    await database.run(sql("UPDATE rota.job SET ts_updated = ts_updated - interval '1 h'"))
    assert await desk.replayer.replay() == 1
    assert (await desk.state(waits))[0] == "APPROVAL_REQUIRED"
    await desk.go_on(granted, waits)
    assert ((await desk.state(granted))[0], (await desk.state(waits))[0]) == ("SCHEDULED", "APPROVAL_REQUIRED")


async def test_nobody_needs_the_approval_of_a_job_that_the_policy_lets_run_again(desk, database):
    """The words of an approval stay with the job that was let in by it."""
    [job] = await desk.submit("approval")
    await desk.approve(job)
    await desk.go_on(job)
    told = await database.value(sql("SELECT w.told FROM rota.job JOIN rota.policy_word w USING (word)"))
    assert msgspec.msgpack.decode(told)["rule"] == "require_approval"


async def test_a_retry_of_what_was_approved_is_asked_about_anew(desk, database):
    [job] = await desk.submit("approval")
    await desk.approve(job)
    await desk.go_on(job)
    [other] = await desk.submit("approval")
    assert (await desk.state(other))[0] == "APPROVAL_REQUIRED"


async def test_it_is_found_by_its_own_id_and_by_its_job(desk):
    [job] = await desk.submit("approval")
    found = await desk.of(job)
    assert await desk.approver.find(str(found.id)) == found


async def test_nobody_approves_what_has_expired_even_before_a_leader_has_seen_that(desk, database):
    [job] = await desk.submit("soon")
    await database.run(DUE)
    for call in (desk.approve, desk.reject):
        with pytest.raises(ApprovalResolved, match="expired at"):
            await call(job)
    assert ((await desk.of(job)).votes, (await desk.state(job))[0]) == ((), "APPROVAL_REQUIRED")
    assert await desk.approver.expire() == 1
    assert await desk.state(job) == ("DENIED", "approval_expired")


async def test_what_expires_while_it_is_cancelled_is_closed(desk, database):
    [job] = await desk.submit("approval")
    await request_cancellation(database, job, "ann")
    await database.run(DUE)
    assert await desk.approver.expire() == 0
    assert (await desk.of(job)).state == "closed"
    assert await letters(database) == []


async def test_old_approvals_are_forgotten_with_their_votes(desk, database):
    kept, gone = await desk.submit("approval", "approval")
    await desk.approve(gone)
    await desk.approve(kept)
    await database.run(
        sql("UPDATE rota.approval SET ts_decided = ts_decided - interval '9 d' WHERE subject = $1"), str(gone)
    )
    assert await database.run(FORGET, datetime.now(UTC) - timedelta(days=1), 100) == 1
    assert {row["state"]: row["n"] for row in await database.rows(LOOK)} == {"granted": 1}
    assert await database.value(sql("SELECT count(*) FROM rota.approval_vote")) == 1


class Steps:
    """As a workflow would join: what it locks is its own business."""

    def __init__(self):
        self.decided_as = []

    async def lock(self, _tx, _subject):
        return b"h" * 32

    async def apply_decision(self, _tx, approval, state, why):
        self.decided_as.append((approval.subject, state, why))


def voting_together(approvals, database):
    """Nobody goes on from its vote before the other has voted, or waits for it."""
    real, voted = approvals.vote, []

    async def vote(*args, **more):
        counted = await real(*args, **more)
        voted.append(counted)

        async def other():
            return len(voted) == 2 or await database.value(BLOCKED)

        await until(other, what="the other one")
        return counted

    approvals.vote = vote


async def asked_for_step(desk, database, **more):
    show = await database.value(sql("SELECT pk_show FROM rota.show"))
    wanted = {"subject": "run-7/publish", "show": show, "hash": b"h" * 32, "title": "publish", **more}
    async with database.transaction() as tx:
        return await desk.approver.approvals.request(tx, [ApprovalRequest(kind="step", **wanted)])


async def test_a_step_of_a_workflow_waits_by_the_same_rows(desk, database):
    steps = desk.approver.subjects["step"] = Steps()
    [asked] = await asked_for_step(desk, database, terms=ApprovalTerms(quorum=2), principal="sam")
    assert await asked_for_step(desk, database) == [], "it waits already"
    voting_together(desk.approver.approvals, database)
    said = await asyncio.gather(*(desk.approver.approve(asked, who) for who in (ANN, BOB)))
    assert sorted(one.approval.state for one in said) == ["granted", "pending"], "each sees the votes before it"
    assert [(subject, state) for subject, state, _ in steps.decided_as] == [("run-7/publish", "granted")]
    assert (await desk.approver.find("run-7/publish")).state == "granted"
    with pytest.raises(SelfApprovalDenied):
        await desk.approver.approve(asked, person("sam"))


async def test_the_hash_of_a_subject_is_that_of_its_first_approval(desk, database):
    desk.approver.subjects["step"] = Steps()
    [first] = await asked_for_step(desk, database)
    await desk.approver.approve(first, ANN)
    [second] = await asked_for_step(desk, database, hash=b"x" * 32)
    assert second.hash == first.hash == b"h" * 32

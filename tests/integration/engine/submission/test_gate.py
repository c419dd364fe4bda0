"""Deferred jobs: written without being queued, then admitted once, held or ended."""

import asyncio
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from rota.engine.admission.decision import ADMISSION_SUBJECT, ALLOWED, AdmissionDecision, AdmissionVerdict
from rota.engine.admission.transitions import admit, apply_decisions, approve, change_unqueued_state
from rota.engine.queries.jobs import JobQueries
from rota.engine.submission.submitter import Submitter
from rota.model.errors import IllegalTransition
from rota.model.job_states import JobState
from rota.model.jobs.submission import LayerSpec, Submission
from tests.support.jobs import NO_EVENTS, a_show, left, task
from tests.support.queue import Dispatcher, agreed, sql

OUTBOX = sql("SELECT subject, payload FROM rota.outbox ORDER BY id")


class DeferredGate:
    """Decides after the write: calling it during submission is a defect."""

    at_once = False

    def decide(self, batch):
        raise AssertionError


REASONS = {
    AdmissionVerdict.REQUIRE_APPROVAL: "approval_required",
    AdmissionVerdict.DENY: "safety_denied",
    AdmissionVerdict.WAIT: "policy_throttled",
}


class SynchronousGate:
    at_once = True

    def __init__(self, *verdicts):
        self.verdicts = verdicts

    def decide(self, batch):
        return [AdmissionDecision(verdict, REASONS.get(verdict, "")) for verdict in self.verdicts[: len(batch)]]


@pytest.fixture
async def submitter(database):
    await a_show(database)
    return Submitter(database, NO_EVENTS, gate=DeferredGate())


@pytest.fixture
def jobs(database):
    return JobQueries(database)


async def waiting(database):
    return sum(counts["waiting"] for counts in (await agreed(database)).values())


async def admitted(database, ids):
    async with database.transaction() as tx:
        return await admit(tx, ids)


async def test_deferred_job_is_pending_and_notifies_the_admission_controller(submitter, database, jobs):
    submitted = await submitter.submit([task(), task()])
    ids = [one.job for one in submitted]
    assert {one.state for one in submitted} == {JobState.PENDING}
    assert await left(database) == {"jobs": 2, "layers": 2, "messages": 1}
    row = await database.row(OUTBOX)
    assert (row["subject"], msgspec.msgpack.decode(row["payload"])) == (ADMISSION_SUBJECT, [str(job) for job in ids])
    job = await jobs.get(ids[0])
    assert (job.state, job.reason, [m.state for m in job.history]) == ("PENDING", "policy_pending", ["PENDING"])


async def test_admitted_job_is_queued_as_if_submitted_without_a_gate(submitter, database, jobs):
    whole = Submission(
        show="film",
        layers=(
            LayerSpec(name="list", task="a", frames="1,5,9-20"),
            LayerSpec(name="map", task="b", items=["x", None, {"y": 1}], cores=2),
            LayerSpec(name="even", task="c", frames="10-100x10"),
        ),
    )
    [one] = await submitter.submit([whole])
    assert await waiting(database) == 0
    assert await admitted(database, [one.job]) == [one.job]
    job = await jobs.get(one.job)
    assert (job.state, job.reason, [m.state for m in job.history]) == ("SCHEDULED", None, ["PENDING", "SCHEDULED"])
    dispatcher = await Dispatcher(database).enlisted()
    pieces = {(piece.layer, frame, piece.payload) for piece in await dispatcher.pieces(100) for frame in piece.frames}
    one_by_one, mapped, even = (layer.id for layer in job.layers)
    assert pieces == (
        {(one_by_one, frame, None) for frame in (1, 5, *range(9, 21))}
        | {(mapped, at, msgspec.msgpack.encode(item)) for at, item in enumerate(["x", None, {"y": 1}])}
        | {(even, frame, None) for frame in range(10, 20)}
    )
    assert list(job.layers[2].frames.numbers()) == list(range(10, 101, 10))
    assert await database.value(sql("SELECT count(items) FROM rota.layer")) == 0


async def test_job_admitted_before_its_run_at_is_deferred(submitter, database):
    at = datetime.now(UTC) + timedelta(hours=1)
    submitted = await submitter.submit([task(run_at=at, layer={"frames": 3}), task()])
    await admitted(database, [one.job for one in submitted])
    [counts] = (await agreed(database)).values()
    assert (counts["deferred"], counts["waiting"]) == (3, 1)


async def test_concurrent_admits_queue_each_job_once(submitter, database):
    submitted = await submitter.submit([task(layer={"frames": 4}) for _ in range(20)])
    ids = [one.job for one in submitted]
    by = await asyncio.gather(admitted(database, ids), admitted(database, ids[::-1]), admitted(database, ids[5:15]))
    assert sorted((job for jobs in by for job in jobs), key=str) == sorted(ids, key=str)
    assert await waiting(database) == 80
    assert await admitted(database, ids) == []


async def test_only_pending_jobs_are_admitted(submitter, database):
    [one] = await submitter.submit([task()])
    async with database.transaction() as tx:
        await change_unqueued_state(tx, [one.job], JobState.PENDING, JobState.APPROVAL_REQUIRED, "approval_required")
    assert await admitted(database, [one.job]) == []
    assert await waiting(database) == 0


async def test_admission_that_rolls_back_admits_nothing(submitter, database, jobs):
    [one] = await submitter.submit([task(layer={"items": [1, 2]})])
    with pytest.raises(asyncio.CancelledError):
        await rolled_back(database, [one.job])
    assert (await jobs.get(one.job)).state is JobState.PENDING
    assert await waiting(database) == 0
    await admitted(database, [one.job])
    assert await waiting(database) == 2


async def rolled_back(database, ids):
    async with database.transaction() as tx:
        await admit(tx, ids)
        raise asyncio.CancelledError


async def test_synchronous_gate_decides_during_submission(database, jobs):
    await a_show(database)
    gate = SynchronousGate(
        AdmissionVerdict.ALLOW, AdmissionVerdict.REQUIRE_APPROVAL, AdmissionVerdict.DENY, AdmissionVerdict.WAIT
    )
    submitted = await Submitter(database, NO_EVENTS, gate=gate).submit([task() for _ in range(4)])
    assert [one.state for one in submitted] == ["SCHEDULED", "APPROVAL_REQUIRED", "PENDING", "PENDING"]
    approval = await jobs.get(submitted[1].job)
    assert (approval.reason, [m.state for m in approval.history]) == (
        "approval_required",
        ["PENDING", "APPROVAL_REQUIRED"],
    )
    assert await waiting(database) == 1
    row = await database.row(OUTBOX)
    assert msgspec.msgpack.decode(row["payload"]) == [str(one.job) for one in submitted[2:]]


async def test_all_decisions_are_applied_in_one_transaction(submitter, database, jobs):
    submitted = await submitter.submit([task() for _ in range(5)])
    allow, deny, approval, wait, undecided = (one.job for one in submitted)
    denied = {}

    async def finish(_tx, ended, state):
        denied.update({job: (decision.reason, state) for job, decision in ended.items()})

    decisions = {
        allow: ALLOWED,
        deny: AdmissionDecision(AdmissionVerdict.DENY, "safety_denied"),
        approval: AdmissionDecision(AdmissionVerdict.REQUIRE_APPROVAL, "approval_required"),
        wait: AdmissionDecision(AdmissionVerdict.WAIT, "policy_unavailable"),
    }
    async with database.transaction() as tx:
        settled = await apply_decisions(tx, decisions, finish)
    assert (settled.admitted, settled.held) == ([allow], [approval])
    assert denied == {deny: ("safety_denied", JobState.DENIED)}
    found = {job.id: (job.state, job.reason) for job in (await jobs.list()).items}
    assert found == {
        allow: ("SCHEDULED", None),
        deny: ("PENDING", "policy_pending"),
        approval: ("APPROVAL_REQUIRED", "approval_required"),
        wait: ("PENDING", "policy_unavailable"),
        undecided: ("PENDING", "policy_pending"),
    }


async def test_approved_job_is_sent_to_the_gate_once(submitter, database, jobs):
    [one] = await submitter.submit([task()])
    async with database.transaction() as tx:
        await change_unqueued_state(tx, [one.job], JobState.PENDING, JobState.APPROVAL_REQUIRED, "approval_required")
    for expected in ([one.job], []):
        async with database.transaction() as tx:
            assert await approve(tx, [one.job]) == expected
    assert (await jobs.get(one.job)).state is JobState.PENDING
    ids = await database.rows(sql("SELECT DISTINCT msg_id FROM rota.outbox"))
    assert len(ids) == 2, "the bus would drop a second message with the same id"


async def test_repeated_wait_reason_adds_no_history_entry(submitter, database, jobs):
    [one] = await submitter.submit([task()])
    for reason in ("policy_unavailable", "policy_unavailable", "tenant_limit"):
        async with database.transaction() as tx:
            await change_unqueued_state(tx, [one.job], JobState.PENDING, JobState.PENDING, reason)
    history = [(entry.state, entry.reason) for entry in (await jobs.get(one.job)).history]
    assert history == [("PENDING", why) for why in ("policy_pending", "policy_unavailable", "tenant_limit")]


async def test_illegal_state_transition_is_refused(database):
    async with database.transaction() as tx:
        with pytest.raises(IllegalTransition):
            await change_unqueued_state(tx, [], JobState.SCHEDULED, JobState.APPROVAL_REQUIRED, None)

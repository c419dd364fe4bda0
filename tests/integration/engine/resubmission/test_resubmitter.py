"""Resubmission: a new job linked to the old one, with its failed frames or all of them."""

import asyncio
from itertools import count

import msgspec
import pytest

from rota.engine.admission import controller
from rota.engine.admission.decision import AllowAll
from rota.engine.queries.jobs import JobQueries
from rota.engine.recovery.retention import LEASE, RetentionMaintenance
from rota.engine.resubmission.resubmitter import Resubmitter
from rota.engine.submission.submitter import Submitter
from rota.infra import failpoints
from rota.infra.blob_store import BlobStore
from rota.infra.lease import Leases
from rota.model.errors import InvalidInput
from rota.model.job_states import JobState
from rota.model.jobs.submission import Budget, Compensation, ContextHints, LayerSpec, Submission
from rota.queue import DeadLetterFilter, FailedFilter, FrameFailure, Queue
from tests.support.jobs import NO_EVENTS, a_show, completions, task
from tests.support.kernels import TABLE, Table
from tests.support.queue import Dispatcher, agreed, entry, sessions_over, sql

COUNT = sql("SELECT rota.layers_count($1::uuid[], $2::int[], $3, 0)")
FINISH = sql("SELECT * FROM rota.jobs_finish($1::uuid[])")
NUMBERS = count()
JOBS = sql("SELECT pk_job FROM rota.job ORDER BY 1")


class Harness:
    """Submits jobs and acts as their workers: ends frames in the queue and counts them in their layers."""

    def __init__(self, database):
        self.database = database
        self.queue = Queue(database)
        self.submitter = Submitter(database, NO_EVENTS)
        self.resubmitter = Resubmitter(database, self.queue, self.submitter, BlobStore(database))

    async def submit(self, submission):
        [one] = await self.submitter.submit([submission], may_be_critical=True)
        return one.job

    async def play(self, fails, *, dead=False):
        """End all waiting frames, failed where `fails(layer name, frame)`; returns the payload of each."""
        dispatcher = await Dispatcher(self.database, f"d{next(NUMBERS)}").enlisted()
        ran = {}
        names = {}
        for piece in await dispatcher.pieces(1000):
            job = await JobQueries(self.database).get(piece.job)
            names |= {layer.id: layer.name for layer in job.layers}
            for token, frame in zip(piece.tokens, piece.frames, strict=True):
                ran[names[piece.layer], frame] = piece.payload
                failed = fails(names[piece.layer], frame)
                if failed:
                    await self.queue.fail([FrameFailure(token, "signal", "too large")])
                else:
                    await self.queue.complete([token])
                ended = await self.database.value(COUNT, [piece.layer], [1], "FAILED" if failed else "SUCCEEDED")
                await self.database.rows(FINISH, ended)
        if dead:
            await self.queue.failed.move_to_dead_letters(FailedFilter())
        return ran


@pytest.fixture
async def harness(database):
    await a_show(database)
    return Harness(database)


async def test_retry_runs_failed_frames_under_their_original_numbers(harness, database):
    layers = (LayerSpec(name="a", task="t", frames="10-100x10"), LayerSpec(name="b", task="t", frames=3))
    old = await harness.submit(Submission(show="film", layers=layers))
    bad = {11, 12, 15}
    await harness.play(lambda layer, frame: layer == "a" and frame in bad)
    assert (await JobQueries(database).get(old)).state is JobState.FAILED
    resubmitted = await harness.resubmitter.retry_job(old)
    assert (resubmitted.old, resubmitted.frames) == (old, 3)
    new = await JobQueries(database).get(resubmitted.job)
    assert [(layer.name, list(layer.frames.numbers())) for layer in new.layers] == [("a", [20, 30, 60])]
    assert (new.details.parent_job_id, new.labels) == (old, {"retry_of": str(old)})
    assert await harness.queue.failed.count(FailedFilter()) == 0
    assert set(await harness.play(lambda *_: False)) == {("a", frame) for frame in bad}
    assert (await JobQueries(database).get(resubmitted.job)).state is JobState.SUCCEEDED
    [counts] = (await agreed(database)).values()
    assert (counts["failed"], counts["completed"], counts["waiting"]) == (0, 13, 0)


@pytest.mark.parametrize("caps_deleted", [False, True], ids=["caps stored", "caps deleted"])
async def test_retry_preserves_every_field(harness, database, caps_deleted):
    given = Submission(
        show="film",
        name="comp",
        folder="shots",
        dept="fx",
        topic="render.fast",
        priority=9,
        labels={"preferred_pool": "p", "node.zone": "z", "mine": "1"},
        env={"A": "1"},
        context={"x": 1},
        budget=Budget(max_total_tokens=5, deadline_ms=60_000),
        requires=("gpu",),
        capability="c",
        risk_tags=("r",),
        actor_id="ann",
        actor_type="human",
        tenant="t",
        principal="p",
        adapter_id="ad",
        pack_id="pk",
        workflow_id="w",
        step_index=3,
        memory_id="m",
        context_hints=ContextHints(tags=("q",)),
        compensation=Compensation(topic="undo", context=1),
        idempotency_key="once",
        max_wait_s=77.0,
        max_cores=8,
        layers=(LayerSpec(task="t", cores=2, input={"big": "x" * 100_000}, retries=2, timeout_s=9.0, max_cores=4),),
    )
    old = await harness.submit(given)
    await harness.play(lambda *_: True, dead=True)
    if caps_deleted:
        retention = RetentionMaintenance(database, Leases(database))
        [lease] = (await retention.leases.acquire([LEASE], kind="upkeep", ttl_s=60.0)).granted
        assert await retention.forget_caps(lease) == 1
    await harness.resubmitter.retry_dead_letters(DeadLetterFilter())
    [row] = await database.rows(JOBS)
    before, after = await JobQueries(database).get(old), await JobQueries(database).get(row["pk_job"])
    same = ("show", "folder", "dept", "name", "topic", "priority", "workflow_id")
    assert {field: getattr(after, field) for field in same} == {field: getattr(before, field) for field in same}
    assert after.labels == {**before.labels, "retry_of": str(old)}
    assert after.details == msgspec.structs.replace(before.details, parent_job_id=old, idempotency_key="")
    assert (after.deadline_at - after.submitted_at).total_seconds() == 60
    assert (after.wait_until - after.submitted_at).total_seconds() == 77
    one, two = before.layers[0], after.layers[0]
    assert (two.work, two.queue, two.input_at) == (one.work, one.queue, one.input_at)
    assert two.input_at is not None
    caps = sql(
        "SELECT int_max_cores FROM rota.job_resource WHERE pk_job = $1 UNION ALL"
        " SELECT int_max_cores FROM rota.layer_resource WHERE pk_job = $1"
    )
    assert [row["int_max_cores"] for row in await database.rows(caps, after.id)] == [800, 400]


async def test_retry_of_a_map_runs_failed_items_with_their_inputs(harness, database):
    old = await harness.submit(task(layer={"items": ["a", "b", "c", None, "e"]}))
    await harness.play(lambda _, frame: frame in (1, 3))
    resubmitted = await harness.resubmitter.retry_job(old)
    ran = await harness.play(lambda *_: False)
    assert ran == {("noop", 1): msgspec.msgpack.encode("b"), ("noop", 3): msgspec.msgpack.encode(None)}
    assert (await JobQueries(database).get(resubmitted.job)).details.maps == (0,)


async def test_retried_items_keep_their_frame_numbers_through_deferred_admission(harness, database):
    old = await harness.submit(task(layer={"items": ["a", "b", "c", "d", "e"]}))
    await harness.play(lambda _, frame: frame in (1, 3, 4))
    harness.submitter.gate = DeferredGate()
    resubmitted = await harness.resubmitter.retry_job(old)
    async with database.transaction() as tx:
        await controller.apply_decisions(tx, {resubmitted.job: controller.ALLOWED}, None)
    assert {
        frame: msgspec.msgpack.decode(item) for (_, frame), item in (await harness.play(lambda *_: False)).items()
    } == {
        1: "b",
        3: "d",
        4: "e",
    }


async def test_retry_of_every_frame_removes_the_dead_letters(harness, database):
    old = await harness.submit(task(layer={"frames": "1,5,9-12"}))
    await harness.play(lambda _, frame: frame == 5, dead=True)
    resubmitted = await harness.resubmitter.retry_job(old, every_frame=True)
    assert resubmitted.frames == 6
    assert await harness.queue.dead_letters.count(DeadLetterFilter()) == 0
    assert sorted(frame for _, frame in await harness.play(lambda *_: False)) == [1, 5, 9, 10, 11, 12]


async def test_live_job_can_retry_failed_frames_but_not_every_frame(harness, database):
    old = await harness.submit(Submission(show="film", layers=(LayerSpec(task="t", frames=2),)))
    dispatcher = await Dispatcher(database).enlisted()
    one, _ = await dispatcher.tokens(2)
    await harness.queue.fail([FrameFailure(one, "signal")])
    with pytest.raises(InvalidInput, match="has not ended"):
        await harness.resubmitter.retry_job(old, every_frame=True)
    resubmitted = await harness.resubmitter.retry_job(old)
    assert resubmitted.frames == 1


async def test_dead_letters_of_several_jobs_become_one_job_each(harness, database):
    olds = [await harness.submit(task(layer={"frames": 3})) for _ in range(3)]
    await harness.play(lambda _, frame: frame > 0, dead=True)
    retried = await harness.resubmitter.retry_dead_letters(DeadLetterFilter(kind="frame"))
    assert len(retried.gone) == 6
    assert {one.old for one in retried.jobs} == set(olds)
    assert {one.frames for one in retried.jobs} == {2}
    assert await harness.queue.dead_letters.count(DeadLetterFilter()) == 0


async def test_concurrent_retries_of_the_same_frames_retry_once(harness, database):
    old = await harness.submit(task(layer={"frames": 8}))
    await harness.play(lambda *_: True, dead=True)
    found, purge = asyncio.Barrier(2), harness.resubmitter._purge

    async def purge_together(tx, dead_letters):
        await found.wait()
        return await purge(tx, dead_letters)

    harness.resubmitter._purge = purge_together
    both = await asyncio.gather(
        *(harness.resubmitter.retry_dead_letters(DeadLetterFilter(kind="frame")) for _ in range(2))
    )
    assert sorted(len(each.gone) for each in both) == [0, 8]
    assert sum(counts["waiting"] for counts in (await agreed(database)).values()) == 8
    harness.resubmitter._purge = purge
    with pytest.raises(InvalidInput, match="no failed frame to retry"):
        await harness.resubmitter.retry_job(old)


async def test_retry_that_rolls_back_changes_nothing(harness, database):
    await harness.submit(task(layer={"frames": 2}))
    await harness.play(lambda *_: True)
    with pytest.raises(asyncio.CancelledError):
        await retry_and_roll_back(harness, database)
    assert await harness.queue.failed.count(FailedFilter()) == 2
    assert await database.rows(JOBS) == []


async def retry_and_roll_back(harness, database):
    async with database.transaction() as tx:
        await harness.resubmitter.retry_failed(FailedFilter(), on=tx)
        raise asyncio.CancelledError


async def test_crash_during_a_retry_removes_nothing_and_the_next_retry_runs_once(
    harness, database, database_url, spawn
):
    old = await harness.submit(task(layer={"frames": 4}))
    await harness.play(lambda _layer, frame: frame < 2, dead=True)
    env = {"URL": database_url, "CRASH_AT": "reopen.after_purge"}
    first = await spawn("tests.integration.engine.engine_client", "retry", old, env=env)
    assert await first.wait() == failpoints.CRASH_EXIT_STATUS, await first.errors()
    await sessions_over(database)
    assert await harness.queue.dead_letters.count(DeadLetterFilter(job=old)) == 2
    assert await database.rows(JOBS) == []
    await harness.resubmitter.retry_job(old)
    assert await harness.queue.dead_letters.count(DeadLetterFilter()) == 0
    [row] = await database.rows(JOBS)
    assert (await JobQueries(database).get(row["pk_job"])).details.parent_job_id == old


async def test_dead_letter_of_a_deleted_job_stays_and_its_retry_is_refused(harness, database):
    lost = await harness.submit(task())
    kept = await harness.submit(task())
    await harness.play(lambda *_: True, dead=True)
    await database.run(sql("DELETE FROM rota.job_done WHERE pk_job = $1"), lost)
    [dead_letter] = await harness.queue.dead_letters.find(DeadLetterFilter(job=lost))
    with pytest.raises(InvalidInput, match="is no longer retained"):
        await harness.resubmitter.retry_dead_letters(DeadLetterFilter(ids=[dead_letter.id]))
    retried = await harness.resubmitter.retry_dead_letters(DeadLetterFilter(kind="frame"))
    assert [one.old for one in retried.jobs] == [kept]
    assert [one.id for one in await harness.queue.dead_letters.find(DeadLetterFilter())] == [dead_letter.id]


async def test_retry_of_every_frame_of_a_map_keeps_the_inputs(harness, database):
    layers = (
        LayerSpec(name="first", task="t", items=["a", None, b"c"]),
        LayerSpec(name="plain", task="t", frames="3-4", input={"args": [1], "kwargs": {}}),
        LayerSpec(name="last", task="u", items=[{"x": 1}]),
    )
    old = await harness.submit(Submission(show="film", layers=layers))
    ran = await harness.play(lambda _, frame: frame == 1)
    resubmitted = await harness.resubmitter.retry_job(old, every_frame=True)
    assert resubmitted.frames == 6
    assert await harness.play(lambda *_: False) == ran
    again = await harness.resubmitter.retry_job(resubmitted.job, every_frame=True)
    assert await harness.play(lambda *_: False) == ran
    assert (await JobQueries(database).get(again.job)).details.maps == (0, 2)


async def test_retry_of_every_frame_of_a_partial_map_keeps_the_inputs(harness):
    old = await harness.submit(task(layer={"items": ["a", "b", "c", "d"]}))
    await harness.play(lambda _, frame: frame in (1, 3))
    part = await harness.resubmitter.retry_job(old)
    ran = await harness.play(lambda *_: False)
    assert (await harness.resubmitter.retry_job(part.job, every_frame=True)).frames == 2
    assert await harness.play(lambda *_: False) == ran != {}


async def test_map_admitted_later_can_be_retried_completely(harness, database):
    harness.submitter.gate = DeferredGate()
    old = await harness.submit(task(layer={"items": [1, 2]}))
    async with database.transaction() as tx:
        await controller.apply_decisions(tx, {old: controller.ALLOWED}, None)
    ran = await harness.play(lambda *_: False)
    harness.submitter.gate = AllowAll()
    await harness.resubmitter.retry_job(old, every_frame=True)
    assert await harness.play(lambda *_: False) == ran


async def test_map_whose_items_are_deleted_cannot_be_retried_completely(harness, database):
    old = await harness.submit(task(layer={"items": [1, 2]}))
    await harness.play(lambda *_: False)
    await database.run(sql("DELETE FROM rota.blob"))
    with pytest.raises(InvalidInput, match="items of layer noop are no longer retained"):
        await harness.resubmitter.retry_job(old, every_frame=True)


async def test_denied_job_is_retried_through_the_gate_with_all_items(harness, database):
    harness.submitter.gate = DeferredGate()
    old = await harness.submit(task(layer={"items": [1, 2]}))
    admission = controller.AdmissionController(database, completions(database), Table(default=TABLE["deny"]))
    await admission.decide_all([old])
    harness.submitter.gate = DeferredGate()
    retried = await harness.resubmitter.retry_dead_letters(DeadLetterFilter(kind="job"))
    assert [(one.old, one.frames) for one in retried.jobs] == [(old, 2)]
    assert (await JobQueries(database).get(retried.jobs[0].job)).state is JobState.PENDING
    assert await harness.queue.dead_letters.count(DeadLetterFilter()) == 0


async def test_frames_of_foreign_queues_are_requeued_unchanged(harness, database):
    await harness.queue.enqueue([entry("own", frames=2)])
    dispatcher = await Dispatcher(database).enlisted()
    await harness.queue.fail([FrameFailure(token, "signal") for token in await dispatcher.tokens(2)])
    retried = await harness.resubmitter.retry_failed(FailedFilter())
    assert (len(retried.gone), retried.jobs) == (2, [])
    assert (await agreed(database))["own"]["deferred"] == 2


class DeferredGate:
    at_once = False

    def decide(self, _batch):
        raise AssertionError("the gate must not decide during submission")

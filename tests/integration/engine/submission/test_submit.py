"""Submission: what is written, what is refused, and that a refused or rolled back submission leaves nothing."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from rota.accounting.admin import QuotaAdmin
from rota.engine.queries.jobs import JobFilter, JobQueries
from rota.engine.submission.submitter import BATCH_MAX, Submitter
from rota.infra.blob_store import BlobStore
from rota.model.errors import InvalidInput, NotFound
from rota.model.job_states import JobState
from rota.model.jobs.submission import Budget, LayerSpec, Submission
from rota.queue import Queue
from tests.support.jobs import NO_EVENTS, a_show, left, task
from tests.support.queue import Dispatcher, agreed, sql

LAYERS = sql("SELECT * FROM rota.layer ORDER BY pk_job, number")
CAPS = sql("""
SELECT 'job' AS kind, int_priority AS priority, int_max_cores AS cores, int_max_gpus AS gpus FROM rota.job_resource
UNION ALL SELECT 'layer', NULL, int_max_cores, int_max_gpus FROM rota.layer_resource ORDER BY kind
""")
FENCE = sql("SELECT int_fence FROM rota.show")
NEW_FOLDER = sql("INSERT INTO rota.folder SELECT gen_random_uuid(), pk_show, 'new' FROM rota.show")
CLASSES = sql("""
SELECT q.queue, c.topic, c.requires, c.labels, c.preferred_pool, c.preferred_worker, c.cores, c.gpus, c.memory_mb
FROM rota.queue_class q JOIN rota.placement_class c USING (class_id) ORDER BY c.class_id
""")


@pytest.fixture
async def submitter(database):
    await a_show(database)
    return Submitter(database, NO_EVENTS)


@pytest.fixture
async def dispatcher(database):
    return await Dispatcher(database).enlisted()


@pytest.fixture
def jobs(database):
    return JobQueries(database)


async def waiting(database):
    """Waiting frames by queue name without its class; checks that the counts match the rows."""
    found = {}
    for queue, counts in (await agreed(database)).items():
        found.setdefault(queue.rpartition("#")[0], []).append(counts["waiting"])
    return {queue: sorted(numbers) for queue, numbers in found.items()}


async def total_waiting(database):
    return sum(counts["waiting"] for counts in (await agreed(database)).values())


async def test_task_submission_creates_a_job_a_layer_and_a_claimable_frame(submitter, database, dispatcher):
    [submitted] = await submitter.submit([task(value={"n": 1})])
    assert (submitted.state, submitted.already) == (JobState.SCHEDULED, False)
    assert await left(database) == {"jobs": 1, "layers": 1, "entries": 1}
    [piece] = await dispatcher.pieces()
    assert (piece.job, piece.frames, piece.attempt) == (submitted.job, range(1), 1)
    assert [counts.running for counts in (await Queue(database).counts_exact()).values()] == [1]


async def test_job_reads_back_as_submitted(submitter, jobs):
    [submitted] = await submitter.submit(
        [task("render", {"n": 1}, layer={"frames": "1-100x2", "cores": 0.5}, labels={"team": "fx"}, capability="read")]
    )
    job = await jobs.get(submitted.job)
    [layer] = job.layers
    assert (job.show, job.folder, job.dept, job.name) == ("film", "default", "default", "render")
    assert (job.state, job.reason, job.labels, job.details.capability) == ("SCHEDULED", None, {"team": "fx"}, "read")
    assert [entry.state for entry in job.history] == ["PENDING", "SCHEDULED"]
    assert (layer.work.task, layer.work.cores, layer.counts) == ("render", 50, {"WAITING": 50})
    assert msgspec.msgpack.decode(layer.input) == {"n": 1}
    assert list(layer.frames.numbers()) == list(range(1, 101, 2))


async def test_layer_of_a_million_frames_is_one_queue_entry(submitter, database):
    await submitter.submit([task(layer={"frames": "0-1999998x2"})])
    assert await left(database) == {"jobs": 1, "layers": 1, "entries": 1}
    assert await waiting(database) == {"film/default/default": [1_000_000]}


async def test_frame_list_is_queued_as_ranges(submitter, database, dispatcher):
    await submitter.submit([task(layer={"frames": "1,5,9-20"})])
    assert [piece.frames for piece in await dispatcher.pieces()] == [range(1, 2), range(5, 6), range(9, 21)]
    [layer] = await database.rows(LAYERS)
    assert (layer["ranges"], layer["frames"], layer["first_frame"]) == ([1, 1, 5, 1, 9, 12], 14, 1)


async def test_each_frame_of_a_map_has_its_own_input(submitter, database, dispatcher):
    await submitter.submit([task(layer={"items": ["a", {"b": 1}, None]})])
    pieces = await dispatcher.pieces()
    assert [msgspec.msgpack.decode(piece.payload) for piece in pieces] == ["a", {"b": 1}, None]
    assert [piece.frames for piece in pieces] == [range(number, number + 1) for number in range(3)]
    assert (await database.row(LAYERS))["items"] is None


async def test_layers_go_to_the_queues_of_their_folder_and_class_with_exact_counts(submitter, database):
    two = Submission(
        show="film",
        folder="shots",
        dept="fx",
        topic="sim.gpu",
        priority="BATCH",
        requires=("CUDA",),
        labels={"node.rack": "7", "team": "x", "preferred_worker_id": "w1"},
        layers=(LayerSpec(task="sim", frames=10, gpus=1), LayerSpec(task="comp", frames=20, cores=4, memory="1GiB")),
    )
    await submitter.submit([two, task(layer={"frames": 3}), two, task(priority=3)])
    assert await waiting(database) == {"film/shots/sim.gpu": [20, 40], "film/default/default": [4]}
    classes = [dict(row.items()) for row in await database.rows(CLASSES)]
    gpu = next(row for row in classes if row["gpus"])
    assert (gpu["requires"], gpu["preferred_worker"]) == (["cuda"], "w1")
    assert msgspec.json.decode(gpu["labels"]) == {"node.rack": "7", "constraint.task.sim": "true"}
    assert {(row["cores"], row["gpus"], row["memory_mb"]) for row in classes} == {
        (100, 1, 0),
        (400, 0, 1024),
        (100, 0, 0),
    }


async def test_departments_of_one_folder_have_separate_queues(submitter, database):
    await submitter.submit([task(), task(dept="fx"), task(dept="fx")])
    counted = sorted(counts["waiting"] for counts in (await agreed(database)).values())
    assert counted == [1, 2]


async def test_batch_jobs_have_ascending_ids_and_are_claimed_in_order(submitter, dispatcher):
    submitted = await submitter.submit([task(value=number) for number in range(50)])
    ids = [one.job for one in submitted]
    assert ids == sorted(ids, key=lambda each: each.int)
    assert [piece.job for piece in await dispatcher.pieces()] == ids


async def test_job_with_a_future_run_at_is_deferred(submitter, database, jobs):
    at = datetime.now(UTC) + timedelta(hours=1)
    later, now = await submitter.submit([task(run_at=at, layer={"frames": 7}, max_wait_s=60), task()])
    assert await left(database) == {"jobs": 2, "layers": 2, "entries": 1, "deferred": 1}
    job = await jobs.get(later.job)
    assert (job.state, job.run_at, job.wait_until) == ("SCHEDULED", at, at + timedelta(seconds=60))
    assert [counts["deferred"] for counts in (await agreed(database)).values()] == [7]
    assert (await jobs.get(now.job)).run_at is None


async def test_job_with_a_past_run_at_is_queued_at_once(submitter, database):
    await submitter.submit([task(run_at=datetime(2020, 1, 1, tzinfo=UTC))])
    assert await left(database) == {"jobs": 1, "layers": 1, "entries": 1}


async def test_deadline_and_max_wait_count_from_submission(submitter, jobs):
    [submitted] = await submitter.submit([task(budget=Budget(deadline_ms=1500), max_wait_s=0.25)])
    job = await jobs.get(submitted.job)
    assert job.deadline_at - job.submitted_at == timedelta(milliseconds=1500)
    assert job.wait_until - job.submitted_at == timedelta(milliseconds=250)


async def test_caps_are_stored_with_the_job_without_raising_the_fence(submitter, database):
    fence = await database.value(FENCE)
    await submitter.submit([task(max_cores=8, priority=2, layer={"max_cores": 4, "max_gpus": 2, "gpus": 1}), task()])
    assert [tuple(row) for row in await database.rows(CAPS)] == [("job", 2, 800, -1), ("layer", None, 400, 2)]
    assert await database.value(FENCE) == fence
    assert [row["capped"] for row in await database.rows(LAYERS)] == [True, False]


async def test_large_input_is_stored_as_a_blob(submitter, database, jobs):
    large = "x" * 200_000
    [submitted] = await submitter.submit([task(value=large)])
    [layer] = (await jobs.get(submitted.job)).layers
    assert layer.input is None
    assert msgspec.msgpack.decode(await BlobStore(database).get(layer.input_at)) == large


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"show": "flim"}, "no show 'flim': did you mean film"),
        ({"folder": "shotz"}, "no folder of show film 'shotz': did you mean shots"),
        ({"dept": "fxx"}, "no dept 'fxx': did you mean fx"),
    ],
)
async def test_unknown_names_are_refused_with_a_suggestion_and_nothing_is_written(submitter, database, wrong, message):
    with pytest.raises(InvalidInput, match=message):
        await submitter.submit([task(), task(**wrong)])
    assert await left(database) == {}


async def test_one_invalid_submission_refuses_the_batch(submitter, database):
    with pytest.raises(InvalidInput, match="not a valid priority"):
        await submitter.submit([task(), task(priority=0)])
    with pytest.raises(InvalidInput, match="too many for one call"):
        await submitter.submit([task()] * (BATCH_MAX + 1))
    with pytest.raises(InvalidInput, match="67108864 bytes are too large"):
        await submitter.submit([b" " * 1_000_000] * 68)
    assert await submitter.submit([]) == []
    assert await left(database) == {}


async def test_renamed_show_is_known_only_by_its_new_name(database):
    admin = await a_show(database)
    submitter = Submitter(database, NO_EVENTS)
    await submitter.submit([task()])
    await admin.rename_show("film", "movie", actor="ann")
    with pytest.raises(InvalidInput, match="no show 'film'"):
        await submitter.submit([task()])
    await a_show(database, "film", depts=())
    await submitter.submit([task(), task(show="movie")])
    counted = sorted(counts["waiting"] for counts in (await agreed(database)).values())
    assert counted == [1, 2], "the new show film has its own queue"


async def test_folder_created_in_the_same_transaction_can_be_used(submitter, database):
    async with database.transaction() as tx:
        await tx.run(NEW_FOLDER)
        await submitter.submit([task(folder="new"), task()], on=tx)
    assert await waiting(database) == {"film/new/default": [1], "film/default/default": [1]}


async def test_rolled_back_transaction_leaves_nothing(submitter, database):
    later = datetime.now(UTC) + timedelta(hours=1)
    whole = [
        task(value="x" * 100_000, idempotency_key="k", max_cores=4, layer={"max_cores": 2}),
        task(layer={"items": [1, 2]}),
        task(run_at=later),
    ]
    with suppress(RuntimeError):
        async with database.transaction() as tx:
            await submitter.submit(whole, on=tx)
            raise RuntimeError
    assert await left(database) == {}
    assert await total_waiting(database) == 0
    async with database.transaction() as tx:
        await submitter.submit(whole, on=tx)
    assert (await left(database)).items() >= {
        "jobs": 3,
        "keys": 1,
        "job_caps": 1,
        "layer_caps": 1,
        "deferred": 1,
    }.items()


async def test_job_pages_go_from_newest_to_oldest(submitter, database, jobs):
    await a_show(database, "other", depts=())
    submitted = await submitter.submit([task() for _ in range(5)] + [task(show="other", layer={"frames": 4})])
    ids = [one.job for one in submitted]
    first = await jobs.list(most=4)
    assert [line.id for line in first.items] == ids[:1:-1]
    rest = await jobs.list(most=4, after=first.next)
    assert ([line.id for line in rest.items], rest.next) == (ids[1::-1], None)
    [line] = (await jobs.list(JobFilter(show="other", state=JobState.SCHEDULED))).items
    assert (line.show, line.frames, line.ended, line.state) == ("other", 4, 0, "SCHEDULED")
    assert (await jobs.list(JobFilter(state=JobState.FAILED))).items == []
    with pytest.raises(NotFound, match="There is no show"):
        await jobs.list(JobFilter(show="flim"))
    with pytest.raises(InvalidInput, match="not a valid number of jobs"):
        await jobs.list(most=0)


async def test_job_list_applies_every_filter_and_hides_other_shows(submitter, database, jobs):
    await a_show(database, "other", depts=())
    other = (await QuotaAdmin(database).show("other")).id
    given = [
        task(labels={"shot": "12"}, topic="render"),
        task(labels={"shot": "13"}, topic="render"),
        task(show="other", labels={"shot": "12"}),
    ]
    render, second, foreign = [one.job for one in await submitter.submit(given)]

    async def found(**wanted):
        return [line.id for line in (await jobs.list(JobFilter(**wanted))).items]

    assert await found(label=("shot", "12")) == [foreign, render]
    assert await found(label=("shot", "12"), topic="render") == [render]
    assert await found(shows=frozenset({other})) == [foreign]
    assert await found(shows=frozenset()) == []
    assert await found(reason="quota_job") == []
    assert (await jobs.list(JobFilter(topic="render"))).items[0].labels == {"shot": "13"}
    assert second == (await found(topic="render"))[0]


async def test_rare_job_is_found_by_following_bounded_pages(submitter, jobs, monkeypatch):
    monkeypatch.setattr("rota.engine.queries.jobs.FIRST_SCAN_JOBS", 2)
    monkeypatch.setattr("rota.engine.queries.jobs.SCAN_JOBS_MAX", 3)
    [rare, *_] = await submitter.submit([task(topic="rare"), *(task() for _ in range(12))])
    page = await jobs.list(JobFilter(topic="rare"), most=1, scans_max=2)
    assert page.items == []
    pages = 0
    while not page.items:
        page, pages = await jobs.list(JobFilter(topic="rare"), after=page.next, most=1, scans_max=2), pages + 1
    assert ([line.id for line in page.items], pages) == ([rare.job], 2)

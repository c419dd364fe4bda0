"""The shortest way to end a job: `jobs_succeed` moves those whose only layer succeeds in one batch, and no others."""

import pytest

from rota.engine.submission.submitter import Submitter
from rota.model.jobs.submission import LayerSpec, Submission
from tests.support.jobs import NO_EVENTS, a_show
from tests.support.queue import sql

LAYERS = sql("SELECT pk_layer FROM rota.layer WHERE pk_job = $1::uuid ORDER BY number")
SUCCEED = sql("SELECT pk_job FROM rota.jobs_succeed($1::uuid[], $2::integer[])")
LEFT = sql("""
SELECT (SELECT count(*) FROM rota.job) AS jobs, (SELECT count(*) FROM rota.layer) AS layers""")
DONE = sql("""
SELECT pk_job, state,
       (SELECT array_agg(ARRAY[l.frames, l.succeeded] ORDER BY l.number) FROM unnest(layers) AS l) AS counts
FROM rota.job_done""")


async def submitted(database, *frames):
    """A job with a layer of each of these sizes, and the ids of its layers."""
    layers = tuple(LayerSpec(task="noop", name=f"l{at}", frames=n) for at, n in enumerate(frames))
    [made] = await Submitter(database, NO_EVENTS).submit([Submission(show="film", topic="default", layers=layers)])
    return made.job, [row["pk_layer"] for row in await database.rows(LAYERS, made.job)]


async def succeed(database, layers, numbers):
    return {row["pk_job"] for row in await database.rows(SUCCEED, layers, numbers)}


async def test_jobs_of_one_layer_that_succeeds_whole_end_with_their_counts(database):
    await a_show(database)
    made = {n: await submitted(database, n) for n in (1, 3)}
    ended = await succeed(database, [layers[0] for _, layers in made.values()], list(made))
    assert ended == {job for job, _ in made.values()}
    rows = {row["pk_job"]: (row["state"], row["counts"]) for row in await database.rows(DONE)}
    assert rows == {job: ("SUCCEEDED", [[n, n]]) for n, (job, _) in made.items()}
    assert tuple(await database.row(LEFT)) == (0, 0)


@pytest.mark.parametrize(
    ("frames", "ending"),
    [((1,), [0]), ((2,), [1]), ((3,), [2]), ((1, 1), [1]), ((1, 1), [1, 1]), ((2, 1), [2, 1]), ((2,), [0])],
)
async def test_jobs_of_which_frames_or_layers_are_left_do_not_end_and_lose_nothing(database, frames, ending):
    await a_show(database)
    job, layers = await submitted(database, *frames)
    other, [its_layer] = await submitted(database, 1)
    assert await succeed(database, [*layers[: len(ending)], its_layer], [*ending, 1]) == {other}
    assert tuple(await database.row(LEFT)) == (1, len(frames))
    assert [row["pk_layer"] for row in await database.rows(LAYERS, job)] == layers


async def test_layer_that_succeeded_before_ends_nothing_again(database):
    await a_show(database)
    job, layers = await submitted(database, 1)
    assert await succeed(database, layers, [1]) == {job}
    assert await succeed(database, layers, [1]) == set()
    assert len(await database.rows(DONE)) == 1

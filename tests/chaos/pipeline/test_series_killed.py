"""The worker that runs a series is killed, or paused until it is given up: each frame ends once, and only frames whose
ends were not stored run again."""

import signal

import pytest

from tests.chaos.pipeline.deployment import POLL_S, Farm
from tests.chaos.pipeline.history import violations
from tests.support.queue import sql
from tests.support.waiting import until

FRAMES = 60
KINDS = ["nap", "crunch"]
"""An async task, and a sync one, whose process has frames of the series in its queue."""
NAP_S = 0.02
LOST_WITHIN_S = 15.0
BOOKED = sql("""
SELECT p.token, p.series_first, p.int_cores_reserved AS cores,
       (SELECT min(s.series_first) FROM rota.proc s WHERE s.series_first IS NOT NULL) AS first
FROM rota.proc p ORDER BY p.token""")
LOSSES = sql("""
SELECT e.frame, count(*) FILTER (WHERE e.code = 'worker_lost') AS lost,
       count(*) FILTER (WHERE e.state = 'RETRIED') AS retried
FROM rota.frame_end e GROUP BY 1""")
ENDED = sql("SELECT 1 FROM rota.job_done WHERE pk_job = $1::uuid")


@pytest.fixture
async def farm(private_stack, tmp_path, proxy):
    stack = await private_stack("postgres", "redis", "nats")
    async with Farm(stack, tmp_path, proxy, links=False) as farm:
        await farm.show("film", burst=1)
        await farm.start(servers=1, workers=1, slots=1, heartbeat_s=0.5)
        yield farm


async def in_series(farm):
    """The rows of a series that has begun and has several frames left."""

    async def long_series():
        rows = await farm.database.rows(BOOKED)
        return len(rows) >= 3 and rows[0]["first"] is not None and rows

    return await until(long_series, within_s=30, what="a series", every_s=0.002)


async def check(farm, runs_max):
    await farm.quiet()
    history = await farm.history()
    assert not (found := violations(history)), "\n".join(map(str, found[:20]))
    ended = [run for run in history.runs if run.ended is not None]
    assert {run.frame for run in ended} == set(range(FRAMES))
    repeated = len(ended) - FRAMES
    assert repeated <= runs_max, f"{repeated} frames ran again"
    return {row["frame"]: row for row in await farm.database.rows(LOSSES)}


@pytest.mark.slow("a lost worker is detected after seconds")
@pytest.mark.parametrize("task", KINDS)
async def test_killed_worker_leaves_one_loss_per_series_and_the_rest_run_again(farm, task):
    await farm.submit(task, NAP_S, frames=FRAMES)
    rows = await in_series(farm)
    assert sum(row["cores"] for row in rows) == 100, "one charge for all of them"
    [worker] = farm.workers
    await worker.kill()
    left = [row["token"] for row in await farm.database.rows(BOOKED)]
    await farm.add_worker("other", slots=1)
    losses = await check(farm, runs_max=len(left))
    assert sum(row["lost"] for row in losses.values()) == 1
    assert sum(row["retried"] for row in losses.values()) == 1


@pytest.mark.slow("a lost worker is detected after seconds")
@pytest.mark.parametrize("task", KINDS)
async def test_paused_worker_that_is_given_up_ends_no_frame_of_its_series_twice(farm, task):
    await farm.submit(task, NAP_S, frames=FRAMES)
    rows = await in_series(farm)
    [worker] = farm.workers
    worker.send(signal.SIGSTOP)
    await farm.add_worker("other", slots=1)
    await until(lambda: farm.is_lost(worker.name), within_s=LOST_WITHIN_S, what="its loss", every_s=POLL_S)
    worker.send(signal.SIGCONT)
    losses = await check(farm, runs_max=len(rows))
    assert sum(row["lost"] for row in losses.values()) == 1


@pytest.mark.slow("a lost worker is detected after seconds")
@pytest.mark.parametrize("task", KINDS)
async def test_worker_that_is_paused_briefly_goes_on_with_its_series(farm, task):
    await farm.submit(task, NAP_S, frames=FRAMES)
    await in_series(farm)
    [worker] = farm.workers
    worker.send(signal.SIGSTOP)
    before = await farm.database.rows(BOOKED)
    worker.send(signal.SIGCONT)
    assert before
    assert not await check(farm, runs_max=0)


@pytest.mark.slow("a worker that its task kills is detected after seconds, several times")
@pytest.mark.timeout(180)
async def test_frame_that_kills_its_worker_costs_the_others_of_its_series_no_retry(farm):
    """It is in a series with short frames, and found after as many losses as it may have."""
    [worker] = farm.workers
    layer = {"retries": {"lost": 2}}
    job = await farm.submit("nap-or-die", FRAMES // 2, frames=FRAMES, ends=("FAILED",), layer=layer)

    async def ended():
        if not worker.alive:
            await worker.start()
        return await farm.database.value(ENDED, job)

    await until(ended, within_s=100, what="the end of the job", every_s=POLL_S)
    await farm.quiet()
    history = await farm.history()
    assert not (found := violations(history)), "\n".join(map(str, found[:20]))
    failed = [end.frame for end in history.ends if end.state == "FAILED"]
    assert failed == [FRAMES // 2]

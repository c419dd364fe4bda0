"""`rota.testing`: Rota in memory, with the values, outcomes and times of a real one."""

import asyncio
import tomllib
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from uuid import UUID

import msgspec
import pytest

from rota import (
    Fatal,
    JobCancelled,
    JobFailed,
    JobTimedOut,
    LayerSpec,
    NotEnded,
    Retries,
    Retry,
    Rota,
    Submission,
    context,
)
from rota.model.errors import IdempotencyConflict, InvalidInput
from rota.testing import MovableClock, inline, manual

NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)
pytest_plugins = ["pytester"]
app = Rota()
attempts = []
began = asyncio.Event()


class Shot(msgspec.Struct):
    name: str
    id: UUID


@app.task
async def name_of(shot: Shot) -> str:
    return shot.name


@app.task
def square(value: int) -> int:
    return value * value


@app.task(retries=Retries(most=2, first_s=10.0))
async def flaky(fails: int) -> int:
    attempts.append(context().attempt)
    context().log(f"attempt {context().attempt}")
    if context().attempt <= fails:
        raise ValueError("no luck")
    return context().attempt


@app.task
async def gives_up():
    raise Fatal("never")


@app.task
async def twice(value: int) -> int:
    job = await square.submit(value)
    return 2 * await job.result()


@app.task
async def lies() -> int:
    return "text"  # type: ignore[return-value]


@app.task
def leaves():
    (context().folder / "a.txt").write_text("left")
    context().artifact("a.txt")


@app.task
async def hangs():
    began.set()
    while not context().cancelled:  # noqa: ASYNC110 - as tasks that poll for cancellation do
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _fresh():
    attempts.clear()


async def test_inline_runs_a_submitted_job_at_once():
    with inline() as rehearsal:
        job = await square.submit(12)
        assert await job.result() == 144
        assert [event.state async for event in job.events()] == [
            "PENDING",
            "SCHEDULED",
            "DISPATCHED",
            "RUNNING",
            "SUCCEEDED",
        ]
        assert await rehearsal.drain() == 0, "no job is left to run"


async def test_values_are_converted_as_for_a_worker():
    with inline():
        shot = Shot("a", UUID(int=5))
        job = await name_of.submit(shot)
        assert await job.result() == "a"
        wrong = await name_of.submit({"name": 5})
        with pytest.raises(JobFailed, match="The task cannot be called: shot does not fit: Expected `str`") as raised:
            await wrong.result()
        assert (raised.value.reason, raised.value.frame, raised.value.attempt) == ("bad_input", 0, 1)
        with pytest.raises(InvalidInput, match="does not match the return type of its task: Expected `int`, got `str`"):
            await (await lies.submit()).result()


async def test_map_returns_results_in_the_order_of_its_items():
    with inline():
        job = await square.map(range(5))
        assert await job.result() == [0, 1, 4, 9, 16]
        assert await app.job(job.id).result() == [0, 1, 4, 9, 16]


async def test_submit_many_is_atomic():
    with manual() as rehearsal:
        jobs = await square.submit_many([square.call(2), square.options(name="three").call(3)])
        assert await rehearsal.drain() == 2
        assert [await job.result() for job in jobs] == [4, 9]
        with pytest.raises(InvalidInput, match="not a valid priority"):
            await square.submit_many([square.call(2), square.options(priority=77).call(3)])
        assert len(rehearsal.submitted(square)) == 2


async def test_task_may_submit_and_wait_for_other_jobs():
    with inline() as rehearsal:
        assert await (await twice.submit(3)).result() == 18
        rehearsal.assert_submitted(square, 3)


async def test_retries_run_at_once_inline_and_by_the_clock_otherwise():
    with inline():
        assert await (await flaky.submit(2)).result() == 3
    with manual() as rehearsal:
        job = await flaky.submit(2)
        assert await rehearsal.drain() == 1
        assert await rehearsal.drain() == 0, "the retry delay is not over"
        with pytest.raises(NotEnded, match="SCHEDULED in a test"):
            await job.result()
        rehearsal.clock.advance(timedelta(minutes=1))
        assert await rehearsal.drain() == 1
        rehearsal.clock.advance(60)
        assert await rehearsal.drain() == 1
        assert await job.result() == 3
        states = [entry.state.value for entry in (await job.get()).history]
    assert states == ["PENDING", *["SCHEDULED", "DISPATCHED", "RUNNING"] * 3, "SUCCEEDED"]


async def test_job_failure_has_the_error_and_its_traceback():
    with inline():
        job = await flaky.submit(5)
        with pytest.raises(JobFailed, match="ValueError: no luck") as raised:
            await job.result()
    failure = raised.value
    assert (failure.code, failure.reason, failure.attempt, failure.job) == ("job_failed", "exception", 3, job.id)
    assert failure.traceback.startswith("Traceback (most recent call last):")
    assert 'raise ValueError("no luck")' in failure.traceback
    assert "rota/worker" not in failure.traceback
    assert attempts == [1, 2, 3]


async def test_fatal_error_is_not_retried_and_logs_are_kept_per_attempt():
    with inline():
        with pytest.raises(JobFailed, match="Fatal: never"):
            await (await gives_up.options(retries=5).submit()).result()
        job = await flaky.submit(1)
        assert "".join([line async for line in job.logs()]) == "attempt 2\n"
        assert "ValueError" in "".join([line async for line in job.logs(attempt=1)])


async def test_time_is_controlled_by_the_test():
    with manual(MovableClock(NOON)) as rehearsal:
        later = await square.schedule(at=NOON + timedelta(hours=1)).submit(2)
        strict = await square.schedule(at="2h").options(deadline="90min").submit(3)
        impatient = await square.schedule(at="1h").options(max_wait=60).submit(4)
        assert await rehearsal.drain() == 0
        assert [why.code for why in (await later.explain()).reasons] == ["deferred"]
        rehearsal.clock.move_to(NOON + timedelta(hours=1, minutes=2))
        assert [why.code for why in (await later.explain()).reasons] == ["queued"]
        assert await rehearsal.drain() == 1
        assert await later.result() == 4
        with pytest.raises(JobFailed, match="max_wait_expired"):
            await impatient.result()
        rehearsal.clock.advance(3600)
        await rehearsal.drain()
        with pytest.raises(JobTimedOut, match="deadline_expired"):
            await strict.result()
        with pytest.raises(InvalidInput, match="cannot go back"):
            rehearsal.clock.advance(-1)


async def test_equal_idempotency_keys_give_one_job():
    with manual() as rehearsal:
        keyed = square.options(key="once")
        first, again = await keyed.submit(2), await keyed.submit(2)
        assert (first, first.already, again.already) == (again, False, True)
        with pytest.raises(IdempotencyConflict, match="'once' was used"):
            await keyed.submit(3)
        assert await rehearsal.drain() == 1


async def test_job_waits_for_its_dependencies_and_follows_after_failed():
    with manual() as rehearsal:
        first, bad = await square.submit(2), await gives_up.submit()
        good = await square.options(after=[first, first.sync]).submit(3)
        assert await good.state() == "PENDING"
        assert [why.code for why in (await good.explain()).reasons] == ["waiting_on_job"]
        cancelled = await square.options(after=[first, bad]).submit(4)
        chained = await square.options(after=[cancelled]).submit(5)
        failed = await square.options(after=[bad.id], after_failed="fail").submit(6)
        run = await square.options(after=[bad, first], after_failed="run").submit(7)
        await rehearsal.drain()
        ends = [str(await job.state()) for job in (good, cancelled, chained, failed, run)]
        assert ends == ["SUCCEEDED", "CANCELLED", "CANCELLED", "FAILED", "SUCCEEDED"]
        with pytest.raises(JobCancelled, match="job_before_failed"):
            await chained.result()
        with pytest.raises(InvalidInput, match="There is no job"):
            await square.options(after=[UUID(int=1)]).submit(1)


async def test_job_with_the_highest_priority_runs_first():
    with manual() as rehearsal:
        order = []
        probe = Rota()

        @probe.task
        async def note(name: str):
            order.append(name)

        await note.options(priority=1).submit("low")
        await note.options(priority=8).submit("high")
        await rehearsal.drain()
        assert order == ["high", "low"]


async def test_cancel_ends_a_waiting_job_and_signals_a_running_one():
    with manual() as rehearsal:
        waiting, running = await square.submit(2), await hangs.submit()
        assert await waiting.cancel() is True
        assert await waiting.cancel() is False
        with pytest.raises(JobCancelled):
            await waiting.result()
        draining = asyncio.create_task(rehearsal.drain())
        await began.wait()
        assert await running.state() == "RUNNING"
        assert await running.cancel() is True
        await draining
        assert await running.wait() == "CANCELLED"


async def test_assert_submitted_checks_task_and_arguments():
    with manual() as rehearsal:
        rehearsal.assert_not_submitted(square)
        job = await square.submit(value=7)
        await square.map([1, 2])
        assert rehearsal.assert_submitted(square) == job
        assert rehearsal.assert_submitted(square, 7) == job
        rehearsal.assert_submitted(square, 2)
        rehearsal.assert_not_submitted(square, 8)
        rehearsal.assert_not_submitted(flaky)
        with pytest.raises(AssertionError, match=r"square was not submitted with \{'value': 9\}.*\{'value': 7\}"):
            rehearsal.assert_submitted(square, value=9)
        with pytest.raises(AssertionError, match="was submitted"):
            rehearsal.assert_not_submitted(square)


async def test_artifacts_of_a_frame_are_available():
    with inline() as rehearsal:
        assert rehearsal.artifacts(await leaves.submit()) == {"a.txt": b"left"}


async def test_jobs_that_submit_each_other_endlessly_fail_the_drain(monkeypatch):
    monkeypatch.setattr("rota.testing.in_memory.DRAIN_ATTEMPTS_MAX", 50)
    endless = Rota()

    @endless.task
    async def again():
        await again.submit()

    with manual() as rehearsal:
        await again.submit()
        with pytest.raises(AssertionError, match="endlessly"):
            await rehearsal.drain()


async def test_retry_delay_of_a_task_is_respected():
    app = Rota()

    @app.task(retries=1)
    async def later() -> int:
        if context().attempt == 1:
            raise Retry("not now", after=30)
        return 1

    with manual() as rehearsal:
        job = await later.submit()
        await rehearsal.drain()
        rehearsal.clock.advance(29)
        assert await rehearsal.drain() == 0
        rehearsal.clock.advance(1)
        assert await rehearsal.drain() == 1
        assert await job.result() == 1


async def test_submit_frames_runs_the_call_once_per_frame():
    app = Rota()

    @app.task
    async def draw(scene: str) -> str:
        return f"{scene}.{context().frame}"

    with inline():
        job = await draw.submit_frames("1-7x3", "pond")
        assert await job.result() == ["pond.1", "pond.4", "pond.7"]
        assert await (await draw.submit_frames(1, "sea")).result() == ["sea.0"]
        with pytest.raises(InvalidInput, match="frame"):
            await draw.submit_frames("7-1x", "pond")


async def test_job_retry_runs_only_the_failed_frames_as_a_new_job():
    app, broken = Rota(), {2, 4}

    @app.task
    async def check(value: int) -> int:
        if value in broken:
            raise Fatal("broken")
        return value * 10

    with inline():
        job = await check.map([1, 2, 3, 4])
        with pytest.raises(JobFailed):
            await job.result()
        broken.clear()
        again = await job.retry()
        assert await again.result() == [20, 40]
        assert (await again.get()).labels == {"retry_of": str(job.id)}
        with pytest.raises(InvalidInput, match="no failed frame"):
            await job.retry()
        assert await (await job.retry(every_frame=True)).result() == [10, 20, 30, 40]


async def test_raw_submission_is_accepted():
    with inline():
        layer = LayerSpec(task="name_of", input={"args": [{"name": "a", "id": str(UUID(int=1))}]})
        assert await (await app.submit(Submission(show="film", layers=(layer,)))).result() == "a"
        with pytest.raises(InvalidInput, match="is a command"):
            await app.submit(Submission(show="film", layers=(LayerSpec(argv=("true",)),)))


def test_pytest_plugin_provides_both_fixtures(pytester, monkeypatch):
    """Load the plugin by name, so that the test uses this tree and not an installed version."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
        from rota import Rota
        app = Rota()

        @app.task
        def double(value: int) -> int:
            return 2 * value

        def test_inline(rota_inline):
            assert double.sync.submit(2).result() == 4
            rota_inline.assert_submitted(double, 2)

        def test_manual(rota_manual):
            job = double.sync.submit(3)
            assert rota_manual.drain_sync() == 1
            assert job.result() == 6
        """
    )
    ended = pytester.runpytest_subprocess("-p", "rota.pytest_plugin", "-p", "no:cacheprovider")
    ended.assert_outcomes(passed=2)


def test_pytest_plugin_is_registered_as_an_entry_point():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    [module] = project["entry-points"]["pytest11"].values()
    assert callable(import_module(module).rota_inline)

"""Submissions of tasks: options become fields, and errors are raised before anything is sent."""

import asyncio
import os
import signal
from datetime import UTC, datetime, timedelta

import pytest

from rota import NotEnded, Rota
from rota.client.connections import TransportPool
from rota.model.errors import InvalidInput
from rota.model.jobs.submission import Budget, LayerSpec, RetrySpec, Submission
from rota.sdk.sync import SyncTask
from rota.testing import MovableClock, inline, manual

NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)
app = Rota(show="film", actor="web")


@app.task(topic="render", cores=2, memory="1GiB", timeout=60)
def render(scene: str, frame: int = 1) -> int:
    return frame


@app.task
async def ping():
    return None


def submission_of(task, *args, **kwargs):
    [one] = task.submissions([task.call(*args, **kwargs)])
    return one


def test_plain_submission_has_the_declared_options():
    assert submission_of(render, "comp", frame=2) == Submission(
        show="film",
        topic="render",
        actor_id="web",
        actor_type="service",
        layers=(
            LayerSpec(
                task="render",
                cores=2.0,
                memory="1024MiB",
                timeout_s=60.0,
                input={"args": ["comp"], "kwargs": {"frame": 2}},
            ),
        ),
    )


def test_options_override_declared_values_and_accumulate():
    customized = render.options(cores=0.5, gpus=1, memory="2GiB", retries=3, timeout="2min", priority="BATCH").options(
        show="ads",
        folder="shots",
        dept="fx",
        name="night",
        topic="gpu",
        labels={"team": "fx"},
        requires=["cuda"],
        env={"A": "1"},
        key="k",
        deadline="1h",
        max_wait=timedelta(minutes=5),
        max_cores=8,
        max_gpus=2,
        artifacts=["*.png"],
    )
    one = submission_of(customized, "comp")
    [layer] = one.layers
    assert (one.show, one.folder, one.dept, one.name, one.topic) == ("ads", "shots", "fx", "night", "gpu")
    assert (one.labels, one.requires, one.env) == ({"team": "fx"}, ("cuda",), {"A": "1"})
    assert (one.priority, one.idempotency_key, one.max_wait_s) == ("BATCH", "k", 300.0)
    assert (one.budget, one.max_cores, one.max_gpus) == (Budget(deadline_ms=3_600_000), 8, 2)
    assert (layer.cores, layer.gpus, layer.memory, layer.timeout_s) == (0.5, 1, "2GiB", 120.0)
    assert (layer.retries, layer.artifacts) == (RetrySpec(most=3), ("*.png",))
    assert submission_of(render, "comp").folder == "default", "the task itself is not changed"
    assert customized("comp") == 1, "it is still callable"


def test_relative_times_use_the_clock_of_the_test():
    with manual(MovableClock(NOON)):
        later = submission_of(ping.schedule(at=timedelta(hours=1)))
        assert later.run_at == NOON + timedelta(hours=1)
        assert submission_of(ping.schedule(at=NOON)).run_at == NOON
        assert submission_of(ping.options(deadline=NOON + timedelta(seconds=2))).budget.deadline_ms == 2000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run_at": NOON.replace(tzinfo=None)}, "has no time zone"),
        ({"run_at": -1}, "not a valid start delay"),
        ({"deadline": datetime(2020, 1, 2, tzinfo=UTC)}, "has passed"),
        ({"max_wait": -5}, "not a valid max_wait"),
        ({"timeout": float("nan")}, "not a valid timeout"),
        ({"prio": 5}, "no option 'prio': did you mean priority"),
        ({"colour": "red"}, "no option 'colour': use one of name, show"),
    ],
)
def test_invalid_options_are_refused_with_a_reason(options, message):
    with pytest.raises(InvalidInput, match=message):
        submission_of(ping.options(**options))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "missing a required argument: 'scene'"),
        (("a", 1, 2), "too many positional arguments"),
        ((object(),), "the type object is not supported"),
    ],
)
def test_invalid_arguments_are_refused_before_sending(args, message):
    with pytest.raises(InvalidInput, match=f"render cannot be submitted with these arguments: {message}"):
        render.call(*args)
    with pytest.raises(InvalidInput, match="no items to map"):
        render.mapping([])


def test_job_of_another_process_is_found_by_its_id():
    assert render.job("0192f0c1-2b3a-7c4d-8e5f-60718293a4b5") == app.job("0192f0c1-2b3a-7c4d-8e5f-60718293a4b5")
    with pytest.raises(InvalidInput, match="is not a valid job id"):
        render.job("mine")


def test_options_of_a_call_override_those_of_the_batch():
    batch = render.options(priority=3, key="all")
    low, own = batch.submissions([render.call("a"), render.options(priority=7).call("b")])
    assert (low.priority, own.priority, own.idempotency_key) == (3, 7, "all")


def test_sync_facade_inside_an_event_loop_is_refused():
    async def inside():
        ping.sync.submit()

    with pytest.raises(InvalidInput, match="runs an event loop"):
        asyncio.run(inside())


def test_sync_facade_accepts_the_same_options():
    facade = render.sync.options(priority=2).schedule(at=5)
    assert isinstance(facade, SyncTask)
    with inline() as rehearsal:
        job = facade.submit("comp", frame=3)
        with pytest.raises(NotEnded, match="drain"):
            job.result()
        rehearsal.clock.advance(5)
        assert rehearsal.drain_sync() == 1
        assert job.result() == 3
        assert (job.state(), job.wait(), job.get().priority) == ("SUCCEEDED", "SUCCEEDED", 2)
        assert [str(event.state) for event in job.events()][-1] == "SUCCEEDED"
        assert ("".join(job.logs()), job.cancel(), job.explain().reasons, job.already) == ("", False, (), False)
        several = facade.submit_many([facade.call("a"), facade.call("b", frame=2)])
        assert facade.job(several[0].id).id == several[0].id == several[0].unsync.id == app.sync.job(several[0].id).id


def test_map_of_the_sync_facade_returns_a_list():
    @Rota().task
    def square(value: int) -> int:
        return value * value

    with inline():
        assert square.sync.map([1, 2, 3]).result() == [1, 4, 9]


def test_unknown_url_scheme_is_refused_on_first_use():
    elsewhere = Rota("gopher://here")

    @elsewhere.task
    def nothing(): ...

    with pytest.raises(InvalidInput, match="'gopher' is not a supported URL scheme"):
        nothing.sync.submit()


def test_child_forked_while_another_thread_opens_a_connection_does_not_deadlock():
    async def opened():
        return clients.current()

    clients = TransportPool({}, lambda: "a transport of its own")
    with clients._lock:
        child = os.fork()
        if not child:
            signal.alarm(5)
            os._exit(asyncio.run(opened()) != "a transport of its own")
    assert os.waitpid(child, 0)[1] == 0


async def waits():
    return 1


def computes():
    return 1


@pytest.mark.parametrize(
    ("options", "waiting", "computing"),
    [({}, 10, 100), ({"async_cores": "0.25", "sync_cores": 2}, 25, 200)],
    ids=["default", "of the app"],
)
def test_task_without_cores_asks_for_those_of_its_kind(options, waiting, computing):
    app = Rota(**options)
    tasks = [app.task(each) for each in (waits, computes)]
    named = [app.task(name=f"{each.__name__}.named", cores=0.5)(each) for each in (waits, computes)]
    assert [task.work.cores for task in (*tasks, *named)] == [waiting, computing, 50, 50]


def test_app_with_invalid_default_cores_is_refused():
    with pytest.raises(InvalidInput, match="'-1' is not a valid amount of cores"):
        Rota(async_cores="-1")

"""Leader loops with a manual clock: intervals, retries, isolation of failures, and cancellation."""

import asyncio
from functools import partial
from itertools import pairwise

import pytest

from rota.infra.lease import LeaderLoop, LeaderStep, Leases
from rota.infra.lease.leader_loop import RETRY_BACKOFF, STEP_FAILURES
from rota.infra.service.lifecycle import EndedEarly
from rota.model.errors import (
    LeaseLost,
    NatsUnavailable,
    PostgresBusy,
    PostgresUnavailable,
    RedisUnavailable,
    RotaError,
    SetupFailed,
    StaleFence,
)
from tests.support.waiting import until

NEVER_S = 3600.0
GONE = NatsUnavailable("gone")


class ManualClock:
    """Time passes only in `run_until` and in the steps."""

    def __init__(self):
        self.now_s = 0.0
        self.sleepers = []

    def monotonic(self):
        return self.now_s

    async def sleep(self, seconds):
        if not seconds:
            return
        wakes = asyncio.get_running_loop().create_future()
        self.sleepers.append((self.now_s + seconds, wakes))
        await wakes

    async def run_until(self, end_s, tasks=1):
        """Wake the sleepers one after the other; `tasks` of them sleep when nothing is due."""
        while True:
            await until(lambda: len(self.sleepers) == tasks, what="all tasks to sleep")
            first = min(self.sleepers, key=lambda each: each[0])
            if first[0] > end_s:
                return
            self.sleepers.remove(first)
            self.now_s = first[0]
            first[1].set_result(None)


class Loop(LeaderLoop):
    def __init__(self, clock, *steps, **options):
        super().__init__(Leases(None, "me", clock), "chair", kind="test", **options)
        self.clock = clock
        self.steps = steps
        self.runs, self.done, self.failed = [], [], []
        self.ended = 0

    def begin_term(self, lease):
        return [*self.steps]

    def end_term(self):
        self.ended += 1

    def on_step_done(self, step, took_s):
        self.done.append((step, took_s))

    def on_step_failed(self, step, error):
        self.failed.append((step, error))
        super().on_step_failed(step, error)

    async def run_step(self, step):
        self.runs.append((round(self.clock.now_s, 3), step.name))
        await super().run_step(step)

    def times(self, name):
        return [at for at, each in self.runs if each == name]


class Leading:
    """`async with Leading(loop)`: one term, cancelled at the end."""

    def __init__(self, loop):
        self.loop = loop

    async def __aenter__(self):
        self.task = asyncio.create_task(self.loop._lead(None))
        return self.task

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.wait([self.task])
        assert self.loop.ended == 1


@pytest.fixture
def clock():
    return ManualClock()


async def nothing():
    return None


async def fail(errors):
    """Raise the errors, one per call; then succeed."""
    if errors:
        raise errors.pop(0)


async def until_cancelled(began=None):
    if began is not None:
        began.set()
    await asyncio.Event().wait()


def failing(*errors):
    return partial(fail, list(errors))


async def term(loop):
    """A term that ends by itself."""
    async with asyncio.timeout(5):
        await loop._lead(None)


async def test_steps_run_at_once_in_their_order_and_then_at_their_intervals(clock):
    steps = [LeaderStep(name, interval_s, nothing) for name, interval_s in (("b", 2.0), ("a", 1.0), ("c", 3.0))]
    loop = Loop(clock, *steps)
    async with Leading(loop):
        await clock.run_until(4.0)
    assert loop.runs == [
        *((0.0, "b"), (0.0, "a"), (0.0, "c"), (1.0, "a"), (2.0, "b"), (2.0, "a"), (3.0, "a"), (3.0, "c")),
        *((4.0, "b"), (4.0, "a")),
    ]


async def test_step_that_is_not_run_at_once_waits_for_one_interval(clock):
    loop = Loop(clock, LeaderStep("a", 1.0, nothing), LeaderStep("late", 2.5, nothing, at_once=False))
    async with Leading(loop):
        await clock.run_until(6.0)
    assert loop.times("late") == [2.5, 5.0]


async def test_new_term_starts_the_intervals_again(clock):
    loop = Loop(clock)
    for terms in (1, 2):
        loop.steps = LeaderStep("a", 10.0, nothing), LeaderStep("late", 2.0, nothing, at_once=False)
        leading = asyncio.create_task(loop._lead(None))
        await clock.run_until(clock.now_s + 3.0)
        leading.cancel()
        await asyncio.wait([leading])
        clock.sleepers.clear()
        assert loop.ended == terms
    assert (loop.times("a"), loop.times("late")) == ([0.0, 2.0], [2.0, 4.0])


async def test_interval_is_measured_from_the_end_of_the_round(clock):
    async def slow():
        clock.now_s += 0.4

    loop = Loop(clock, LeaderStep("slow", 1.0, slow), LeaderStep("quick", 1.0, nothing))
    async with Leading(loop):
        await clock.run_until(3.0)
    assert loop.times("slow") == [0.0, 1.4, 2.8]
    assert loop.times("quick") == [0.4, 1.8, 3.2]
    assert loop.done[0] == ("slow", pytest.approx(0.4))


@pytest.mark.parametrize(
    "error",
    [
        GONE,
        PostgresUnavailable("gone"),
        PostgresBusy("lock"),
        SetupFailed("no right to do this"),
        ExceptionGroup("two", [GONE, PostgresBusy("lock")]),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("parallel", [False, True])
async def test_failed_step_is_counted_and_retried_and_the_others_go_on(clock, error, parallel):
    before = STEP_FAILURES.labels("test", "b")._value.get()
    steps = [
        LeaderStep("a", 1.0, nothing),
        LeaderStep("b", 100.0, failing(error, error)),
        LeaderStep("c", 1.0, nothing),
    ]
    loop = Loop(clock, *steps, parallel=parallel)
    async with Leading(loop) as leading:
        await clock.run_until(20.0, tasks=3 if parallel else 1)
        assert not leading.done()
    assert len(loop.times("a")) == len(loop.times("c")) == 21
    assert len(loop.times("b")) == 3
    assert [name for name, _ in loop.failed] == ["b", "b"]
    assert not any(isinstance(each, ExceptionGroup) for _, each in loop.failed), "the cause is reported"
    assert STEP_FAILURES.labels("test", "b")._value.get() == before + 2


async def test_step_whose_task_group_fails_is_retried(clock):
    """Before Python 3.13 such a TaskGroup leaves its task with a cancellation that nobody requested."""
    errors = [GONE]

    async def work():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail(errors))

    loop = Loop(clock, LeaderStep("a", 1.0, work), parallel=True)
    async with Leading(loop):
        await clock.run_until(1.0)
    assert (loop.times("a"), loop.failed, len(loop.done)) == ([0.0, 1.0], [("a", GONE)], 1)


async def test_failing_step_is_retried_with_growing_pauses_until_it_succeeds(clock):
    loop = Loop(clock, LeaderStep("a", NEVER_S, failing(*[GONE] * 8)))
    async with Leading(loop):
        await clock.run_until(2 * NEVER_S)
    times = loop.times("a")
    pauses = [after - before for before, after in pairwise(times)]
    for streak, pause_s in enumerate(pauses[:8], 1):
        assert RETRY_BACKOFF.pause_s(streak, 0.0) <= pause_s + 0.001 <= RETRY_BACKOFF.pause_s(streak, 1.0) + 0.002
    assert pauses[8] == pytest.approx(NEVER_S)


async def test_failure_does_not_make_a_step_rarer_than_its_interval(clock):
    loop = Loop(clock, LeaderStep("a", 0.5, failing(*[GONE] * 100)))
    async with Leading(loop):
        await clock.run_until(5.0)
    assert loop.times("a") == [at / 2 for at in range(11)]


@pytest.mark.parametrize("parallel", [False, True])
async def test_other_error_ends_the_term_and_is_raised_as_it_is(clock, parallel):
    cancelled = []

    async def wait():
        try:
            await until_cancelled()
        finally:
            cancelled.append(True)

    bug = LookupError("bug")
    loop = Loop(clock, LeaderStep("a", 1.0, failing(bug)), LeaderStep("b", 1.0, wait), parallel=parallel)
    with pytest.raises(LookupError) as caught:
        await term(loop)
    assert caught.value is bug
    assert (loop.ended, loop.failed, cancelled) == (1, [], [True] if parallel else [])


@pytest.mark.parametrize("lost", [LeaseLost("lost", lease="chair"), StaleFence("lost", leases=["chair"])])
async def test_loss_of_the_lease_ends_the_term_even_if_all_errors_are_retried(clock, lost):
    loop = Loop(clock, LeaderStep("a", 1.0, failing(lost)), retried=(RotaError,))
    with pytest.raises(type(lost)):
        await term(loop)


async def test_group_with_another_error_is_not_retried(clock):
    mixed = ExceptionGroup("two", [GONE, ExceptionGroup("inner", [LookupError("bug")])])
    with pytest.raises(ExceptionGroup):
        await term(Loop(clock, LeaderStep("a", 1.0, failing(mixed))))


async def test_subclass_chooses_the_errors_to_retry(clock):
    loop = Loop(clock, LeaderStep("a", 1.0, failing(ValueError("busy"))), retried=(ValueError,))
    async with Leading(loop):
        await clock.run_until(1.0)
    assert loop.times("a") == [0.0, 1.0]


async def raise_when_cancelled(began):
    try:
        await until_cancelled(began)
    except asyncio.CancelledError:
        raise RedisUnavailable("gone", address="nowhere") from None


async def fail_in_a_task_group(began):
    """A TaskGroup whose task fails while the group is cancelled raises the failure and not the cancellation."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(raise_when_cancelled(began))


async def swallow_cancellation(began):
    try:
        await until_cancelled(began)
    except asyncio.CancelledError:
        return


@pytest.mark.parametrize("work", [raise_when_cancelled, fail_in_a_task_group, swallow_cancellation])
@pytest.mark.parametrize("parallel", [False, True])
async def test_step_that_fails_while_it_is_cancelled_ends_the_term(clock, work, parallel):
    began = asyncio.Event()
    steps = LeaderStep("a", NEVER_S, partial(work, began)), LeaderStep("b", NEVER_S, nothing)
    loop = Loop(clock, *steps, parallel=parallel)
    leading = asyncio.create_task(loop._lead(None))
    await began.wait()
    leading.cancel()
    done, _ = await asyncio.wait([leading], timeout=5)
    for _ in range(3):
        leading.cancel()
    assert done == {leading}
    assert leading.cancelled()
    assert (loop.failed, loop.ended) == ([], 1)


async def test_step_whose_inner_task_was_cancelled_does_not_end_silently(clock):
    async def work():
        inner = asyncio.create_task(until_cancelled())
        inner.cancel()
        await inner

    loop = Loop(clock, LeaderStep("a", 1.0, work), LeaderStep("b", 1.0, nothing), parallel=True)
    with pytest.raises(EndedEarly):
        await term(loop)


async def test_wake_runs_a_step_before_its_interval_is_over(clock):
    woken = asyncio.Event()
    runs = asyncio.Queue()
    loop = Loop(clock, LeaderStep("a", NEVER_S, partial(runs.put, 1), wake=woken), parallel=True)
    async with asyncio.timeout(5), Leading(loop):
        for _ in range(3):
            await runs.get()
            assert not woken.is_set()
            woken.set()


async def test_wake_during_a_run_runs_the_step_once_more(clock):
    woken = asyncio.Event()
    runs = asyncio.Queue()

    async def work():
        if runs.qsize() == 0:
            woken.set()
        await runs.put(1)

    loop = Loop(clock, LeaderStep("a", NEVER_S, work, wake=woken), parallel=True)
    async with Leading(loop):
        await until(lambda: runs.qsize() == 2, what="the second run")
    assert not woken.is_set()


async def test_wake_interrupts_the_pause_after_a_failure(clock, monkeypatch):
    monkeypatch.setattr("rota.infra.lease.leader_loop.RETRY_BACKOFF", type(RETRY_BACKOFF)(NEVER_S, NEVER_S))
    woken = asyncio.Event()
    loop = Loop(clock, LeaderStep("a", NEVER_S, failing(GONE), wake=woken), parallel=True)
    async with Leading(loop):
        await until(lambda: loop.failed, what="the failure")
        woken.set()
        await until(lambda: loop.done, what="the retry")

"""Async tasks on a real bus: each frame runs once and is reported once, whatever its handler does."""

import sys

import msgspec
import pytest
import structlog

from rota.model.protocol import AssignedRange, Assignment, AttemptStatus, encode
from rota.model.token_ranges import merge_ranges
from rota.worker.data.blob_store import FileStore
from tests.integration.worker.worker_support import serving, task, workers
from tests.support.waiting import until

ONE = 100
STOP_FAST = {"kill_after_s": 0.2}


@pytest.fixture
async def server(nats_url, bus_prefix):
    async with serving(nats_url, bus_prefix) as running:
        yield running


@pytest.fixture
async def start(nats_url, bus_prefix, server, tmp_path):
    async with workers(nats_url, bus_prefix, server, tmp_path) as factory:
        yield factory


def value_of(end):
    return msgspec.msgpack.decode(end.value)


async def test_frames_without_a_value_are_reported_as_one_range(server, start):
    await start()
    token = await server.send("nothing", 512)
    assert await server.ended(token, 512) == [None] * 512
    assert merge_ranges(run for report in server.reports for run in report.done) == [(token, 512)]
    assert len(server.reports) <= 8, "reported as ranges, however often the loop switched tasks"


async def test_values_return_from_handlers_that_await_and_that_do_not(server, start):
    await start()
    end = await server.run("add", args=[2], kwargs={"b": 3})
    assert (end.status, value_of(end)) == (AttemptStatus.SUCCEEDED, 5)
    end = await server.run("naps", args=[0.03])
    assert (end.status, value_of(end)) == (AttemptStatus.SUCCEEDED, 0.03)
    assert end.took_ms >= 30


async def test_handler_context_identifies_its_frame(server, start):
    await start(offer={"gpus": 2})
    ends = await server.run(task("where", gpus=1), 2, attempt=3)
    found = [value_of(end) for end in ends]
    assert [frame[2:4] for frame in found] == [[1, 3], [2, 3]]
    assert {tuple(frame[4]) for frame in found} <= {(0,), (1,)}
    assert len({frame[1] for frame in found}) == 1


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize(
    ("kind", "status", "code", "name"),
    [
        ("value", AttemptStatus.FAILED, "exception", "ValueError"),
        ("fatal", AttemptStatus.FAILED_FATAL, "fatal", "Fatal"),
        ("exit", AttemptStatus.FAILED, "exception", "SystemExit"),
        ("interrupt", AttemptStatus.FAILED, "exception", "KeyboardInterrupt"),
    ],
)
async def test_handler_exception_ends_its_frame_and_not_the_worker(server, start, kind, status, code, name, wait):
    await start()
    end = await server.run("fails", args=[kind, "because password=hunter22", wait])
    assert (end.status, end.code) == (status, code)
    assert end.error == f"{name}: because password=***"
    assert await server.run("nothing") is None


@pytest.mark.parametrize("how", ["group", "gather", "wait_for", "first step"])
@pytest.mark.parametrize("kind", ["exit", "interrupt"])
async def test_exit_in_a_subtask_does_not_end_the_worker(server, start, how, kind):
    running = await start()
    neighbour = await server.send("naps", args=[0.2])
    end = await server.run("exits_in_a_task", args=[how, kind])
    assert (end.status, end.code) == (AttemptStatus.FAILED, "exception")
    assert (await server.ended(neighbour)).status is AttemptStatus.SUCCEEDED
    assert not running.task.done()


async def test_exit_in_an_inspected_subtask_is_an_ordinary_exception(server, start):
    await start()
    end = await server.run("exits_in_a_task", args=["left alone", "exit"])
    assert value_of(end) == "SystemExit: 3"


async def test_handler_can_request_a_delayed_retry(server, start):
    await start()
    end = await server.run("later")
    assert (end.status, end.code, end.after_s) == (AttemptStatus.FAILED_RETRYABLE, "retry", 7.5)


async def test_error_texts_are_truncated_redacted_and_never_raise(server, start):
    await start()
    end = await server.run("fails", args=["value", "x" * 50_000])
    assert len(end.error) <= 10_000
    assert end.error.endswith("(50012 characters in all)")
    assert (await server.run("unspeakable")).error == "Unspeakable: <str() failed with RuntimeError>"
    secret = task("fails", env={"API_TOKEN": "c4nary-value"})
    assert "c4nary" not in (await server.run(secret, args=["value", "got c4nary-value back"])).error


@pytest.mark.parametrize(
    "given",
    [b"\xc1", b"\x05", msgspec.msgpack.encode({"args": 3}), msgspec.msgpack.encode({"args": [1], "more": 1})],
)
async def test_malformed_input_fails_fatally(server, start, given):
    await start()
    ends = await server.run("add", 2, raw=given)
    assert [(end.status, end.code) for end in ends] == [(AttemptStatus.FAILED_FATAL, "bad_input")] * 2


@pytest.mark.parametrize("name", ["add", "sync_add"])
async def test_mismatched_arguments_fail_fatally(server, start, name):
    await start()
    end = await server.run(name, kwargs={"c": 1})
    assert (end.status, end.code) == (AttemptStatus.FAILED_FATAL, "bad_input")


async def test_unknown_task_is_refused(server, start):
    await start()
    ends = await server.run("no_such_task", 2)
    assert [(end.status, end.code) for end in ends] == [(AttemptStatus.REFUSED, "unknown_task")] * 2


@pytest.mark.parametrize(
    ("offer", "work"),
    [
        ({"slots": 3}, {}),
        ({"cores": 300}, {"cores": ONE}),
        ({"gpus": 3}, {"gpus": 1}),
        ({"memory_mb": 300}, {"memory_mb": 100}),
    ],
)
async def test_frames_over_capacity_are_refused_and_capacity_returns(server, start, offer, work):
    await start(offer=offer)
    token = await server.send(task("waits", **work), 5)
    assert [end.code for end in await server.ended(token + 3, 2)] == ["no_room"] * 2
    assert (await server.run(task("nothing", **work))).code == "no_room"
    await server.cancel(token, 3)
    await server.ended(token, 3)
    for _ in range(3):
        assert await server.run(task("nothing", **work), 3) == [None] * 3


async def test_frames_with_the_same_input_do_not_share_changes(server, start):
    await start()
    assert [value_of(end) for end in await server.run("appends", 3, args=[[]])] == [1, 1, 1]
    assert await server.run("expects_nothing_in", 3, args=[[]]) == [None] * 3
    assert [value_of(end) for end in await server.run("marks", 3)] == ["", "", ""]


async def test_handler_runs_in_its_own_task_from_the_first_step(server, start):
    await start()
    ends = await server.run("times_out_inside", 3)
    assert [value_of(end) for end in ends] == ["in time"] * 3
    assert value_of(await server.run("gathers")) == [0, 1, 2]
    first, *others = await server.run("cancels_its_task", 3)
    assert first is None
    assert [value_of(end) for end in others] == ["untouched"] * 2


async def test_redelivered_or_regrouped_message_runs_once(server, start):
    await start()
    token = await server.send("add", 4, args=[1])
    await server.ended(token, 4)
    await server.send("add", 4, args=[1], token=token)
    await server.send("add", 4, args=[1], token=token + 2)
    await server.ended(token + 4, 2)
    assert await server.run("nothing") is None
    assert server.twice == []


async def test_large_results_go_to_the_store_and_large_inputs_come_from_it(server, start, tmp_path):
    store = FileStore(tmp_path / "store")
    await start(store=store)
    for name in ("large", "sync_large"):
        end = await server.run(name, args=[200_000])
        assert (end.status, end.value) == (AttemptStatus.SUCCEEDED, None)
        assert msgspec.msgpack.decode(store.get(end.pointer)) == b"x" * 200_000
    pointer = store.put(msgspec.msgpack.encode({"args": [4]}))
    assert value_of(await server.run("add", pointer=pointer)) == 4
    assert (await server.run("add", pointer=f"file:{'0' * 64}:3")).code == "input_missing"


async def test_large_result_without_a_store_fails_with_a_code(server, start):
    await start()
    end = await server.run("large", args=[70_000])
    assert (end.status, end.code) == (AttemptStatus.FAILED, "result_too_large")
    assert (await server.run("unencodable")).code == "unencodable_result"


async def test_results_over_one_message_size_all_arrive(server, start):
    await start()
    ends = await server.run("large", 60, args=[60_000])
    assert {len(value_of(end)) for end in ends} == {60_000}
    assert 1 < max(len(report.ends) for report in server.reports) < 10


async def test_cancel_stops_its_frame_and_no_other(server, start, tmp_path):
    await start()
    token = await server.send("tidies", args=[str(tmp_path / "note")])
    other = await server.send("naps", args=[0.3])
    await server.began(token)
    await server.cancel(token - 5, 100, reason="nobody wants it")
    end = await server.ended(token)
    assert (end.status, end.code, end.error) == (AttemptStatus.CANCELLED, "cancelled", "nobody wants it")
    assert (tmp_path / "note").read_text() == "tidied"
    assert (await server.ended(other)).status is AttemptStatus.SUCCEEDED


async def test_late_or_early_cancel_changes_nothing(server, start):
    await start()
    token = await server.send("nothing")
    assert await server.ended(token) is None
    await server.cancel(token)
    await server.cancel(token + 1)
    assert await server.run("nothing", token=token + 1) is None
    assert server.twice == []


async def test_frame_over_its_timeout_is_timed_out(server, start):
    await start()
    end = await server.run(task("waits", timeout_s=0.1))
    assert (end.status, end.code) == (AttemptStatus.TIMEOUT, "timeout")
    assert end.took_ms >= 100


async def test_handler_that_ignores_cancellation_is_abandoned(server, start):
    await start()
    token = await server.send(task("deaf", timeout_s=0.05, **STOP_FAST))
    assert (await server.ended(token)).status is AttemptStatus.TIMEOUT
    assert await server.run("nothing") is None
    await until(lambda: sys.modules["worker_tasks"].finished, what="its own end")
    assert await server.run("nothing") is None
    assert server.twice == []


async def test_progress_and_logs_are_published(server, start):
    await start()
    token = await server.send("tells", args=[50])
    await server.began(token)
    await server.ended(token)
    assert {50.0: "half way"} in [
        dict([update.percent[token]]) for update in server.progress if token in update.percent
    ]
    assert await server.logged(token, "log") == (b"a line\n", 0)
    token = await server.send("says", 2)
    assert await server.ended(token, 2) == [None, None]
    assert await server.logged(token + 1, "log") == (b"at once\n", 0)


async def test_frames_that_end_at_once_are_never_reported_as_started(server, start):
    await start()
    await server.run("nothing", 100)
    token = await server.send("naps", args=[0.2])
    await server.began(token)
    assert [update.started for update in server.progress] == [[(token, 1)]]


async def test_undecodable_messages_are_ignored(server, start):
    await start()
    portion = AssignedRange(1, 1, server.workers[0], server.workers[0], 1, 1, 0)
    invalid = [
        b"\xc1",
        b"",
        encode(Assignment([], [portion])),
        encode(Assignment([task("nothing")], [msgspec.structs.replace(portion, n=2**40)])),
        encode(Assignment([task("nothing")], [msgspec.structs.replace(portion, n=0)])),
    ]
    for data in invalid:
        await server.publish(data)
    for subject in ("sys.job.cancel", "sys.worker.told"):
        await server.bus.publish_core(subject, b"\xc1")
    assert await server.run("nothing") is None
    assert 1 not in server.ends


async def test_forking_handler_reports_once(server, start):
    await start()
    assert value_of(await server.run("forks")) is True
    assert server.twice == []


async def test_handler_that_blocks_the_loop_is_named_and_heartbeats_continue(server, start):
    await start()
    with structlog.testing.capture_logs() as logs:
        beats = len(server.beats())
        token = await server.send("holds_the_loop", args=[2.0])
        await server.ended(token)
    (blocked,) = [line for line in logs if line["event"] == "event_loop_blocked"]
    assert "holds_the_loop" in blocked["at"]
    assert len(server.beats()) >= beats + 5


async def test_fast_frames_are_not_delayed_by_slow_ones(server, start):
    await start()
    slow = await server.send("naps", 20, args=[0.4])
    assert await server.run("nothing", 50) == [None] * 50
    assert slow not in server.ends
    await server.ended(slow, 20)


async def test_heartbeats_list_held_frames_and_the_last_report(server, start):
    await start()
    token = await server.send("waits", 3)
    await server.held(token + 2)
    assert server.beats()[-1].held == [(token, 3)]
    await server.run("nothing")
    await server.cancel(token, 3)
    await server.ended(token, 3)
    await until(lambda: server.beats()[-1].held == [], what="an empty heartbeat")
    last = server.beats()[-1]
    assert last.reported >= 2
    assert (last.pool, last.slots, last.draining) == ("local", 1000, False)
    numbers = [beat.number for beat in server.beats()]
    assert numbers == sorted(set(numbers))

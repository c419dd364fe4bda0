"""Sync tasks in real processes: whatever a task does to its process, the worker and its other frames survive."""

import asyncio
import os
import signal

import msgspec
import pytest

from rota.model.protocol import AttemptStatus
from tests.integration.worker.worker_support import ROOT, alive, processes_of, serving, task, workers
from tests.support.waiting import until


@pytest.fixture
async def server(nats_url, bus_prefix):
    async with serving(nats_url, bus_prefix) as running:
        yield running


@pytest.fixture
async def start(nats_url, bus_prefix, server, tmp_path):
    before = set(processes_of())
    async with workers(nats_url, bus_prefix, server, tmp_path) as factory:
        yield factory
    assert set(processes_of()) <= before, "processes were left behind"


def value_of(end):
    return msgspec.msgpack.decode(end.value)


async def test_values_return_and_the_context_identifies_the_frame(server, start):
    await start()
    ends = await server.run("sync_add", 6, args=[2], kwargs={"b": 3})
    assert [value_of(end) for end in ends] == [5] * 6
    found = await server.run(task("sync_where", env={"COLOUR": "blue"}), 2, attempt=4)
    assert [value_of(end) for end in found] == [[1, 4, "1", "blue", str(ROOT)], [2, 4, "2", "blue", str(ROOT)]]
    assert value_of(await server.run("sync_where"))[3] == ""


async def test_processes_are_few_and_reused(server, start):
    await start()
    ends = await server.run("sync_pid", 30)
    assert 1 <= len({value_of(end) for end in ends}) <= 2


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("value", AttemptStatus.FAILED, "exception"),
        ("fatal", AttemptStatus.FAILED_FATAL, "fatal"),
        ("exit", AttemptStatus.FAILED, "exception"),
        ("interrupt", AttemptStatus.FAILED, "exception"),
    ],
)
async def test_exceptions_are_reported_without_secrets_and_logged_with_traceback(server, start, kind, status, code):
    await start()
    token = await server.send("sync_fails", args=[kind, "token: abcdef"])
    end = await server.ended(token)
    assert (end.status, end.code) == (status, code)
    assert end.error.endswith(": token: ***")
    if code == "exception":
        assert b"Traceback" in (await server.logged(token, "stderr"))[0]


@pytest.mark.parametrize(("name", "args", "code"), [("exits", [3], "exit_status"), ("kills_itself", [], "signal")])
async def test_exiting_process_fails_only_its_own_frame(server, start, name, args, code):
    await start()
    slow = await server.send("sleeps", args=[0.5])
    end = await server.run(name, args=args)
    assert (end.status, end.code) == (AttemptStatus.FAILED, code)
    assert value_of(await server.run("sync_add", args=[1])) == 1
    assert await server.ended(slow) is None


async def test_process_killed_from_outside_is_replaced(server, start):
    await start()
    pid = value_of(await server.run("sync_pid"))
    token = await server.send("sleeps", args=[60])
    await server.began(token)
    os.kill(pid, signal.SIGKILL)
    end = await server.ended(token)
    assert (end.status, end.code) == (AttemptStatus.FAILED, "signal")
    assert end.error == "The task's process exited: It was ended by SIGKILL."
    assert value_of(await server.run("sync_pid")) != pid


async def test_killed_idle_process_costs_no_frame(server, start):
    await start(processes=1)
    pid = value_of(await server.run("sync_pid"))
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not alive(pid), what="its end")
    assert value_of(await server.run("sync_pid")) != pid


async def test_large_output_is_truncated_to_head_and_tail(server, start):
    await start(output_max=100_000)
    token = await server.send("prints", args=[1000, 100_000])
    assert await server.ended(token) is None
    data, dropped = await server.logged(token)
    assert len(data) == 100_000
    assert dropped == 1000 * 100_000 + len("that was all\n") - 100_000
    assert data.endswith(b"that was all\n")
    assert (await server.logged(token, "stderr"))[0] == b"on stderr\n"


async def test_output_of_each_frame_is_complete_in_its_own_log(server, start):
    await start()
    token = await server.send("prints", 40, args=[100])
    await server.ended(token, 40)
    for one in range(token, token + 40):
        assert (await server.logged(one))[0] == b"\n" * 100 + b"that was all\n"


async def test_hanging_task_is_killed_and_its_process_replaced(server, start):
    await start(processes=1)
    end = await server.run(task("sleeps", timeout_s=0.1, kill_after_s=0.1), args=[60])
    assert (end.status, end.code) == (AttemptStatus.TIMEOUT, "timeout")
    assert value_of(await server.run("sync_add", args=[1])) == 1


async def test_task_that_polls_for_cancel_notices_it(server, start, tmp_path):
    await start(processes=1)
    pid = value_of(await server.run("sync_pid"))
    token = await server.send(task("notices_cancel", kill_after_s=60), args=[str(tmp_path / "note")])
    await server.began(token)
    await server.cancel(token)
    assert (await server.ended(token)).status is AttemptStatus.CANCELLED
    assert (tmp_path / "note").read_text() == "noticed"
    assert value_of(await server.run("sync_pid")) == pid


async def test_cancel_kills_a_task_that_does_not_stop_and_its_children(server, start, tmp_path):
    await start()
    token = await server.send(task("leaves_a_child", kill_after_s=0.1), args=[str(tmp_path / "pid")])
    await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), what="its child")
    child = int((tmp_path / "pid").read_text())
    await server.cancel(token)
    assert (await server.ended(token)).status is AttemptStatus.CANCELLED
    await until(lambda: not alive(child), what="the end of its child")


async def test_frames_waiting_for_a_process_can_be_cancelled(server, start):
    await start(processes=1)
    token = await server.send(task("sleeps", kill_after_s=0.1), 3, args=[60])
    await server.began(token)
    await server.held(token + 2)
    await server.cancel(token + 1)
    assert (await server.ended(token + 1)).status is AttemptStatus.CANCELLED
    assert token not in server.ends
    await server.cancel(token, 3)
    assert [end.status for end in await server.ended(token, 3)] == [AttemptStatus.CANCELLED] * 3
    assert server.twice == []


async def test_forking_task_reports_once(server, start):
    await start()
    assert value_of(await server.run("sync_forks")) is True
    assert value_of(await server.run("closes_stdout")) == "closed"
    assert value_of(await server.run("sync_add", args=[1])) == 1
    assert server.twice == []


async def test_progress_and_logs_of_processes_are_published(server, start):
    await start()
    token = await server.send("sync_tells")
    await server.ended(token)
    assert (25.0, "a quarter") in [update.percent[token] for update in server.progress if token in update.percent]
    assert await server.logged(token, "log") == (b"from a process\n", 0)


async def test_unloadable_app_fails_its_frames_and_not_the_worker(server, start, tmp_path):
    await start(app=str(tmp_path / "gone.py"))
    end = await server.run("sync_add", args=[1])
    assert (end.status, end.code) == (AttemptStatus.FAILED, "no_process")
    assert "There is no file" in end.error
    assert await server.run("nothing") is None


async def test_cancelled_worker_kills_its_processes_and_returns_its_frames(server, start):
    running = await start()
    token = await server.send("sleeps", args=[60])
    await server.began(token)
    running.task.cancel()
    await asyncio.wait([running.task])
    end = await server.ended(token)
    assert (end.status, end.code) == (AttemptStatus.REFUSED, "worker_stopped")

"""Sync agents run in processes that can be killed, and that end themselves when nobody renews the lease."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from rota.agents.running import AgentRun, BodyFailed
from rota.model.failure_classes import FailureClass
from rota.worker.agents import process_pool
from rota.worker.agents.process_pool import AgentProcessPool
from tests.support.waiting import until

APP = "tests.support.agent_tasks:app"


def run_of(name):
    return AgentRun(name, 7, 1000, 2000, 3000)


@pytest.fixture
def lease():
    return {"until": time.monotonic() + 60}


@pytest.fixture
async def processes(lease):
    made = AgentProcessPool(APP, Path.cwd(), lambda: lease["until"])
    yield made
    await made.close()


@pytest.fixture
def began(tmp_path, monkeypatch):
    path = tmp_path / "began"
    monkeypatch.setenv("BEGAN", str(path))
    return path


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def children_of(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def started(path):
    return int(await until(lambda: path.exists() and path.read_text(), within_s=20))


async def test_a_body_runs_and_its_process_is_used_again(processes, tmp_path, monkeypatch):
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    await processes.run_agent(run_of("told"))
    assert (tmp_path / "told").read_text() == "told 7 1000"
    [child] = processes._idle
    await processes.run_agent(run_of("fine"))
    assert processes._idle == [child]


async def test_what_a_body_writes_is_in_the_log_line_by_line(processes, monkeypatch):
    lines = []
    monkeypatch.setattr(process_pool.log, "info", lambda event, **facts: lines.append((event, facts)), raising=False)
    await processes.run_agent(run_of("talks"))
    await until(lambda: len(lines) >= 2)
    assert [(facts["agent"], facts["line"]) for _, facts in lines] == [
        ("talks", "one line in pieces"),
        ("talks", "and the rest"),
    ]


async def test_a_failure_is_classified_where_the_exception_is(processes):
    with pytest.raises(BodyFailed, match="RuntimeError: sync failed") as failed:
        await processes.run_agent(run_of("forbidden"))
    assert failed.value.failure is FailureClass.PERMANENT_FORBIDDEN
    with pytest.raises(BodyFailed, match="KeyError") as failed:
        await processes.run_agent(run_of("odd"))
    assert failed.value.failure is FailureClass.THROTTLED, "the hook of the app says so"


async def test_a_process_that_ends_is_the_end_of_its_body_alone(processes):
    with pytest.raises(BodyFailed, match="exit status 3"):
        await processes.run_agent(run_of("gone"))
    await processes.run_agent(run_of("fine"))


async def test_a_body_that_is_stopped_is_asked_first(processes, began):
    task = asyncio.create_task(processes.run_agent(run_of("slow")))
    pid = await started(began)
    stopped_at = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - stopped_at < process_pool.KILL_AFTER_S
    assert not is_alive(pid)
    assert processes._idle == []


async def test_a_body_that_does_not_heed_it_is_killed(processes, began, monkeypatch):
    monkeypatch.setattr(process_pool, "KILL_AFTER_S", 0.2)
    task = asyncio.create_task(processes.run_agent(run_of("deaf")))
    pid = await started(began)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_alive(pid)


@pytest.mark.parametrize("body", ["deaf", "greedy"])
async def test_without_a_renewal_the_process_is_ended_whatever_its_body_does(
    processes, began, lease, monkeypatch, body
):
    """As when the worker is stopped by SIGSTOP: nothing is said, and the lease is over."""
    monkeypatch.setattr(process_pool, "LEASE_SEND_INTERVAL_S", 60.0)
    await processes.run_agent(run_of("fine"))  # its process is there, so the time below is all the body's
    lease["until"] = time.monotonic() + 1.5
    task = asyncio.create_task(processes.run_agent(run_of(body)))
    pid = await started(began)
    with pytest.raises(BodyFailed, match="SIGKILL"):
        await task
    assert time.monotonic() < lease["until"] + 3
    assert not is_alive(pid)


@pytest.mark.parametrize("body", ["slow", "greedy"])
async def test_renewals_keep_a_body_alive_also_one_that_never_lets_others_run(
    processes, began, lease, monkeypatch, body
):
    monkeypatch.setattr(process_pool, "LEASE_SEND_INTERVAL_S", 0.05)
    await processes.run_agent(run_of("fine"))  # its process is there, so the time below is all the body's
    lease["until"] = time.monotonic() + 0.2
    task = asyncio.create_task(processes.run_agent(run_of(body)))
    pid = await started(began)
    lease["until"] = time.monotonic() + 60
    began_at = time.monotonic()
    await until(lambda: time.monotonic() - began_at > 1.6)
    assert is_alive(pid)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_alive(pid)


async def test_nobody_on_the_leash_is_left_when_its_holder_is_killed(processes, began, monkeypatch):
    monkeypatch.setattr(process_pool, "LEASE_SEND_INTERVAL_S", 0.05)
    task = asyncio.create_task(processes.run_agent(run_of("slow")))
    pid = await started(began)
    [holder] = children_of(pid)
    os.kill(holder, signal.SIGKILL)
    with pytest.raises(BodyFailed, match="SIGKILL"):
        await task
    assert not is_alive(pid)


async def test_an_idle_process_outlives_any_silence_and_leaves_nobody_behind(processes, lease):
    await processes.run_agent(run_of("fine"))  # its process is there, so the time below is all the body's
    lease["until"] = time.monotonic() + 0.01
    await processes.run_agent(run_of("fine"))
    [child] = processes._idle
    [holder] = children_of(child.process.pid)
    began_at = time.monotonic()
    await until(lambda: time.monotonic() - began_at > 1.3)
    assert child.alive
    await processes.close()
    await until(lambda: not is_alive(holder))


async def test_an_app_that_cannot_be_loaded_is_a_failure_with_its_reason(lease):
    processes = AgentProcessPool("tests.support.nowhere", Path.cwd(), lambda: lease["until"])
    with pytest.raises(BodyFailed, match="did not start: Cannot import"):
        await processes.run_agent(run_of("fine"))

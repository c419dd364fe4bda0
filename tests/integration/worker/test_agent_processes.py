"""Sync agents run in killable processes that end themselves when their lease is not renewed."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from rota.agents.running import AgentRun, BodyFailed
from rota.model.failure_classes import FailureClass
from rota.worker.agents import process_runner
from rota.worker.agents.process_runner import AgentProcessRunner
from tests.support.waiting import until

APP = "tests.support.agent_tasks:app"


def begin(name):
    """What the scheduler passes to the runner of a body."""
    return lambda: AgentRun(name, 7, 1000, 2000, 3000)


@pytest.fixture
def lease():
    return {"until": time.monotonic() + 60}


@pytest.fixture
async def processes(lease):
    made = AgentProcessRunner(APP, Path.cwd(), lambda: lease["until"])
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
    return [int(field) for field in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def started(path):
    return int(await until(lambda: path.exists() and path.read_text(), within_s=20))


async def test_agent_body_runs_and_its_process_is_reused(processes, tmp_path, monkeypatch):
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    await processes.run(begin("told"))
    assert (tmp_path / "told").read_text() == "told 7 1000"
    [child] = processes.pool.idle
    await processes.run(begin("fine"))
    assert processes.pool.idle == (child,)


async def test_agent_output_is_logged_line_by_line(processes, monkeypatch):
    lines = []
    monkeypatch.setattr(process_runner.log, "info", lambda event, **facts: lines.append((event, facts)), raising=False)
    await processes.run(begin("talks"))
    await until(lambda: len(lines) >= 2)
    assert [(facts["agent"], facts["line"]) for _, facts in lines] == [
        ("talks", "one line in pieces"),
        ("talks", "and the rest"),
    ]


async def test_agent_failure_is_classified_in_its_process(processes):
    with pytest.raises(BodyFailed, match="RuntimeError: sync failed") as failed:
        await processes.run(begin("forbidden"))
    assert failed.value.failure is FailureClass.PERMANENT_FORBIDDEN
    with pytest.raises(BodyFailed, match="KeyError") as failed:
        await processes.run(begin("odd"))
    assert failed.value.failure is FailureClass.THROTTLED, "classified by the hook of the app"


async def test_exiting_process_fails_only_its_own_body(processes):
    with pytest.raises(BodyFailed, match="exit status 3"):
        await processes.run(begin("gone"))
    await processes.run(begin("fine"))


async def test_cancelled_body_gets_sigterm_first(processes, began):
    task = asyncio.create_task(processes.run(begin("slow")))
    pid = await started(began)
    stopped_at = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - stopped_at < process_runner.KILL_AFTER_S
    assert not is_alive(pid)
    assert processes.pool.idle == ()


async def test_body_that_ignores_sigterm_is_killed(processes, began, monkeypatch):
    monkeypatch.setattr(process_runner, "KILL_AFTER_S", 0.2)
    task = asyncio.create_task(processes.run(begin("deaf")))
    pid = await started(began)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_alive(pid)


@pytest.mark.parametrize("body", ["deaf", "greedy"])
async def test_process_whose_lease_is_not_renewed_is_killed(processes, began, lease, monkeypatch, body):
    """As when SIGSTOP stops the worker: no renewal arrives and the lease expires."""
    monkeypatch.setattr(process_runner, "LEASE_SEND_INTERVAL_S", 60.0)
    await processes.run(begin("fine"))  # starts the process, so that the time below is spent in the body
    lease["until"] = time.monotonic() + 1.5
    task = asyncio.create_task(processes.run(begin(body)))
    pid = await started(began)
    with pytest.raises(BodyFailed, match="SIGKILL"):
        await task
    assert time.monotonic() < lease["until"] + 3
    assert not is_alive(pid)


@pytest.mark.parametrize("body", ["slow", "greedy"])
async def test_lease_renewal_keeps_even_a_busy_body_alive(processes, began, lease, monkeypatch, body):
    monkeypatch.setattr(process_runner, "LEASE_SEND_INTERVAL_S", 0.05)
    await processes.run(begin("fine"))  # starts the process, so that the time below is spent in the body
    lease["until"] = time.monotonic() + 0.2
    task = asyncio.create_task(processes.run(begin(body)))
    pid = await started(began)
    lease["until"] = time.monotonic() + 60
    began_at = time.monotonic()
    await until(lambda: time.monotonic() - began_at > 1.6)
    assert is_alive(pid)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_alive(pid)


async def test_process_whose_lease_watchdog_is_killed_ends(processes, began, monkeypatch):
    monkeypatch.setattr(process_runner, "LEASE_SEND_INTERVAL_S", 0.05)
    task = asyncio.create_task(processes.run(begin("slow")))
    pid = await started(began)
    [watchdog] = children_of(pid)
    os.kill(watchdog, signal.SIGKILL)
    with pytest.raises(BodyFailed, match="SIGKILL"):
        await task
    assert not is_alive(pid)


async def test_idle_process_survives_lease_expiry_and_leaves_no_child(processes, lease):
    await processes.run(begin("fine"))  # starts the process, so that the time below is spent in the body
    lease["until"] = time.monotonic() + 0.01
    await processes.run(begin("fine"))
    [child] = processes.pool.idle
    [watchdog] = children_of(child.process.pid)
    began_at = time.monotonic()
    await until(lambda: time.monotonic() - began_at > 1.3)
    assert child.alive
    await processes.close()
    await until(lambda: not is_alive(watchdog))


async def test_unloadable_app_fails_the_run_with_its_reason(lease):
    processes = AgentProcessRunner("tests.support.nowhere", Path.cwd(), lambda: lease["until"])
    with pytest.raises(BodyFailed, match="did not start: Cannot import"):
        await processes.run(begin("fine"))
    await processes.close()

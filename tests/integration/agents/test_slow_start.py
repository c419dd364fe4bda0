"""Sync agents whose process is slow to start: the start is no part of a run's time limit and is never wasted."""

import time

import pytest

from rota.agents.running import ActiveRun, ActiveRuns, AgentRun
from rota.infra.clock import SystemClock
from rota.infra.postgres import PostgresTarget
from rota.infra.redis import RedisTarget
from rota.infra.service import Service, Supervisor
from rota.model.agents import AgentOutcome
from rota.model.settings import Settings
from rota.runtime import build_submitter
from rota.sdk import load_app
from rota.worker.agents.process_runner import AgentProcessRunner
from rota.worker.agents.runner import AgentApp, WorkerAgents
from tests.support.agents import changed, history, ignore
from tests.support.waiting import until

TIMEOUT_S = 2.0

APP = """
import os, time
from pathlib import Path
from rota import Rota

app = Rota()

@app.agent(every="1h", timeout="2s")
def patient(run):
    Path(os.environ["REMAINING_MS"]).write_text(f"{run.deadline_ms - time.time() * 1000}")

@app.agent(every="1h", timeout="100ms")
def endless(run):
    while True:
        time.sleep(60)

# Only processes of agents find a gate: the worker loads the app before the test sets it.
if gate := os.environ.get("GATE"):
    Path(gate).with_name(f"starting-{os.getpid()}").touch()
    while not Path(gate).exists():
        time.sleep(0.005)
"""


class Gate:
    """Processes of the app start when it is opened."""

    def __init__(self, folder, app):
        self.app = app
        self._folder = folder

    @property
    def starting(self):
        return len(list(self._folder.glob("starting-*")))

    def open(self):
        (self._folder / "gate").touch()


@pytest.fixture
def gate(tmp_path, monkeypatch):
    (tmp_path / "slow_app.py").write_text(APP)
    monkeypatch.syspath_prepend(tmp_path)
    app = load_app.load("slow_app.py", tmp_path)
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    monkeypatch.setenv("REMAINING_MS", str(tmp_path / "remaining_ms"))
    return Gate(tmp_path, app)


async def test_slow_start_of_a_process_is_no_part_of_the_time_limit(gate, database, database_url, redis_url, tmp_path):
    options = {"interval_ms": 50, "zombie_cleanup__threshold_ms": 0, "zombie_cleanup__interval_ms": 50}
    settings = changed(Settings(), **{f"redis__scheduler__{path}": value for path, value in options.items()})
    service = WorkerAgents(
        settings,
        AgentApp("slow_app.py", tmp_path, gate.app.recurring),
        PostgresTarget(url=database_url),
        RedisTarget(url=redis_url),
        lambda database: build_submitter(settings, database),
        ignore,
    )
    supervisor = Supervisor()
    supervisor.add(Service("agents", service.run))
    async with supervisor.running():
        await until(lambda: gate.starting, within_s=30, what="the start of a process")
        began_at = time.monotonic()
        await until(lambda: time.monotonic() - began_at > TIMEOUT_S + 0.2)
        assert await history(database, "patient") == await history(database, "endless") == []
        gate.open()
        [patient] = await until(lambda: history(database, "patient"), within_s=30)
        [endless] = await until(lambda: history(database, "endless"), within_s=30)
    assert (patient["outcome"], endless["outcome"]) == ("SUCCEEDED", "TIMEOUT")
    assert float((tmp_path / "remaining_ms").read_text()) > 0, "its deadline is in the future when it starts"


class _Permit:
    def release(self):
        return True


async def test_process_that_was_starting_when_its_run_was_stopped_runs_the_next_one(gate, tmp_path):
    ended = []
    runs = ActiveRuns(SystemClock(), ended.append, None, lambda: time.monotonic() + 60)
    processes = AgentProcessRunner("slow_app.py", tmp_path, lambda: time.monotonic() + 60)
    spec = gate.app.recurring["patient"].spec

    def start(number):
        run = ActiveRun(spec, AgentRun("patient", number, None, 0, 0), 0, _Permit(), time.monotonic())
        runs.start(run, processes, 60.0)
        return run

    first = start(1)
    await until(lambda: gate.starting == 1, within_s=30)
    runs.stop(first, AgentOutcome.CANCELLED)
    await until(lambda: ended == [first])
    second = start(2)
    gate.open()
    await until(lambda: ended == [first, second], within_s=30)
    assert second.outcome is AgentOutcome.SUCCEEDED
    assert gate.starting == 1, "the second run used the process of the first"
    await processes.close()

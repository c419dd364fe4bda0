"""Agents of an app in its worker, and agents that submit a job, which any server runs."""

from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from rota.agents.admin import AgentAdmin
from rota.agents.job_agents import submission_of_run
from rota.agents.running import AgentRun
from rota.infra.service import Service, Supervisor
from rota.model.events import EventFilter
from rota.model.settings.agents import AgentKeySettings
from rota.runtime import build_submitter, nats_target, postgres_target, redis_target
from rota.sdk import load_app
from rota.worker.agents.events import AgentEvents
from rota.worker.agents.runner import AgentApp, WorkerAgents
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until

APP = "tests.support.agent_tasks:app"
JOBS = sql("""
SELECT pk_job FROM rota.job WHERE labels ->> 'agent' = $1
UNION SELECT pk_job FROM rota.job_done WHERE labels ->> 'agent' = $1""")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show("default")
        yield farm


@asynccontextmanager
async def agents_of_app(farm, monkeypatch, tmp_path, nats_url=""):
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    app = load_app.load(APP, Path.cwd())
    selected = {name: app.recurring[name] for name in ("told", "on_the_loop", "hourly", "forbidden")}
    events = AgentEvents(nats_target(farm.settings, nats_url or farm.urls.nats), farm.settings.nats)
    service = WorkerAgents(
        farm.settings,
        AgentApp(APP, Path.cwd(), selected),
        postgres_target(farm.settings, farm.urls.postgres),
        redis_target(farm.settings, farm.urls.redis, "agents"),
        lambda database: build_submitter(farm.settings, database),
        events.publisher.emit,
        "worker",
    )
    supervisor = Supervisor()
    supervisor.add(Service("agent_events", events.run), Service("agents", service.run))
    async with supervisor.running():
        yield service


async def test_worker_runs_the_agents_of_its_app(farm, monkeypatch, tmp_path):
    admin = AgentAdmin(farm.database, farm.replica.redis, AgentKeySettings(), "test")
    async with agents_of_app(farm, monkeypatch, tmp_path):
        for name, outcome in (("told", "SUCCEEDED"), ("on_the_loop", "SUCCEEDED"), ("forbidden", "FAILED")):
            [run] = await until(lambda name=name: admin.history(name), within_s=20, what=f"a run of {name}")
            assert (run.outcome, run.replica) == (outcome, "worker")
    assert (tmp_path / "told").read_text().startswith("told ")
    assert (await admin.show("forbidden")).failure == "PERMANENT_FORBIDDEN"


async def test_agent_runs_of_a_worker_are_published_as_events(farm, monkeypatch, tmp_path):
    wanted = EventFilter(kinds=("agent.failed",))
    async with farm.replica.engine.event_stream.subscribe(wanted) as reader, agents_of_app(farm, monkeypatch, tmp_path):
        [batch] = await until(lambda: reader.read(1), within_s=20, what="an event")
    [event] = batch.events()
    assert (event.facts["agent"], event.facts["failure"]) == ("forbidden", "PERMANENT_FORBIDDEN")


async def test_agents_run_without_nats(farm, monkeypatch, tmp_path):
    admin = AgentAdmin(farm.database, farm.replica.redis, AgentKeySettings(), "test")
    async with agents_of_app(farm, monkeypatch, tmp_path, nats_url="nats://127.0.0.1:1"):
        [run] = await until(lambda: admin.history("on_the_loop"), within_s=20)
    assert run.outcome == "SUCCEEDED"


async def test_job_agent_is_run_by_any_server_once_per_due_time(farm, monkeypatch, tmp_path):
    admin = AgentAdmin(farm.database, farm.replica.redis, AgentKeySettings(), "test")
    async with agents_of_app(farm, monkeypatch, tmp_path):
        await until(lambda: admin.history("hourly"), within_s=20)
    await farm.worker(of=APP)
    [job] = [row["pk_job"] for row in await farm.database.rows(JOBS, "hourly")]
    assert await farm.ended(job) == "SUCCEEDED"
    await until(lambda: admin.trigger("hourly"))
    await until(lambda: _count(farm, 2), within_s=20, what="a job submitted by a server")
    runs = await until(lambda: _ended(admin, 2))
    assert runs[0].replica != "worker"


async def _count(farm, wanted):
    return len(await farm.database.rows(JOBS, "hourly")) == wanted


async def _ended(admin, wanted):
    runs = await admin.history("hourly")
    return runs if len(runs) == wanted else None


def test_job_of_an_agent_has_no_principal_whatever_its_code_names():
    job = msgspec.structs.replace(load_app.load(APP, Path.cwd()).recurring["hourly"].spec.job, principal="ceo")
    assert submission_of_run(job, AgentRun("hourly", 1, 5000, 6000, 7000)).principal == ""


def test_slot_is_the_idempotency_key_of_its_job():
    job = load_app.load(APP, Path.cwd()).recurring["hourly"].spec.job
    first = submission_of_run(job, AgentRun("hourly", 1, 5000, 6000, 7000))
    again = submission_of_run(job, AgentRun("hourly", 2, 5000, 9000, 9999))
    assert first == again
    assert first.idempotency_key == "agent:hourly:5000"
    assert submission_of_run(job, AgentRun("hourly", 3, 8000, 9000, 9999)) != first

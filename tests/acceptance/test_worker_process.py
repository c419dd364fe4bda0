"""`rota worker` as a process: signals, cleanup of child processes, and startup errors."""

import signal
import socket
import sys

import httpx
import pytest

from rota.infra.telemetry import logs
from rota.model.protocol import AttemptStatus
from tests.integration.worker.worker_support import APP, alive, command, processes_of, serving, task
from tests.support.commands import Terminal
from tests.support.waiting import until


@pytest.fixture
async def server(nats_url, bus_prefix):
    async with serving(nats_url, bus_prefix) as running:
        yield running


@pytest.fixture
def rota_worker(spawn, nats_url, bus_prefix, server):
    async def start(*args, app=APP, **env):
        env = {"ROTA_NATS_URL": nats_url, "ROTA_NATS_PREFIX": bus_prefix, "ROTA_LOG_FORMAT": "json", **env}
        return await spawn("rota.cli", "worker", *([app] if app else []), "--cores", "64", *args, env=env)

    return start


@pytest.fixture
def cli(monkeypatch, capsys, nats_url):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("ROTA_NATS_URL", nats_url)
    yield Terminal(monkeypatch, capsys)
    logs.configure("console", "warning")


async def until_registered(server):
    await until(lambda: server.workers and server.beats(), within_s=20, what="the first heartbeat")


async def busy(server, process):
    """Start a frame of each kind; returns their tokens and the child processes."""
    tokens = [
        await server.send("waits"),
        await server.send(task("sleeps"), args=[600]),
        await server.send(command("sleep", "600")),
    ]
    for token in tokens:
        await server.began(token)
    return tokens, processes_of(process.pid)


async def all_exited(pids):
    await until(lambda: not any(map(alive, pids)), what="the exit of all processes")


async def test_worker_options_appear_in_its_registration(server, rota_worker):
    await rota_worker(
        "--pool", "gpu", "--slots", "7", "--gpus", "2", "--name", "w1", "--label", "rack=b", "--memory", "1GiB"
    )
    await until_registered(server)
    (registration,) = server.hellos
    assert (registration.pool, registration.slots, registration.cores, registration.gpus) == ("gpu", 7, 6400, 2)
    assert (registration.name, registration.labels, registration.memory_mb) == ("w1", {"rack": "b"}, 1024)
    beat = server.beats()[-1]
    assert 0 < beat.memory_load <= 100
    assert 0 <= beat.cpu_load <= 100


async def test_worker_with_metrics_port_serves_health_and_metrics(server, rota_worker):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    await rota_worker(ROTA_WORKER_METRICS_PORT=str(port))
    await until_registered(server)
    ready = await until(lambda: _get(port, "/ready"))
    assert ready.status_code == 200
    metrics = await _get(port, "/metrics")
    assert "rota_worker_frames_total" in metrics.text
    assert (await _get(port, "/health")).status_code == 200
    assert (await _get(port, "/api/v1/jobs")).status_code == 404


async def _get(port, path):
    async with httpx.AsyncClient() as client:
        try:
            return await client.get(f"http://127.0.0.1:{port}{path}")
        except httpx.ConnectError:
            return None


async def test_first_signal_drains_running_frames(server, rota_worker):
    process = await rota_worker()
    await until_registered(server)
    tokens = [
        await server.send("naps", args=[1.0]),
        await server.send(task("sleeps"), args=[1.0]),
        await server.send(command("sleep", "1")),
    ]
    for token in tokens:
        await server.began(token)
    process.send(signal.SIGTERM)
    assert await process.wait() == 0
    ends = [await server.ended(token) for token in tokens]
    assert [end is None or end.status is AttemptStatus.SUCCEEDED for end in ends] == [True] * 3
    last = server.beats()[-1]
    assert (last.draining, last.held) == (True, [])


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_second_signal_returns_frames_immediately(server, rota_worker, second):
    process = await rota_worker()
    await until_registered(server)
    tokens, children = await busy(server, process)
    process.send(signal.SIGTERM)
    await until(lambda: server.beats()[-1].draining, what="the drain")
    process.send(second)
    assert await process.wait(timeout_s=5) == 128 + second
    for token in tokens:
        end = await server.ended(token)
        assert (end.status, end.code) == (AttemptStatus.REFUSED, "worker_stopped")
    await all_exited(children)
    last = server.beats()[-1]
    assert (last.draining, last.held) == (True, [])
    assert server.twice == []


async def test_killed_worker_leaves_no_child_processes(server, rota_worker):
    process = await rota_worker()
    await until_registered(server)
    _, children = await busy(server, process)
    assert len(children) >= 2
    process.kill()
    await process.wait()
    await all_exited(children)


async def test_killed_worker_leaves_no_grandchildren(server, rota_worker, tmp_path):
    process = await rota_worker()
    await until_registered(server)
    pid_file = tmp_path / "pid"
    await server.send(task("leaves_a_child"), args=[str(pid_file)])
    script = "sleep 600 & echo $!; wait"
    token = await server.send(command("sh", "-c", script))
    await until(lambda: server.output(token)[0] and pid_file.exists() and pid_file.read_text(), what="grandchildren")
    grandchildren = [int(pid_file.read_text()), int(server.output(token)[0])]
    assert all(map(alive, grandchildren))
    descendants = processes_of(process.pid)
    process.kill()
    await process.wait()
    await all_exited([*descendants, *grandchildren])


async def test_ctrl_c_before_registration_exits_with_0(spawn, nats_url, bus_prefix):
    env = {"ROTA_NATS_URL": nats_url, "ROTA_NATS_PREFIX": bus_prefix, "ROTA_LOG_LEVEL": "debug"}
    process = await spawn("rota.cli", "worker", APP, env=env)
    while b"worker_registration_retrying" not in await process._process.stderr.readline():
        pass
    process.send(signal.SIGINT)
    assert await process.wait(timeout_s=5) == 0
    assert "Traceback" not in await process.errors()


async def test_task_ignoring_cancellation_does_not_block_exit(server, rota_worker):
    process = await rota_worker(ROTA_WORKER_DRAIN_TIMEOUT="200ms")
    await until_registered(server)
    token = await server.send(task("deaf_for_ever"))
    await server.began(token)
    process.send(signal.SIGTERM)
    assert await process.wait(timeout_s=8) == 0
    assert (await server.ended(token)).code == "worker_stopped"


async def test_worker_without_an_app_runs_only_commands(server, rota_worker):
    await rota_worker(app="")
    await until_registered(server)
    assert await server.run(command("true")) is None
    assert (await server.run("nothing")).code == "unknown_task"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["no_such_module:app"], "Cannot import 'no_such_module:app'"),
        (["no/such/file.py"], "There is no file"),
        ([f"{APP}le"], "has no app 'apple'"),
        ([APP, "--label", "rack"], "is not a valid label: use key=value"),
        ([APP, "--cores", "many"], "not a valid amount of cores"),
        ([APP, "--memory", "much"], "not a valid amount of memory"),
    ],
)
async def test_invalid_worker_arguments_print_one_error(cli, args, message):
    result = await cli(" ".join(["worker", *args]))
    assert result.status == 2
    assert message in result.err
    assert len(result.err.splitlines()) == 1


async def test_app_import_error_is_reported_without_secrets(cli, tmp_path):
    (tmp_path / "broken.py").write_text("raise ValueError('password=c4nary')\n")
    result = await cli(f"worker {tmp_path}/broken.py")
    assert result.status == 2
    assert "ValueError" in result.err
    assert "c4nary" not in result.err


async def test_refused_registration_exits_with_one_error(spawn, nats_url, bus_prefix):
    async with serving(nats_url, bus_prefix, refusal="There is no pool x."):
        env = {"ROTA_NATS_URL": nats_url, "ROTA_NATS_PREFIX": bus_prefix, "ROTA_LOG_LEVEL": "error"}
        process = await spawn("rota.cli", "worker", APP, env=env)
        assert await process.wait() == 1
        assert "rota: The server refused this worker: There is no pool x. [setup_failed]" in await process.errors()


async def test_worker_without_nats_names_the_missing_setting(cli, tmp_path, monkeypatch):
    monkeypatch.delenv("ROTA_NATS_URL")
    monkeypatch.setenv("ROTA_LOCAL_DATA_DIR", str(tmp_path))
    result = await cli("worker")
    assert result.status == 2
    assert "set nats.url" in result.err


async def test_report_with_lost_reply_is_republished_and_counted_once(server, rota_worker):
    await rota_worker(LOST_REPLY_AT="worker.report")
    await until_registered(server)
    assert await server.run("nothing") is None
    assert await server.run("nothing") is None
    assert server.twice == []


async def test_worker_crash_before_assignment_ack_reports_nothing(server, rota_worker):
    process = await rota_worker(CRASH_AT="worker.taken_before_ack")
    await until_registered(server)
    token = await server.send("waits")
    assert await process.wait() == 137
    assert token not in server.ends

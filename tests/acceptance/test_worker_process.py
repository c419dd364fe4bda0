"""`rota worker` as a person runs it: signals, what it leaves behind, and what it says when it cannot start."""

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
    async def start(*words, app=APP, **env):
        env = {"ROTA_NATS_URL": nats_url, "ROTA_NATS_PREFIX": bus_prefix, "ROTA_LOG_FORMAT": "json", **env}
        return await spawn("rota.cli", "worker", *([app] if app else []), "--cores", "64", *words, env=env)

    return start


@pytest.fixture
def typed(monkeypatch, capsys, nats_url):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("ROTA_NATS_URL", nats_url)
    yield Terminal(monkeypatch, capsys)
    logs.configure("console", "warning")


async def until_known(server):
    await until(lambda: server.workers and server.beats(), within_s=20, what="its first heartbeat")


async def busy(server, process):
    """A frame of each kind under way; their tokens and the processes they have."""
    tokens = [
        await server.send("waits"),
        await server.send(task("sleeps"), args=[600]),
        await server.send(command("sleep", "600")),
    ]
    for token in tokens:
        await server.began(token)
    return tokens, processes_of(process.pid)


async def gone(pids):
    await until(lambda: not any(map(alive, pids)), what="the end of every process")


async def test_the_options_are_what_it_offers(server, rota_worker):
    await rota_worker(
        "--pool", "gpu", "--slots", "7", "--gpus", "2", "--name", "w1", "--label", "rack=b", "--memory", "1GiB"
    )
    await until_known(server)
    (hello,) = server.hellos
    assert (hello.pool, hello.slots, hello.cores, hello.gpus) == ("gpu", 7, 6400, 2)
    assert (hello.name, hello.labels, hello.memory_mb) == ("w1", {"rack": "b"}, 1024)
    beat = server.beats()[-1]
    assert 0 < beat.memory_load <= 100
    assert 0 <= beat.cpu_load <= 100


async def test_a_worker_with_a_port_for_it_tells_its_health_and_metrics(server, rota_worker):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    await rota_worker(ROTA_WORKER_METRICS_PORT=str(port))
    await until_known(server)
    ready = await until(lambda: _got(port, "/ready"))
    assert ready.status_code == 200
    metrics = await _got(port, "/metrics")
    assert "rota_worker_frames_total" in metrics.text
    assert (await _got(port, "/health")).status_code == 200
    assert (await _got(port, "/api/v1/jobs")).status_code == 404


async def _got(port, path):
    async with httpx.AsyncClient() as client:
        try:
            return await client.get(f"http://127.0.0.1:{port}{path}")
        except httpx.ConnectError:
            return None


async def test_the_first_signal_lets_frames_finish(server, rota_worker):
    process = await rota_worker()
    await until_known(server)
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
async def test_the_second_signal_gives_frames_back_at_once(server, rota_worker, second):
    process = await rota_worker()
    await until_known(server)
    tokens, children = await busy(server, process)
    process.send(signal.SIGTERM)
    await until(lambda: server.beats()[-1].draining, what="the drain")
    process.send(second)
    assert await process.wait(timeout_s=5) == 128 + second
    for token in tokens:
        end = await server.ended(token)
        assert (end.status, end.code) == (AttemptStatus.REFUSED, "worker_stopped")
    await gone(children)
    last = server.beats()[-1]
    assert (last.draining, last.held) == (True, [])
    assert server.twice == []


async def test_a_killed_worker_takes_its_processes_along(server, rota_worker):
    process = await rota_worker()
    await until_known(server)
    _, children = await busy(server, process)
    assert len(children) >= 2
    process.kill()
    await process.wait()
    await gone(children)


async def test_ctrl_c_before_any_server_answers_ends_it(spawn, nats_url, bus_prefix):
    env = {"ROTA_NATS_URL": nats_url, "ROTA_NATS_PREFIX": bus_prefix, "ROTA_LOG_LEVEL": "debug"}
    process = await spawn("rota.cli", "worker", APP, env=env)
    while b"worker_registration_retrying" not in await process._process.stderr.readline():
        pass
    process.send(signal.SIGINT)
    assert await process.wait(timeout_s=5) == 0
    assert "Traceback" not in await process.errors()


async def test_a_handler_that_ignores_everything_does_not_keep_the_process(server, rota_worker):
    process = await rota_worker(ROTA_WORKER_DRAIN_TIMEOUT="200ms")
    await until_known(server)
    token = await server.send(task("deaf_for_ever"))
    await server.began(token)
    process.send(signal.SIGTERM)
    assert await process.wait(timeout_s=8) == 0
    assert (await server.ended(token)).code == "worker_stopped"


async def test_a_worker_without_an_app_runs_commands(server, rota_worker):
    await rota_worker(app="")
    await until_known(server)
    assert await server.run(command("true")) is None
    assert (await server.run("nothing")).code == "unknown_task"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no_such_module:app"], "Cannot import 'no_such_module:app'"),
        (["no/such/file.py"], "There is no file"),
        ([f"{APP}le"], "has no app 'apple'"),
        ([APP, "--label", "rack"], "is not a valid label: use key=value"),
        ([APP, "--cores", "many"], "not a valid amount of cores"),
        ([APP, "--memory", "much"], "not a valid amount of memory"),
    ],
)
async def test_bad_words_are_refused_with_a_sentence(typed, words, says):
    said = await typed(" ".join(["worker", *words]))
    assert said.status == 2
    assert says in said.err
    assert len(said.err.splitlines()) == 1


async def test_an_app_that_fails_at_import_is_told_in_a_sentence(typed, tmp_path):
    (tmp_path / "broken.py").write_text("raise ValueError('password=c4nary')\n")
    said = await typed(f"worker {tmp_path}/broken.py")
    assert said.status == 2
    assert "ValueError" in said.err
    assert "c4nary" not in said.err


async def test_a_refused_worker_ends_with_one_sentence(spawn, nats_url, bus_prefix):
    async with serving(nats_url, bus_prefix, refusal="There is no pool x."):
        env = {"ROTA_NATS_URL": nats_url, "ROTA_NATS_PREFIX": bus_prefix, "ROTA_LOG_LEVEL": "error"}
        process = await spawn("rota.cli", "worker", APP, env=env)
        assert await process.wait() == 1
        assert "rota: The server refused this worker: There is no pool x. [setup_failed]" in await process.errors()


async def test_without_nats_a_worker_says_what_to_set(typed, tmp_path, monkeypatch):
    monkeypatch.delenv("ROTA_NATS_URL")
    monkeypatch.setenv("ROTA_LOCAL_DATA_DIR", str(tmp_path))
    said = await typed("worker")
    assert said.status == 2
    assert "set nats.url" in said.err


async def test_a_report_whose_reply_was_lost_is_published_again_and_counted_once(server, rota_worker):
    await rota_worker(LOST_REPLY_AT="worker.report")
    await until_known(server)
    assert await server.run("nothing") is None
    assert await server.run("nothing") is None
    assert server.twice == []


async def test_a_worker_that_dies_with_an_assignment_in_hand_reports_nothing(server, rota_worker):
    process = await rota_worker(CRASH_AT="worker.taken_before_ack")
    await until_known(server)
    token = await server.send("waits")
    assert await process.wait() == 137
    assert token not in server.ends

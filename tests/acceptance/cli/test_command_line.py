"""The `rota` command as a process: startup, errors, and cleanup when it is killed."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from rota.model.errors import DataDirInUse
from tests.support.harness.made_data import copy_made
from tests.support.harness.servers import options_for_tests
from tests.support.waiting import until

ROTA = str(Path(sys.executable).with_name("rota"))


@pytest.fixture
async def rota(request, spawn, tmp_path):
    """Starts `rota …` in a private directory, on a free port."""
    bins = {f"ROTA_LOCAL_{name.upper()}_BIN": path for name, path in options_for_tests(tmp_path).bins.items()}

    async def start(*args, env=None):
        if args[0] == "up" and not (tmp_path / "data").exists():
            copy_made(request.getfixturevalue("made_data"), tmp_path / "data")
        settings = {
            "ROTA_LISTEN_PORT": "0",
            "ROTA_LOCAL_DATA_DIR": str(tmp_path / "data"),
            "COLUMNS": "200",
            "ROTA_NATS_CONNECT_TIMEOUT": "1s",
            **bins,
            **(env or {}),
        }
        return await spawn(None, argv=[ROTA, *args], env=settings)

    return start


async def _ended(process, timeout_s=30):
    out, err = await process.output(), await process.errors()
    return await process.wait(timeout_s), out, err


async def _up(rota, **more):
    process = await rota("up", **more)
    assert "Rota is up" in await process.line(40)
    lines = [await process.line() for _ in range(6)]
    listen = next(line.split()[-1] for line in lines if "health, metrics" in line)
    return process, listen


def _get(url, key=None):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _descendants(pid):
    children = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, todo = set(), [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


async def test_up_serves_until_sigterm_and_leaves_no_process(rota, tmp_path):
    process, listen = await _up(rota)
    assert _get(f"{listen}/health")[0] == 200
    assert _get(f"{listen}/ready")[0] == 200
    key = (tmp_path / "data" / "api.key").read_text().strip()
    assert "rota_" in _get(f"{listen}/metrics", key)[1]
    assert [_get(f"{listen}{path}")[0] for path in ("/metrics", "/api/v1/me", "/nothing")] == [401, 401, 401]
    assert _get(f"{listen}/api/v1/me", key)[0] == 200
    children_pids = _descendants(process.pid)
    assert len(children_pids) > 3
    process.send(signal.SIGTERM)
    status, _, errors = await _ended(process)
    assert status == 0, errors
    assert not [pid for pid in children_pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow("starts a full installation twice")
async def test_killed_up_stops_its_servers_and_can_restart(rota):
    process, _ = await _up(rota)
    children_pids = _descendants(process.pid)
    process.kill()
    await until(lambda: not [pid for pid in children_pids if Path(f"/proc/{pid}").exists()], within_s=20)
    process, listen = await _up(rota)
    assert _get(f"{listen}/ready")[0] == 200


async def test_up_restarts_a_killed_server_and_becomes_ready(rota):
    process, listen = await _up(rota)
    pid = _server_pid(process.pid, "valkey-server", "redis-server")
    os.kill(pid, signal.SIGKILL)
    await until(
        lambda: _server_pid(process.pid, "valkey-server", "redis-server") not in {None, pid},
        within_s=20,
        what="a restarted server",
    )
    await until(lambda: _get(f"{listen}/ready")[0] == 200, within_s=20, what="readiness")
    assert (await _ended(await rota("status", "--json")))[0] == 0


def _server_pid(parent, *names):
    for pid in _descendants(parent):
        try:
            if Path(f"/proc/{pid}/exe").readlink().name in {*names, "redis-check-rdb"}:
                return pid
        except OSError:
            continue
    return None


async def test_detached_up_reports_status_and_stops_with_down(rota):
    status, out, errors = await _ended(await rota("up", "--detach"), 60)
    assert status == 0, errors
    assert "Rota is up" in out
    status, out, _ = await _ended(await rota("status", "--json"))
    data = json.loads(out)
    assert status == 0
    assert data["ok"]
    assert [server["name"] for server in data["servers"]] == ["postgres", "redis", "nats"]
    assert "***" in data["servers"][0]["url"]
    status, out, _ = await _ended(await rota("down"))
    assert (status, "has stopped" in out) == (0, True)
    status, out, _ = await _ended(await rota("status"))
    assert (status, "is not up" in out) == (1, True)
    status, out, _ = await _ended(await rota("down"))
    assert (status, "is not up" in out) == (0, True)


async def test_second_up_in_the_same_directory_is_refused(rota):
    first, _ = await _up(rota)
    status, _, errors = await _ended(await rota("up"))
    assert status == 1
    assert f"in use by process {first.pid}: run `rota down` first" in errors
    assert "[data_dir_in_use]" in errors
    assert "Traceback" not in errors


async def test_db_and_audit_commands_work_on_a_running_stack(rota):
    await _up(rota)
    status, out, errors = await _ended(await rota("db", "status", "--json"))
    assert status == 0, errors
    assert {line["state"] for line in json.loads(out)} == {"applied"}
    status, out, _ = await _ended(await rota("db", "migrate"))
    assert (status, out.strip()) == (0, "The schema is up to date.")
    status, out, errors = await _ended(await rota("audit", "verify"))
    assert status == 0, errors


async def test_passwords_are_neither_printed_nor_logged(rota, tmp_path):
    process, _ = await _up(rota, env={"ROTA_LOG_LEVEL": "debug", "ROTA_LOG_FORMAT": "json"})
    pid = _server_pid(process.pid, "postgres")
    os.kill(pid, signal.SIGKILL)
    printed = [(await _ended(await rota(*args)))[1:] for args in (("status",), ("config", "show"), ("db", "status"))]
    process.send(signal.SIGTERM)
    printed.append((await _ended(process))[1:])
    secrets = [*json.loads((tmp_path / "data" / "credentials.json").read_text()).values()]
    secrets.append((tmp_path / "data" / "api.key").read_text().strip().rpartition("_")[2])
    logged = [path.read_text(errors="replace") for path in (tmp_path / "data" / "log").iterdir()]
    for secret in secrets:
        assert not [text for text in (*logged, *(part for pair in printed for part in pair)) if secret in text]


BAD = "postgresql://u:hunter2secret@127.0.0.1:1/x"


@pytest.mark.parametrize(
    ("env", "status", "sentence"),
    [
        ({"ROTA_POSTGRES_URL": BAD, "ROTA_REDIS_URL": "REDIS", "ROTA_NATS_URL": "NATS"}, 1, "cannot be reached"),
        ({"ROTA_POSTGRES_URL": "PG", "ROTA_REDIS_URL": "redis://127.0.0.1:1", "ROTA_NATS_URL": "NATS"}, 1, "Redis at"),
        ({"ROTA_POSTGRES_URL": "PG", "ROTA_REDIS_URL": "REDIS", "ROTA_NATS_URL": "nats://127.0.0.1:1"}, 1, "NATS at"),
        ({"ROTA_POSTGRES_URL": "PG-WRONG", "ROTA_REDIS_URL": "REDIS", "ROTA_NATS_URL": "NATS"}, 1, "[login_refused]"),
        ({"ROTA_POSTGRES_URL": "PG", "ROTA_REDIS_URL": "REDIS-WRONG", "ROTA_NATS_URL": "NATS"}, 1, "[login_refused]"),
        ({"ROTA_POSTGRES_URL": "PG", "ROTA_REDIS_URL": "REDIS", "ROTA_NATS_URL": "NATS-WRONG"}, 1, "[login_refused]"),
        ({"ROTA_POSTGRES_URL": "PG", "ROTA_REDIS_URL": "REDIS"}, 2, "nats.url must be set"),
        ({"ROTA_POSTGERS_URL": "PG"}, 2, "ROTA_POSTGRES_URL"),
        ({"ROTA_REDIS_AGENT_MAX_CONCURRENT_AGENTS": "many"}, 2, "redis.agent.max_concurrent_agents is many"),
    ],
)
async def test_server_with_bad_configuration_prints_one_error(rota, stack, database_url, env, status, sentence):
    known = {"PG": database_url, "REDIS": stack.redis_url, "NATS": stack.nats_url}
    wrong = {f"{name}-WRONG": _with_wrong_password(url) for name, url in known.items()}
    env = {name: {**known, **wrong}.get(value, value) for name, value in env.items()}
    ended, out, errors = await _ended(await rota("server", env={"ROTA_SERVICE_START_TIMEOUT": "0s", **env}))
    assert (ended, out) == (status, "")
    assert sentence in errors
    assert "Traceback" not in errors
    assert "hunter2secret" not in errors


async def test_server_waits_for_postgres_that_starts_later(rota, stack, database_url, proxy):
    at = urlsplit(database_url)
    link = await proxy(at.hostname, at.port)
    link.cut()
    env = {
        "ROTA_POSTGRES_URL": link.url(database_url),
        "ROTA_REDIS_URL": stack.redis_url,
        "ROTA_NATS_URL": stack.nats_url,
    }
    server = await rota("server", env=env)
    await server.until_logged("server_connect_retry")
    link.heal()
    await server.until_logged("services_ready")
    server.send(signal.SIGTERM)
    status, _, errors = await _ended(server)
    assert status == 0, errors


def _with_wrong_password(url):
    head, _, tail = url.rpartition("@")
    return f"{head.rpartition(':')[0]}:hunter2secret@{tail}"


async def test_redis_with_eviction_policy_is_refused(rota, stack, database_url, private_redis):
    private = await private_redis()
    import redis.asyncio

    async with redis.asyncio.Redis.from_url(private.url) as client:
        await client.config_set("maxmemory-policy", "allkeys-lru")
    urls = {"ROTA_POSTGRES_URL": database_url, "ROTA_REDIS_URL": private.url, "ROTA_NATS_URL": stack.nats_url}
    status, _, errors = await _ended(await rota("server", env=urls))
    assert status == 1
    assert "allkeys-lru" in errors
    assert "noeviction" in errors
    assert "[evicting_redis]" in errors


async def test_missing_schema_is_refused_with_the_migrate_command(rota, stack, empty_database_url):
    urls = {
        "ROTA_POSTGRES_URL": empty_database_url,
        "ROTA_REDIS_URL": stack.redis_url,
        "ROTA_NATS_URL": stack.nats_url,
    }
    status, _, errors = await _ended(await rota("server", env=urls))
    assert status == 1
    assert "run `rota db migrate`" in errors
    status, out, errors = await _ended(await rota("db", "migrate", env=urls))
    assert status == 0, errors
    assert "applied" in out


async def test_configured_urls_replace_local_servers(rota, stack, database_url, tmp_path):
    urls = {"ROTA_POSTGRES_URL": database_url, "ROTA_REDIS_URL": stack.redis_url, "ROTA_NATS_URL": stack.nats_url}
    process = await rota("up", env={**urls, "ROTA_LOCAL_DATA_DIR": str(tmp_path / "unused")})
    assert "Rota is up" in await process.line(40)
    assert not (tmp_path / "unused" / "postgres" / "data").exists()
    process.send(signal.SIGINT)
    assert (await _ended(process))[0] == 0


async def test_up_with_unreachable_nats_does_not_migrate(rota, stack, empty_database_url):
    urls = {
        "ROTA_POSTGRES_URL": empty_database_url,
        "ROTA_REDIS_URL": stack.redis_url,
        "ROTA_NATS_URL": "nats://127.0.0.1:1",
    }
    status, _, errors = await _ended(await rota("up", env=urls))
    assert (status, "NATS at" in errors) == (1, True)
    status, out, _ = await _ended(await rota("db", "status", "--json", env=urls))
    assert {line["state"] for line in json.loads(out)} == {"pending"}


async def test_up_continues_when_its_output_is_closed(rota):
    process, _ = await _up(rota)
    process._process.stdout._transport.close()
    process.send(signal.SIGTERM)
    assert await process.wait() == 0


def test_down_waits_for_the_drain_timeout_and_does_not_signal_an_unrelated_process(tmp_path, monkeypatch):
    from rota.cli.local import up
    from rota.infra.data_dir import DataDirOwner
    from rota.model.settings import Settings

    other_process = subprocess.Popen(["sleep", "60"])
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, msgspec.json.encode(DataDirOwner(other_process.pid, started="1")))
        monkeypatch.setattr(up, "STOP_MARGIN_S", 0.1)
        monkeypatch.setattr(up, "data_dir", lambda _settings: tmp_path)
        service = msgspec.structs.replace(Settings().service, drain_timeout=0.9)
        with pytest.raises(DataDirInUse, match=r"still in use by .* after 1 s"):
            up.down(msgspec.structs.replace(Settings(), service=service))
        assert other_process.poll() is None
    finally:
        os.close(lock)
        other_process.kill()
        other_process.wait()


@pytest.mark.parametrize(
    "data_dir", ["~nosuchuser/x", "/proc/x/y", "FILE/below", "LOOP/x", "/tmp/" + "n" * 300, "/tmp/x\x07y", "/tmp/x[/y]"]
)
@pytest.mark.parametrize("args", [("up",), ("up", "-d"), ("status",), ("down",)])
def test_unusable_data_directory_prints_an_error(tmp_path, data_dir, args, capfd, monkeypatch):
    from rota.cli.main import main

    (tmp_path / "FILE").touch()
    (tmp_path / "LOOP").symlink_to(tmp_path / "LOOP")
    for name in ("FILE", "LOOP"):
        data_dir = data_dir.replace(name, str(tmp_path / name))
    monkeypatch.setenv("ROTA_LOCAL_DATA_DIR", data_dir)
    monkeypatch.setenv("ROTA_NATS_URL", "nats://127.0.0.1:1")  # startup fails regardless of the directory
    monkeypatch.setenv("ROTA_NATS_CONNECT_TIMEOUT", "100ms")
    monkeypatch.setenv("ROTA_POSTGRES_URL", BAD)
    monkeypatch.setenv("ROTA_REDIS_URL", "redis://127.0.0.1:1")
    monkeypatch.setattr(sys, "argv", ["rota", *args])
    with pytest.raises(SystemExit):
        main()
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err
    assert "This should not happen" not in printed.err
    assert printed.err.count("\n") + printed.out.count("\n") >= 1


async def test_listening_port_in_use_prints_an_error(rota):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, errors = await _ended(await rota("up", env={"ROTA_LISTEN_PORT": str(port)}))
    assert status == 1
    assert f"Port {port} on 127.0.0.1 is taken" in errors
    assert "Traceback" not in errors

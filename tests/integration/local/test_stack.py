"""Local servers: one owner, no orphans, no data loss, and every error names the remedy."""

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import asyncpg
import nats
import pytest
import redis.asyncio

from rota.infra.data_dir import DataDirOwner, owner_of
from rota.local import LocalStack
from rota.local.identity import LAUNCHER
from rota.model.errors import DataDirInUse, DataDirVersion, DiskFull, LoginRefused, PortTaken, ServerFailed, SetupFailed
from tests.support.harness.servers import options_for_tests
from tests.support.waiting import until

OWNER = "tests.integration.local.stack_owner"


async def _row_count(url):
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("CREATE TABLE IF NOT EXISTS kept (at timestamptz DEFAULT now())")
        await connection.execute("INSERT INTO kept DEFAULT VALUES")
        return await connection.fetchval("SELECT count(*) FROM kept")
    finally:
        await connection.close()


async def _stream_count(url):
    client = await nats.connect(url, allow_reconnect=False, reconnect_time_wait=0.01)
    try:
        jetstream = client.jetstream()
        await jetstream.add_stream(name="KEPT", subjects=["kept"])
        await jetstream.publish("kept", b"x")
        return (await jetstream.stream_info("KEPT")).state.messages
    finally:
        await client.close()


async def _answers(urls):
    assert await _row_count(urls["postgres"]) > 0
    assert await _stream_count(urls["nats"]) > 0
    async with redis.asyncio.Redis.from_url(urls["redis"]) as client:
        assert await client.ping()


def _family(pids):
    """`pids` and all their descendants."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, todo = set(), list(pids)
    while todo:
        pid = todo.pop()
        found.add(pid)
        todo += parents.get(pid, [])
    return found


def _running(pids):
    """The pids that are running; zombies are not."""
    alive = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            alive.add(pid)
    return alive


async def _owner(spawn, data, *mode):
    owner = await spawn(OWNER, data, *mode)
    urls, pids = json.loads(await owner.line(40)), json.loads(await owner.line())
    return owner, urls, pids


# Regressions: patterns, quotes and non-ASCII letters that broke a server or exposed it to the network.
@pytest.mark.parametrize("name", ["with spaces", "x[red]*?y", "é\"'$%{a}#b\\c"])
async def test_data_ports_and_passwords_survive_a_clean_stop(tmp_path, name):
    first = LocalStack(options_for_tests(tmp_path / name))
    await first.start()
    urls = {server: first.url(server) for server in first.servers}
    await _answers(urls)
    assert _listening(first) == {"0100007F"}
    await first.stop()
    again = LocalStack(options_for_tests(tmp_path / name))
    await again.start()
    try:
        assert {server: again.url(server) for server in again.servers} == urls
        assert await _row_count(urls["postgres"]) == 2
        assert await _stream_count(urls["nats"]) == 2
    finally:
        await again.stop()


async def test_redis_persists_nothing_and_never_evicts(private_redis):
    private = await private_redis()
    async with redis.asyncio.Redis.from_url(private.url) as client:
        assert (await client.info("memory"))["maxmemory_policy"] == "noeviction"
        assert (await client.config_get("save", "appendonly")) == {"save": "", "appendonly": "no"}
        await client.set("k", "v")
    await private.kill()
    await private.restart()
    async with redis.asyncio.Redis.from_url(private.url) as client:
        assert await client.dbsize() == 0


async def test_second_owner_is_refused_with_the_pid_and_changes_nothing(private_stack):
    running = await private_stack("redis")
    data = running.options.data_dir
    before = (data / "state.json").read_text()
    with pytest.raises(DataDirInUse, match=rf"in use by process {os.getpid()}: run `rota down`"):
        await LocalStack(running.options).start()
    assert owner_of(data) == DataDirOwner.current()
    assert (data / "state.json").read_text() == before


@pytest.mark.parametrize("mode", ["auto", "guard"])
async def test_killed_owner_stops_every_server_without_data_loss(spawn, tmp_path, mode):
    owner, urls, pids = await _owner(spawn, tmp_path / "d", mode)
    await _answers(urls)
    family = _family(pids)
    assert len(family) > 3
    owner.kill()
    await until(lambda: not _running(family), within_s=20, what="every server to end")
    _, urls_again, _ = await _owner(spawn, tmp_path / "d")
    assert urls_again == urls
    assert await _row_count(urls["postgres"]) == 2
    assert await _stream_count(urls["nats"]) == 2


async def test_new_owner_waits_for_the_servers_of_a_killed_one(spawn, tmp_path):
    owner, urls, pids = await _owner(spawn, tmp_path / "d")
    os.kill(pids[1], signal.SIGSTOP)  # one server cannot stop, so it still holds the lock
    owner.kill()
    await owner.wait()
    waiting = asyncio.create_task(_owner(spawn, tmp_path / "d"))
    left = owner_of(tmp_path / "d")
    assert (left.pid, left.alive) == (owner.pid, False)
    os.kill(pids[1], signal.SIGCONT)
    _, urls_again, _ = await waiting
    assert urls_again == urls


@pytest.mark.parametrize("victims", [["postgres"], ["redis"], ["nats"], ["postgres", "redis", "nats"]])
async def test_killed_servers_restart_at_the_same_urls_with_their_data(private_stack, victims):
    stack = await private_stack("postgres", "redis", "nats")
    urls = {name: stack.url(name) for name in stack.servers}
    await _answers(urls)
    pids = {name: server.process.pid for name, server in stack.servers.items()}
    watching = asyncio.create_task(stack.watch())
    for name in victims:
        os.kill(pids[name], signal.SIGKILL)
    for name in victims:
        server = stack.servers[name]
        await until(lambda s=server, p=pids[name]: s.process.pid != p, what=f"a restarted {name}")
    await until(lambda: _all_answer(urls), within_s=20, what="answers from all servers")
    assert {name: stack.url(name) for name in stack.servers} == urls
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def _all_answer(urls):
    try:
        await _answers(urls)
    except (OSError, asyncpg.PostgresError, redis.RedisError, nats.errors.Error):
        return False
    return True


async def test_server_that_keeps_dying_ends_the_watch_with_an_error(private_stack, monkeypatch):
    monkeypatch.setattr("rota.local.stack.RESTARTS_MAX", 1)
    stack = await private_stack("redis")
    watching = asyncio.create_task(stack.watch())
    server = stack.servers["redis"]
    for _ in range(2):
        pid = server.process.pid
        os.kill(pid, signal.SIGKILL)
        await until(lambda p=pid: watching.done() or (server.process.pid != p and server.process.status is None))
    with pytest.raises(ServerFailed, match="died 2 times within 60 s"):
        await watching


async def test_cluster_of_another_major_version_is_refused_and_unchanged(private_stack):
    stack = await private_stack("postgres")
    await stack.stop()
    made_by = stack.options.data_dir / "postgres" / "data" / "PG_VERSION"
    made_by.write_text("13\n")
    with pytest.raises(
        DataDirVersion, match=r"made by PostgreSQL 13 and .* set local\.postgres\.bin to a PostgreSQL 13"
    ):
        await LocalStack(stack.options).start()
    assert made_by.read_text() == "13\n"
    assert not (made_by.parent / "postmaster.pid").exists()
    assert owner_of(stack.options.data_dir) is None


async def test_saved_port_that_is_now_taken_is_replaced(private_stack):
    stack = await private_stack("redis")
    port = stack.servers["redis"].port
    await stack.stop()
    with socket.create_server(("127.0.0.1", port)):
        again = LocalStack(stack.options)
        await again.start()
        assert again.servers["redis"].port != port
        await again.stop()


async def test_port_taken_between_choice_and_bind_is_retried(private_stack, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        chosen = iter([taken.getsockname()[1]])
        real = LocalStack._server

        def rigged(self, name, home, binary):
            server = real(self, name, home, binary)
            choose = server._choose_port
            server._choose_port = lambda: next(chosen, None) or choose()
            return server

        monkeypatch.setattr(LocalStack, "_server", rigged)
        stack = await private_stack("redis", "nats")
        assert taken.getsockname()[1] not in {server.port for server in stack.servers.values()}
        await stack.stop()


@pytest.mark.parametrize("name", ["postgres", "redis", "nats"])
async def test_configured_port_that_is_taken_is_refused_and_nothing_runs(tmp_path, name):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        stack = LocalStack(options_for_tests(tmp_path / "d", servers=(name,), ports={name: port}))
        with pytest.raises(PortTaken, match=rf"Port {port} for \w+ is in use: .*local\.{name}\.port"):
            await stack.start()
    assert owner_of(tmp_path / "d") is None


async def test_passwords_are_only_in_private_files_and_in_no_command_line(private_stack):
    stack = await private_stack("postgres", "redis", "nats")
    secrets = json.loads((stack.options.data_dir / "credentials.json").read_text()).values()
    for pid in _family([server.process.pid for server in stack.servers.values()]):
        with suppress(FileNotFoundError, ProcessLookupError):  # PostgreSQL helper processes may exit meanwhile
            command = Path(f"/proc/{pid}/cmdline").read_text()
            assert not [secret for secret in secrets if secret in command]
    for path in stack.options.data_dir.rglob("*"):
        if path.is_file() and "postgres/data" not in str(path) and path.stat().st_size < 100_000:
            holds_secret = any(secret.encode() in path.read_bytes() for secret in secrets)
            assert not holds_secret or stat.S_IMODE(path.stat().st_mode) == 0o600, path


def _listening(stack):
    """The addresses, in kernel notation, on which the ports of the stack listen."""
    ports = {f"{server.port:04X}" for server in stack.servers.values()}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and address.partition(":")[2] in ports:
                found.add(address.partition(":")[0])
    return found


async def test_paused_server_is_stopped_cleanly(private_stack):
    stack = await private_stack("postgres")
    server = stack.servers["postgres"]
    server.process.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(10):
        await stack.stop()
    assert server.process.status == 0
    assert owner_of(stack.options.data_dir) is None


async def test_missing_credentials_are_reported_immediately(private_stack):
    stack = await private_stack("postgres")
    await stack.stop()
    (stack.options.data_dir / "credentials.json").unlink()
    with pytest.raises(SetupFailed, match=r"credentials\.json is missing"):
        await LocalStack(stack.options).start()


async def test_credentials_that_do_not_match_the_cluster_are_refused_immediately(private_stack):
    stack = await private_stack("postgres")
    await stack.stop()
    path = stack.options.data_dir / "credentials.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "postgres": "another"}))
    with pytest.raises(LoginRefused, match=r"refuses the password"):
        await LocalStack(stack.options).start()
    assert owner_of(stack.options.data_dir) is None


def test_process_with_a_reused_pid_is_not_taken_for_the_owner():
    mine = DataDirOwner.current()
    assert mine.alive
    assert not DataDirOwner(mine.pid, started="1").alive
    assert not DataDirOwner(2**40).alive


def _run_on_small_disk(tmp_path, script):
    """Run `script` with an 8 MB disk mounted at `tmp_path`; needs its own mount namespace."""
    command_prefix = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c"]
    mount = f"mount -t tmpfs -o size=8m tmpfs '{tmp_path}'"
    if subprocess.run([*command_prefix, mount], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a file system for a full disk: run as root, or allow user namespaces")
    return subprocess.run(
        [*command_prefix, f"{mount} && exec '{sys.executable}' -c \"$SCRIPT\" '{tmp_path}'"],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "SCRIPT": script},
        check=False,
    )


@pytest.mark.parametrize("check_first", [True, False])
def test_full_disk_is_reported_and_nothing_keeps_running(tmp_path, check_first):
    done = _run_on_small_disk(
        tmp_path,
        f"""
import asyncio, sys
from pathlib import Path
from rota.infra.data_dir import owner_of
from rota.local import LocalStack, StackOptions, datadir
from rota.model.errors import DiskFull
if not {check_first}:
    datadir.FREE_MIN_NEW_CLUSTER_MB = 0
try:
    asyncio.run(LocalStack(StackOptions(Path(sys.argv[1]) / "d")).start())
except DiskFull as error:
    print(error.code, error)
    print(owner_of(Path(sys.argv[1]) / "d"))
""",
    )
    code, _, rest = done.stdout.partition(" ")
    assert code == DiskFull.code, done.stderr
    assert "free some space" in rest
    assert rest.endswith("None\n")


async def test_unwritable_data_directory_is_refused_with_the_remedy():
    with pytest.raises(SetupFailed, match=r"/proc/rota cannot be used .* set local\.data-dir"):
        await LocalStack(options_for_tests(Path("/proc/rota"))).start()


async def test_damaged_state_file_is_reported(private_stack):
    stack = await private_stack("redis")
    await stack.stop()
    (stack.options.data_dir / "state.json").write_text("{")
    with pytest.raises(SetupFailed, match=r"state\.json is damaged .* restore it"):
        await LocalStack(stack.options).start()
    assert owner_of(stack.options.data_dir) is None


async def test_interrupted_initdb_leaves_no_partial_cluster(private_stack):
    stack = await private_stack("postgres")
    await stack.stop()
    data = stack.options.data_dir / "postgres" / "data"
    data.rename(data.with_name("data.new"))
    (data.with_name("data.new") / "PG_VERSION").unlink()
    again = LocalStack(stack.options)
    await again.start()
    assert await _row_count(again.url("postgres")) == 1
    await again.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has another account to become: run as root")
@pytest.mark.parametrize("mode", ["userns", "setuid"])
async def test_root_runs_postgres_under_another_account(spawn, mode):
    with _OpenDirectory() as data:
        owner, urls, _ = await _owner(spawn, data, mode)
        assert await owner.line() == f"0 {mode}"
        assert await _row_count(urls["postgres"]) == 1
        await owner.write_line("stop")
        assert await owner.wait() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as a plain user already: run as root")
async def test_unprivileged_user_needs_no_special_setup(spawn, tmp_path):
    # A user namespace without capabilities behaves like an ordinary account.
    as_user = [sys.executable, "-I", "-S", str(LAUNCHER), "--parent", str(os.getpid()), "--deathsig", "9"]
    as_user += ["--userns", "1000:1000", "--", sys.executable, "-m", OWNER, str(tmp_path / "d")]
    owner = await spawn(None, argv=as_user)
    urls = json.loads(await owner.line(40))
    await owner.line()
    assert await owner.line() == "1000 plain"
    assert await _row_count(urls["postgres"]) == 1
    await owner.write_line("stop")
    assert await owner.wait() == 0


class _OpenDirectory:
    """A directory that every account may enter; those of pytest are private."""

    def __enter__(self):
        import tempfile

        self._made = tempfile.TemporaryDirectory(prefix="rota-open-", ignore_cleanup_errors=True)
        Path(self._made.name).chmod(0o755)
        return Path(self._made.name) / "d"

    def __exit__(self, *_):
        self._made.cleanup()

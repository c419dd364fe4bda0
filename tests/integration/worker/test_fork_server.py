"""Commands of a fork server: signals at any moment, its own death, large arguments, no trace of the worker."""

import asyncio
import errno
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rota.model.protocol import AttemptStatus
from rota.worker.processes import fork_server
from rota.worker.processes.forked_process import CommandSpawner
from tests.integration.worker.worker_support import alive, command, processes_of, serving, workers
from tests.support.waiting import until

NO_LIMITS = "0,0,0,0,0"


class Spawner(CommandSpawner):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.output = bytearray()

    def run(self, *argv, program="/bin/sh", **env):
        return self.spawn(
            program,
            argv,
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], **env},
            limits=NO_LIMITS,
            stdout=self.output.extend,
            stderr=self.output.extend,
        )

    def shell(self, script, **env):
        return self.run("sh", "-c", script, **env)

    async def pid_told(self):
        """The first line of the output, a number."""
        await until(lambda: b"\n" in self.output, what="its first line")
        return int(self.output.split(b"\n")[0])


@pytest.fixture
async def spawner(tmp_path):
    before = set(processes_of())
    spawner = Spawner(tmp_path)
    yield spawner
    await spawner.close()
    assert set(processes_of()) <= before, "processes were left behind"


@asynccontextmanager
async def stopped(pid):
    """The process is stopped within the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_command_tells_its_pid_output_and_status(spawner):
    process = spawner.shell("echo $$ $COLOUR; pwd; exit 7", COLOUR="blue")
    await process.started
    await process.ended.wait()
    assert process.status == 7
    assert spawner.output.decode() == f"{process.pid} blue\n{spawner.folder}\n"


async def test_command_has_no_descriptors_but_its_streams(spawner):
    other = spawner.shell("exec sleep 600")
    process = spawner.run("ls", "-l", "/proc/self/fd", program="/bin/ls")
    await process.ended.wait()
    other.kill()
    found = [line.split()[-3:] for line in spawner.output.decode().splitlines()[1:]]
    assert [name for name, _, where in found if not where.startswith("/proc/")] == ["0", "1", "2"]
    assert found[0][2] == "/dev/null"
    await other.ended.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_signal_right_after_the_spawn_is_not_lost(spawner, number):
    """Before the child has a session, and while it ignores signals as its server does."""
    for _ in range(50):
        process = spawner.run("sleep", "600", program="/bin/sleep")
        process.signal(number)
        await process.ended.wait()
        assert process.status == -number


async def test_signal_after_the_end_reaches_nobody(spawner):
    process = spawner.shell("exit 0")
    await process.ended.wait()
    other = spawner.shell("echo ready; exec sleep 600")
    await until(lambda: b"ready" in spawner.output)
    process.kill()
    process.signal(signal.SIGTERM)
    assert spawner.shell("exit 0") is not None
    assert other.status is None
    other.kill()
    await other.ended.wait()


async def test_background_processes_are_killed_with_their_command(spawner):
    process = spawner.shell("sleep 600 & echo $!")
    await process.ended.wait()
    child = await spawner.pid_told()
    await until(lambda: not alive(child), what="its end")


async def test_arguments_larger_than_a_socket_buffer_arrive_in_order(spawner):
    """While the server is stopped, so that all of them wait in this process."""
    await spawner.shell("exit 0").ended.wait()
    large = "x" * 100_000
    async with stopped(spawner.pid):
        processes = [spawner.run("sh", "-c", "echo ${#1}; exit $2", large, large, str(n)) for n in range(20)]
    for number, process in enumerate(processes):
        await process.ended.wait()
        assert process.status == number
    assert spawner.output == b"100000\n" * 20


async def test_commands_end_with_their_server_and_the_next_one_starts_another(spawner):
    process = spawner.shell("sleep 600 & echo $!; exec sleep 600")
    child = await spawner.pid_told()
    first = spawner.pid
    os.kill(first, signal.SIGKILL)
    await process.ended.wait()
    assert process.status == -signal.SIGKILL
    await until(lambda: not alive(child) and not alive(process.pid), what="the end of its process group")
    again = spawner.shell("exit 3")
    await again.ended.wait()
    assert again.status == 3
    assert spawner.pid != first


async def test_server_that_was_killed_before_it_took_a_command_fails_its_start(spawner):
    await spawner.shell("exit 0").ended.wait()
    async with stopped(spawner.pid):
        process = spawner.shell("exit 0")
        os.kill(spawner.pid, signal.SIGKILL)
    with pytest.raises(OSError, match="fork server was killed"):
        await process.started
    assert process.ended.is_set()


async def test_closing_kills_what_is_left(tmp_path):
    spawner = Spawner(tmp_path)
    process = spawner.shell("trap '' TERM HUP INT; echo $$; while :; do sleep 0.01; done")
    pid = await spawner.pid_told()
    await spawner.close()
    await until(lambda: not alive(pid), what="its end")
    assert process.ended.is_set()


@pytest.mark.parametrize(
    ("program", "folder", "text"),
    [
        ("/no/such/program", "", "/no/such/program cannot be run: No such file"),
        ("/bin/true", "gone", "cannot be started"),
    ],
)
async def test_command_that_cannot_be_executed_says_why(spawner, program, folder, text):
    spawner.folder = spawner.folder / folder
    process = spawner.run("x", program=program)
    await process.ended.wait()
    assert process.status == fork_server.CANNOT_RUN_STATUS
    assert text in spawner.output.decode()


async def test_fork_that_the_system_refuses_fails_the_start(spawner, monkeypatch):
    sent = []
    server = object.__new__(fork_server.ForkServer)
    server._pids = server._numbers = {}
    server._send = lambda *message: sent.append(message)

    def refused():
        raise OSError(errno.EAGAIN, "no process left")

    monkeypatch.setattr(os, "fork", refused)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    server._run(5, b"", [])
    assert sent == [(fork_server.FAILED, 5, errno.EAGAIN)]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    process = spawner.shell("exit 0")
    process._connection._handle(fork_server.FAILED, 1, errno.EAGAIN)
    with pytest.raises(OSError, match="temporarily unavailable"):
        await process.started


async def test_cancelled_wait_for_the_start_leaves_the_process_to_its_owner(spawner):
    process = spawner.shell("exec sleep 600")
    waiting = asyncio.ensure_future(process.started)
    waiting.cancel()
    await asyncio.wait([waiting])
    await process.kill_and_wait(10)
    assert process.status == -signal.SIGKILL


async def test_command_cannot_read_the_environment_of_its_worker(nats_url, bus_prefix, tmp_path, monkeypatch):
    """As the environment of its parent."""
    monkeypatch.setenv("ROTA_POSTGRES_URL", "postgres://u:c4nary@host/db")
    async with serving(nats_url, bus_prefix) as server, workers(nats_url, bus_prefix, server, tmp_path) as start:
        await start()
        token = await server.send(command("sh", "-c", "tr '\\0' '\\n' < /proc/$PPID/environ; echo read"))
        assert await server.ended(token) is None
        assert (await server.logged(token))[0] == b"read\n"


async def test_frames_of_a_killed_server_fail_and_the_worker_goes_on(nats_url, bus_prefix, tmp_path):
    async with serving(nats_url, bus_prefix) as server, workers(nats_url, bus_prefix, server, tmp_path) as start:
        await start()
        token = await server.send(command("sh", "-c", "echo $PPID; exec sleep 600"))
        await until(lambda: b"\n" in server.output(token)[0], what="its parent")
        pid = int(server.output(token)[0])
        assert "fork_server" in Path(f"/proc/{pid}/cmdline").read_text()
        os.kill(pid, signal.SIGKILL)
        end = await server.ended(token)
        assert (end.status, end.code) == (AttemptStatus.FAILED, "signal")
        assert await server.run(command("true")) is None

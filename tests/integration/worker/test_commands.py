"""Commands as real processes: argv unchanged, a clean environment, their own directory, nothing left behind."""

import sys
from pathlib import Path

import msgspec
import pytest

from rota.model.jobs.work import ProcessLimits
from rota.model.protocol import AttemptStatus
from tests.integration.worker.worker_support import alive, command, processes_of, serving, workers
from tests.support.waiting import until

PYTHON = sys.executable


@pytest.fixture
async def server(nats_url, bus_prefix):
    async with serving(nats_url, bus_prefix) as running:
        yield running


@pytest.fixture
async def start(nats_url, bus_prefix, server, tmp_path):
    before = set(processes_of())
    async with workers(nats_url, bus_prefix, server, tmp_path / "work") as factory:
        yield factory
    assert set(processes_of()) <= before, "processes were left behind"


async def output_of(server, work, n=1, **more):
    """The standard output of a command."""
    token = await server.send(work, n, **more)
    await server.ended(token, n)
    return (await server.logged(token))[0].decode()


async def test_command_runs_its_argv_without_a_shell(server, start):
    await start()
    assert await output_of(server, command("echo", "$HOME", "a  b; exit 3", "*")) == "$HOME a  b; exit 3 *\n"


async def test_frame_number_is_in_argv_and_environment(server, start):
    await start()
    token = await server.send(command("sh", "-c", "echo {frame} {frame:04d} $ROTA_FRAME {x}"), 2, attempt=7)
    assert await server.ended(token, 2) == [None, None]
    assert await server.logged(token + 1) == (b"2 0002 2 {x}\n", 0)


async def test_environment_contains_declared_variables_and_few_others(server, start, monkeypatch):
    monkeypatch.setenv("ROTA_POSTGRES_URL", "postgres://u:c4nary-secret@host/db")
    monkeypatch.setenv("AWS_THING", "c4nary")
    await start()
    text = await output_of(server, command("env", env={"COLOUR": "blue", "LANG": "xx"}, gpus=0))
    found = dict(line.split("=", 1) for line in text.splitlines())
    allowed = {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR"}
    ours = {"ROTA_JOB", "ROTA_LAYER", "ROTA_FRAME", "ROTA_ATTEMPT", "ROTA_GPUS", "ROTA_INPUT"}
    assert found.keys() - allowed - ours == {"COLOUR", "TMPDIR", "CUDA_VISIBLE_DEVICES"} | found.keys() & {"LC_CTYPE"}
    assert (found["COLOUR"], found["LANG"], found["ROTA_ATTEMPT"]) == ("blue", "xx", "1")
    assert "c4nary" not in text


async def test_gpus_are_assigned_by_index(server, start):
    await start(offer={"gpus": 2})
    assert await output_of(server, command("sh", "-c", "echo $CUDA_VISIBLE_DEVICES", gpus=2)) == "0,1\n"


async def test_each_frame_has_its_own_directory_removed_at_its_end(server, start, tmp_path):
    await start()
    here = await output_of(server, command("sh", "-c", "pwd; touch left; ls; chmod 500 ."))
    folder, listing = here.split("\n", 1)
    assert Path(folder).parent == tmp_path / "work"
    assert "left" in listing
    await until(lambda: not Path(folder).exists(), what="the removal of its directory")


async def test_directories_are_kept_on_request(server, start):
    await start(keep_dirs=True)
    folder = (await output_of(server, command("pwd"))).strip()
    assert Path(folder).is_dir()


async def test_input_is_written_to_a_file(server, start):
    await start()
    text = await output_of(server, command("sh", "-c", "od -An -tx1 $ROTA_INPUT"), raw=msgspec.msgpack.encode([1]))
    assert text.split() == ["91", "01"]


@pytest.mark.parametrize(
    ("argv", "code", "error"),
    [
        (["sh", "-c", "exit 3"], "exit_status", "It ended with exit status 3."),
        (["sh", "-c", "kill -SEGV $$"], "signal", "It was ended by SIGSEGV."),
        (["no-such-command"], "no_command", "The command 'no-such-command' is not on this worker's PATH."),
        (
            ["true", "a\0b"],
            "no_command",
            "The command cannot be started: an argument or a variable contains the character NUL.",
        ),
    ],
)
async def test_command_failure_has_a_code_and_a_message(server, start, argv, code, error):
    await start()
    end = await server.run(command(*argv))
    assert (end.status, end.code, end.error) == (AttemptStatus.FAILED, code, error)
    assert await server.run(command("true")) is None


async def test_large_output_is_truncated_to_head_and_tail(server, start):
    await start(output_max=200_000)
    token = await server.send(command("sh", "-c", "echo first; head -c 100000000 /dev/zero; echo last"))
    assert await server.ended(token) is None
    data, dropped = await server.logged(token)
    assert (len(data), dropped) == (200_000, 100_000_011 - 200_000)
    assert data.startswith(b"first\n")
    assert data.endswith(b"last\n")


async def test_output_is_streamed_while_the_command_runs(server, start):
    await start()
    token = await server.send(command("sh", "-c", "echo now; exec sleep 60", kill_after_s=1))
    await until(lambda: server.output(token) == (b"now\n", 0), what="its first line")
    await server.cancel(token)
    assert (await server.ended(token)).status is AttemptStatus.CANCELLED


async def test_requested_memory_is_enforced_as_a_limit(server, start):
    await start()
    end = await server.run(command(PYTHON, "-S", "-c", "x = bytearray(200 * 1024 * 1024)", memory_mb=64))
    assert (end.status, end.code) == (AttemptStatus.FAILED, "exit_status")
    assert await server.run(command(PYTHON, "-S", "-c", "x = bytearray(20 * 1024 * 1024)", memory_mb=64)) is None


BUSY = "while True: pass"
WRITES = "open('f', 'wb').write(b'x' * 3_000_000)"
OPENS = "files = [open('/dev/null') for _ in range(50)]"
MAPS = "import mmap; mmap.mmap(-1, 3_000_000_000)"


@pytest.mark.parametrize(
    ("argv", "limits", "code", "error"),
    [
        (
            [PYTHON, "-c", BUSY],
            ProcessLimits(cpu_s=1),
            "cpu_limit",
            "The command exceeded its limit of 1 s of CPU time per process",
        ),
        (
            ["sh", "-c", f"{PYTHON} -c '{BUSY}'; exit $?"],
            ProcessLimits(cpu_s=1),
            "cpu_limit",
            "The command exceeded its limit of 1 s",
        ),
        (
            ["sh", "-c", "head -c 3000000 /dev/zero > f"],
            ProcessLimits(file_mb=2),
            "file_limit",
            "The command wrote a file of more than 2",
        ),
        ([PYTHON, "-c", WRITES], ProcessLimits(file_mb=2), "exit_status", "Limits per process: files of 2MiB."),
        ([PYTHON, "-c", OPENS], ProcessLimits(open_files=30), "exit_status", "Limits per process: 30 open files."),
        (
            [PYTHON, "-c", MAPS],
            ProcessLimits(address_mb=2000),
            "exit_status",
            "Limits per process: 2000MiB of address space.",
        ),
    ],
)
async def test_command_over_a_limit_fails_with_a_reason(server, start, argv, limits, code, error):
    running = await start()
    end = await server.run(command(*argv, limits=limits))
    assert (end.status, end.code) == (AttemptStatus.FAILED, code)
    assert error in end.error
    assert not running.task.done()
    within = ProcessLimits(cpu_s=60, address_mb=8000, open_files=100, file_mb=100)
    assert await server.run(command("sh", "-c", "head -c 3000000 /dev/zero > f", limits=within)) is None


async def test_worker_limits_cap_the_limits_of_commands(server, start):
    await start(limits=ProcessLimits(open_files=20))
    for asked, found in ((0, "20"), (500, "20"), (10, "10")):
        work = command("sh", "-c", "ulimit -Hn", limits=ProcessLimits(open_files=asked))
        assert (await output_of(server, work)).strip() == found


async def test_command_that_ignores_sigxcpu_is_killed(server, start):
    await start()
    script = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    end = await server.run(command(PYTHON, "-c", script, limits=ProcessLimits(cpu_s=1)))
    assert (end.status, end.code) == (AttemptStatus.FAILED, "signal")
    assert end.error == "It was ended by SIGKILL. Limits per process: 1 s of CPU time."


async def test_command_whose_reader_closed_the_pipe_ends_as_in_a_shell(server, start):
    await start()
    token = await server.send(command("sh", "-c", "yes | head -n 1; echo done"))
    assert await server.ended(token) is None
    assert (await server.logged(token))[0] == b"y\ndone\n"
    assert server.output(token, "stderr") == (b"", 0)


async def test_cancel_sends_sigterm_first(server, start):
    await start()
    work = command("sh", "-c", "trap 'echo asked; exit 0' TERM; echo on; while :; do sleep 0.01; done", kill_after_s=60)
    token = await server.send(work)
    await until(lambda: server.output(token)[0] == b"on\n", what="its first line")
    await server.cancel(token)
    assert (await server.ended(token)).status is AttemptStatus.CANCELLED
    assert (await server.logged(token))[0] == b"on\nasked\n"


async def test_timeout_kills_the_whole_process_group(server, start):
    await start()
    script = "trap '' TERM; sleep 600 & echo $!; wait; sleep 600"
    token = await server.send(command("sh", "-c", script, timeout_s=0.3, kill_after_s=0.2))
    assert (await server.ended(token)).status is AttemptStatus.TIMEOUT
    child = int((await server.logged(token))[0])
    await until(lambda: not alive(child), what="the end of the process group")


async def test_background_processes_end_with_their_command(server, start):
    await start()
    child = int(await output_of(server, command("sh", "-c", "sleep 600 & echo $!")))
    await until(lambda: not alive(child), what="the end of the background process")

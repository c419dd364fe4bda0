"""Commands as real processes: argv as given, a clean environment, a directory each, nothing left behind."""

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


async def said(server, work, n=1, **more):
    """What a command printed."""
    token = await server.send(work, n, **more)
    await server.ended(token, n)
    return (await server.logged(token))[0].decode()


async def test_a_command_runs_as_its_argv_says_without_a_shell(server, start):
    await start()
    assert await said(server, command("echo", "$HOME", "a  b; exit 3", "*")) == "$HOME a  b; exit 3 *\n"


async def test_frames_are_numbered_in_argv_and_environment(server, start):
    await start()
    token = await server.send(command("sh", "-c", "echo {frame} {frame:04d} $ROTA_FRAME {x}"), 2, attempt=7)
    assert await server.ended(token, 2) == [None, None]
    assert await server.logged(token + 1) == (b"2 0002 2 {x}\n", 0)


async def test_the_environment_holds_what_was_declared_and_little_else(server, start, monkeypatch):
    monkeypatch.setenv("ROTA_POSTGRES_URL", "postgres://u:c4nary-secret@host/db")
    monkeypatch.setenv("AWS_THING", "c4nary")
    await start()
    text = await said(server, command("env", env={"COLOUR": "blue", "LANG": "xx"}, gpus=0))
    found = dict(line.split("=", 1) for line in text.splitlines())
    allowed = {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR"}
    ours = {"ROTA_JOB", "ROTA_LAYER", "ROTA_FRAME", "ROTA_ATTEMPT", "ROTA_GPUS", "ROTA_INPUT"}
    assert found.keys() - allowed - ours == {"COLOUR", "TMPDIR", "CUDA_VISIBLE_DEVICES"} | found.keys() & {"LC_CTYPE"}
    assert (found["COLOUR"], found["LANG"], found["ROTA_ATTEMPT"]) == ("blue", "xx", "1")
    assert "c4nary" not in text


async def test_gpus_are_handed_out_by_number(server, start):
    await start(offer={"gpus": 2})
    assert await said(server, command("sh", "-c", "echo $CUDA_VISIBLE_DEVICES", gpus=2)) == "0,1\n"


async def test_each_frame_has_a_directory_of_its_own_that_goes_with_it(server, start, tmp_path):
    await start()
    here = await said(server, command("sh", "-c", "pwd; touch left; ls; chmod 500 ."))
    folder, listing = here.split("\n", 1)
    assert Path(folder).parent == tmp_path / "work"
    assert "left" in listing
    await until(lambda: not Path(folder).exists(), what="the removal of its directory")


async def test_directories_are_kept_when_that_is_asked_for(server, start):
    await start(keep_dirs=True)
    folder = (await said(server, command("pwd"))).strip()
    assert Path(folder).is_dir()


async def test_an_input_lies_in_a_file(server, start):
    await start()
    text = await said(server, command("sh", "-c", "od -An -tx1 $ROTA_INPUT"), raw=msgspec.msgpack.encode([1]))
    assert text.split() == ["91", "01"]


@pytest.mark.parametrize(
    ("argv", "code", "error"),
    [
        (["sh", "-c", "exit 3"], "exit_status", "It ended with exit status 3."),
        (["sh", "-c", "kill -SEGV $$"], "signal", "It was ended by SIGSEGV."),
        (["no-such-command"], "no_command", "The command 'no-such-command' is not on this worker's PATH."),
        (["true", "a\0b"], "no_command", "The command cannot be started: embedded null byte."),
    ],
)
async def test_how_a_command_failed_is_told_by_code_and_sentence(server, start, argv, code, error):
    await start()
    end = await server.run(command(*argv))
    assert (end.status, end.code, end.error) == (AttemptStatus.FAILED, code, error)
    assert await server.run(command("true")) is None


async def test_a_hundred_megabytes_are_cut_to_head_and_tail(server, start):
    await start(output_max=200_000)
    token = await server.send(command("sh", "-c", "echo first; head -c 100000000 /dev/zero; echo last"))
    assert await server.ended(token) is None
    data, dropped = await server.logged(token)
    assert (len(data), dropped) == (200_000, 100_000_011 - 200_000)
    assert data.startswith(b"first\n")
    assert data.endswith(b"last\n")


async def test_output_is_told_while_the_command_runs(server, start):
    await start()
    token = await server.send(command("sh", "-c", "echo now; exec sleep 60", kill_after_s=1))
    await until(lambda: server.output(token) == (b"now\n", 0), what="its first line")
    await server.cancel(token)
    assert (await server.ended(token)).status is AttemptStatus.CANCELLED


async def test_memory_that_was_asked_for_is_a_limit(server, start):
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
async def test_a_command_over_a_limit_fails_and_says_so(server, start, argv, limits, code, error):
    running = await start()
    end = await server.run(command(*argv, limits=limits))
    assert (end.status, end.code) == (AttemptStatus.FAILED, code)
    assert error in end.error
    assert not running.task.done()
    within = ProcessLimits(cpu_s=60, address_mb=8000, open_files=100, file_mb=100)
    assert await server.run(command("sh", "-c", "head -c 3000000 /dev/zero > f", limits=within)) is None


async def test_limits_of_a_worker_hold_for_commands_that_ask_for_more_or_for_none(server, start):
    await start(limits=ProcessLimits(open_files=20))
    for asked, found in ((0, "20"), (500, "20"), (10, "10")):
        work = command("sh", "-c", "ulimit -Hn", limits=ProcessLimits(open_files=asked))
        assert (await said(server, work)).strip() == found


async def test_a_command_that_passes_over_the_warning_is_killed(server, start):
    await start()
    deaf = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    end = await server.run(command(PYTHON, "-c", deaf, limits=ProcessLimits(cpu_s=1)))
    assert (end.status, end.code) == (AttemptStatus.FAILED, "signal")
    assert end.error == "It was ended by SIGKILL. Limits per process: 1 s of CPU time."


async def test_a_command_whose_reader_has_gone_ends_by_that_as_in_a_shell(server, start):
    await start()
    token = await server.send(command("sh", "-c", "yes | head -n 1; echo done"))
    assert await server.ended(token) is None
    assert (await server.logged(token))[0] == b"y\ndone\n"
    assert server.output(token, "stderr") == (b"", 0)


async def test_cancel_asks_first(server, start):
    await start()
    work = command("sh", "-c", "trap 'echo asked; exit 0' TERM; echo on; while :; do sleep 0.01; done", kill_after_s=60)
    token = await server.send(work)
    await until(lambda: server.output(token)[0] == b"on\n", what="its first line")
    await server.cancel(token)
    assert (await server.ended(token)).status is AttemptStatus.CANCELLED
    assert (await server.logged(token))[0] == b"on\nasked\n"


async def test_a_time_out_kills_the_whole_group(server, start):
    await start()
    script = "trap '' TERM; sleep 600 & echo $!; wait; sleep 600"
    token = await server.send(command("sh", "-c", script, timeout_s=0.3, kill_after_s=0.2))
    assert (await server.ended(token)).status is AttemptStatus.TIMEOUT
    child = int((await server.logged(token))[0])
    await until(lambda: not alive(child), what="the end of the group")


async def test_what_a_command_leaves_in_the_background_ends_with_it(server, start):
    await start()
    child = int(await said(server, command("sh", "-c", "sleep 600 & echo $!")))
    await until(lambda: not alive(child), what="the end of the background")

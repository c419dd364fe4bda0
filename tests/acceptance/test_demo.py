"""First steps of a new user: the README quick start as printed, `rota up` with its worker, and the demo."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.support.harness.made_data import copy_made
from tests.support.harness.servers import options_for_tests
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TASKS = """
import time
from pathlib import Path
from rota import Rota
app = Rota()

@app.task(cores=0.5)
def double(n): return 2 * n

@app.task
def large(n): return "x" * n

@app.task
def slow(until):
    while not Path(until).exists():
        time.sleep(0.05)
"""


@pytest.fixture
def env(tmp_path, made_data):
    """Environment of commands: a private data directory and a free port."""
    copy_made(made_data, tmp_path / ".rota")
    bins = {f"ROTA_LOCAL_{name.upper()}_BIN": path for name, path in options_for_tests(tmp_path).bins.items()}
    return {"ROTA_LISTEN_PORT": "0", "COLUMNS": "200", "PATH": f"{BIN}:{os.environ['PATH']}", **bins}


@pytest.fixture
async def rota(spawn, tmp_path, env):
    """Starts `rota ...`; `ended` returns its status, output and errors."""
    (tmp_path / "tasks.py").write_text(TASKS)

    async def start(*args):
        return await spawn(None, argv=[str(BIN / "rota"), *args], env=env, cwd=tmp_path)

    yield start
    await ended(await start("down"))


async def ended(process, timeout_s=45):
    out, err = await process.output(), await process.errors()
    return await process.wait(timeout_s), out, err


async def out(process):
    status, output, errors = await ended(process)
    assert status == 0, errors
    return output


async def the_worker(rota):
    [worker] = json.loads(await out(await rota("workers", "--json")))
    return worker


@pytest.mark.slow("starts a full installation and runs a dozen commands")
async def test_up_starts_a_worker_that_runs_tasks_and_commands(rota):
    up = await rota("up", "--app", "tasks.py")
    banner = [await up.line(40) for _ in range(7)]
    assert "tasks of tasks.py and commands" in banner[6]
    assert "is up" in (await out(await rota("status"))).splitlines()[-1]
    assert (await out(await rota("submit", "double", "21", "--wait"))).splitlines()[-1] == "42"
    assert "SUCCEEDED" in await out(await rota("submit", "--wait", "--", "true"))
    [job, _] = json.loads(await out(await rota("jobs", "--json")))
    assert job["state"] == "SUCCEEDED"
    job_data = json.loads(await out(await rota("job", "show", "double", "--json")))
    assert job_data["layers"][0]["cores"] == 0.5
    assert len((await out(await rota("submit", "large", "300000", "--wait"))).splitlines()[-1]) == 300_000
    up.send(signal.SIGINT)
    assert (await ended(up))[0] == 0


@pytest.mark.slow("starts a full installation and waits for a heartbeat timeout")
async def test_killed_worker_is_replaced_and_its_frame_is_retried(rota):
    up = await rota("up", "--app", "tasks.py")
    assert "Rota is up" in await up.line(40)
    first = await the_worker(rota)
    job = json.loads(await out(await rota("submit", "--json", "--", "sleep", "2")))["job"]
    pid = await until(lambda: _worker_pid(up.pid), what="the worker")
    os.kill(pid, signal.SIGKILL)
    assert "SUCCEEDED" in await out(await rota("job", "wait", job, "--timeout", "40s"))
    assert (await the_worker(rota))["id"] != first["id"]
    up.send(signal.SIGTERM)
    assert (await ended(up))[0] == 0


def _worker_pid(parent):
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            args = entry.read_bytes().split(b"\0")
            is_ours = int((entry.parent / "stat").read_text().rpartition(")")[2].split()[1]) == parent
        except OSError:
            continue
        if is_ours and b"worker" in args:
            return int(entry.parent.name)
    return None


@pytest.mark.slow("starts a full installation twice")
async def test_up_drains_frames_on_ctrl_c_and_leaves_no_worker_when_killed(rota, tmp_path):
    up = await rota("up", "--app", "tasks.py")
    assert "Rota is up" in await up.line(40)
    waiting = await rota("submit", "slow", str(tmp_path / "go"), "--wait")
    await until(lambda: _running(rota), within_s=20, what="a frame running on the worker")
    waiting.send(signal.SIGINT)
    status, _, errors = await ended(waiting)
    assert (status, "the job continues" in errors) == (130, True)
    up.send(signal.SIGINT)
    await until(lambda: "worker_draining" in (tmp_path / ".rota/log/worker.log").read_text(), what="the drain")
    (tmp_path / "go").touch()
    status, _, errors = await ended(up)
    assert (status, "running frames finish first" in errors) == (0, True)
    up = await rota("up", "--app", "tasks.py")
    assert "Rota is up" in await up.line(40)
    [job] = json.loads(await out(await rota("jobs", "--json")))
    assert (job["state"], job["ended"]) == ("SUCCEEDED", 1)
    worker = await until(lambda: _worker_pid(up.pid), what="the worker")
    up.kill()
    await until(lambda: not Path(f"/proc/{worker}").exists(), within_s=20, what="the exit of the worker")


async def _running(rota):
    return (await the_worker(rota))["frames"]


@pytest.mark.parametrize(
    ("app", "sentence"),
    [
        ("nothing.py", "The worker did not start: There is no file"),
        ("env.py", "has no `Rota()`"),
        ("no_such_module:app", "No module named 'no_such_module'"),
    ],
)
async def test_up_with_unusable_app_exits_with_one_error(rota, tmp_path, app, sentence):
    (tmp_path / "env.py").write_text("x = 1\n")
    status, output, errors = await ended(await rota("up", "--app", app))
    assert (status, output) == (1, "")
    assert sentence in errors
    assert errors.endswith("[setup_failed]\n")


async def test_up_with_no_worker_option_starts_no_worker(rota):
    assert "Rota is up" in await out(await rota("up", "--detach", "--no-worker"))
    assert json.loads(await out(await rota("workers", "--json"))) == []
    assert json.loads(await out(await rota("status", "--json")))["worker"] is None
    output = await out(await rota("submit", "--", "true"))
    assert output.startswith("Submitted job")


@pytest.mark.slow("starts a full installation")
async def test_readme_quick_start_commands_print_the_documented_output(spawn, tmp_path, env):
    """Compares everything but ids, times, ports and process numbers."""
    text = (ROOT / "README.md").read_text().partition("## Quick start\n")[2]
    script = text.partition("```sh\n")[2].partition("```")[0]
    printed = text.partition("```console\n")[2].partition("```")[0]
    install, _, rest = script.partition("\n")
    assert install.startswith("make setup && . .venv/bin/activate")
    (tmp_path / "quick_start.sh").write_text(rest)
    process = await spawn(None, argv=["sh", "-c", f"cd {tmp_path} && exec sh ./quick_start.sh 2>&1"], env=env)
    _, output, _ = await ended(process, 60)
    assert _without_numbers(output) == _without_numbers(printed)


def _without_numbers(text):
    text = re.sub(r"\S*\.rota", "DIR", re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", text))
    text = re.sub(r"process \d+|127\.0\.0\.1:\d+", "PLACE", text)
    text = re.sub(r"[\d.]+ m?s\b", "TIME", text)
    return [" ".join(line.split()) for line in text.splitlines() if "[warning" not in line]


@pytest.mark.slow("the demo runs at the pace of a person watching it")
@pytest.mark.timeout(150)
async def test_demo_completes_and_passes_all_its_checks(spawn, tmp_path):
    process = await spawn(None, argv=[str(BIN / "rota"), "demo"], env={"TMPDIR": str(tmp_path)})
    status, output, errors = await ended(process, 140)
    assert status == 0, errors
    lines = [line for line in output.splitlines() if "✓" in line]
    for args in (
        "quota_subscription",
        "2 GPUs",
        "oops is cancelled",
        "wipe is denied and never ran: rule nothing-is-wiped",
        "dora approved it",
        "the workflow trip books a flight and a hotel, but there is no car in Oslo: its run fails",
        "both are compensated, the last first: the hotel, then the flight",
        "bert was killed",
        "cap is raised",
        "flushed",
        "pulse",
    ):
        assert any(args in line for line in lines), args
    assert "none lost, none duplicated" in output
    assert output.count("all at 0") == 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("rota-")] == []

"""What a newcomer types: the quick start of the README as it is printed, `rota up` with its worker, and the demo."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

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
    """Of commands in a directory of this test's own, on a free port."""
    shutil.copytree(made_data, tmp_path / ".rota")
    bins = {f"ROTA_LOCAL_{name.upper()}_BIN": path for name, path in options_for_tests(tmp_path).bins.items()}
    return {"ROTA_LISTEN_PORT": "0", "COLUMNS": "200", "PATH": f"{BIN}:{os.environ['PATH']}", **bins}


@pytest.fixture
async def typed(spawn, tmp_path, env):
    """Runs `rota ...`, whose status, output and errors `ended` tells."""
    (tmp_path / "tasks.py").write_text(TASKS)

    async def start(*words):
        return await spawn(None, argv=[str(BIN / "rota"), *words], env=env, cwd=tmp_path)

    yield start
    await ended(await start("down"))


async def ended(process, timeout_s=45):
    out, err = await process.output(), await process.errors()
    return await process.wait(timeout_s), out, err


async def out(process):
    status, said, errors = await ended(process)
    assert status == 0, errors
    return said


async def the_worker(typed):
    [worker] = json.loads(await out(await typed("workers", "--json")))
    return worker


@pytest.mark.slow("a start of a whole installation and a dozen commands")
async def test_up_runs_tasks_and_commands_on_a_worker_of_its_own(typed):
    up = await typed("up", "--app", "tasks.py")
    banner = [await up.line(40) for _ in range(7)]
    assert "tasks of tasks.py and commands" in banner[6]
    assert "is up" in (await out(await typed("status"))).splitlines()[-1]
    assert (await out(await typed("submit", "double", "21", "--wait"))).splitlines()[-1] == "42"
    assert "SUCCEEDED" in await out(await typed("submit", "--wait", "--", "true"))
    [job, _] = json.loads(await out(await typed("jobs", "--json")))
    assert job["state"] == "SUCCEEDED"
    told = json.loads(await out(await typed("job", "show", "double", "--json")))
    assert told["layers"][0]["cores"] == 0.5
    assert len((await out(await typed("submit", "large", "300000", "--wait"))).splitlines()[-1]) == 300_000
    up.send(signal.SIGINT)
    assert (await ended(up))[0] == 0


@pytest.mark.slow("a start of a whole installation, and the silence of a worker")
async def test_a_worker_that_is_killed_is_replaced_and_its_frame_runs_again(typed):
    up = await typed("up", "--app", "tasks.py")
    assert "Rota is up" in await up.line(40)
    first = await the_worker(typed)
    job = json.loads(await out(await typed("submit", "--json", "--", "sleep", "2")))["job"]
    pid = await until(lambda: _worker_pid(up.pid), what="the worker")
    os.kill(pid, signal.SIGKILL)
    assert "SUCCEEDED" in await out(await typed("job", "wait", job, "--timeout", "40s"))
    assert (await the_worker(typed))["id"] != first["id"]
    up.send(signal.SIGTERM)
    assert (await ended(up))[0] == 0


def _worker_pid(parent):
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
            is_ours = int((entry.parent / "stat").read_text().rpartition(")")[2].split()[1]) == parent
        except OSError:
            continue
        if is_ours and b"worker" in words:
            return int(entry.parent.name)
    return None


@pytest.mark.slow("two starts of a whole installation")
async def test_ctrl_c_lets_frames_finish_and_a_killed_up_leaves_no_worker(typed, tmp_path):
    up = await typed("up", "--app", "tasks.py")
    assert "Rota is up" in await up.line(40)
    waiting = await typed("submit", "slow", str(tmp_path / "go"), "--wait")
    await until(lambda: _running(typed), within_s=20, what="a frame on the worker")
    waiting.send(signal.SIGINT)
    status, _, errors = await ended(waiting)
    assert (status, "the job continues" in errors) == (130, True)
    up.send(signal.SIGINT)
    await until(lambda: "worker_draining" in (tmp_path / ".rota/log/worker.log").read_text(), what="the drain")
    (tmp_path / "go").touch()
    status, _, errors = await ended(up)
    assert (status, "running frames finish first" in errors) == (0, True)
    up = await typed("up", "--app", "tasks.py")
    assert "Rota is up" in await up.line(40)
    [job] = json.loads(await out(await typed("jobs", "--json")))
    assert (job["state"], job["ended"]) == ("SUCCEEDED", 1)
    worker = await until(lambda: _worker_pid(up.pid), what="the worker")
    up.kill()
    await until(lambda: not Path(f"/proc/{worker}").exists(), within_s=20, what="the end of the worker")


async def _running(typed):
    return (await the_worker(typed))["frames"]


@pytest.mark.parametrize(
    ("app", "sentence"),
    [
        ("nothing.py", "The worker did not start: There is no file"),
        ("env.py", "has no `Rota()`"),
        ("no_such_module:app", "No module named 'no_such_module'"),
    ],
)
async def test_an_app_that_cannot_be_used_ends_up_with_a_sentence(typed, tmp_path, app, sentence):
    (tmp_path / "env.py").write_text("x = 1\n")
    status, said, errors = await ended(await typed("up", "--app", app))
    assert (status, said) == (1, "")
    assert sentence in errors
    assert errors.endswith("[setup_failed]\n")


async def test_up_without_a_worker(typed):
    assert "Rota is up" in await out(await typed("up", "--detach", "--no-worker"))
    assert json.loads(await out(await typed("workers", "--json"))) == []
    assert json.loads(await out(await typed("status", "--json")))["worker"] is None
    said = await out(await typed("submit", "--", "true"))
    assert said.startswith("Submitted job")


@pytest.mark.slow("a start of a whole installation")
async def test_the_quick_start_of_the_readme_works_as_it_is_printed(spawn, tmp_path, env):
    """Its commands typed as they stand, and what they print but for ids, times and numbers of processes."""
    text = (ROOT / "README.md").read_text().partition("## Quick start\n")[2]
    script = text.partition("```sh\n")[2].partition("```")[0]
    printed = text.partition("```console\n")[2].partition("```")[0]
    install, _, rest = script.partition("\n")
    assert install.startswith("make setup && . .venv/bin/activate")
    (tmp_path / "typed.sh").write_text(rest)
    process = await spawn(None, argv=["sh", "-c", f"cd {tmp_path} && exec sh ./typed.sh 2>&1"], env=env)
    _, said, _ = await ended(process, 60)
    assert _without_numbers(said) == _without_numbers(printed)


def _without_numbers(text):
    text = re.sub(r"\S*\.rota", "DIR", re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", text))
    text = re.sub(r"process \d+|127\.0\.0\.1:\d+", "PLACE", text)
    text = re.sub(r"[\d.]+ m?s\b", "TIME", text)
    return [" ".join(line.split()) for line in text.splitlines() if "[warning" not in line]


@pytest.mark.slow("the demo takes as long as a person watches it")
@pytest.mark.timeout(150)
async def test_the_demo_keeps_its_promises(spawn, tmp_path):
    process = await spawn(None, argv=[str(BIN / "rota"), "demo"], env={"TMPDIR": str(tmp_path)})
    status, said, errors = await ended(process, 140)
    assert status == 0, errors
    lines = [line for line in said.splitlines() if "✓" in line]
    for words in (
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
        assert any(words in line for line in lines), words
    assert "none lost, none duplicated" in said
    assert said.count("all at 0") == 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("rota-")] == []

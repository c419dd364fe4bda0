"""`rota top` and `rota doctor` on a running installation."""

import asyncio
import io
import json
import os
import pty
import signal
import sys
from contextlib import suppress

import pytest
from rich.console import Console

from rota.accounting.service import AccountingService
from rota.cli.core.exit_codes import ExitCode
from rota.cli.top import data as top_data
from rota.cli.top import view as top_view
from tests.support.commands import Terminal, rows
from tests.support.jobs import a_show
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging
from tests.support.waiting import until

LOST = sql("UPDATE rota.worker SET state = 'lost', ts_ended = clock_timestamp()")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show("default")
        yield farm


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path, database_url, redis_url, nats_url, bus_prefix):
    monkeypatch.chdir(tmp_path)
    for name, value in (("POSTGRES_URL", database_url), ("REDIS_URL", redis_url), ("NATS_URL", nats_url)):
        monkeypatch.setenv(f"ROTA_{name}", value)
    monkeypatch.setenv("ROTA_NATS_PREFIX", bus_prefix)
    return Terminal(monkeypatch, capsys)


async def busy(farm):
    await farm.worker("anna", slots=4)
    hanging("x")
    job = await farm.submit("hang", "x", show="default", frames=10, name="beauty")
    await farm.running("x", 4)
    return job


async def test_top_once_shows_quotas_pools_workers_and_jobs(farm, cli):
    job = await busy(farm)
    text = rows(await cli.out("top --once"))
    assert text[1].startswith("frames 6 waiting 4 on workers 0 ended jobs 1 live")
    assert any(line.startswith("default local █") for line in text)
    assert any(line.startswith("anna local ") and line.endswith(" 4/4") for line in text)
    assert any(line.startswith("beauty default") and " 0/10 4 " in line for line in text)
    seen = json.loads(await cli.out("top --json"))
    assert (seen["waiting"], seen["running"], seen["jobs"][0]["id"]) == (6, 4, str(job))
    assert [(pool["name"], pool["workers"], pool["frames"]) for pool in seen["pools"]] == [("local", 1, 4)]
    assert (seen["shows"][0]["cores"], seen["workers"][0]["used_cores"]) == (4.0, 4.0)


async def test_top_on_an_empty_installation_prints_hints(database, cli):
    text = await cli.out("top --once")
    for sentence in ("There is no show yet", "There is no pool yet", "No worker is up", "No job is live"):
        assert sentence in text


@pytest.mark.parametrize("size", [(80, 24), (60, 12), (200, 60), (40, 5)])
async def test_top_view_fits_the_terminal_size(farm, size):
    await busy(farm)
    for n in range(30):
        await farm.submit("noop", show="default", name=f"waiting-{n}")
    poller = top_data.TopPoller(farm.database)
    await poller.poll()
    seen = await poller.poll()
    width, height = size
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(top_view.render(seen, width, height))
    lines = console.export_text().splitlines()
    assert len(lines) <= max(height, 10)
    assert max(map(len, lines)) <= width
    assert seen.per_s is not None


async def test_top_redraws_and_q_restores_the_terminal(farm, cli):
    await busy(farm)
    assert await run_in_terminal(["top", "--every", "0.2"], b"beauty", b"q") == 0


async def test_top_ctrl_c_restores_the_terminal(farm, cli):
    await busy(farm)
    assert await run_in_terminal(["top", "--every", "0.2"], b"beauty", signal.SIGINT) == 0


async def run_in_terminal(args, seen, then):
    """Run a command in a pseudo-terminal; after it has printed `seen` twice, send `then`. Returns its exit status."""
    controller, terminal = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rota.cli", *args, stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    os.set_blocking(controller, False)
    shown = b""

    async def drawn_twice():
        nonlocal shown
        with suppress(BlockingIOError):
            shown += os.read(controller, 65536)
        return shown.count(seen) >= 2

    try:
        await until(drawn_twice)
        os.write(controller, then) if isinstance(then, bytes) else process.send_signal(then)
        status = await asyncio.wait_for(process.wait(), 10)
        with_rest = shown + os.read(controller, 65536)
        assert b"\x1b[?1049l" in with_rest  # it has left the alternate screen
        return status
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(controller)


async def test_doctor_passes_on_a_healthy_installation(farm, cli):
    await farm.worker()
    result = await cli("doctor")
    assert (result.status, result.out.splitlines()[-1]) == (ExitCode.OK, "All checks passed."), result.out
    data = json.loads(await cli.out("doctor --json"))
    assert data["ok"] is True
    names = [check["name"] for check in data["checks"]]
    for name in ("PostgreSQL", "schema", "connections", "servers", "workers", "books", "scripts", "NATS", "streams"):
        assert names.count(name) == 1, names
    assert {check["grade"] for check in data["checks"]} <= {"ok", "skipped"}


async def test_doctor_fails_on_ledger_drift_and_names_the_repair(database, redis, cli):
    """No server runs, because it would repair the drift before the check."""
    admin = await a_show(database, "default")
    await admin.create_pool("local", actor="ann")
    await admin.create_subscription("default", "local", size=8, burst=8, actor="ann")
    await AccountingService(database, redis).change(lambda admin: admin.set_managed("default", True, actor="ann"))
    [key] = await redis.keys("*acct:sub:*")
    await redis.hset(key, "int_cores", "3")
    result = await cli("doctor")
    assert result.status == ExitCode.FAILED
    assert "books: `rota ledger audit` shows every key" in result.out
    await cli("ledger audit --repair")
    assert "Those of default do not agree" not in (await cli("doctor")).out


async def test_doctor_warns_about_lost_workers(farm, cli):
    await farm.worker()
    await farm.database.run(LOST)
    result = await cli("doctor")
    assert (result.status, "workers: `rota workers --all` lists them" in result.out) == (ExitCode.OK, True)


async def test_doctor_fails_unreachable_servers_and_skips_dependent_checks(cli, monkeypatch, database):
    monkeypatch.setenv("ROTA_REDIS_URL", "redis://127.0.0.1:1")
    monkeypatch.setenv("ROTA_NATS_URL", "nats://127.0.0.1:1")
    monkeypatch.setenv("ROTA_NATS_CONNECT_TIMEOUT", "0.2s")
    result = await cli("doctor --json")
    grades = {check["name"]: check["grade"] for check in json.loads(result.out)["checks"]}
    assert result.status == ExitCode.FAILED
    assert (grades["Redis"], grades["NATS"], grades["streams"], grades["PostgreSQL"]) == (
        "fail",
        "fail",
        "skipped",
        "ok",
    )
    assert grades["servers"] == "fail", "no server is running"


async def test_doctor_checks_the_policy_when_configured(cli, monkeypatch, database, tmp_path):
    async def found():
        checks = json.loads((await cli("doctor --json")).out)["checks"]
        return [(check["grade"], check["sentence"]) for check in checks if check["name"] == "policy"]

    assert await found() == []
    path = tmp_path / "policy.yaml"
    monkeypatch.setenv("ROTA_POLICY_FILE", str(path))
    path.write_text("rules: [{id: a, decision: allow}]")
    [(grade, sentence)] = await found()
    assert (grade, sentence.startswith(f"1 rule by {path}, snapshot ")) == ("ok", True)
    path.write_text("rules: 3")
    assert await found() == [("fail", f"{path}:1: rules must be a list.")]
    monkeypatch.setenv("ROTA_SAFETY_KERNEL_ADDR", "127.0.0.1:1")
    [(grade, sentence)] = await found()
    assert (grade, "127.0.0.1:1 did not answer" in sentence) == ("fail", True)

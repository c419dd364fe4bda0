"""`rota top` and `rota doctor` on a farm that runs: what is seen, what is well, and what is not."""

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
def typed(monkeypatch, capsys, tmp_path, database_url, redis_url, nats_url, bus_prefix):
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


async def test_one_look_shows_quotas_pools_workers_and_jobs(farm, typed):
    job = await busy(farm)
    text = rows(await typed.out("top --once"))
    assert text[1].startswith("frames 6 waiting 4 on workers 0 ended jobs 1 live")
    assert any(line.startswith("default local █") for line in text)
    assert any(line.startswith("anna local ") and line.endswith(" 4/4") for line in text)
    assert any(line.startswith("beauty default") and " 0/10 4 " in line for line in text)
    seen = json.loads(await typed.out("top --json"))
    assert (seen["waiting"], seen["running"], seen["jobs"][0]["id"]) == (6, 4, str(job))
    assert [(pool["name"], pool["workers"], pool["frames"]) for pool in seen["pools"]] == [("local", 1, 4)]
    assert (seen["shows"][0]["cores"], seen["workers"][0]["used_cores"]) == (4.0, 4.0)


async def test_nothing_at_all_says_how_to_begin(database, typed):
    text = await typed.out("top --once")
    for sentence in ("There is no show yet", "There is no pool yet", "No worker is up", "No job is live"):
        assert sentence in text


@pytest.mark.parametrize("size", [(80, 24), (60, 12), (200, 60), (40, 5)])
async def test_a_picture_fits_the_terminal(farm, size):
    await busy(farm)
    for n in range(30):
        await farm.submit("noop", show="default", name=f"waiting-{n}")
    looking = top_data.TopPoller(farm.database)
    await looking.poll()
    seen = await looking.poll()
    width, height = size
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(top_view.render(seen, width, height))
    lines = console.export_text().splitlines()
    assert len(lines) <= max(height, 10)
    assert max(map(len, lines)) <= width
    assert seen.per_s is not None


async def test_the_live_view_draws_again_and_q_leaves_the_terminal_as_it_was(farm, typed):
    await busy(farm)
    assert await in_a_terminal(["top", "--every", "0.2"], b"beauty", b"q") == 0


async def test_ctrl_c_leaves_the_live_view_as_well(farm, typed):
    await busy(farm)
    assert await in_a_terminal(["top", "--every", "0.2"], b"beauty", signal.SIGINT) == 0


async def in_a_terminal(words, seen, then):
    """The status of a command that runs in a terminal of its own, once it has shown something twice and met `then`."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rota.cli", *words, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    shown = b""

    async def drawn_twice():
        nonlocal shown
        with suppress(BlockingIOError):
            shown += os.read(ours, 65536)
        return shown.count(seen) >= 2

    try:
        await until(drawn_twice)
        os.write(ours, then) if isinstance(then, bytes) else process.send_signal(then)
        status = await asyncio.wait_for(process.wait(), 10)
        with_rest = shown + os.read(ours, 65536)
        assert b"\x1b[?1049l" in with_rest  # back from the screen of its own
        return status
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)


async def test_a_farm_that_is_well_passes_every_check(farm, typed):
    await farm.worker()
    said = await typed("doctor")
    assert (said.status, said.out.splitlines()[-1]) == (ExitCode.OK, "All checks passed."), said.out
    told = json.loads(await typed.out("doctor --json"))
    assert told["ok"] is True
    names = [check["name"] for check in told["checks"]]
    for name in ("PostgreSQL", "schema", "connections", "servers", "workers", "books", "scripts", "NATS", "streams"):
        assert names.count(name) == 1, names
    assert {check["grade"] for check in told["checks"]} <= {"ok", "skipped"}


async def test_drifted_books_fail_with_what_mends_them(database, redis, typed):
    """No server is up, which would mend them before anybody looks."""
    admin = await a_show(database, "default")
    await admin.create_pool("local", actor="ann")
    await admin.create_subscription("default", "local", size=8, burst=8, actor="ann")
    await AccountingService(database, redis).change(lambda admin: admin.set_managed("default", True, actor="ann"))
    [key] = await redis.keys("*acct:sub:*")
    await redis.hset(key, "int_cores", "3")
    said = await typed("doctor")
    assert said.status == ExitCode.FAILED
    assert "books: `rota ledger audit` shows every key" in said.out
    await typed("ledger audit --repair")
    assert "Those of default do not agree" not in (await typed("doctor")).out


async def test_workers_that_were_lost_are_worth_a_warning(farm, typed):
    await farm.worker()
    await farm.database.run(LOST)
    said = await typed("doctor")
    assert (said.status, "workers: `rota workers --all` lists them" in said.out) == (ExitCode.OK, True)


async def test_servers_that_do_not_answer_fail_and_what_hangs_on_them_is_skipped(typed, monkeypatch, database):
    monkeypatch.setenv("ROTA_REDIS_URL", "redis://127.0.0.1:1")
    monkeypatch.setenv("ROTA_NATS_URL", "nats://127.0.0.1:1")
    monkeypatch.setenv("ROTA_NATS_CONNECT_TIMEOUT", "0.2s")
    said = await typed("doctor --json")
    grades = {check["name"]: check["grade"] for check in json.loads(said.out)["checks"]}
    assert said.status == ExitCode.FAILED
    assert (grades["Redis"], grades["NATS"], grades["streams"], grades["PostgreSQL"]) == (
        "fail",
        "fail",
        "skipped",
        "ok",
    )
    assert grades["servers"] == "fail", "there is none"


async def test_the_policy_is_looked_at_where_there_is_one(typed, monkeypatch, database, tmp_path):
    async def found():
        checks = json.loads((await typed("doctor --json")).out)["checks"]
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

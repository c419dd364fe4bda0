"""docs/howto/cancellation.md: its agents stop as documented, and its fencing table refuses a late run."""

import asyncio
import os
import re
import signal
import threading
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from rota.agents.running import AgentRun
from rota.model.failure_classes import FailureClass
from rota.worker.agents.process_main import run_agent_body
from rota.worker.agents.process_messages import AgentProcessRequest
from tests.support.waiting import until

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "cancellation.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def page():
    names = {"__name__": "page"}
    for block in BLOCKS:
        exec(compile(block, "cancellation.md", "exec"), names)
    return names


async def test_page_async_body_cleans_up_when_cancelled(page):
    agent, held = page["app"].recurring["refresh"], page["held"]
    stopping = asyncio.create_task(page["stopped"](agent, 0.05))
    await until(lambda: held == [1])
    assert await stopping
    assert held == []
    assert len(asyncio.all_tasks()) == 1, "its tasks ended with it"


def test_page_sync_body_cleans_up_on_sigterm(page, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    stop = threading.Thread(target=_terminate_when, args=(_runs_sleep,))
    stop.start()
    try:
        done = run_agent_body(
            page["app"].recurring["export"], AgentProcessRequest(AgentRun("export", 1, None, 0, 0)), None
        )
    finally:
        stop.join()
        signal.signal(signal.SIGTERM, before)
    assert (done.failure, done.error) == (FailureClass.TRANSIENT, "It was stopped.")
    assert list(tmp_path.iterdir()) == []
    assert "stopped" in capfd.readouterr().out


def _runs_sleep():
    """Whether the body has started its work: an earlier signal would find nothing to clean up."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            if (name, int(rest.split()[1])) == ("sleep", os.getpid()):
                return True
    return False


def _terminate_when(condition):
    asyncio.run(until(condition, within_s=20))
    os.kill(os.getpid(), signal.SIGTERM)


def test_page_fencing_table_refuses_a_late_run(page, database_url):
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE export_done (day date PRIMARY KEY, token bigint)")
        for number in (7, 9):
            page["publish"](connection, "2026-01-31", AgentRun("export", 1, None, 0, 0, token=number))
        with pytest.raises(RuntimeError, match="a later run has it"):
            page["publish"](connection, "2026-01-31", AgentRun("export", 1, None, 0, 0, token=8))
        assert connection.execute("SELECT token FROM export_done").fetchall() == [(9,)]

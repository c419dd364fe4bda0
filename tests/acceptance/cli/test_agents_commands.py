"""Agent commands of operators."""

import json

import pytest

from tests.support.agents import HOUR_MS, Pod, RunRecorder, every, history
from tests.support.commands import Terminal
from tests.support.waiting import until


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path, database_url, redis_url):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    monkeypatch.setenv("ROTA_REDIS_URL", redis_url)
    return Terminal(monkeypatch, capsys)


@pytest.fixture
async def agents(database, redis):
    """Two agents that have run once; no replica runs them afterwards."""
    seen = RunRecorder()
    made = {"sync": every(HOUR_MS, seen.quick), "broken": every(HOUR_MS, seen.failing(ValueError("no luck")))}
    async with Pod(database, redis, **made):
        for name in made:
            await until(lambda name=name: history(database, name))


async def test_agents_list_without_agents_shows_how_to_declare_one(cli):
    assert "@app.agent(every=...)" in (await cli("agents list")).out


async def test_agents_list_shows_the_last_outcome(cli, agents):
    listed = (await cli("agents list")).out
    assert "sync" in listed
    assert "every 1h" in listed
    found = {each["name"]: each for each in json.loads((await cli("agents list -o json")).out)}
    assert (found["broken"]["last_outcome"], found["broken"]["streak"]) == ("FAILED", 1)
    assert "ValueError: no luck" in (await cli("agents show broken")).out


async def test_agents_history_shows_outcomes_and_errors(cli, agents):
    assert "ValueError: no luck" in (await cli("agents history broken")).out
    [run] = json.loads((await cli("agents history sync -o json")).out)
    assert (run["outcome"], run["replica"]) == ("SUCCEEDED", "pod")


async def test_agent_is_paused_resumed_and_triggered(cli, agents):
    assert (await cli("agents pause sync")).out == "Agent sync is paused.\n"
    assert "Nothing changed" in (await cli("agents pause sync")).out
    assert "resume sync` first" in (await cli("agents trigger sync")).err
    assert "is resumed" in (await cli("agents resume sync")).out
    assert (await cli("agents trigger sync")).out == "Agent sync is due now.\n"


async def test_agent_backfill_starts_stops_and_rejects_invalid_times(cli, agents):
    began = await cli("agents backfill sync --from 2026-01-01T00:00Z --to 2026-01-01T03:00Z")
    assert (
        began.out
        == "Agent sync runs 3 more times, from 2026-01-01 00:00:00 to 2026-01-01 02:00:00, one after the other.\n"
    )
    assert "A backfill is in progress at 2026-01-01 00:00:00" in (await cli("agents show sync")).out
    assert "already has a backfill" in (await cli("agents backfill sync --from 2026-01-01T00:00Z")).err
    assert "'soon' is not a valid time" in (await cli("agents backfill sync --from soon")).err
    assert "--from TIME" in (await cli("agents backfill sync")).err
    assert (await cli("agents backfill sync --stop")).out == "The backfill of agent sync is stopped.\n"
    assert "Nothing changed" in (await cli("agents backfill sync --stop")).out


async def test_agents_health_fails_when_no_replica_runs_agents(cli, agents):
    result = await cli("agents health")
    assert result.status == 1
    assert "no replica runs agents" in result.out


async def test_unknown_agent_prints_an_error(cli):
    result = await cli("agents show nobody")
    assert result.status != 0
    assert "There is no agent 'nobody'" in result.err

"""Agents as an operator types about them."""

import json

import pytest

from tests.support.agents import HOUR_MS, Pod, Seen, every, history
from tests.support.commands import Terminal
from tests.support.waiting import until


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path, database_url, redis_url):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    monkeypatch.setenv("ROTA_REDIS_URL", redis_url)
    return Terminal(monkeypatch, capsys)


@pytest.fixture
async def agents(database, redis):
    """Two that have run, and nobody who would run them again."""
    seen = Seen()
    made = {"sync": every(HOUR_MS, seen.quick), "broken": every(HOUR_MS, seen.failing(ValueError("no luck")))}
    async with Pod(database, redis, **made):
        for name in made:
            await until(lambda name=name: history(database, name))


async def test_a_farm_without_agents_says_how_to_make_one(typed):
    assert "@app.agent(every=...)" in (await typed("agents list")).out


async def test_agents_are_listed_with_what_came_of_them(typed, agents):
    told = (await typed("agents list")).out
    assert "sync" in told
    assert "every 1h" in told
    found = {each["name"]: each for each in json.loads((await typed("agents list -o json")).out)}
    assert (found["broken"]["last_outcome"], found["broken"]["streak"]) == ("FAILED", 1)
    assert "ValueError: no luck" in (await typed("agents show broken")).out


async def test_history_has_durations_and_errors(typed, agents):
    assert "ValueError: no luck" in (await typed("agents history broken")).out
    [run] = json.loads((await typed("agents history sync -o json")).out)
    assert (run["outcome"], run["replica"]) == ("SUCCEEDED", "pod")


async def test_an_agent_is_paused_resumed_and_triggered(typed, agents):
    assert (await typed("agents pause sync")).out == "Agent sync is paused.\n"
    assert "Nothing changed" in (await typed("agents pause sync")).out
    assert "resume sync` first" in (await typed("agents trigger sync")).err
    assert "is resumed" in (await typed("agents resume sync")).out
    assert (await typed("agents trigger sync")).out == "Agent sync is due now.\n"


async def test_an_agent_is_backfilled_and_a_moment_that_is_none_is_a_sentence(typed, agents):
    began = await typed("agents backfill sync --from 2026-01-01T00:00Z --to 2026-01-01T03:00Z")
    assert (
        began.out
        == "Agent sync runs 3 more times, from 2026-01-01 00:00:00 to 2026-01-01 02:00:00, one after the other.\n"
    )
    assert "A backfill is in progress at 2026-01-01 00:00:00" in (await typed("agents show sync")).out
    assert "already has a backfill" in (await typed("agents backfill sync --from 2026-01-01T00:00Z")).err
    assert "'soon' is not a valid time" in (await typed("agents backfill sync --from soon")).err
    assert "--from TIME" in (await typed("agents backfill sync")).err
    assert (await typed("agents backfill sync --stop")).out == "The backfill of agent sync is stopped.\n"
    assert "Nothing changed" in (await typed("agents backfill sync --stop")).out


async def test_health_says_when_nobody_runs_agents(typed, agents):
    ended = await typed("agents health")
    assert ended.status == 1
    assert "no replica runs agents" in ended.out


async def test_what_does_not_exist_is_one_sentence(typed):
    ended = await typed("agents show nobody")
    assert ended.status != 0
    assert "There is no agent 'nobody'" in ended.err

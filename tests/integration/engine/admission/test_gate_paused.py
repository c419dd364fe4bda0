"""A server that is paused between the word of the policy and what it does by it: the word is too old by then."""

from pathlib import Path

import pytest

from tests.integration.engine.admission import precheck_client
from tests.support.jobs import a_show
from tests.support.queue import sql
from tests.support.waiting import until

NOW = sql("SELECT extract(epoch FROM clock_timestamp())::float8")
CLIENT = "tests.integration.engine.admission.precheck_client"


async def too_late(database, client):
    """Resumed when what it has heard is too old."""
    await until(
        lambda: Path(f"/proc/{client.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T", what="a pause"
    )
    since = await database.value(NOW)

    async def passed():
        return await database.value(NOW) > since + precheck_client.WORD_S

    await until(passed, what="the word to be too old")
    client.resume()


@pytest.mark.parametrize("place", ["gate.after_word", "submit.before_statement"])
async def test_a_word_that_was_asked_ahead_queues_nothing_after_a_pause(database, database_url, spawn, place):
    await a_show(database)
    client = await spawn(CLIENT, env={"URL": database_url, "PAUSE_AT": place})
    await too_late(database, client)
    assert await client.line() == "PENDING PENDING"
    assert await client.line() == "SCHEDULED SCHEDULED", "the gatekeeper has asked again"


@pytest.mark.parametrize("place", ["gatekeeper.after_decision", "submit.before_admit"])
async def test_a_word_that_the_gatekeeper_has_queues_nothing_after_a_pause(database, database_url, spawn, place):
    await a_show(database)
    client = await spawn(CLIENT, env={"URL": database_url, "PAUSE_AT": place, "LATER": "1"})
    assert await client.line() == "PENDING PENDING"
    await too_late(database, client)
    assert await client.line() == "PENDING PENDING"
    assert await database.value(sql("SELECT count(*) FROM rota.ready_entries")) == 0
    assert await database.value(sql("SELECT count(*) FROM rota.job WHERE ts_ask_at IS NOT NULL")) == 2

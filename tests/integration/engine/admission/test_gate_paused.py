"""A server paused between receiving a decision and applying it: the decision has expired when it resumes."""

from pathlib import Path

import pytest

from tests.integration.engine.admission import precheck_client
from tests.support.jobs import a_show
from tests.support.queue import sql
from tests.support.waiting import until

NOW = sql("SELECT extract(epoch FROM clock_timestamp())::float8")
CLIENT = "tests.integration.engine.admission.precheck_client"


async def resume_after_expiry(database, client):
    """Resume the paused client once its decision has expired."""
    await until(
        lambda: Path(f"/proc/{client.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T", what="a pause"
    )
    since = await database.value(NOW)

    async def passed():
        return await database.value(NOW) > since + precheck_client.TTL_S

    await until(passed, what="the decision to expire")
    client.resume()


@pytest.mark.parametrize("failpoint", ["gate.after_word", "submit.before_statement"])
async def test_precheck_decision_expired_by_a_pause_queues_nothing(database, database_url, spawn, failpoint):
    await a_show(database)
    client = await spawn(CLIENT, env={"URL": database_url, "PAUSE_AT": failpoint})
    await resume_after_expiry(database, client)
    assert await client.line() == "PENDING PENDING"
    assert await client.line() == "SCHEDULED SCHEDULED", "the controller asked again"


@pytest.mark.parametrize("failpoint", ["gatekeeper.after_decision", "submit.before_admit"])
async def test_controller_decision_expired_by_a_pause_queues_nothing(database, database_url, spawn, failpoint):
    await a_show(database)
    client = await spawn(CLIENT, env={"URL": database_url, "PAUSE_AT": failpoint, "LATER": "1"})
    assert await client.line() == "PENDING PENDING"
    await resume_after_expiry(database, client)
    assert await client.line() == "PENDING PENDING"
    assert await database.value(sql("SELECT count(*) FROM rota.ready_entries")) == 0
    assert await database.value(sql("SELECT count(*) FROM rota.job WHERE ts_ask_at IS NOT NULL")) == 2

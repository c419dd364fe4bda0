"""Crashes and lost replies at every failpoint of submission: a retry has each job once and complete."""

import pytest

from rota.infra import failpoints
from tests.integration.engine.submission import submit_client
from tests.support.jobs import a_show, left
from tests.support.queue import agreed, sessions_over, sql

# Statements of the client: insert, queues, two lanes, insert, input, message, and a last insert.
VISITS = {
    "submit.before_statement": (3, 6, 7),
    "submit.statement": (5, 7, 8),
    "submit.before_admit": (1,),
    "submit.admit": (1,),
}
FAILPOINTS = [
    (kind, f"{name}:{visit}") for kind, name in failpoints.declared_failpoints() for visit in VISITS.get(name, ())
]
INCONSISTENT_ROWS = sql("""
SELECT (SELECT count(*) FROM rota.job j WHERE NOT EXISTS (SELECT FROM rota.layer l WHERE l.pk_job = j.pk_job))
     + (SELECT count(*) FROM rota.idempotency_key k WHERE NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = k.pk_job))
     + (SELECT count(*) FROM rota.ready_entries e WHERE NOT EXISTS (SELECT FROM rota.job j WHERE j.pk_job = e.job_id))
     + (SELECT count(*) FROM rota.job j WHERE j.state = 'SCHEDULED'
        AND NOT EXISTS (SELECT FROM rota.ready_entries e WHERE e.job_id = j.pk_job))
     + (SELECT count(*) FROM rota.layer l WHERE l.input_at IS NOT NULL AND NOT EXISTS (SELECT FROM rota.blob))
     + (SELECT count(*) FROM rota.job WHERE state = 'PENDING' AND NOT EXISTS (SELECT FROM rota.outbox))
""")


@pytest.mark.parametrize(("kind", "failpoint"), FAILPOINTS, ids=[failpoint for _, failpoint in FAILPOINTS])
async def test_crash_or_lost_reply_leaves_whole_jobs_and_a_retry_completes_them(
    spawn, database_url, database, kind, failpoint
):
    await a_show(database)
    fault = {"CRASH_AT" if kind == "hit" else "LOST_REPLY_AT": failpoint}
    client = await spawn("tests.integration.engine.submission.submit_client", env={"URL": database_url, **fault})
    status = await client.wait()
    assert status == (failpoints.CRASH_EXIT_STATUS if kind == "hit" else 0), await client.errors()
    await sessions_over(database)
    assert await database.value(INCONSISTENT_ROWS) == 0

    await submit_client.work(database)
    assert await database.value(INCONSISTENT_ROWS) == 0
    found = await left(database)
    assert (found["jobs"], found["layers"], found["keys"], found["job_caps"]) == (4, 4, 4, 1)
    assert sum(counts["waiting"] for counts in (await agreed(database)).values()) == 10 + 3 + 1 + 1


def test_every_submission_failpoint_is_covered():
    named = {name for _, name in failpoints.declared_failpoints() if name.startswith("submit.")}
    assert named - set(VISITS) == {"submit.before_intake"}

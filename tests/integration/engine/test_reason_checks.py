"""Every column that holds a reason accepts the codes of its enums in Python, and no other."""

import re

import asyncpg
import pytest

from rota.engine.completion.retry_decision import known_code
from rota.infra.postgres import migrate
from rota.infra.postgres.migration_files import discover, discover_functions
from rota.model.attempt_codes import AttemptCode
from rota.model.protocol import AttemptResult, AttemptStatus
from rota.model.reasons import DeadLetterReason, Reason

ATTEMPTS = {*Reason, *AttemptCode}
ALLOWED = {
    "job.reason": set(Reason),
    "job_done.reason": set(Reason),
    "frame_end.code": ATTEMPTS,
    "done_entries.reason": ATTEMPTS,
    "dlq_entries.reason": ATTEMPTS | set(DeadLetterReason),
}
ADD = {
    "job_done.reason": """
        INSERT INTO rota.job_done (pk_job, pk_show, pk_folder, pk_dept, str_name, topic, priority, state, reason,
                                   ts_submitted, ts_finished, history, layers)
        VALUES (gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 'x', 'x', 5, 'FAILED', $1,
                now(), now(), '[]', '{}')""",
    "frame_end.code": """
        INSERT INTO rota.frame_end (pk_layer, frame, attempt, token, state, code)
        VALUES (gen_random_uuid(), 1, 1, 1, 'FAILED', $1)""",
    "done_entries.reason": """
        INSERT INTO rota.done_entries (token, lane_id, job_id, layer_id, frame, attempt, reason)
        VALUES (1, 1, gen_random_uuid(), gen_random_uuid(), 1, 1, $1)""",
    "dlq_entries.reason": "INSERT INTO rota.dlq_entries (kind, reason, cause) VALUES ('job', $1, 'x')",
}
FIRST_CHECK = 27
"""The migration that adds the first of these checks."""
UNKNOWN = ["max_scheduling_retries", "failed", "A reason.", ""]
CHECKS = """
SELECT c.conrelid::regclass || '', pg_get_constraintdef(c.oid), c.convalidated FROM pg_constraint c
WHERE c.contype = 'c' AND c.conrelid = $1::text::regclass AND pg_get_constraintdef(c.oid) ~ 'is_[a-z_]+\\('"""


@pytest.fixture
async def connection(database_url):
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


@pytest.mark.parametrize("column", ALLOWED)
async def test_check_of_a_reason_allows_the_codes_of_its_enums_and_no_other(connection, column):
    table, _, name = column.partition(".")
    [(_, check, validated)] = await connection.fetch(CHECKS, f"rota.{table}")
    assert validated
    function = re.search(r"is_\w+", check)[0]
    codes = sorted({*Reason, *AttemptCode, *DeadLetterReason, *UNKNOWN})
    allowed = await connection.fetch(f"SELECT code FROM unnest($1::text[]) AS code WHERE rota.{function}(code)", codes)
    assert {row["code"] for row in allowed} == ALLOWED[column]
    assert f"({name})" in check


@pytest.mark.parametrize("column", ADD)
async def test_row_with_an_unknown_reason_is_refused(connection, column):
    for code in sorted(ALLOWED[column]):
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(ADD[column], str(code))
        await transaction.rollback()
    for code in UNKNOWN:
        with pytest.raises(asyncpg.CheckViolationError):
            await connection.execute(ADD[column], code)


@pytest.mark.parametrize("status", [status for status in AttemptStatus if status is not AttemptStatus.SUCCEEDED])
@pytest.mark.parametrize("code", ["", "a_code_of_a_newer_worker"])
def test_unknown_code_of_a_worker_becomes_one_that_is_stored(status, code):
    assert known_code(AttemptResult(5, status, code=code)) in ATTEMPTS
    assert known_code(AttemptResult(5, status, code="exit_status")) == "exit_status"


async def test_unknown_reasons_of_older_versions_are_replaced_by_the_upgrade(empty_database_url):
    before = [each for each in discover() if each.number < FIRST_CHECK or each.phase == "pre"]
    await migrate(empty_database_url, migrations=before, functions=discover_functions())
    connection = await asyncpg.connect(empty_database_url)
    try:
        for statement in ADD.values():
            await connection.execute(statement, "max_scheduling_retries")
        await migrate(empty_database_url)
        found = {
            column: await connection.fetchval("SELECT {1} FROM rota.{0}".format(*column.split("."))) for column in ADD
        }
    finally:
        await connection.close()
    assert found == {
        "job_done.reason": "dispatch_failed",
        "frame_end.code": "exception",
        "done_entries.reason": "exception",
        "dlq_entries.reason": "exception",
    }

"""The flag in PostgreSQL that says whether servers use a policy.

Applications and commands submit jobs with settings of their own, which may name no policy. So each server sets the
flag at its start, and while it is set `rota.job_submit` queues no job without a decision: such jobs are stored as
PENDING and a server decides. All servers should have the same setting; if they differ, the last one to start wins.
"""

from __future__ import annotations

from rota.infra.postgres import Database, query

SET = query(__package__, "guard_set")
GET = query(__package__, "guard_get")


async def set_enabled(database: Database, *, asks: bool) -> None:
    await database.run(SET, asks)


async def is_enabled(database: Database) -> bool:
    return bool(await database.value(GET))

"""What PostgreSQL knows of the policy: whether servers ask one.

Jobs also come from applications and commands that have settings of their own, which may not name a policy. So a server
says at its start whether it asks, and while that is so `rota.job_submit` queues nothing without a word: such jobs are
written as PENDING, and servers ask. Servers of one installation are set alike; of those that are not, the last to start
is believed.
"""

from __future__ import annotations

from rota.infra.postgres import Database, query

SET = query(__package__, "guard_set")


async def set_enabled(database: Database, *, asks: bool) -> None:
    await database.run(SET, asks)

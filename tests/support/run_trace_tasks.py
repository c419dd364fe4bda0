"""Agents that append a trace of their runs to an unguarded table.

`AGENTS` defines them: `name=kind:interval_ms:work_ms`, separated by spaces; kind is `sync` or `async`. Each run writes
`begin`, a `tick` every few milliseconds while it works, and `end`.
"""

import asyncio
import os
import time

import asyncpg
import psycopg

from rota import Rota

TICK_S = 0.02
INSERT = "INSERT INTO rota.agent_trail (name, run, acquired_ms, what) VALUES ($1, $2, $3, $4)"
app = Rota()


def sync(work_ms):
    def body(run):
        with psycopg.connect(os.environ["URL"], autocommit=True) as connection:

            def write(what):
                connection.execute(INSERT.replace("$1, $2, $3, $4", "%s, %s, %s, %s"), _row(run, what))

            write("begin")
            for _ in range(int(work_ms / 1000 / TICK_S)):
                time.sleep(TICK_S)
                write("tick")
            write("end")

    return body


def async_(work_ms):
    async def body(run):
        connection = await asyncpg.connect(os.environ["URL"])
        try:
            await connection.execute(INSERT, *_row(run, "begin"))
            for _ in range(int(work_ms / 1000 / TICK_S)):
                await asyncio.sleep(TICK_S)
                await connection.execute(INSERT, *_row(run, "tick"))
            await connection.execute(INSERT, *_row(run, "end"))
        finally:
            connection.terminate()

    return body


def _row(run, what):
    return run.name, run.run, run.acquired_ms, what


for definition in os.environ.get("AGENTS", "").split():
    name, _, given = definition.partition("=")
    kind, interval_ms, work_ms = given.split(":")
    make = sync if kind == "sync" else async_
    app.agent(every=int(interval_ms) / 1000, timeout="1h", name=name)(make(int(work_ms)))

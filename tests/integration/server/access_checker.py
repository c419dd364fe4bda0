"""A process that checks API keys, run by the tests as a second replica.

It caches for an hour, so any change it notices arrived as a notification. It prints `ready`, and for each key on its
standard input `in NAME`, or the reason of the refusal.
"""

import asyncio
import os
import sys

from rota.infra.postgres import Database, PostgresTarget
from rota.infra.service import Service, Supervisor, run_until_signalled
from rota.infra.telemetry import logs
from rota.model.errors import RotaError
from rota.server.access import KeyCheck


def report(text):
    print(text, flush=True)


async def answer_keys(key_check):
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            actor = await key_check.check(line.decode().strip())
            report(f"in {actor.name}")
        except RotaError as error:
            report(error.facts.get("reason", error.code))


async def main():
    database = await Database.open(PostgresTarget(url=os.environ["URL"]))
    key_check = KeyCheck(database, remember_s=3600)

    async def serve(life):
        answer_task = asyncio.create_task(answer_keys(key_check))
        life.ready()
        report("ready")
        await life.until_draining()
        answer_task.cancel()
        await asyncio.wait([answer_task])

    supervisor = Supervisor()
    supervisor.add(*key_check.services(), Service("answer_keys", serve))
    try:
        await run_until_signalled(supervisor)
    finally:
        await database.close()


if __name__ == "__main__":
    logs.configure("json", "debug")
    asyncio.run(main())

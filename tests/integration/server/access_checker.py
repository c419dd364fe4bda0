"""A process that lets keys in or not, run by the tests as a second replica.

It remembers for an hour, so that whatever it notices was told to it. It prints `ready`, and for each key on its
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


def say(text):
    print(text, flush=True)


async def answer(checking):
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            actor = await checking.check(line.decode().strip())
            say(f"in {actor.name}")
        except RotaError as error:
            say(error.facts.get("reason", error.code))


async def main():
    database = await Database.open(PostgresTarget(url=os.environ["URL"]))
    checking = KeyCheck(database, remember_s=3600)

    async def face(life):
        answering = asyncio.create_task(answer(checking))
        life.ready()
        say("ready")
        await life.until_draining()
        answering.cancel()
        await asyncio.wait([answering])

    supervisor = Supervisor()
    supervisor.add(*checking.services(), Service("face", face))
    try:
        await run_until_signalled(supervisor)
    finally:
        await database.close()


if __name__ == "__main__":
    logs.configure("json", "debug")
    asyncio.run(main())

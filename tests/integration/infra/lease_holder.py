"""A process that holds a lease and writes under it on request; run by the tests as a second process.

It prints `held FENCE` when it has acquired the lease and `lost` when it learns of the loss. For each line on standard
input it tries one guarded insert into `rota.note` and prints `wrote` or the error's code.
"""

import asyncio
import os
import sys

from rota.infra.lease import Leases
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.postgres.sql import parse_query
from rota.infra.telemetry import logs
from rota.model.errors import LeaseLost, RotaError

NOTE = parse_query("test.note", "-- Leave a trace.\nINSERT INTO rota.note (fence) VALUES ($1)")


def say(text):
    print(text, flush=True)


async def write_on_request(leases, lease):
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        try:
            async with leases.database.transaction() as tx:
                await leases.guard(tx, lease)
                await tx.run(NOTE, lease.fence)
            say("wrote")
        except RotaError as error:
            say(error.code)


async def main(name, ttl_s):
    database = await Database.open(PostgresTarget(url=os.environ["URL"]))
    leases = Leases(database)
    try:
        async with leases.hold(name, kind="test", ttl_s=float(ttl_s)) as lease:
            say(f"held {lease.fence}")
            # In its own task, which a lease loss does not cancel: only the fence may stop it.
            writer = asyncio.create_task(write_on_request(leases, lease))
            await asyncio.Event().wait()
    except LeaseLost:
        say("lost")
    await writer


if __name__ == "__main__":
    logs.configure()
    asyncio.run(main(*sys.argv[1:]))

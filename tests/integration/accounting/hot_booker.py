"""A process that books one subscription from several concurrent tasks; run by the tests as a second process.

Each line on standard input is a command, answered by one line: `fill` books until every task was refused, `churn N`
has each task release some frames and book again N times, `release` releases all. The answer is the number of frames
that the process holds.
"""

import asyncio
import os
import random
import sys
from uuid import UUID, uuid4

from rota.accounting import AccountingService, BookingGroup, Charge
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.redis import RedisTarget, connect
from rota.infra.telemetry import logs

BOOKERS = 4
BATCH = 7


class Booker:
    def __init__(self, accounting, show, charge, first):
        self.accounting = accounting
        self.show = show
        self.charge = charge
        self.next = first
        self.held = []

    async def fill(self):
        while not await self.book(BATCH):
            pass
        while not await self.book(1):
            pass

    async def book(self, number):
        """Book `number` frames; returns whether any was refused."""
        tokens = range(self.next, self.next + number)
        self.next += number
        [outcome] = await self.accounting.book(self.show, [BookingGroup(self.charge, self.show, tokens)])
        self.held += outcome.booked
        return bool(outcome.refused)

    async def churn(self, rounds):
        for _ in range(rounds):
            await self.release(random.randint(0, 2 * BATCH))
            await self.book(random.randint(1, BATCH))

    async def release(self, number):
        gone, self.held = self.held[:number], self.held[number:]
        await self.accounting.release(self.show, gone)


async def main(first, show, *keys):
    database = await Database.open(PostgresTarget(url=os.environ["DATABASE"]))
    client = connect(RedisTarget(url=os.environ["REDIS"]))
    accounting = AccountingService(database, client)
    alloc, folder, dept = map(UUID, keys)
    bookers = [
        Booker(accounting, UUID(show), Charge(alloc, folder, uuid4(), uuid4(), dept, 50), int(first) + 10**9 * number)
        for number in range(BOOKERS)
    ]
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while command := (await lines.readline()).decode().split():
        async with asyncio.TaskGroup() as tasks:
            for booker in bookers:
                match command:
                    case ["fill"]:
                        tasks.create_task(booker.fill())
                    case ["churn", rounds]:
                        tasks.create_task(booker.churn(int(rounds)))
                    case ["release"]:
                        tasks.create_task(booker.release(len(booker.held)))
        print(sum(len(booker.held) for booker in bookers), flush=True)
    await client.aclose()
    await database.close()


if __name__ == "__main__":
    logs.configure()
    asyncio.run(main(*sys.argv[1:]))

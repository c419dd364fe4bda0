"""Reads exact counts ten times a second and prints the duration of each read in ms, until its input ends.

A separate process, so that other work in an event loop does not add to the time. The first input line is the URL, the
second the queue.
"""

import asyncio
import sys
import time

from rota.infra.postgres import Database, PostgresTarget
from rota.queue import Queue


async def main(url, queue_name):
    database = await Database.open(PostgresTarget(url=url))
    queue = Queue(database)
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    while not ended.done():
        began = time.perf_counter()
        await queue.counts_exact([queue_name])
        print((time.perf_counter() - began) * 1000, flush=True)
        await asyncio.wait([ended], timeout=0.1)
    await database.close()


if __name__ == "__main__":
    asyncio.run(main(sys.stdin.readline().strip(), sys.stdin.readline().strip()))

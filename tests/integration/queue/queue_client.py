"""A process that uses every operation of the queue once, as producer, dispatcher, worker and leader.

With a failpoint armed it crashes there, or loses a reply and retries as its callers would. It prints `done`.
"""

import asyncio
import os
from uuid import UUID

from rota.api.admin import DeadLetter
from rota.infra.failpoints import LostReply
from rota.infra.lease import Leases
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.telemetry import logs
from rota.queue import (
    DeadLetterFilter,
    FailedFilter,
    FrameFailure,
    MaintenanceIntervals,
    Queue,
    QueueEntry,
    QueueMaintenance,
)

FRAMES = 100
QUEUES = ("film", "slow")


def entry(queue, number, frames=FRAMES):
    return QueueEntry(queue=queue, job=UUID(int=number), layer=UUID(int=number), frames=frames, payload=b"p")


async def with_retry(call):
    """Repeat a call that is safe to repeat after a lost reply."""
    try:
        return await call()
    except LostReply:
        return await call()


async def claimed(queue, owner, lanes, want):
    """Claim; after a lost reply, find the claim among the open tokens."""
    known = await queue.open_tokens(owner)
    try:
        claims = await queue.claim(lanes, want, owner)
    except LostReply:
        return [token for token in await queue.open_tokens(owner) if token not in known]
    return [token for claim in claims for token in claim.tokens]


async def work(queue, owner):
    try:
        await queue.enqueue([entry("film", 1), entry("slow", 2, 10)])
    except LostReply:
        assert (await queue.counts_exact(["film"]))["film"].waiting == FRAMES, (
            "the frames are queued although the reply was lost"
        )
    lanes = {candidate.queue: candidate.lane for candidate in await queue.candidates()}
    await claimed(queue, owner, [lanes["slow"]], 3)
    tokens = await claimed(queue, owner, [lanes["film"]], 60)
    await with_retry(lambda: queue.complete(tokens[:10]))
    await with_retry(lambda: queue.give_back(tokens[10:15]))
    await with_retry(lambda: queue.retry(tokens[15:20], 0.0))
    await with_retry(lambda: queue.fail([FrameFailure(token, "exception") for token in tokens[20:30]]))
    await queue.cancel_running(tokens[30:32])
    await with_retry(lambda: queue.cancel_waiting(UUID(int=1), frames=range(95, 98)))
    await queue.park(tokens[32:40], UUID(int=1), rest_of=[lanes["film"]])
    await queue.unpark(UUID(int=1), 10_000)
    await with_retry(lambda: queue.failed.retry(FailedFilter(queue="film"), most=2))
    await with_retry(lambda: queue.failed.move_to_dead_letters(FailedFilter(queue="film"), most=4))
    await queue.dead_letters.add([DeadLetter(kind="message", reason="unreadable_message", cause="m1")])
    await with_retry(lambda: queue.dead_letters.retry(DeadLetterFilter(kind="frame"), most=1))


async def run_maintenance(queue, owner, lease, leases):
    """Frames of the paused queue outlive the ring; all others end, and their slots are pruned."""

    async def tombstone(tokens):
        return set(tokens)

    maintenance = QueueMaintenance(
        queue, leases, tombstone, MaintenanceIntervals(slot_bytes=1, prune_delay_s=0.0, failed_retention_s=0.0)
    )
    await queue.pause("slow")
    for number in range(8):
        await maintenance.promote(lease)
        await queue.enqueue([entry("film", 10 + number, 1)])
        lanes = [candidate.lane for candidate in await queue.candidates()]
        await queue.complete(await claimed(queue, owner, lanes, 4000))
        await maintenance.fold(lease)
        await maintenance.turn_ring(lease)
        await maintenance.return_orphans(lease)
    await with_retry(lambda: maintenance.expire(lease))
    await maintenance.shed(lease)


async def main():
    database = await Database.open(PostgresTarget(url=os.environ["URL"]))
    queue, leases = Queue(database), Leases(database)
    names = ["dispatcher:first", "dispatcher:second", "queue:upkeep"]
    granted = {lease.name: lease for lease in (await leases.acquire(names, kind="test", ttl_s=60.0)).granted}
    first, second = [await queue.register_owner(granted[name]) for name in names[:2]]
    await work(queue, first)
    await leases.release([granted["dispatcher:first"]])
    await run_maintenance(queue, second, granted["queue:upkeep"], leases)
    print("done", flush=True)
    await database.close()


if __name__ == "__main__":
    logs.configure()
    asyncio.run(main())

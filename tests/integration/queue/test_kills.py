"""Kill -9 and lost replies at every named place: counts stay those of the rows, and every frame can still end."""

import pytest

from rota.infra import failpoints
from rota.queue import MaintenanceIntervals, Queue
from tests.support.queue import Dispatcher, Leader, agreed, sessions_over, sql

ROOMS = ("queue.", "failed.", "dead_letters.")
PLACES = [(kind, name) for kind, name in failpoints.declared_failpoints() if name.startswith(ROOMS)]
ENQUEUED = 110 + 8
ALL_EXPIRED = sql("UPDATE rota.lease SET expires_at = clock_timestamp()")
UNPARK = sql("UPDATE rota.queue_returned SET parked_job = NULL")
RESUME = sql("UPDATE rota.queues SET paused = false")


@pytest.mark.parametrize(("kind", "place"), PLACES, ids=[name for _, name in PLACES])
async def test_dying_or_losing_a_reply_anywhere_loses_and_doubles_nothing(spawn, database_url, database, kind, place):
    arm = {"CRASH_AT" if kind == "hit" else "LOST_REPLY_AT": place}
    client = await spawn("tests.integration.queue.queue_client", env={"URL": database_url, **arm})
    status = await client.wait()
    assert status == (failpoints.CRASH_EXIT_STATUS if kind == "hit" else 0), await client.errors()
    await sessions_over(database)
    before = await agreed(database)
    total = sum(sum(counts.values()) for counts in before.values())
    assert total == ENQUEUED if kind == "after_send" else total <= ENQUEUED

    for statement in (ALL_EXPIRED, UNPARK, RESUME):
        await database.run(statement)
    await finish_everything(database)
    after = await agreed(database)
    assert sum(sum(counts.values()) for counts in after.values()) == total
    assert all(counts[state] == 0 for counts in after.values() for state in ("waiting", "running", "deferred"))


async def finish_everything(database):
    """A new leader and a new dispatcher take over; nothing was booked, so all of the dead one's claims come back."""
    queue = Queue(database)
    leader = await Leader.of(queue, MaintenanceIntervals(slot_bytes=1))
    await leader.return_orphans()
    dispatcher = await Dispatcher(database).enlisted()
    for _ in range(3):
        await leader.promote()
        await queue.complete(await dispatcher.tokens(4000))
        await leader.fold()
        await leader.turn_ring()

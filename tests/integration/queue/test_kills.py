"""SIGKILL and lost replies at every failpoint: counts match the rows, and every frame can still end."""

import pytest

from rota.infra import failpoints
from rota.queue import MaintenanceIntervals, Queue
from tests.support.queue import Dispatcher, Leader, agreed, sessions_over, sql

PREFIXES = ("queue.", "failed.", "dead_letters.")
FAILPOINTS = [(kind, name) for kind, name in failpoints.declared_failpoints() if name.startswith(PREFIXES)]
ENQUEUED = 110 + 8
ALL_EXPIRED = sql("UPDATE rota.lease SET expires_at = clock_timestamp()")
UNPARK = sql("UPDATE rota.queue_returned SET parked_job = NULL")
RESUME = sql("UPDATE rota.queues SET paused = false")


@pytest.mark.parametrize(("kind", "place"), FAILPOINTS, ids=[name for _, name in FAILPOINTS])
async def test_crash_or_lost_reply_at_any_failpoint_loses_and_duplicates_nothing(
    spawn, database_url, database, kind, place
):
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
    """A new leader and dispatcher take over; nothing was booked, so all claims of the dead dispatcher return."""
    queue = Queue(database)
    leader = await Leader.of(queue, MaintenanceIntervals(slot_bytes=1, prune_delay_s=0.0))
    await leader.return_orphans()
    dispatcher = await Dispatcher(database).enlisted()
    for _ in range(3):
        await leader.promote()
        await queue.complete(await dispatcher.tokens(4000))
        await leader.fold()
        await leader.turn_ring()

"""A booking fails or loses its reply: what is given back to the queue is not booked by an attempt that comes late."""

import asyncio

import pytest

from rota.accounting.ledger import DeclineReason
from rota.model.errors import PostgresBusy, PostgresUnavailable, RedisUnavailable
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, gates, hanging, seen
from tests.support.waiting import until

PROCS = sql("SELECT token FROM rota.proc ORDER BY token")


@pytest.fixture
async def cluster(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        yield cluster
        for gate in gates.values():
            gate.set()
        await cluster.quiet()


class Interrupted:
    """Replaces `AccountingService.book`: the first call fails as `fail` says."""

    def __init__(self, accounting, fail):
        self.book = accounting.book
        self.fail = fail
        self.calls = []
        self.answered = asyncio.Event()
        """A later call was answered."""
        accounting.book = self

    async def __call__(self, show, groups, *, force=False):
        self.calls.append((show, groups))
        if len(self.calls) == 1:
            await self.fail(show, groups)
        outcomes = await self.book(show, groups, force=force)
        self.answered.set()
        return outcomes


async def burst(cluster, cores):
    await cluster.accounting.change(lambda admin: admin.change_subscription("film", "local", burst=cores, actor="test"))


async def test_attempt_that_ends_after_its_reply_was_lost_books_no_frame_that_was_given_back(cluster):
    """The first attempt is late: meanwhile another one was refused, and its frame was given back and booked anew."""
    await cluster.show(managed=False, burst=1)
    await cluster.worker(slots=20)
    hanging("a"), hanging("b")
    await cluster.submit("hang", "a")
    await cluster.running("a")

    async def lose_reply(_show, _groups):
        raise PostgresUnavailable("lost during a statement", outcome="unknown")

    interrupted = Interrupted(cluster.replica.accounting, lose_reply)
    await cluster.submit("hang", "b")
    await interrupted.answered.wait()
    await burst(cluster, 10)
    await cluster.running("b")
    [late] = await interrupted.book(*interrupted.calls[0])
    assert list(late.declined.values()) == [DeclineReason.TOMBSTONED]
    assert len(await cluster.database.rows(PROCS)) == 2


@pytest.mark.parametrize("error", [PostgresBusy("a lock"), RedisUnavailable("away")], ids=["postgres", "redis"])
@pytest.mark.parametrize("managed", [True, False], ids=["managed", "unmanaged"])
async def test_frames_that_were_booked_before_the_booking_failed_are_not_given_back(cluster, managed, error):
    await cluster.show(managed=managed)
    await cluster.worker(slots=20)

    async def fail_after_booking(show, groups):
        await interrupted.book(show, groups)
        raise error

    interrupted = Interrupted(cluster.replica.accounting, fail_after_booking)
    job = await cluster.submit("note", frames=5)
    assert await cluster.ended(job) == "SUCCEEDED"
    assert sorted(seen["note"]) == [(frame, 1) for frame in range(5)]
    assert len(interrupted.calls) == 1


async def test_tokens_that_redis_counted_before_its_reply_was_lost_are_released_within_seconds(cluster):
    await cluster.show(burst=1)
    await cluster.worker(slots=20)

    async def lose_reply(show, groups):
        await cluster.replica.accounting.live._book(show, groups, "limits")
        raise RedisUnavailable("away")

    Interrupted(cluster.replica.accounting, lose_reply)
    job = await cluster.submit("noop")

    async def has_ended():
        return await cluster.done(job)

    await until(has_ended, within_s=5.0, what="the end of the job")


async def test_claims_under_a_lost_lease_are_returned_by_the_dispatcher_that_made_them(cluster):
    await cluster.show(managed=True, burst=10)
    job = await cluster.submit("noop", frames=3)
    dispatcher = cluster.replica.engine.dispatcher
    await until(lambda: dispatcher.pending_queues.entries, what="the queue")
    [pending] = dispatcher.pending_queues.entries.values()
    [claim] = await cluster.replica.queue.claim(pending.lanes, 3, dispatcher._owner)
    await dispatcher._return_claims_of(dispatcher._owner)
    assert claim.frames == 3
    assert await cluster.replica.queue.open_tokens(dispatcher._owner) == []
    await cluster.worker()
    assert await cluster.ended(job) == "SUCCEEDED"

"""Races of a protocol that guards one store only, on the protocol Rota began with and on Rota's own.

A booking is two steps: counters in Redis, then a row in PostgreSQL. A release is two steps in the opposite order. A
reseed reads PostgreSQL and then writes Redis. `SequenceProtocol` guards reseeds by one sequence number: scripts add
with HINCRBY and increment `acct:seq`, and a reseed writes only if it is unchanged. `TokenProtocol` is Rota's. Each race
is written once, step by step, and run on both. A frame takes 10 cores; races return the cores that run in the end.
"""

from functools import partial
from uuid import uuid4

import pytest

from rota.accounting import allocations
from rota.accounting.ledger import DeclineReason
from rota.accounting.live import reconcile, seeding
from rota.accounting.service import AccountingService
from tests.contract.ledger_suite import sql
from tests.integration.accounting.accounting_support import ShowQuota, paused_at

FRAME = 10
BOOK = """
for n = 1, 5 do
  local limit = redis.call('HGET', KEYS[n], n == 1 and 'burst' or 'int_max_cores')
  local current = tonumber(redis.call('HGET', KEYS[n], 'int_cores') or '0')
  local capped = n == 1 or tonumber(limit or '0') > 0
  if ARGV[2] ~= '1' and capped and current + ARGV[1] > tonumber(limit or '0') then
    return {0, n, current, tonumber(limit or '0')}
  end
end
for n = 1, 5 do redis.call('HINCRBY', KEYS[n], 'int_cores', ARGV[1]) end
return {1, redis.call('INCR', KEYS[6])}
"""
CAS = """
if (redis.call('GET', KEYS[6]) or '0') ~= ARGV[1] then return 0 end
for n = 1, 5 do redis.call('HSET', KEYS[n], 'int_cores', ARGV[2]) end
return 1
"""
INSERT = sql(
    "INSERT INTO rota.proc SELECT $2, $1, pk, pk, pk, pk, pk, pk, 1000, 0, 1, now() FROM (SELECT $1::uuid AS pk) AS own"
)
DELETE = sql("DELETE FROM rota.proc WHERE pk_show = $1 AND token = $2")
CORES = sql("SELECT coalesce(sum(int_cores_reserved), 0)::bigint / 100 FROM rota.proc WHERE pk_show = $1")


class SequenceProtocol:
    """The protocol with a sequence number; five keys, one show."""

    def __init__(self, database, redis, guarded=True):
        self.database = database
        self.redis = redis
        self.guarded = guarded
        self.show = uuid4()
        patterns = ("sub:{0}:{0}", "folder:{0}", "job:{0}", "layer:{0}", "point:{0}:{0}")
        self.keys = [*(f"acct:{pattern.format(self.show)}" for pattern in patterns), "acct:seq"]

    async def make(self, burst):
        await self.redis.hset(self.keys[0], "burst", burst)
        self.burst = burst
        return self

    async def decide(self, token):
        """The first step of a booking."""
        [fits, *_] = await self.redis.eval(BOOK, 6, *self.keys, FRAME, 0)
        return token if fits else None

    async def insert(self, decided):
        if decided is not None:
            await self.database.run(INSERT, self.show, decided)
        return decided is not None

    async def book(self, token):
        return await self.insert(await self.decide(token))

    async def delete(self, token):
        """The first step of a release."""
        await self.database.run(DELETE, self.show, token)

    async def publish(self, deleted):
        await self.redis.eval(BOOK, 6, *self.keys, -FRAME, 1)

    async def take_snapshot(self):
        """The first step of a reseed."""
        return await self.redis.get("acct:seq") or b"0", await self.running()

    async def write(self, snapshot):
        """Returns whether the reseed was applied."""
        seq, cores = snapshot
        seq = seq if self.guarded else await self.redis.get("acct:seq") or b"0"
        return bool(await self.redis.eval(CAS, 6, *self.keys, seq, cores))

    async def reseed(self):
        return await self.write(await self.take_snapshot())

    async def lose_redis(self):
        """Redis returns empty and is seeded, as at a start."""
        await self.redis.flushdb()
        await self.redis.hset(self.keys[0], "burst", self.burst)
        assert await self.reseed()

    async def counted(self):
        return int(await self.redis.hget(self.keys[0], "int_cores"))

    async def running(self):
        return await self.database.value(CORES, self.show)


class TokenProtocol:
    """Rota's protocol in the same steps: between two of them the real call is paused."""

    def __init__(self, database, redis, monkeypatch, **options):
        self.quota = ShowQuota(AccountingService(database, redis))
        self.paused_at = partial(paused_at, monkeypatch)
        self.options = options

    async def make(self, burst):
        await self.quota.make(burst=burst)
        return self

    async def decide(self, token):
        booking = self.paused_at(allocations, "insert", self.quota.book([token], cores=100 * FRAME))
        return booking, await booking.__aenter__()

    async def insert(self, decided):
        booking, task = decided
        await booking.__aexit__(None, None, None)
        self.last = task.result()
        return bool(self.last.booked)

    async def book(self, token):
        return bool((await self.quota.book([token], cores=100 * FRAME)).booked)

    async def delete(self, token):
        return await allocations.delete(self.quota.database, self.quota.show, [token])

    async def publish(self, deleted):
        await self.quota.live.publisher.publish(self.quota.show, deleted)

    async def take_snapshot(self):
        counting = self.paused_at(allocations, "tokens", self.quota.reconcile(**self.options), after=True)
        return counting, await counting.__aenter__()

    async def write(self, snapshot):
        counting, task = snapshot
        await counting.__aexit__(None, None, None)
        return task.result() is not None

    async def reseed(self):
        return await self.quota.reconcile(**self.options) is not None

    async def lose_redis(self):
        await self.quota.live.client.flushdb()
        assert await seeding.seed(self.quota.live, self.quota.show)

    async def counted(self):
        assert len(set((await self.quota.counters()).values())) == 1, "the five levels have equal counts"
        return int(await self.quota.count())

    async def running(self):
        assert await self.quota.over_cap() == []
        return await self.quota.database.value(CORES, self.quota.show)


@pytest.fixture
async def guarded(database, redis):
    return partial(SequenceProtocol, database, redis)


@pytest.fixture
async def tokens(database, redis, monkeypatch):
    return partial(TokenProtocol, database, redis, monkeypatch)


async def with_frames(protocol, frames, burst):
    await protocol.make(burst)
    for token in range(frames):
        assert await protocol.book(token)
    return protocol


async def book_after_snapshot(protocol):
    """A reseed takes its snapshot, a frame is booked, the reseed writes; then one more reseed."""
    await with_frames(protocol, 5, burst=1000)
    snapshot = await protocol.take_snapshot()
    assert await protocol.book(5)
    wrote = await protocol.write(snapshot)
    after_the_first = await protocol.counted()
    assert await protocol.reseed()
    return wrote, after_the_first, await protocol.counted(), await protocol.running()


async def test_booking_after_the_snapshot_of_an_unguarded_reseed_is_lost(guarded):
    assert await book_after_snapshot(guarded(guarded=False)) == (True, 50, 60, 60)


async def test_booking_after_the_snapshot_of_a_guarded_reseed_makes_it_retry(guarded):
    assert await book_after_snapshot(guarded()) == (False, 60, 60, 60)


async def test_booking_after_the_snapshot_of_a_reconciliation_is_kept(tokens):
    assert await book_after_snapshot(tokens()) == (True, 60, 60, 60)


async def reseed_between_script_and_insert(protocol):
    """A frame is decided, a whole reseed runs, the frame is inserted, two more are booked."""
    await with_frames(protocol, 5, burst=60)
    decided = await protocol.decide(5)
    assert await protocol.reseed()
    inserted = await protocol.insert(decided)
    return inserted, await protocol.book(6), await protocol.book(7), await protocol.running()


async def test_guarded_reseed_between_script_and_insert_breaches_the_cap(guarded):
    assert await reseed_between_script_and_insert(guarded()) == (True, True, False, 70)


async def test_reconciliation_between_script_and_insert_keeps_the_booking_during_its_grace(tokens):
    assert await reseed_between_script_and_insert(tokens(release_orphans=False)) == (True, False, False, 60)


async def test_reconciliation_that_tombstones_between_script_and_insert_gets_the_insert_refused(tokens):
    protocol = tokens(grace_s=0.0)
    assert await reseed_between_script_and_insert(protocol) == (False, True, False, 60)
    assert protocol.last.declined == {5: DeclineReason.TOMBSTONED}


async def reseed_between_delete_and_publish(protocol):
    """A row is deleted, a whole reseed runs, the release is published, two frames are booked."""
    await with_frames(protocol, 6, burst=60)
    deleted = await protocol.delete(0)
    assert await protocol.reseed()
    await protocol.publish(deleted)
    counted = await protocol.counted()
    return counted, await protocol.book(6), await protocol.book(7), await protocol.running()


async def test_guarded_reseed_between_delete_and_publish_breaches_the_cap(guarded):
    assert await reseed_between_delete_and_publish(guarded()) == (40, True, True, 70)


async def test_reconciliation_between_delete_and_publish_releases_once(tokens):
    assert await reseed_between_delete_and_publish(tokens()) == (50, True, False, 60)


async def reseed_paused_across_restart(protocol):
    """ABA: a reseed pauses after its snapshot; Redis is lost and seeded; after as many changes the reseed writes."""
    await with_frames(protocol, 5, burst=100)
    snapshot = await protocol.take_snapshot()
    await protocol.lose_redis()
    for token in range(5, 10):
        assert await protocol.book(token)
    wrote = await protocol.write(snapshot)
    return wrote, await protocol.counted(), await protocol.book(10), await protocol.running()


async def test_guarded_reseed_paused_across_a_redis_restart_breaches_the_cap(guarded):
    assert await reseed_paused_across_restart(guarded()) == (True, 50, True, 110)


async def test_reconciliation_paused_across_a_redis_restart_writes_nothing(tokens):
    assert await reseed_paused_across_restart(tokens()) == (False, 100, False, 100)


async def test_reconciliation_paused_across_a_restart_is_detected_by_fence_whatever_the_sequence(tokens):
    protocol = await with_frames(tokens(), 5, burst=100)
    snapshot, seq = await protocol.take_snapshot(), await protocol.quota.seq()
    await protocol.lose_redis()
    await protocol.quota.live.client.set("acct:seq", seq)
    assert not await protocol.write(snapshot)
    assert await protocol.counted() == 50
    assert isinstance(
        await reconcile.reconcile_show(protocol.quota.live, protocol.quota.show), reconcile.ReconcileReport
    )

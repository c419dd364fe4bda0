"""The races of a guard that watches one store: the same steps on the protocol Rota began from, and on Rota's.

A booking is two steps, counters in Redis and then a row in PostgreSQL; a release is two the other way round; a reseed
reads PostgreSQL and then writes Redis. `Guarded` is the protocol in which one sequence number guards reseeds: scripts
add with HINCRBY and move `acct:seq`, a reseed writes only if it has not moved. `Tokens` is ours. Each race is written
once, step by step, and run on both. Frames take 10 cores; what comes back is the cores that run in the end.
"""

from functools import partial
from uuid import uuid4

import pytest

from rota.accounting import allocations
from rota.accounting.ledger import DeclineReason
from rota.accounting.live import reconcile, seeding
from rota.accounting.service import AccountingService
from tests.contract.ledger_suite import sql
from tests.integration.accounting.accounting_support import Farm, stopped

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


class Guarded:
    """The protocol with the sequence number; five keys, one show."""

    def __init__(self, database, redis, guarded=True):
        self.database = database
        self.redis = redis
        self.guarded = guarded
        self.show = uuid4()
        words = ("sub:{0}:{0}", "folder:{0}", "job:{0}", "layer:{0}", "point:{0}:{0}")
        self.keys = [*(f"acct:{word.format(self.show)}" for word in words), "acct:seq"]

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

    async def look(self):
        """The first step of a reseed."""
        return await self.redis.get("acct:seq") or b"0", await self.running()

    async def write(self, looked):
        """Whether the reseed took place."""
        seq, cores = looked
        seq = seq if self.guarded else await self.redis.get("acct:seq") or b"0"
        return bool(await self.redis.eval(CAS, 6, *self.keys, seq, cores))

    async def reseed(self):
        return await self.write(await self.look())

    async def lose_everything(self):
        """Redis comes back empty and is filled, as at a start."""
        await self.redis.flushdb()
        await self.redis.hset(self.keys[0], "burst", self.burst)
        assert await self.reseed()

    async def counted(self):
        return int(await self.redis.hget(self.keys[0], "int_cores"))

    async def running(self):
        return await self.database.value(CORES, self.show)


class Tokens:
    """Rota's protocol, by the same steps. What waits between two of them is the real call, stopped there."""

    def __init__(self, database, redis, monkeypatch, **recounting):
        self.farm = Farm(AccountingService(database, redis))
        self.stopped = partial(stopped, monkeypatch)
        self.recounting = recounting

    async def make(self, burst):
        await self.farm.make(burst=burst)
        return self

    async def decide(self, token):
        booking = self.stopped(allocations, "insert", self.farm.book([token], cores=100 * FRAME))
        return booking, await booking.__aenter__()

    async def insert(self, decided):
        booking, task = decided
        await booking.__aexit__(None, None, None)
        self.last = task.result()
        return bool(self.last.booked)

    async def book(self, token):
        return bool((await self.farm.book([token], cores=100 * FRAME)).booked)

    async def delete(self, token):
        return await allocations.delete(self.farm.database, self.farm.show, [token])

    async def publish(self, deleted):
        await self.farm.live.publisher.publish(self.farm.show, deleted)

    async def look(self):
        counting = self.stopped(allocations, "tokens", self.farm.recount(**self.recounting), after=True)
        return counting, await counting.__aenter__()

    async def write(self, looked):
        counting, task = looked
        await counting.__aexit__(None, None, None)
        return task.result() is not None

    async def reseed(self):
        return await self.farm.recount(**self.recounting) is not None

    async def lose_everything(self):
        await self.farm.live.client.flushdb()
        assert await seeding.seed(self.farm.live, self.farm.show)

    async def counted(self):
        assert len(set((await self.farm.counters()).values())) == 1, "the five levels count alike"
        return int(await self.farm.count())

    async def running(self):
        assert await self.farm.over() == []
        return await self.farm.database.value(CORES, self.farm.show)


@pytest.fixture
async def guarded(database, redis):
    return partial(Guarded, database, redis)


@pytest.fixture
async def tokens(database, redis, monkeypatch):
    return partial(Tokens, database, redis, monkeypatch)


async def filled(books, frames, burst):
    await books.make(burst)
    for token in range(frames):
        assert await books.book(token)
    return books


async def a_booking_after_the_look(books):
    """t0 to t6: a reseed looks, a frame is booked, the reseed writes, and once more from the start."""
    await filled(books, 5, burst=1000)
    looked = await books.look()
    assert await books.book(5)
    wrote = await books.write(looked)
    after_the_first = await books.counted()
    assert await books.reseed()
    return wrote, after_the_first, await books.counted(), await books.running()


async def test_a_booking_after_the_look_of_a_reseed_is_lost_without_a_guard(guarded):
    assert await a_booking_after_the_look(guarded(guarded=False)) == (True, 50, 60, 60)


async def test_a_booking_after_the_look_of_a_reseed_makes_a_guarded_one_start_anew(guarded):
    assert await a_booking_after_the_look(guarded()) == (False, 60, 60, 60)


async def test_a_booking_after_the_look_of_a_recount_is_kept_and_the_recount_ends(tokens):
    assert await a_booking_after_the_look(tokens()) == (True, 60, 60, 60)


async def a_reseed_between_script_and_insert(books):
    """A: a frame is decided, a reseed comes and goes, the frame is inserted, two more ask."""
    await filled(books, 5, burst=60)
    decided = await books.decide(5)
    assert await books.reseed()
    inserted = await books.insert(decided)
    return inserted, await books.book(6), await books.book(7), await books.running()


async def test_a_reseed_between_script_and_insert_breaches_the_cap_of_the_guarded(guarded):
    assert await a_reseed_between_script_and_insert(guarded()) == (True, True, False, 70)


async def test_a_recount_between_script_and_insert_leaves_the_booking_alone_in_its_grace(tokens):
    assert await a_reseed_between_script_and_insert(tokens(release_orphans=False)) == (True, False, False, 60)


async def test_a_recount_that_buries_between_script_and_insert_has_the_insert_refused(tokens):
    books = tokens(grace_s=0.0)
    assert await a_reseed_between_script_and_insert(books) == (False, True, False, 60)
    assert books.last.declined == {5: DeclineReason.TOMBSTONED}


async def a_reseed_between_delete_and_publish(books):
    """B: a row is deleted, a reseed comes and goes, the release is published, two ask."""
    await filled(books, 6, burst=60)
    deleted = await books.delete(0)
    assert await books.reseed()
    await books.publish(deleted)
    counted = await books.counted()
    return counted, await books.book(6), await books.book(7), await books.running()


async def test_a_reseed_between_delete_and_publish_breaches_the_cap_of_the_guarded(guarded):
    assert await a_reseed_between_delete_and_publish(guarded()) == (40, True, True, 70)


async def test_a_recount_between_delete_and_publish_gives_back_once(tokens):
    assert await a_reseed_between_delete_and_publish(tokens()) == (50, True, False, 60)


async def a_reseed_that_slept_through_a_restart(books):
    """ABA: a reseed looks and sleeps; Redis is lost and filled; as many changes later it writes what it saw."""
    await filled(books, 5, burst=100)
    looked = await books.look()
    await books.lose_everything()
    for token in range(5, 10):
        assert await books.book(token)
    wrote = await books.write(looked)
    return wrote, await books.counted(), await books.book(10), await books.running()


async def test_a_reseed_that_slept_through_a_restart_breaches_the_cap_of_the_guarded(guarded):
    assert await a_reseed_that_slept_through_a_restart(guarded()) == (True, 50, True, 110)


async def test_a_recount_that_slept_through_a_restart_writes_nothing(tokens):
    assert await a_reseed_that_slept_through_a_restart(tokens()) == (False, 100, False, 100)


async def test_a_reseed_that_slept_through_a_restart_is_told_by_its_fence_whatever_the_number_says(tokens):
    books = await filled(tokens(), 5, burst=100)
    looked, seq = await books.look(), await books.farm.seq()
    await books.lose_everything()
    await books.farm.live.client.set("acct:seq", seq)
    assert not await books.write(looked)
    assert await books.counted() == 50
    assert isinstance(await reconcile.reconcile_show(books.farm.live, books.farm.show), reconcile.ReconcileReport)

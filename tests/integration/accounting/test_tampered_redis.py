"""Hands in Redis: every key of the books in turn is replaced, deleted or spoilt.

Nothing crashes: bookings, releases, recounts, reseeds, changes of limits and audits go on. No cap is passed meanwhile
(A1): what no script writes takes the fence of the show away, and it is seeded anew. The audit finds it before anybody
uses it, and the repair mends it; where nobody calls either, one look and one recount mend what decides.

One thing no check can see: a number that a script could have written. Such a counter or cap is believed until the next
recount or reseed, so for `wrong numbers` no cap is promised, only that it is found and mended.
"""

import asyncio
import itertools
from functools import partial
from uuid import uuid4

import pytest

from rota.accounting import audit as auditing
from rota.accounting.audit import orphan_keys, repair
from rota.accounting.live import reader as live_reader
from rota.accounting.live import reconcile, script_args
from rota.accounting.resources import CapsUpdate
from rota.accounting.service import AccountingService
from rota.model.quota import Usage
from tests.integration.accounting.accounting_support import PLENTY, Farm, stopped

COUNTING = ("sub", "folder", "job", "layer", "point")
INSIDE = ("show", "limits", "charges", "buckets", "tokens", "shadow", "seq")
UNSEEN = {"seq", "shadow"}
"""Nothing is decided by these outside a recount, so an audit does not look at them."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nobody else books here, so audits need not look twice and recounts not wait for bookings under way."""
    monkeypatch.setattr(auditing, "SAMPLE_INTERVAL_S", 0.0)
    monkeypatch.setattr(auditing, "SAMPLES_MAX", 2)
    monkeypatch.setattr(reconcile, "reconcile_show", partial(reconcile.reconcile_show, grace_s=0.0))


@pytest.fixture
async def farm(database, redis):
    return await Farm(AccountingService(database, redis)).make()


class Case:
    """Five frames of six that fit: at the level of the spoilt key, or at the subscription or the job."""

    def __init__(self, farm, name, numbers):
        self.farm = farm
        self.name = name
        self.numbers = numbers
        self.tight = name if name in COUNTING else "job" if name == "limits" else "sub"

    @property
    def key(self):
        keys, farm = self.farm.keys, self.farm
        things = {"sub": farm.pool, "folder": farm.folder, "job": farm.job, "layer": farm.layer, "point": farm.dept}
        if self.name in things:
            return keys.counter_key(f"{self.name}:{things[self.name]}")
        return keys.tokens(self.numbers.bucket) if self.name == "tokens" else getattr(keys, self.name)

    async def prepare(self):
        """Booked and limited; for the shadow, with a recount that died half way."""
        farm = self.farm
        farm.job, farm.layer = uuid4(), uuid4()
        self.held = (await farm.book(self.numbers.take(5), gpus=1)).booked
        assert len(self.held) == 5
        await self.limit(self.tight, 6)
        if self.name == "shadow":
            await farm.live.client.hset(farm.keys.show, "recount", 2**53)
            await farm.live.client.hset(farm.keys.shadow, f"sub:{farm.pool}:cores", 500)

    async def limit(self, name, most):
        match name:
            case "sub":
                await self.farm.burst(most if most > 0 else PLENTY, gpus=most)
            case "folder":
                await self.farm.cap_folder(CapsUpdate(max_cores=most, max_gpus=most))
            case "point":
                await self.farm.cap_point(CapsUpdate(max_cores=most, max_gpus=most))
            case "job":
                await self.farm.cap_job(max_cores=most, max_gpus=most)
            case "layer":
                await self.farm.cap_layer(max_cores=most, max_gpus=most)

    async def clear(self):
        await mend(self.farm)
        await self.farm.release(await self.farm.tokens())
        await self.limit(self.tight, -1)

    async def more(self, **how):
        outcome = await self.farm.book(self.numbers.take(2), gpus=1, **how)
        assert await self.farm.over() == [], self.name
        return outcome

    async def right(self):
        """Everything is as if nothing had happened: what still fits is booked, and not more."""
        found = await self.farm.audit()
        assert found.ok, (self.name, found)
        assert await self.farm.agrees()
        await self.fills()

    async def fills(self):
        level = script_args.LEVEL_OF_PREFIX[self.tight]
        held = (await self.farm.held()).get((level, self.farm.charge().key(level)), Usage())
        room = 6 - held.gpus
        assert len((await self.farm.book(self.numbers.take(8), gpus=1)).booked) == room, self.name
        assert await self.farm.over() == []


async def mend(farm):
    await repair(farm.books, await farm.books.admin.show("duck"))


class Numbers:
    """Tokens that were never used, within one bucket per case."""

    def __init__(self):
        self.bucket = -1
        self._next = itertools.count()

    def next_bucket(self):
        self.bucket += 1
        self._next = itertools.count(self.bucket * 128)

    def take(self, number):
        return [next(self._next) for _ in range(number)]


async def cases(farm, names=(*COUNTING, *INSIDE)):
    numbers = Numbers()
    for name in names:
        numbers.next_bucket()
        case = Case(farm, name, numbers)
        await case.prepare()
        yield case
        await case.clear()


async def another_type(client, key):
    kind = await client.type(key)
    await client.delete(key)
    await (client.hset(key, "a", "b") if kind == b"string" else client.set(key, "a"))


async def a_list(client, key):
    await client.delete(key)
    await client.rpush(key, "a")


async def deleted(client, key):
    await client.delete(key)


def every(value):
    """Every value of the key, whatever it is, becomes this one."""

    async def spoil(client, key):
        match await client.type(key):
            case b"string":
                await client.set(key, value)
            case b"hash":
                await client.hset(key, mapping=dict.fromkeys(await client.hkeys(key), value))
            case b"zset":
                await client.delete(key)
                await client.zadd(key, {value: 0})

    return spoil


async def foreign(client, key):
    match await client.type(key):
        case b"hash":
            await client.hset(key, mapping={"strange": "field", "300": "12", "sub:x": "1", b"\xff": b"\xfe"})
        case b"zset":
            await client.zadd(key, {"strange": 3, "7": 2, "99999999999999999999": 5})


DAMAGES = {
    "another type": another_type,
    "deleted": deleted,
    "words": every("words"),
    "negative": every("-5"),
    "foreign": foreign,
}
MORE_DAMAGES = {
    "a list": a_list,
    "bytes": every(b"\xff\xfe"),
    "nothing": every(""),
    "huge": every("99999999999999999999"),
    "too fine": every("0.005"),
    "not a number": every("nan"),
    "hexadecimal": every("0x10"),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_the_audit_finds_it_and_the_repair_mends_it(farm, damage):
    await audit_and_repair(farm, DAMAGES[damage], harmless=UNSEEN | ({"show"} if damage == "foreign" else set()))


@pytest.mark.soak
@pytest.mark.parametrize("damage", MORE_DAMAGES)
async def test_the_audit_finds_rarer_damage_too(farm, damage):
    await audit_and_repair(farm, MORE_DAMAGES[damage], harmless=UNSEEN)


async def audit_and_repair(farm, damage, harmless):
    async for case in cases(farm):
        await damage(farm.live.client, case.key)
        assert (await farm.audit()).ok == (case.name in harmless), case.name
        await mend(farm)
        await case.right()


@pytest.mark.parametrize("damage", DAMAGES)
async def test_nothing_crashes_and_no_cap_is_passed(farm, damage):
    await use(farm, DAMAGES[damage])


@pytest.mark.soak
@pytest.mark.parametrize("damage", MORE_DAMAGES)
async def test_nothing_crashes_for_rarer_damage_either(farm, damage):
    await use(farm, MORE_DAMAGES[damage])


async def use(farm, damage):
    """Everything that reads or writes Redis, in another order for every other key, then one look and one recount."""
    upkeep = farm.upkeep()
    async for case in cases(farm):
        await damage(farm.live.client, case.key)
        works = [farm.recount, lambda: farm.live.sync_limits(farm.show), farm.resize, farm.recount]
        for work in works[:: 1 if len(case.name) % 2 else -1]:
            for how in ({"capped": False}, {"capped": True}, {"job": uuid4(), "layer": uuid4()}):
                await case.more(**how)
            await work()
        await farm.book(case.held, gpus=1)
        assert await farm.release(case.held[:1]) == case.held[:1]
        await farm.live.counters(farm.show)
        await farm.audit()
        await upkeep.reseed_limits()
        await upkeep.seed_lagging_shows()
        assert await farm.recount() is not None, case.name
        assert await farm.decides_right(), case.name
        await case.fills()


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_cap_that_is_lowered_meanwhile_holds(farm, damage):
    async for case in cases(farm, (*COUNTING, "limits", "show")):
        await DAMAGES[damage](farm.live.client, case.key)
        await case.limit(case.tight, 5)
        for how in ({"capped": False}, {"capped": True}):
            assert not (await case.more(**how)).booked, case.name


@pytest.mark.parametrize("name", COUNTING)
async def test_wrong_numbers_are_found_and_mended(farm, name):
    async for case in cases(farm, [name]):
        for field, value in (("int_cores", "1"), ("int_gpus", "7"), ("burst", "900"), ("int_max_gpus", "900")):
            if await farm.live.client.hexists(case.key, field):
                await farm.live.client.hset(case.key, field, value)
                assert not (await farm.audit()).ok, field
                await mend(farm)
        await case.right()


async def test_one_recount_mends_counters_and_one_reseed_limits(farm):
    async for case in cases(farm, COUNTING):
        await farm.live.client.hset(case.key, mapping={"int_cores": "3", "int_gpus": "9"})
        assert list((await farm.recount()).drifted.values()) == [1]
        cap = "burst" if case.name == "sub" else "int_max_cores"
        await farm.live.client.hset(case.key, cap, "900")
        assert await farm.live.sync_limits(farm.show)
        await case.right()


async def test_a_limit_that_lacks_its_gpus_does_not_become_unlimited(farm):
    async for case in cases(farm, COUNTING):
        await farm.live.client.hdel(case.key, "gpu_burst" if case.name == "sub" else "int_max_gpus")
        await case.more(cores=1)
        await farm.upkeep().seed_lagging_shows()
        await case.right()


async def test_a_token_that_was_given_another_charge_is_found_and_mended(farm):
    async for case in cases(farm, ["tokens"]):
        await farm.book(case.numbers.take(1), cores=7, gpus=1, job=uuid4(), layer=uuid4())
        numbers = set(await farm.live.client.hvals(case.key))
        await farm.live.client.hset(case.key, str(case.held[0] % 128), max(numbers))
        await farm.recount()
        assert not (await farm.audit()).ok
        await mend(farm)
        assert (await farm.audit()).ok
        assert await farm.agrees()


async def test_a_recount_does_not_take_lost_buckets_for_nothing_booked(farm):
    async for case in cases(farm, ["buckets"]):
        await farm.live.client.delete(case.key)
        await farm.recount()
        await case.more()
        await farm.upkeep().seed_lagging_shows()
        await case.right()


async def test_a_recount_does_not_follow_buckets_out_of_order(farm):
    async for case in cases(farm, ["buckets"]):
        bucket = case.numbers.bucket
        await farm.book([(bucket + 1) * 128, (bucket + 2) * 128], cores=1, job=uuid4(), layer=uuid4())
        await farm.live.client.zadd(case.key, {str(bucket): bucket + 1.5})
        async with asyncio.timeout(5):
            assert await farm.recount() is None
        await farm.upkeep().seed_lagging_shows()
        await farm.recount()
        assert await farm.agrees()


@pytest.mark.parametrize("field", ["strange", "300", "0x1", b"\xff"])
async def test_a_recount_is_not_led_astray_by_a_token_that_is_none(farm, field):
    async for case in cases(farm, ["tokens"]):
        [number] = set(await farm.live.client.hvals(case.key))
        await farm.live.client.hset(case.key, field, number)
        assert await farm.recount() is None
        await farm.upkeep().seed_lagging_shows()
        await case.right()


async def test_a_bucket_that_is_no_longer_named_is_not_taken_for_counted(farm):
    async for case in cases(farm, ["buckets"]):
        await farm.live.client.zrem(case.key, str(case.numbers.bucket))
        assert not (await farm.audit()).ok
        await mend(farm)
        await case.right()


@pytest.mark.parametrize("gone", [None, "words"])
async def test_numbers_of_charges_are_not_given_twice(farm, gone):
    """Two charges under one number, and a recount would take the one for the other."""
    async for case in cases(farm, ["show"]):
        client = farm.live.client
        await (client.hset(case.key, "charges", gone) if gone else client.hdel(case.key, "charges"))
        assert not (await case.more(cores=7, job=uuid4(), layer=uuid4())).booked
        await farm.upkeep().seed_lagging_shows()
        await case.right()


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_recount_whose_shadow_is_spoilt_under_its_hands_changes_nothing(farm, monkeypatch, damage):
    await farm.book(range(5))
    async with stopped(monkeypatch, reconcile._ShowReconciler, "_swap_counters", farm.recount()) as recounting:
        await DAMAGES[damage](farm.live.client, farm.keys.shadow)
    assert (recounting.result() is None) == (damage != "foreign")
    assert await farm.agrees()
    assert (await farm.recount()).clean


async def test_a_count_of_charges_that_was_set_back_is_found_and_mended(farm):
    async for case in cases(farm, ["show"]):
        await farm.live.client.hset(case.key, "charges", 0)
        assert not (await farm.audit()).ok
        await mend(farm)
        await case.right()


@pytest.mark.parametrize("field", ["fence", "seeding"])
async def test_a_fence_above_that_of_postgresql_does_not_shut_the_show_for_ever(farm, field):
    """Left by a hand, or by a PostgreSQL that was restored from an older copy of itself."""
    await farm.live.client.hdel(farm.keys.show, "fence")
    await farm.live.client.hset(farm.keys.show, field, 4000)
    assert not (await farm.book([1])).all_booked
    await farm.upkeep().seed_lagging_shows()
    assert (await farm.book([1])).booked == [1]
    assert (await farm.audit()).ok
    assert await farm.fence() < 100


async def test_keys_of_jobs_nobody_knows_are_strangers_and_no_others_are(farm):
    await farm.book(range(5))
    await farm.cap_job(max_cores=9)
    lost = [f"acct:{level}:{uuid4()}" for level in ("job", "layer")]
    for key in lost:
        await farm.live.client.hset(key, mapping={"int_cores": "3", "int_gpus": "0"})
    assert await orphan_keys(farm.live, [farm.show]) == sorted(lost)
    await live_reader.unlink(farm.live.client, lost)
    assert await orphan_keys(farm.live, [farm.show]) == []
    assert (await farm.audit()).ok


async def test_books_of_a_show_nobody_knows_are_removed_by_the_reseed_of_limits(farm):
    other = farm.live.keys.show_keys(str(uuid4()))
    await farm.live.client.hset(other.show, mapping={"fence": 3, "run": "x"})
    await farm.live.client.zadd(other.buckets, {"0": 0})
    await farm.live.client.hset(other.tokens(0), "1", "1")
    await farm.live.client.hset("acct:show:words", "fence", 3)
    await farm.upkeep().reseed_limits()
    assert await farm.live.client.exists(other.show, other.buckets, other.tokens(0)) == 0
    assert (await farm.audit()).ok

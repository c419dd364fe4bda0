"""Manual changes in Redis: every accounting key in turn is replaced, deleted or damaged.

Nothing crashes: bookings, releases, reconciliations, reseeds, changes of limits and audits continue. No cap is exceeded
meanwhile (A1): a value that no script writes invalidates the fence of the show, which is then seeded again. The audit
finds the damage before it is used, and the repair fixes it; without either, one seeding pass and one reconciliation fix
the values that decide.

No check can detect a number that a script could have written. Such a counter or cap is trusted until the next
reconciliation or reseed, so for `wrong numbers` the tests require only that it is found and repaired.
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
from tests.integration.accounting.accounting_support import PLENTY, ShowQuota, paused_at

COUNTING = ("sub", "folder", "job", "layer", "point")
INSIDE = ("show", "limits", "charges", "buckets", "tokens", "shadow", "seq")
UNSEEN = {"seq", "shadow"}
"""Only a reconciliation uses these, so an audit does not check them."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No other process books here, so audits need one sample and reconciliations no grace."""
    monkeypatch.setattr(auditing, "SAMPLE_INTERVAL_S", 0.0)
    monkeypatch.setattr(auditing, "SAMPLES_MAX", 2)
    monkeypatch.setattr(reconcile, "reconcile_show", partial(reconcile.reconcile_show, grace_s=0.0))


@pytest.fixture
async def quota(database, redis):
    return await ShowQuota(AccountingService(database, redis)).make()


class Case:
    """Five of six frames are booked; the cap is at the level of the damaged key, else at the subscription or job."""

    def __init__(self, quota, name, numbers):
        self.quota = quota
        self.name = name
        self.numbers = numbers
        self.tight = name if name in COUNTING else "job" if name == "limits" else "sub"

    @property
    def key(self):
        keys, quota = self.quota.keys, self.quota
        things = {
            "sub": quota.pool,
            "folder": quota.folder,
            "job": quota.job,
            "layer": quota.layer,
            "point": quota.dept,
        }
        if self.name in things:
            return keys.counter_key(f"{self.name}:{things[self.name]}")
        return keys.tokens(self.numbers.bucket) if self.name == "tokens" else getattr(keys, self.name)

    async def prepare(self):
        """Book and limit; for the shadow, also leave a reconciliation that crashed midway."""
        quota = self.quota
        quota.job, quota.layer = uuid4(), uuid4()
        self.held = (await quota.book(self.numbers.take(5), gpus=1)).booked
        assert len(self.held) == 5
        await self.limit(self.tight, 6)
        if self.name == "shadow":
            await quota.live.client.hset(quota.keys.show, "recount", 2**53)
            await quota.live.client.hset(quota.keys.shadow, f"sub:{quota.pool}:cores", 500)

    async def limit(self, name, most):
        match name:
            case "sub":
                await self.quota.burst(most if most > 0 else PLENTY, gpus=most)
            case "folder":
                await self.quota.cap_folder(CapsUpdate(max_cores=most, max_gpus=most))
            case "point":
                await self.quota.cap_point(CapsUpdate(max_cores=most, max_gpus=most))
            case "job":
                await self.quota.cap_job(max_cores=most, max_gpus=most)
            case "layer":
                await self.quota.cap_layer(max_cores=most, max_gpus=most)

    async def clear(self):
        await repair_show(self.quota)
        await self.quota.release(await self.quota.tokens())
        await self.limit(self.tight, -1)

    async def book_two(self, **how):
        outcome = await self.quota.book(self.numbers.take(2), gpus=1, **how)
        assert await self.quota.over_cap() == [], self.name
        return outcome

    async def assert_repaired(self):
        """Assert that no damage is left: exactly the frames that still fit can be booked."""
        found = await self.quota.audit()
        assert found.ok, (self.name, found)
        assert await self.quota.agrees()
        await self.assert_fills()

    async def assert_fills(self):
        level = script_args.LEVEL_OF_PREFIX[self.tight]
        held = (await self.quota.held()).get((level, self.quota.charge().key(level)), Usage())
        remaining = 6 - held.gpus
        assert len((await self.quota.book(self.numbers.take(8), gpus=1)).booked) == remaining, self.name
        assert await self.quota.over_cap() == []


async def repair_show(quota):
    await repair(quota.accounting, await quota.accounting.admin.show("duck"))


class Numbers:
    """Unused tokens, in one bucket per case."""

    def __init__(self):
        self.bucket = -1
        self._next = itertools.count()

    def next_bucket(self):
        self.bucket += 1
        self._next = itertools.count(self.bucket * 128)

    def take(self, number):
        return [next(self._next) for _ in range(number)]


async def cases(quota, names=(*COUNTING, *INSIDE)):
    numbers = Numbers()
    for name in names:
        numbers.next_bucket()
        case = Case(quota, name, numbers)
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
    """Replace every value of the key by this one."""

    async def overwrite(client, key):
        match await client.type(key):
            case b"string":
                await client.set(key, value)
            case b"hash":
                await client.hset(key, mapping=dict.fromkeys(await client.hkeys(key), value))
            case b"zset":
                await client.delete(key)
                await client.zadd(key, {value: 0})

    return overwrite


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
async def test_audit_finds_damage_and_repair_fixes_it(quota, damage):
    await audit_and_repair(quota, DAMAGES[damage], harmless=UNSEEN | ({"show"} if damage == "foreign" else set()))


@pytest.mark.soak
@pytest.mark.parametrize("damage", MORE_DAMAGES)
async def test_audit_finds_rare_damage(quota, damage):
    await audit_and_repair(quota, MORE_DAMAGES[damage], harmless=UNSEEN)


async def audit_and_repair(quota, damage, harmless):
    async for case in cases(quota):
        await damage(quota.live.client, case.key)
        assert (await quota.audit()).ok == (case.name in harmless), case.name
        await repair_show(quota)
        await case.assert_repaired()


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damaged_redis_causes_no_crash_and_no_cap_breach(quota, damage):
    await use_damaged(quota, DAMAGES[damage])


@pytest.mark.soak
@pytest.mark.parametrize("damage", MORE_DAMAGES)
async def test_rare_damage_causes_no_crash_and_no_cap_breach(quota, damage):
    await use_damaged(quota, MORE_DAMAGES[damage])


async def use_damaged(quota, damage):
    """Run everything that reads or writes Redis, in two orders, then one seeding pass and one reconciliation."""
    maintenance = quota.maintenance()
    async for case in cases(quota):
        await damage(quota.live.client, case.key)
        steps = [quota.reconcile, lambda: quota.live.sync_limits(quota.show), quota.resize, quota.reconcile]
        for step in steps[:: 1 if len(case.name) % 2 else -1]:
            for how in ({"capped": False}, {"capped": True}, {"job": uuid4(), "layer": uuid4()}):
                await case.book_two(**how)
            await step()
        await quota.book(case.held, gpus=1)
        assert await quota.release(case.held[:1]) == case.held[:1]
        await quota.live.counters(quota.show)
        await quota.audit()
        await maintenance.reseed_limits()
        await maintenance.seed_lagging_shows()
        assert await quota.reconcile() is not None, case.name
        assert await quota.hashes_agree(), case.name
        await case.assert_fills()


@pytest.mark.parametrize("damage", DAMAGES)
async def test_cap_lowered_on_damaged_redis_holds(quota, damage):
    async for case in cases(quota, (*COUNTING, "limits", "show")):
        await DAMAGES[damage](quota.live.client, case.key)
        await case.limit(case.tight, 5)
        for how in ({"capped": False}, {"capped": True}):
            assert not (await case.book_two(**how)).booked, case.name


@pytest.mark.parametrize("name", COUNTING)
async def test_wrong_numbers_are_found_and_repaired(quota, name):
    async for case in cases(quota, [name]):
        for field, value in (("int_cores", "1"), ("int_gpus", "7"), ("burst", "900"), ("int_max_gpus", "900")):
            if await quota.live.client.hexists(case.key, field):
                await quota.live.client.hset(case.key, field, value)
                assert not (await quota.audit()).ok, field
                await repair_show(quota)
        await case.assert_repaired()


async def test_reconciliation_repairs_counters_and_reseed_repairs_limits(quota):
    async for case in cases(quota, COUNTING):
        await quota.live.client.hset(case.key, mapping={"int_cores": "3", "int_gpus": "9"})
        assert list((await quota.reconcile()).drifted.values()) == [1]
        cap = "burst" if case.name == "sub" else "int_max_cores"
        await quota.live.client.hset(case.key, cap, "900")
        assert await quota.live.sync_limits(quota.show)
        await case.assert_repaired()


async def test_limit_without_its_gpu_field_does_not_become_unlimited(quota):
    async for case in cases(quota, COUNTING):
        await quota.live.client.hdel(case.key, "gpu_burst" if case.name == "sub" else "int_max_gpus")
        await case.book_two(cores=1)
        await quota.maintenance().seed_lagging_shows()
        await case.assert_repaired()


async def test_token_with_a_wrong_charge_is_found_and_repaired(quota):
    async for case in cases(quota, ["tokens"]):
        await quota.book(case.numbers.take(1), cores=7, gpus=1, job=uuid4(), layer=uuid4())
        numbers = set(await quota.live.client.hvals(case.key))
        await quota.live.client.hset(case.key, str(case.held[0] % 128), max(numbers))
        await quota.reconcile()
        assert not (await quota.audit()).ok
        await repair_show(quota)
        assert (await quota.audit()).ok
        assert await quota.agrees()


async def test_reconciliation_does_not_take_lost_buckets_for_no_bookings(quota):
    async for case in cases(quota, ["buckets"]):
        await quota.live.client.delete(case.key)
        await quota.reconcile()
        await case.book_two()
        await quota.maintenance().seed_lagging_shows()
        await case.assert_repaired()


async def test_reconciliation_stops_at_buckets_out_of_order(quota):
    async for case in cases(quota, ["buckets"]):
        bucket = case.numbers.bucket
        await quota.book([(bucket + 1) * 128, (bucket + 2) * 128], cores=1, job=uuid4(), layer=uuid4())
        await quota.live.client.zadd(case.key, {str(bucket): bucket + 1.5})
        async with asyncio.timeout(5):
            assert await quota.reconcile() is None
        await quota.maintenance().seed_lagging_shows()
        await quota.reconcile()
        assert await quota.agrees()


@pytest.mark.parametrize("field", ["strange", "300", "0x1", b"\xff"])
async def test_reconciliation_stops_at_an_invalid_token(quota, field):
    async for case in cases(quota, ["tokens"]):
        [number] = set(await quota.live.client.hvals(case.key))
        await quota.live.client.hset(case.key, field, number)
        assert await quota.reconcile() is None
        await quota.maintenance().seed_lagging_shows()
        await case.assert_repaired()


async def test_bucket_missing_from_the_index_is_found_and_repaired(quota):
    async for case in cases(quota, ["buckets"]):
        await quota.live.client.zrem(case.key, str(case.numbers.bucket))
        assert not (await quota.audit()).ok
        await repair_show(quota)
        await case.assert_repaired()


@pytest.mark.parametrize("gone", [None, "words"])
async def test_charge_numbers_are_not_reused(quota, gone):
    """A reconciliation would confuse two charges with one number."""
    async for case in cases(quota, ["show"]):
        client = quota.live.client
        await (client.hset(case.key, "charges", gone) if gone else client.hdel(case.key, "charges"))
        assert not (await case.book_two(cores=7, job=uuid4(), layer=uuid4())).booked
        await quota.maintenance().seed_lagging_shows()
        await case.assert_repaired()


@pytest.mark.parametrize("damage", DAMAGES)
async def test_reconciliation_with_a_damaged_shadow_changes_nothing(quota, monkeypatch, damage):
    await quota.book(range(5))
    async with paused_at(monkeypatch, reconcile._ShowReconciler, "_swap_counters", quota.reconcile()) as reconciling:
        await DAMAGES[damage](quota.live.client, quota.keys.shadow)
    assert (reconciling.result() is None) == (damage != "foreign")
    assert await quota.agrees()
    assert (await quota.reconcile()).clean


async def test_charge_count_set_back_is_found_and_repaired(quota):
    async for case in cases(quota, ["show"]):
        await quota.live.client.hset(case.key, "charges", 0)
        assert not (await quota.audit()).ok
        await repair_show(quota)
        await case.assert_repaired()


@pytest.mark.parametrize("field", ["fence", "seeding"])
async def test_redis_fence_above_that_of_postgresql_does_not_block_the_show_forever(quota, field):
    """Left by a manual change, or by a PostgreSQL restored from an older backup."""
    await quota.live.client.hdel(quota.keys.show, "fence")
    await quota.live.client.hset(quota.keys.show, field, 4000)
    assert not (await quota.book([1])).all_booked
    await quota.maintenance().seed_lagging_shows()
    assert (await quota.book([1])).booked == [1]
    assert (await quota.audit()).ok
    assert await quota.fence() < 100


async def test_only_keys_of_unknown_jobs_are_reported_as_orphans(quota):
    await quota.book(range(5))
    await quota.cap_job(max_cores=9)
    lost = [f"acct:{level}:{uuid4()}" for level in ("job", "layer")]
    for key in lost:
        await quota.live.client.hset(key, mapping={"int_cores": "3", "int_gpus": "0"})
    assert await orphan_keys(quota.live, [quota.show]) == sorted(lost)
    await live_reader.unlink(quota.live.client, lost)
    assert await orphan_keys(quota.live, [quota.show]) == []
    assert (await quota.audit()).ok


async def test_keys_of_an_unknown_show_are_removed_by_the_reseed_of_limits(quota):
    other = quota.live.keys.show_keys(str(uuid4()))
    await quota.live.client.hset(other.show, mapping={"fence": 3, "run": "x"})
    await quota.live.client.zadd(other.buckets, {"0": 0})
    await quota.live.client.hset(other.tokens(0), "1", "1")
    await quota.live.client.hset("acct:show:words", "fence", 3)
    await quota.maintenance().reseed_limits()
    assert await quota.live.client.exists(other.show, other.buckets, other.tokens(0)) == 0
    assert (await quota.audit()).ok

"""Reconciliation beside continuous bookings: it ends, misses nothing, and counts only keys that have a counter."""

from uuid import uuid4

import msgspec
import pytest

from rota.accounting import allocations
from rota.accounting.ledger import BATCH_MAX, BookingGroup
from rota.accounting.live import reader as live_reader
from rota.accounting.live import reconcile, seeding
from rota.accounting.live.ledger import LiveLedger
from rota.accounting.live.script_args import SPAN
from rota.infra.redis import RedisKeys
from rota.model.quota import Level
from tests.contract.ledger_suite import MAKE_JOB, Books


@pytest.fixture
def ledger(database, redis):
    return LiveLedger(database, redis, RedisKeys())


@pytest.fixture
async def quota(database, ledger):
    async def push_limits(show):
        if not await ledger.sync_limits(show):
            assert await seeding.seed(ledger, show)

    return await Books(database, ledger, managed=True, tell=push_limits).make()


@pytest.fixture
def keys(ledger, quota):
    return ledger.keys.show_keys(str(quota.show))


@pytest.fixture
def between(monkeypatch):
    """Call `work` each time the reconciliation reads rows: at the beginning and after every script call."""

    def install(work):
        read = allocations.tokens

        async def tokens(*given):
            await work()
            return await read(*given)

        monkeypatch.setattr(allocations, "tokens", tokens)

    return install


async def reconciled(ledger, quota):
    found = await reconcile.reconcile_show(ledger, quota.show, grace_s=0)
    assert found is not None
    return found


async def test_continuously_rising_tokens_do_not_outrun_reconciliation(ledger, quota, between):
    await quota.book(range(4 * SPAN))
    steps = iter(range(4, 40))

    async def book_another_bucket():
        step = next(steps)
        await quota.book(range(step * SPAN, (step + 1) * SPAN))

    between(book_another_bucket)
    assert (await reconciled(ledger, quota)).clean
    assert await quota.agree() == 100 * SPAN * next(steps)


async def test_bookings_and_releases_on_both_sides_of_the_marker_are_counted(ledger, quota, redis, keys, between):
    await quota.book(range(6 * SPAN))
    await redis.hset(keys.counter_key(f"sub:{quota.pool}"), "int_cores", "3")
    done = []

    async def release_upwards_and_book_downwards():
        step = len(done)
        done.append(step)
        await ledger.release(quota.show, range(step * SPAN, step * SPAN + 5))
        await quota.book(range((9 - step) * SPAN, (9 - step) * SPAN + 7))

    between(release_upwards_and_book_downwards)
    found = await reconciled(ledger, quota)
    assert found.drifted == {Level.SUBSCRIPTION: 1}
    assert await quota.agree() == 100 * (6 * SPAN + 2 * len(done))


async def test_bucket_that_appears_between_listed_ones_is_counted(ledger, quota, monkeypatch):
    for bucket in (0, 2, 4):
        await quota.book([bucket * SPAN])
    listed = live_reader.buckets
    appeared = []

    async def buckets(*given):
        numbers = await listed(*given)
        if numbers == [2, 0]:
            appeared.append(1)
            await quota.book([SPAN])
        return numbers

    monkeypatch.setattr(live_reader, "buckets", buckets)
    assert (await reconciled(ledger, quota)).clean
    assert appeared == [1]
    assert await quota.agree() == 400


async def test_frame_booked_and_released_during_reconciliation_is_not_counted_again(
    ledger, quota, between, monkeypatch
):
    await quota.book([0])
    read = allocations.page

    async def page(*given):
        rows = await read(*given)
        await ledger.release(quota.show, [1, 300])
        return rows

    frames = iter([[1, 300]])

    async def book_two_once():
        for tokens in frames:
            await quota.book(tokens)

    monkeypatch.setattr(allocations, "page", page)
    between(book_two_once)
    await reconciled(ledger, quota)
    await ledger.release(quota.show, [1, 300])
    assert await quota.agree() == 100


@pytest.mark.parametrize("number", [1, 5000])
async def test_rows_above_every_token_are_adopted_immediately(ledger, quota, number):
    await quota.book(range(10))
    fence = (await ledger.limits.read(quota.show)).fence
    strays = range(50 * SPAN, 50 * SPAN + number)
    for chunk in live_reader.chunked(strays, BATCH_MAX):
        await allocations.insert(ledger.database, quota.show, fence, [quota.group(chunk)])
    assert (await reconciled(ledger, quota)).adopted == number
    assert (await reconciled(ledger, quota)).clean
    assert await quota.agree() == 100 * (10 + number)


async def test_jobs_without_limits_add_nothing_to_the_shadow(ledger, quota, redis, keys, between):
    shadows = []

    async def record_shadow():
        shadows.extend(field.decode() for field in await redis.hkeys(keys.shadow))

    await ledger.book(quota.show, [single(quota, token) for token in range(300)])
    between(record_shadow)
    assert (await reconciled(ledger, quota)).clean
    assert {field.partition(":")[0] for field in shadows} == {"begun", "sub", "folder", "point"}


async def test_shadow_of_the_wrong_type_ends_reconciliation_without_damage(ledger, quota, redis, keys, between):
    await quota.book(range(3 * SPAN))

    async def overwrite_shadow():
        await redis.set(keys.shadow, "not a hash")

    between(overwrite_shadow)
    assert await reconcile.reconcile_show(ledger, quota.show, grace_s=0) is None
    await quota.book(range(9 * SPAN, 9 * SPAN + 5))
    assert await quota.agree() == 100 * (3 * SPAN + 5)


async def test_job_limited_during_reconciliation_is_counted_by_the_next_one(ledger, quota, redis, keys, between):
    groups = [single(quota, token) for token in range(3)]
    job = groups[0].charge.job
    await ledger.book(quota.show, groups)
    name = f"job:{job}"

    async def limit_it_and_release_one():
        if await redis.hget(keys.show, "recount") == b"0" and not await redis.exists(keys.counter_key(name)):
            await ledger.database.run(MAKE_JOB, job, quota.show)
            await ledger.limits.push_missing(quota.show, [name])
            await ledger.release(quota.show, [0])

    between(limit_it_and_release_one)
    await reconciled(ledger, quota)
    assert await redis.hget(keys.counter_key(name), "int_cores") == b"0"
    assert await redis.hexists(keys.show, "uncounted")
    await ledger.book(quota.show, [msgspec.structs.replace(groups[0], tokens=[9])])
    await reconciled(ledger, quota)
    assert await redis.hget(keys.counter_key(name), "int_cores") == b"1"
    assert not await redis.hexists(keys.show, "uncounted")


async def test_seeding_counts_limited_jobs_and_creates_no_hash_for_others(ledger, quota, redis, keys):
    groups = [single(quota, token) for token in range(3)]
    await ledger.book(quota.show, groups)
    limited, *others = [group.charge.job for group in groups]
    await ledger.database.run(MAKE_JOB, limited, quota.show)
    assert await seeding.seed(ledger, quota.show)
    assert await redis.hget(keys.counter_key(f"job:{limited}"), "int_cores") == b"1"
    assert not any([await redis.exists(keys.counter_key(f"job:{job}")) for job in others])
    assert await quota.agree() == 300


@pytest.mark.parametrize(
    ("buckets", "charges", "then"), [(1, 1, 2), (8, 128, 8), (4, 129, 4), (4, 256, 4), (8, 1024, 4), (1, 1024, 1)]
)
def test_bucket_count_per_call_shrinks_as_charges_grow(buckets, charges, then):
    assert reconcile._next_bucket_count(buckets, charges) == then


def single(quota, token):
    """A job of one frame without limits."""
    return BookingGroup(quota.charge(job=uuid4(), layer=uuid4()), quota.host, [token], capped=False)

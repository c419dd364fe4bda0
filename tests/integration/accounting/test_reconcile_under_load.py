"""A recount beside bookings that never pause: it ends, misses nothing, and counts only what has a counter."""

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
async def books(database, ledger):
    async def tell(show):
        if not await ledger.sync_limits(show):
            assert await seeding.seed(ledger, show)

    return await Books(database, ledger, managed=True, tell=tell).make()


@pytest.fixture
def keys(ledger, books):
    return ledger.keys.show_keys(str(books.show))


@pytest.fixture
def between(monkeypatch):
    """Calls what it is given each time the recount reads rows: once at the beginning, then after every count."""

    def install(work):
        read = allocations.tokens

        async def tokens(*given):
            await work()
            return await read(*given)

        monkeypatch.setattr(allocations, "tokens", tokens)

    return install


async def recounted(ledger, books):
    found = await reconcile.reconcile_show(ledger, books.show, grace_s=0)
    assert found is not None
    return found


async def test_tokens_that_rise_without_a_pause_do_not_outrun_it(ledger, books, between):
    await books.book(range(4 * SPAN))
    steps = iter(range(4, 40))

    async def book_another_bucket():
        step = next(steps)
        await books.book(range(step * SPAN, (step + 1) * SPAN))

    between(book_another_bucket)
    assert (await recounted(ledger, books)).clean
    assert await books.agree() == 100 * SPAN * next(steps)


async def test_what_is_booked_and_released_on_both_sides_of_the_mark_is_counted(ledger, books, redis, keys, between):
    await books.book(range(6 * SPAN))
    await redis.hset(keys.counter_key(f"sub:{books.pool}"), "int_cores", "3")
    done = []

    async def release_upwards_and_book_downwards():
        step = len(done)
        done.append(step)
        await ledger.release(books.show, range(step * SPAN, step * SPAN + 5))
        await books.book(range((9 - step) * SPAN, (9 - step) * SPAN + 7))

    between(release_upwards_and_book_downwards)
    found = await recounted(ledger, books)
    assert found.drifted == {Level.SUBSCRIPTION: 1}
    assert await books.agree() == 100 * (6 * SPAN + 2 * len(done))


async def test_a_bucket_that_appears_between_those_that_were_listed_is_counted(ledger, books, monkeypatch):
    for bucket in (0, 2, 4):
        await books.book([bucket * SPAN])
    listed = live_reader.buckets
    appeared = []

    async def buckets(*given):
        numbers = await listed(*given)
        if numbers == [2, 0]:
            appeared.append(1)
            await books.book([SPAN])
        return numbers

    monkeypatch.setattr(live_reader, "buckets", buckets)
    assert (await recounted(ledger, books)).clean
    assert appeared == [1]
    assert await books.agree() == 400


async def test_a_frame_that_begins_and_ends_under_its_eyes_is_not_counted_again(ledger, books, between, monkeypatch):
    await books.book([0])
    read = allocations.page

    async def page(*given):
        rows = await read(*given)
        await ledger.release(books.show, [1, 300])
        return rows

    frames = iter([[1, 300]])

    async def book_two_once():
        for tokens in frames:
            await books.book(tokens)

    monkeypatch.setattr(allocations, "page", page)
    between(book_two_once)
    await recounted(ledger, books)
    await ledger.release(books.show, [1, 300])
    assert await books.agree() == 100


@pytest.mark.parametrize("number", [1, 5000])
async def test_rows_above_every_token_are_adopted_at_once(ledger, books, number):
    await books.book(range(10))
    fence = (await ledger.limits.read(books.show)).fence
    strays = range(50 * SPAN, 50 * SPAN + number)
    for piece in live_reader.chunked(strays, BATCH_MAX):
        await allocations.insert(ledger.database, books.show, fence, [books.group(piece)])
    assert (await recounted(ledger, books)).adopted == number
    assert (await recounted(ledger, books)).clean
    assert await books.agree() == 100 * (10 + number)


async def test_jobs_without_limits_leave_nothing_in_the_shadow(ledger, books, redis, keys, between):
    shadows = []

    async def look():
        shadows.extend(field.decode() for field in await redis.hkeys(keys.shadow))

    await ledger.book(books.show, [single(books, token) for token in range(300)])
    between(look)
    assert (await recounted(ledger, books)).clean
    assert {field.partition(":")[0] for field in shadows} == {"begun", "sub", "folder", "point"}


async def test_a_shadow_that_cannot_be_added_to_ends_the_recount_and_spoils_nothing(
    ledger, books, redis, keys, between
):
    await books.book(range(3 * SPAN))

    async def put_a_string_there():
        await redis.set(keys.shadow, "not a hash")

    between(put_a_string_there)
    assert await reconcile.reconcile_show(ledger, books.show, grace_s=0) is None
    await books.book(range(9 * SPAN, 9 * SPAN + 5))
    assert await books.agree() == 100 * (3 * SPAN + 5)


async def test_a_job_whose_limits_come_during_a_recount_is_counted_by_the_next_one(ledger, books, redis, keys, between):
    groups = [single(books, token) for token in range(3)]
    job = groups[0].charge.job
    await ledger.book(books.show, groups)
    name = f"job:{job}"

    async def limit_it_and_release_one():
        if await redis.hget(keys.show, "recount") == b"0" and not await redis.exists(keys.counter_key(name)):
            await ledger.database.run(MAKE_JOB, job, books.show)
            await ledger.limits.push_missing(books.show, [name])
            await ledger.release(books.show, [0])

    between(limit_it_and_release_one)
    await recounted(ledger, books)
    assert await redis.hget(keys.counter_key(name), "int_cores") == b"0"
    assert await redis.hexists(keys.show, "uncounted")
    await ledger.book(books.show, [msgspec.structs.replace(groups[0], tokens=[9])])
    await recounted(ledger, books)
    assert await redis.hget(keys.counter_key(name), "int_cores") == b"1"
    assert not await redis.hexists(keys.show, "uncounted")


async def test_a_seeding_counts_jobs_that_have_limits_and_makes_no_hash_for_others(ledger, books, redis, keys):
    groups = [single(books, token) for token in range(3)]
    await ledger.book(books.show, groups)
    limited, *others = [group.charge.job for group in groups]
    await ledger.database.run(MAKE_JOB, limited, books.show)
    assert await seeding.seed(ledger, books.show)
    assert await redis.hget(keys.counter_key(f"job:{limited}"), "int_cores") == b"1"
    assert not any([await redis.exists(keys.counter_key(f"job:{job}")) for job in others])
    assert await books.agree() == 300


@pytest.mark.parametrize(
    ("buckets", "charges", "then"), [(1, 1, 2), (8, 128, 8), (4, 129, 4), (4, 256, 4), (8, 1024, 4), (1, 1024, 1)]
)
def test_the_more_charges_in_a_call_the_fewer_buckets_in_the_next(buckets, charges, then):
    assert reconcile._next_bucket_count(buckets, charges) == then


def single(books, token):
    """A job of one frame without limits."""
    return BookingGroup(books.charge(job=uuid4(), layer=uuid4()), books.host, [token], capped=False)

"""Frames in series on one booking: one charge for all of them, from the first frame to the last, in both ledgers."""

import asyncio
import random
from uuid import uuid4

import msgspec
import pytest

from rota.accounting import allocations
from rota.accounting.ledger import NIL_UUID, BookingGroup, DeclineReason, Followers, SingleFrameBatch
from rota.accounting.live.seeding import seed
from rota.accounting.service import AccountingService
from rota.infra.postgres import Database, PostgresTarget
from rota.model.quota import Level, Usage
from tests.contract.ledger_suite import plain, sql
from tests.integration.accounting.accounting_support import OVER, TOKENS, ShowQuota
from tests.support.waiting import until

ROWS = sql("SELECT token, int_cores_reserved AS cores, series_first, b_ended FROM rota.proc ORDER BY token")
LAYERS = sql("SELECT pk_layer FROM rota.proc ORDER BY token")
BLOCKED = sql("SELECT count(*) FROM pg_locks l WHERE NOT l.granted")
LEFT = sql("SELECT count(*) FROM rota.proc WHERE b_ended")


@pytest.fixture(params=["managed", "unmanaged"])
async def quota(request, database, redis):
    return await ShowQuota(AccountingService(database, redis)).make(managed=request.param == "managed")


def layer_series(quota, *spans, cores=100):
    """Series of one layer, given as (first, carrier)."""
    series = {
        carrier: Followers(range(first, carrier), [quota.job] * (carrier - first), [quota.layer] * (carrier - first))
        for first, carrier in spans
    }
    return BookingGroup(quota.charge(cores=cores), quota.host, [carrier for _, carrier in spans], series=series)


def job_series(quota, *spans):
    """Series of single-frame jobs."""
    charge = quota.charge(job=NIL_UUID, layer=NIL_UUID)
    carriers = [carrier for _, carrier in spans]
    series = {
        carrier: Followers(
            range(first, carrier), [uuid4() for _ in range(first, carrier)], [uuid4() for _ in range(first, carrier)]
        )
        for first, carrier in spans
    }
    return SingleFrameBatch(
        charge, quota.host, carriers, [uuid4() for _ in carriers], [uuid4() for _ in carriers], series=series
    )


async def book(quota, *groups):
    """Booked, already booked, refused and declined tokens, and the refusal, of each group."""
    return [msgspec.structs.astuple(plain(outcome)) for outcome in await quota.accounting.book(quota.show, groups)]


async def cores(quota):
    """Cores in use of the subscription, as the show's ledger counts them, and by the rows."""
    ledger = quota.accounting.live if await quota.accounting.is_managed(quota.show) else quota.accounting.transactional
    counted = (await ledger.counters(quota.show)).get((Level.SUBSCRIPTION, quota.pool), Usage()).cores
    booked = sum(row["cores"] for row in await quota.database.rows(ROWS))
    assert counted == booked
    return booked


async def end(quota, *tokens):
    """Ends frames; returns the tokens whose charge was released."""
    return sorted(token for each in await quota.accounting.release(quota.show, tokens) for token in each.tokens)


async def tokens(quota):
    return [row["token"] for row in await quota.database.rows(TOKENS, quota.show)]


@pytest.mark.parametrize("make", [layer_series, job_series])
async def test_series_is_charged_once_until_its_last_frame_ends(quota, make):
    assert await book(quota, make(quota, (10, 14), (20, 21))) == [([14, 21], [], [], {}, None)]
    assert await tokens(quota) == [*range(10, 15), 20, 21]
    assert await cores(quota) == 200
    assert await end(quota, 10, 11) == []
    assert await end(quota, 20, 21) == [21]
    assert await cores(quota) == 100
    assert await end(quota, 12, 13) == []
    assert await end(quota, 14) == [14]
    assert await cores(quota) == 0
    assert await tokens(quota) == []


async def test_carrier_that_ends_first_leaves_its_charge_until_the_others_have_ended(quota):
    await book(quota, layer_series(quota, (10, 14)))
    assert await end(quota, 13, 14) == []
    assert await cores(quota) == 100
    assert await tokens(quota) == [10, 11, 12, 14]
    assert await end(quota, 14) == []
    assert await end(quota, 11) == []
    assert await cores(quota) == 100
    assert await end(quota, 10, 12) == [14]
    assert await cores(quota) == 0
    assert await tokens(quota) == []


async def test_series_of_which_parts_have_ended_ends_with_all_others_at_once(quota):
    await book(quota, layer_series(quota, (10, 19)))
    assert await end(quota, 12) == []
    assert await end(quota, *range(10, 12), *range(13, 20)) == [19]
    assert await tokens(quota) == []
    assert await cores(quota) == 0


async def test_cap_of_two_cores_admits_two_series_with_all_their_frames(quota):
    await quota.burst(2)
    [outcome] = await book(quota, layer_series(quota, (10, 14), (20, 24), (30, 34)))
    booked, _, refused, _, refusal = outcome
    assert (booked, refused, refusal.table) == ([14, 24], [34], Level.SUBSCRIPTION)
    assert await tokens(quota) == [*range(10, 15), *range(20, 25)]
    await end(quota, 14)
    [outcome] = await book(quota, layer_series(quota, (40, 44)))
    assert outcome[2] == [44]
    await end(quota, *range(10, 14))
    assert await book(quota, layer_series(quota, (50, 54))) == [([54], [], [], {}, None)]
    assert not await quota.database.rows(OVER)


@pytest.mark.parametrize("make", [layer_series, job_series])
async def test_repeated_booking_of_a_series_changes_nothing(quota, make):
    group = make(quota, (10, 14))
    await book(quota, group)
    rows = await quota.database.rows(ROWS)
    assert await book(quota, group) == [([], [14], [], {}, None)]
    assert await quota.database.rows(ROWS) == rows
    await end(quota, 10)
    assert await book(quota, group) == [([], [14], [], {10: DeclineReason.TOMBSTONED}, None)]
    await end(quota, *range(11, 15))
    [outcome] = await book(quota, group)
    assert outcome[3] == dict.fromkeys(range(10, 15), DeclineReason.TOMBSTONED)
    assert await tokens(quota) == []
    assert await cores(quota) == 0


async def test_series_whose_carrier_is_tombstoned_is_not_booked(quota):
    """A frame without its carrier would run without a charge."""
    await allocations.tombstone(quota.database, quota.show, [14])
    [outcome] = await book(quota, layer_series(quota, (10, 14), (20, 22)))
    assert outcome[0] == [22]
    assert outcome[3] == dict.fromkeys(range(10, 15), DeclineReason.TOMBSTONED)
    assert await tokens(quota) == [20, 21, 22]
    assert await cores(quota) == 100


async def test_single_follower_that_is_tombstoned_leaves_the_rest_of_the_series(quota):
    await allocations.tombstone(quota.database, quota.show, [12])
    assert await book(quota, layer_series(quota, (10, 14))) == [([14], [], [], {12: DeclineReason.TOMBSTONED}, None)]
    assert await tokens(quota) == [10, 11, 13, 14]
    assert await end(quota, 10, 11, 13, 14) == [14]


async def test_emptied_redis_is_seeded_with_one_charge_per_series(quota, redis):
    await book(quota, layer_series(quota, (10, 14), (20, 24)), job_series(quota, (30, 33)))
    await end(quota, 24)
    await redis.flushdb()
    if await quota.accounting.is_managed(quota.show):
        await seed(quota.accounting.live, quota.show)
    assert await cores(quota) == 300
    await end(quota, *range(20, 24))
    assert await cores(quota) == 200


async def test_show_that_becomes_managed_or_unmanaged_keeps_its_series(quota):
    await book(quota, layer_series(quota, (10, 14), (20, 24)))
    await end(quota, 14, 20)
    managed = await quota.accounting.is_managed(quota.show)
    await quota.change("set_managed", quota.name, managed=not managed)
    assert await cores(quota) == 200
    await end(quota, *range(10, 14))
    assert await cores(quota) == 100
    assert await end(quota, *range(21, 25)) == [24]
    assert await cores(quota) == 0


async def test_concurrent_ends_of_one_series_in_any_order_release_its_charge_once(quota, database_url):
    """Transactions that end single frames of series at the same time: the last one releases, whichever it is."""
    rng = random.Random(17)
    wide = await Database.open(PostgresTarget(url=database_url, pool_max=8))
    try:
        for turn in range(12):
            first = 1000 * turn
            spans = [(first + 100 * at, first + 100 * at + rng.randrange(1, 7)) for at in range(3)]
            await book(quota, layer_series(quota, *spans))
            frames = [token for low, high in spans for token in range(low, high + 1)]
            rng.shuffle(frames)
            parts = [sorted(frames[at::5]) for at in range(5)]
            released = await asyncio.gather(*(allocations.delete(wide, quota.show, part) for part in parts if part))
            gone = sorted(token for each in released for token in each.tokens())
            assert gone == [carrier for _, carrier in spans]
            for each in released:
                await quota.accounting.publisher.publish(quota.show, each)
            assert await tokens(quota) == []
            assert await cores(quota) == 0
    finally:
        await wide.close()
    assert await quota.database.value(LEFT) == 0


async def test_end_of_a_carrier_waits_for_a_concurrent_end_of_the_last_other_frame(quota, database_url):
    """The carrier's end would else see the other frame, and the other's end a carrier that has not ended."""
    await book(quota, layer_series(quota, (10, 11)))
    other = await Database.open(PostgresTarget(url=database_url, pool_max=2))
    try:
        async with other.transaction() as tx:
            assert (await allocations.delete(tx, quota.show, [10])).tokens() == []
            carrier = asyncio.create_task(allocations.delete(quota.database, quota.show, [11]))
            await until(lambda: other.value(BLOCKED))
        assert (await carrier).tokens() == [11]
    finally:
        await other.close()
    assert await tokens(quota) == []


async def test_series_over_two_claims_has_a_gap_in_its_tokens(quota):
    followers = Followers([10, 11, 600], [quota.job] * 3, [quota.layer] * 3)
    group = BookingGroup(quota.charge(cores=100), quota.host, [602], series={602: followers})
    assert await book(quota, group) == [([602], [], [], {}, None)]
    assert await tokens(quota) == [10, 11, 600, 602]
    assert await end(quota, 600, 602) == []
    assert await cores(quota) == 100
    assert await end(quota, 10, 11) == [602]
    assert await cores(quota) == 0


async def test_followers_of_another_layer_than_their_carrier_keep_their_own(quota):
    job, layer = uuid4(), uuid4()
    batch = job_series(quota, (10, 13))
    series = {13: Followers(range(10, 13), [job] * 3, [layer] * 3)}
    [group] = msgspec.structs.replace(batch, series=series).groups()
    await book(quota, group)
    assert [row["pk_layer"] for row in await quota.database.rows(LAYERS)] == [layer] * 3 + [*batch.layers]
    await end(quota, *range(10, 14))


@pytest.mark.parametrize("quota", ["managed"], indirect=True)
@pytest.mark.parametrize("carrier_ended_before", [False, True])
async def test_unknown_commit_of_the_last_end_of_a_series_releases_its_carrier(
    quota, monkeypatch, carrier_ended_before
):
    """Frames behind a long one are handed back, the carrier too: the end of the long one deletes both rows."""
    monkeypatch.setattr("rota.accounting.service.UNKNOWN_COMMIT_DELAY_S", 0.0)
    await book(quota, layer_series(quota, (10, 14)))
    if carrier_ended_before:
        await end(quota, *range(11, 15))
    last = [10] if carrier_ended_before else list(range(10, 15))
    await allocations.delete(quota.database, quota.show, last)  # and its reply is lost
    quota.accounting.add_unknown_commit(last)
    await quota.accounting.resolve_unknown_commits()
    if quota.accounting.suspected:
        await quota.accounting.release_lost(quota.accounting.suspected)
    assert await cores(quota) == 0

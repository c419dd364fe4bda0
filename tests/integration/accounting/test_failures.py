"""The table of failures, row by row: what is wrong meanwhile, who mends it, and how soon. No cap is passed in any.

| what fails | wrong meanwhile | mended by |
|---|---|---|
| a release is not published | Redis counts too much | whoever owes it; one recount, without its grace |
| the reply of a release is lost | Redis counts too much | one look at graves; one recount, without its grace |
| a booker dies between script and insert | Redis counts too much | who buries its claims; else one recount |
| what was refused is not given back | Redis counts too much | whoever owes it; one recount, after its grace |
| a booker dies after the insert, before its reply | nothing | the caller, by asking again |
| Redis is not told of a cap that was lowered | nothing: PostgreSQL refuses | the next booking |
| Redis is not told of a cap that was raised | less is booked than could be | one reseed of limits |
| Redis dies | managed shows are not booked | one look, once it is back |
| a show changes hands under way | nothing | nobody need |
| Redis holds books of a show it does not keep | nothing | one reseed of limits |
| a process does not publish | Redis counts too much | one recount, without its grace |
"""

from contextlib import AsyncExitStack

import pytest
from structlog.testing import capture_logs

from rota.accounting import allocations
from rota.accounting.ledger import DeclineReason
from rota.accounting.live import reconcile
from rota.accounting.live.release_publisher import FAILED, MISCONFIGURED
from rota.accounting.service import UNKNOWN_COMMIT_DELAY_S, AccountingService
from rota.infra import failpoints
from rota.infra.clock import SystemClock
from rota.infra.redis import RedisTarget, connect
from rota.model.errors import RedisUnavailable
from rota.model.quota import Level, Refusal, Resource
from rota.runtime import tombstone_unbooked
from tests.contract.ledger_suite import outcome_of
from tests.integration.accounting.accounting_support import Farm, die, stopped

HOURS_S = 36_000.0
FULL = Refusal(Level.SUBSCRIPTION, Resource.CORES, 600, 600, 100)


class HandClock(SystemClock):
    at_s = 0.0

    def monotonic(self):
        return self.at_s


@pytest.fixture
async def farm(database, redis):
    """Six frames fit."""
    return await Farm(AccountingService(database, redis)).make(burst=6)


class Away:
    """A way to Redis that can be cut and healed."""

    def __init__(self, proxy):
        self._proxy = proxy

    def __enter__(self):
        self._proxy.cut()

    def __exit__(self, *_):
        self._proxy.heal()


@pytest.fixture
async def far(database, redis_url, proxy):
    """The same, over a network that can fail: (farm, a context in which Redis cannot be reached)."""
    address = redis_url.removeprefix("redis://").partition("/")[0].rpartition("@")[2]
    host, port = address.split(":")
    between = await proxy(host, int(port))
    client = connect(RedisTarget(url=between.url(redis_url)))
    yield await Farm(AccountingService(database, client)).make(burst=6), Away(between)
    await client.aclose()


async def test_a_release_that_is_not_published_is_given_back_by_one_recount_without_a_grace(far):
    farm, away = far
    await farm.book(range(6))
    failed = FAILED._value.get()
    with away:
        assert await farm.release([0]) == [0]
    assert FAILED._value.get() == failed + 1
    assert (await farm.count(), await farm.tokens()) == ("6", [1, 2, 3, 4, 5])
    assert (await farm.book([6])).refusal == FULL
    assert (await farm.recount(grace_s=HOURS_S)).released == 1
    assert (await farm.book([6, 7])).booked == [6]
    assert await farm.agrees()
    assert await farm.over() == []


async def test_a_booker_that_dies_between_script_and_insert_is_buried_by_one_recount_after_its_grace(farm, monkeypatch):
    fence = await farm.fence()
    async with stopped(monkeypatch, allocations, "insert", farm.book([0])) as booking:
        await die(booking)
    assert (await farm.count(), await farm.tokens()) == ("1", [])
    assert (await farm.book(range(1, 8))).booked == [1, 2, 3, 4, 5]
    assert (await farm.recount(release_orphans=False)).buried == 0
    assert await farm.count() == "6"
    assert (await farm.recount()).buried == 1
    late = await allocations.insert(farm.database, farm.show, fence, [farm.group([0])])
    assert late.refused == {0: DeclineReason.TOMBSTONED}
    assert (await farm.book([8, 9])).booked == [8]
    assert await farm.agrees()
    assert await farm.over() == []


async def test_what_a_dead_dispatcher_booked_in_redis_alone_goes_with_its_claims(farm, monkeypatch):
    await farm.book([0, 1])
    async with stopped(monkeypatch, allocations, "insert", farm.book([2, 3])) as booking:
        await die(booking)
    assert (await farm.count(), await farm.tokens()) == ("4", [0, 1])
    assert await tombstone_unbooked(farm.books, range(4)) == {2, 3}
    assert await farm.count() == "2"
    assert await farm.agrees()


async def test_claims_of_a_dead_dispatcher_are_returned_although_redis_is_away(far, monkeypatch):
    farm, away = far
    async with stopped(monkeypatch, allocations, "insert", farm.book([0])) as booking:
        await die(booking)
    with away:
        assert await tombstone_unbooked(farm.books, [0]) == {0}
    assert (await farm.recount(grace_s=HOURS_S)).released == 1


async def test_a_release_whose_reply_was_lost_is_told_by_its_grave(far, monkeypatch):
    farm, away = far
    clock = HandClock()
    monkeypatch.setattr(farm.books, "_clock", clock)
    await farm.book(range(4))
    await allocations.delete(farm.database, farm.show, [0, 1])  # and nobody learns what was released
    farm.books.add_unknown_commit([0, 1, 2])
    await farm.books.resolve_unknown_commits()
    assert await farm.count() == "4", "it may still be under way"
    clock.at_s += UNKNOWN_COMMIT_DELAY_S
    with away, pytest.raises(RedisUnavailable):
        await farm.books.resolve_unknown_commits()
    await farm.books.resolve_unknown_commits()
    assert await farm.count() == "2"
    assert await farm.agrees()


async def test_what_could_not_be_given_back_is_when_redis_is(far, monkeypatch):
    farm, away = far
    await farm.book([0])
    fence = await farm.fence()
    async with stopped(monkeypatch, allocations, "insert", farm.book([1, 2])) as booking:
        await die(booking)
    with away:
        await farm.live.publisher.rollback_bookings(farm.show, fence, [farm.group([1, 2])])
        assert not await farm.live.publisher.flush_pending()
    assert await farm.count() == "3"
    assert await farm.live.publisher.flush_pending()
    assert await farm.agrees()


async def test_a_booking_that_gets_its_row_in_the_grace_of_a_recount_is_left_alone(farm, monkeypatch):
    under_way = AsyncExitStack()
    booking = await under_way.enter_async_context(stopped(monkeypatch, allocations, "insert", farm.book([0])))
    async with stopped(monkeypatch, allocations, "tombstone", farm.recount()) as recounting:
        await under_way.aclose()
    assert booking.result().booked == [0]
    assert (recounting.result().buried, recounting.result().released) == (0, 0)
    assert await farm.agrees()


@pytest.mark.parametrize("place", ["procs.insert", "live.book"])
async def test_a_booker_that_loses_a_reply_asks_again_and_is_counted_once(farm, monkeypatch, place):
    with monkeypatch.context() as patched:
        patched.setattr(
            failpoints,
            "after_send",
            failpoints.FaultPlan.parse({"LOST_REPLY_AT": place}).after_send,
        )
        with pytest.raises(ConnectionError):
            await farm.book(range(4))
    again = await farm.book(range(4))
    assert again == (outcome_of(already=range(4)) if place == "procs.insert" else outcome_of(booked=range(4)))
    assert await farm.count() == "4"
    assert await farm.agrees()


async def test_a_cap_is_known_to_redis_as_soon_as_its_change_returns(farm):
    await farm.burst(3)
    assert await farm.count(field="burst") == "3"
    assert (await farm.book(range(6))).booked == [0, 1, 2]
    await farm.burst(5)
    assert (await farm.book(range(3, 9))).booked == [3, 4]


async def test_a_lowered_cap_that_redis_was_not_told_of_holds_from_the_next_booking_on(far):
    farm, away = far
    await farm.book(range(2))
    with away, capture_logs() as logged:
        await farm.burst(3)
    assert [line["event"] for line in logged if line["log_level"] == "warning"] == ["limit_push_failed"]
    assert await farm.count(field="burst") == "6"
    outcome = await farm.book(range(2, 6))
    assert (outcome.booked, outcome.refusal) == ([2], Refusal(Level.SUBSCRIPTION, Resource.CORES, 300, 300, 100))
    assert await farm.count(field="burst") == "3"
    assert await farm.over() == []


async def test_a_raised_cap_that_redis_was_not_told_of_waits_for_one_reseed(far):
    farm, away = far
    await farm.book(range(6))
    with away:
        await farm.burst(8)
    assert (await farm.book([6], capped=False)).refusal == FULL
    await farm.upkeep().reseed_limits()
    assert (await farm.book(range(6, 10))).booked == [6, 7]


async def test_a_booking_under_way_when_a_cap_is_lowered_is_decided_again(farm, monkeypatch):
    async with stopped(monkeypatch, allocations, "insert", farm.book(range(6))) as booking:
        await farm.burst(2)
    assert (booking.result().booked, booking.result().refused) == ([0, 1], [2, 3, 4, 5])
    assert await farm.agrees()
    assert await farm.over() == []


async def test_a_token_left_under_an_earlier_fence_is_decided_anew_when_it_is_asked_for_again(farm, monkeypatch):
    """Redis still holds what a booker that died was given under the cap of then."""
    await farm.book(range(3))
    async with stopped(monkeypatch, allocations, "insert", farm.book(range(3, 6))) as booking:
        await die(booking)
    await farm.burst(4)
    outcome = await farm.book(range(3, 6))
    assert (outcome.booked, outcome.refused) == ([3], [4, 5])
    assert await farm.over() == []
    assert await farm.agrees()


async def test_what_is_given_back_late_is_not_taken_from_whoever_booked_it_since(farm, monkeypatch):
    """Two ask for one token: the fence rises, the second books it under the new one, then the first gives it back."""
    fence = await farm.fence()
    async with stopped(monkeypatch, allocations, "insert", farm.book([0])) as booking:
        await farm.burst(5)
        assert (await farm.book([0])).booked == [0]
        await farm.live.publisher.rollback_bookings(farm.show, fence, [farm.group([0])])
        assert await farm.count() == "1"
    assert booking.result() == outcome_of(already=[0])
    assert await farm.agrees()


async def test_a_release_that_comes_late_is_void_once_its_token_may_be_another_s(farm):
    await farm.book([0, 1])
    deleted = await allocations.delete(farm.database, farm.show, [0])
    await farm.recount()
    await farm.books.raise_fence(farm.show)
    await farm.upkeep().prune_tombstones()
    assert (await farm.book([0])).booked == [0]
    await farm.books.publisher.publish(farm.show, deleted)
    assert await farm.count() == "2"
    assert await farm.agrees()


@pytest.fixture
async def mortal(database, private_redis):
    """A farm on a Redis of its own, and an unmanaged one beside it."""
    server = await private_redis()
    client = connect(RedisTarget(url=server.url))
    books = AccountingService(database, client)
    yield await Farm(books).make(burst=6), await Farm(books).make(managed=False, name="goose", burst=6), server
    await client.aclose()


async def test_when_redis_dies_managed_shows_wait_unmanaged_ones_go_on_and_one_look_brings_all_back(mortal):
    duck, goose, server = mortal
    await duck.book(range(4))
    await server.kill()
    with pytest.raises(RedisUnavailable):
        await duck.book([4])
    assert (await goose.book(range(100, 104))).booked == [100, 101, 102, 103]
    assert await goose.release([100]) == [100]
    assert await duck.release([0]) == [0]
    await duck.burst(5)
    assert await duck.tokens() == [1, 2, 3]

    await server.restart()
    assert await duck.book([1, 4]) == outcome_of(already=[1], declined={4: DeclineReason.UNSEEDED})
    assert duck.books.unseeded.is_set()
    await duck.upkeep().seed_lagging_shows()
    assert await duck.agrees()
    outcome = await duck.book(range(4, 9))
    assert (outcome.booked, outcome.refusal) == ([4, 5], Refusal(Level.SUBSCRIPTION, Resource.CORES, 500, 500, 100))
    assert (await goose.book(range(104, 110))).booked == [104, 105, 106]


async def test_what_was_booked_before_redis_died_cannot_be_inserted_after(mortal, monkeypatch):
    duck, _, server = mortal
    await duck.book(range(3))
    async with stopped(monkeypatch, allocations, "insert", duck.book(range(3, 6))) as booking:
        await server.kill()
        await server.restart()
        await duck.upkeep().seed_lagging_shows()
        assert (await duck.book(range(10, 16))).booked == [10, 11, 12]
    assert booking.result().refused == [3, 4, 5]
    assert await duck.over() == []
    assert await duck.agrees()


async def test_nothing_is_booked_while_redis_is_filled(farm, monkeypatch):
    await farm.book(range(4))
    await farm.live.client.flushdb()
    async with stopped(monkeypatch, allocations, "page_groups", farm.upkeep().seed_lagging_shows(), after=True):
        assert (await farm.book([4])).declined == {4: DeclineReason.UNSEEDED}
        assert await farm.release([0]) == [0]
    assert (await farm.book(range(4, 9))).booked == [4, 5]
    assert (await farm.recount()).released == 1
    assert (await farm.book([9, 10])).booked == [9]
    assert await farm.agrees()


async def tables(farm):
    return await farm.books.transactional.counters(farm.show)


async def test_a_booking_under_way_when_its_show_leaves_redis_is_booked_in_the_tables(farm, monkeypatch):
    await farm.book(range(3))
    async with stopped(monkeypatch, allocations, "insert", farm.book(range(3, 8))) as booking:
        await farm.flip(False)
        assert await tables(farm) == await farm.held()
        assert (await farm.book([20])).booked == [20]
    assert (booking.result().booked, booking.result().refused) == ([3, 4], [5, 6, 7])
    assert await tables(farm) == await farm.held()
    assert await farm.over() == []


async def test_a_release_under_way_when_its_show_leaves_redis_is_given_back_once(farm):
    await farm.book(range(6))
    deleted = await allocations.delete(farm.database, farm.show, [0, 1])
    await farm.flip(False)
    await farm.books.publisher.publish(farm.show, deleted)
    assert await tables(farm) == await farm.held()
    assert await farm.release(range(6)) == [2, 3, 4, 5]
    assert await tables(farm) == {}


async def test_a_show_that_comes_to_redis_brings_its_counters_and_its_caps(database, redis):
    farm = await Farm(AccountingService(database, redis)).make(managed=False, burst=6)
    await farm.book(range(5), gpus=1)
    await farm.flip(True)
    assert await farm.agrees()
    outcome = await farm.book([5, 6])
    assert (outcome.booked, outcome.refusal) == ([5], FULL)
    assert await farm.release(range(5)) == [0, 1, 2, 3, 4]
    assert (await farm.count(), await farm.count(field="int_gpus")) == ("1", "0")


async def test_a_show_that_came_to_redis_while_it_was_away_is_not_booked_before_it_is_seeded(far):
    farm, away = far
    await farm.flip(False)
    await farm.book(range(5))
    with away:
        await farm.flip(True)
    assert (await farm.book([5])).declined == {5: DeclineReason.UNSEEDED}
    await farm.upkeep().seed_lagging_shows()
    assert (await farm.book([5, 6])).booked == [5]
    assert await farm.over() == []


async def test_what_redis_holds_of_a_show_it_does_not_keep_harms_nobody_and_one_reseed_removes_it(far):
    farm, away = far
    await farm.book(range(5))
    with away:
        await farm.flip(False)
    assert await farm.count() == "5"
    assert await farm.release([0, 1]) == [0, 1]
    assert (await farm.book(range(5, 10))).booked == [5, 6, 7]
    assert (await farm.count(), await tables(farm)) == ("5", await farm.held())
    await farm.recount()
    await farm.upkeep().seed_lagging_shows()
    assert (await farm.book([10])).refusal == FULL
    await farm.upkeep().reseed_limits()
    assert await farm.live.client.keys("acct:*") == [b"acct:seq"]


async def test_a_process_that_does_not_publish_makes_redis_count_too_much_until_one_recount(farm):
    silent = farm.colleague()
    await farm.book(range(6))
    with capture_logs() as logged:
        assert not await silent.check_publishing()
    assert [line["event"] for line in logged] == ["redis_publish_misconfigured"]
    assert await farm.release([0, 1], by=silent) == [0, 1]
    assert MISCONFIGURED._value.get() == 1
    assert (await farm.book([6])).refusal == FULL
    assert (await farm.recount(grace_s=HOURS_S)).released == 2
    assert (await farm.book([6, 7, 8])).booked == [6, 7]
    assert await farm.agrees()


async def test_a_process_without_redis_books_no_managed_show_and_still_tells_what_is_booked(farm):
    await farm.book([0])
    told = await farm.book([0, 1], by=farm.colleague())
    assert told == outcome_of(already=[0], declined={1: DeclineReason.REDIS_OFF})
    assert await farm.count() == "1"


async def test_the_tables_of_a_managed_show_follow_with_one_recompute(farm):
    await farm.book(range(3), gpus=1)
    await farm.upkeep().recompute()
    shared = {key: usage for key, usage in (await farm.held()).items() if key[0] not in (Level.JOB, Level.LAYER)}
    assert await tables(farm) == shared
    await farm.release(range(3))
    await farm.upkeep().recompute()
    assert await tables(farm) == {}


async def test_a_second_recount_at_once_does_no_harm(farm, monkeypatch):
    await farm.book(range(4))
    async with stopped(monkeypatch, allocations, "tokens", farm.recount(), after=True) as first:
        assert (await farm.recount()).clean
        await farm.book([4])
    assert first.result() is None
    assert await farm.agrees()


async def test_a_recount_that_was_overtaken_does_not_go_on_with_the_other_s_shadow(farm, monkeypatch):
    await farm.book(range(4))
    overtaking = AsyncExitStack()
    async with stopped(monkeypatch, allocations, "tokens", farm.recount(), after=True) as first:
        begun = stopped(monkeypatch, reconcile._ShowReconciler, "_reconcile_buckets", farm.recount())
        second = await overtaking.enter_async_context(begun)
    assert first.result() is None
    assert await farm.count() == "4"
    await overtaking.aclose()
    assert second.result().clean
    assert await farm.agrees()

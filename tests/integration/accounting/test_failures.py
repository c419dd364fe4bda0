"""Failures one by one: what is wrong meanwhile, what repairs it, and how soon. No cap is exceeded in any of them.

| failure | wrong meanwhile | repaired by |
|---|---|---|
| a release is not published | Redis counts too much | its publisher; one reconciliation, without grace |
| the reply of a release is lost | Redis counts too much | a check of tombstones; one reconciliation, without grace |
| a booker crashes between script and insert | Redis counts too much | tombstones for its claims; one reconciliation |
| PostgreSQL answers that it cannot insert now | nothing | no repair is needed |
| a rollback is not published | Redis counts too much | its publisher; one reconciliation, after the grace |
| a booker crashes after the insert, before its reply | nothing | the caller, by a retry |
| a lowered cap is not pushed to Redis | nothing: PostgreSQL refuses | the next booking |
| a raised cap is not pushed to Redis | less is booked than allowed | one reseed of limits |
| Redis crashes | managed shows are not booked | one seeding pass, once it is back |
| the managed flag changes during a call | nothing | no repair is needed |
| Redis has keys of an unmanaged show | nothing | one reseed of limits |
| a process does not publish | Redis counts too much | one reconciliation, without grace |
"""

import asyncio
import itertools
import time
from contextlib import AsyncExitStack
from copy import copy

import pytest
from structlog.testing import capture_logs

from rota.accounting import allocations, service
from rota.accounting.ledger import DeclineReason
from rota.accounting.live import reader as live_reader
from rota.accounting.live import reconcile, seeding
from rota.accounting.live.release_publisher import FAILED, MISCONFIGURED
from rota.accounting.service import UNKNOWN_COMMIT_DELAY_S, AccountingService
from rota.infra.clock import SystemClock
from rota.infra.redis import RedisTarget, connect
from rota.model.errors import PostgresBusy, RedisUnavailable
from rota.model.quota import Level, Refusal, Resource
from tests.contract.ledger_suite import outcome_of, sql
from tests.integration.accounting.accounting_support import ShowQuota, crash, paused_at
from tests.support.harness.lost_replies import lose_reply

HOURS_S = 36_000.0
ENDED = 100_000
FLIP_MAX_S = 3.0
ENDED_JOBS = sql("""
WITH jobs AS (
  INSERT INTO rota.job_resource (pk_job, pk_show)
  SELECT gen_random_uuid(), $1::uuid FROM generate_series(1, $2::integer) RETURNING pk_job
)
INSERT INTO rota.layer_resource (pk_layer, pk_job, pk_show) SELECT gen_random_uuid(), pk_job, $1::uuid FROM jobs""")
FULL = Refusal(Level.SUBSCRIPTION, Resource.CORES, 600, 600, 100)


class ManualClock(SystemClock):
    at_s = 0.0

    def monotonic(self):
        return self.at_s


@pytest.fixture
async def quota(database, redis):
    """Six frames fit."""
    return await ShowQuota(AccountingService(database, redis)).make(burst=6)


class RedisOutage:
    """A context in which Redis cannot be reached."""

    def __init__(self, proxy):
        self._proxy = proxy

    def __enter__(self):
        self._proxy.cut()

    def __exit__(self, *_):
        self._proxy.heal()


@pytest.fixture
async def proxied(database, redis_url, proxy):
    """The same behind a proxy: (quota, a context in which Redis cannot be reached)."""
    address = redis_url.removeprefix("redis://").partition("/")[0].rpartition("@")[2]
    host, port = address.split(":")
    between = await proxy(host, int(port))
    client = connect(RedisTarget(url=between.url(redis_url)))
    yield await ShowQuota(AccountingService(database, client)).make(burst=6), RedisOutage(between)
    await client.aclose()


async def test_unpublished_release_is_repaired_by_one_reconciliation_without_grace(proxied):
    quota, outage = proxied
    await quota.book(range(6))
    failed = FAILED._value.get()
    with outage:
        assert await quota.release([0]) == [0]
    assert FAILED._value.get() == failed + 1
    assert (await quota.count(), await quota.tokens()) == ("6", [1, 2, 3, 4, 5])
    assert (await quota.book([6])).refusal == FULL
    assert (await quota.reconcile(grace_s=HOURS_S)).released == 1
    assert (await quota.book([6, 7])).booked == [6]
    assert await quota.agrees()
    assert await quota.over_cap() == []


async def test_booker_crash_between_script_and_insert_is_tombstoned_after_the_grace(quota, monkeypatch):
    fence = await quota.fence()
    async with paused_at(monkeypatch, allocations, "insert", quota.book([0])) as booking:
        await crash(booking)
    assert (await quota.count(), await quota.tokens()) == ("1", [])
    assert (await quota.book(range(1, 8))).booked == [1, 2, 3, 4, 5]
    assert (await quota.reconcile(release_orphans=False)).buried == 0
    assert await quota.count() == "6"
    assert (await quota.reconcile()).buried == 1
    late = await allocations.insert(quota.database, quota.show, fence, [quota.group([0])])
    assert late.refused == {0: DeclineReason.TOMBSTONED}
    assert (await quota.book([8, 9])).booked == [8]
    assert await quota.agrees()
    assert await quota.over_cap() == []


async def test_redis_only_bookings_of_a_dead_dispatcher_are_released_with_its_claims(quota, monkeypatch):
    await quota.book([0, 1])
    async with paused_at(monkeypatch, allocations, "insert", quota.book([2, 3])) as booking:
        await crash(booking)
    assert (await quota.count(), await quota.tokens()) == ("4", [0, 1])
    assert await quota.accounting.bar_unbooked(range(4)) == {2, 3}
    assert await quota.count() == "2"
    assert await quota.agrees()


async def test_claims_of_a_dead_dispatcher_are_returned_while_redis_is_down(proxied, monkeypatch):
    quota, outage = proxied
    async with paused_at(monkeypatch, allocations, "insert", quota.book([0])) as booking:
        await crash(booking)
    with outage:
        assert await quota.accounting.bar_unbooked([0]) == {0}
    assert (await quota.reconcile(grace_s=HOURS_S)).released == 1


async def test_release_with_a_lost_reply_is_resolved_by_its_tombstone(proxied, monkeypatch):
    quota, outage = proxied
    clock = ManualClock()
    monkeypatch.setattr(quota.accounting, "_clock", clock)
    await quota.book(range(4))
    await allocations.delete(quota.database, quota.show, [0, 1])  # and the caller never learns what was released
    quota.accounting.add_unknown_commit([0, 1, 2])
    await quota.accounting.resolve_unknown_commits()
    assert await quota.count() == "4", "the delete may still be in flight"
    clock.at_s += UNKNOWN_COMMIT_DELAY_S
    with outage, pytest.raises(RedisUnavailable):
        await quota.accounting.resolve_unknown_commits()
    await quota.accounting.resolve_unknown_commits()
    assert await quota.count() == "2"
    assert await quota.agrees()


async def test_rollback_that_failed_during_an_outage_is_retried_when_redis_returns(proxied, monkeypatch):
    quota, outage = proxied
    await quota.book([0])
    fence = await quota.fence()
    async with paused_at(monkeypatch, allocations, "insert", quota.book([1, 2])) as booking:
        await crash(booking)
    with outage:
        await quota.live.publisher.rollback_bookings(quota.show, fence, [quota.group([1, 2])])
        assert not await quota.live.publisher.flush_pending()
    assert await quota.count() == "3"
    assert await quota.live.publisher.flush_pending()
    assert await quota.agrees()


async def test_booking_inserted_within_the_reconciliation_grace_is_kept(quota, monkeypatch):
    in_flight = AsyncExitStack()
    booking = await in_flight.enter_async_context(paused_at(monkeypatch, allocations, "insert", quota.book([0])))
    async with paused_at(monkeypatch, allocations, "tombstone", quota.reconcile()) as reconciling:
        await in_flight.aclose()
    assert booking.result().booked == [0]
    assert (reconciling.result().buried, reconciling.result().released) == (0, 0)
    assert await quota.agrees()


@pytest.mark.parametrize("place", ["procs.insert", "live.book"])
async def test_booker_that_loses_a_reply_and_retries_is_counted_once(quota, monkeypatch, place):
    with monkeypatch.context() as patched:
        lose_reply(patched, place)
        with pytest.raises(ConnectionError):
            await quota.book(range(4))
    again = await quota.book(range(4))
    assert again == (outcome_of(already=range(4)) if place == "procs.insert" else outcome_of(booked=range(4)))
    assert await quota.count() == "4"
    assert await quota.agrees()


async def test_changed_cap_is_in_redis_when_the_change_returns(quota):
    await quota.burst(3)
    assert await quota.count(field="burst") == "3"
    assert (await quota.book(range(6))).booked == [0, 1, 2]
    await quota.burst(5)
    assert (await quota.book(range(3, 9))).booked == [3, 4]


async def test_lowered_cap_not_pushed_to_redis_applies_from_the_next_booking(proxied):
    quota, outage = proxied
    await quota.book(range(2))
    with outage, capture_logs() as logged:
        await quota.burst(3)
    assert [line["event"] for line in logged if line["log_level"] == "warning"] == ["limit_push_failed"]
    assert await quota.count(field="burst") == "6"
    outcome = await quota.book(range(2, 6))
    assert (outcome.booked, outcome.refusal) == ([2], Refusal(Level.SUBSCRIPTION, Resource.CORES, 300, 300, 100))
    assert await quota.count(field="burst") == "3"
    assert await quota.over_cap() == []


async def test_raised_cap_not_pushed_to_redis_applies_after_one_reseed(proxied):
    quota, outage = proxied
    await quota.book(range(6))
    with outage:
        await quota.burst(8)
    assert (await quota.book([6], capped=False)).refusal == FULL
    await quota.maintenance().reseed_limits()
    assert (await quota.book(range(6, 10))).booked == [6, 7]


async def test_booking_in_flight_when_a_cap_is_lowered_is_decided_again(quota, monkeypatch):
    async with paused_at(monkeypatch, allocations, "insert", quota.book(range(6))) as booking:
        await quota.burst(2)
    assert (booking.result().booked, booking.result().refused) == ([0, 1], [2, 3, 4, 5])
    assert await quota.agrees()
    assert await quota.over_cap() == []


async def test_token_left_under_an_earlier_fence_is_decided_again_when_booked(quota, monkeypatch):
    """Redis still has the tokens that a crashed booker got under the earlier cap."""
    await quota.book(range(3))
    async with paused_at(monkeypatch, allocations, "insert", quota.book(range(3, 6))) as booking:
        await crash(booking)
    await quota.burst(4)
    outcome = await quota.book(range(3, 6))
    assert (outcome.booked, outcome.refused) == ([3], [4, 5])
    assert await quota.over_cap() == []
    assert await quota.agrees()


async def test_late_rollback_does_not_release_a_token_booked_again_since(quota, monkeypatch):
    """Two callers book one token: the fence rises, the second books it under the new one, then the first rolls back."""
    fence = await quota.fence()
    async with paused_at(monkeypatch, allocations, "insert", quota.book([0])) as booking:
        await quota.burst(5)
        assert (await quota.book([0])).booked == [0]
        await quota.live.publisher.rollback_bookings(quota.show, fence, [quota.group([0])])
        assert await quota.count() == "1"
    assert booking.result() == outcome_of(already=[0])
    assert await quota.agrees()


async def test_late_release_is_void_once_its_token_may_be_booked_again(quota):
    await quota.book([0, 1])
    deleted = await allocations.delete(quota.database, quota.show, [0])
    await quota.reconcile()
    await quota.accounting.raise_fence(quota.show)
    await quota.maintenance().prune_tombstones()
    assert (await quota.book([0])).booked == [0]
    await quota.accounting.publisher.publish(quota.show, deleted)
    assert await quota.count() == "2"
    assert await quota.agrees()


@pytest.fixture
async def private_shows(database, private_redis):
    """A managed and an unmanaged show on a private Redis, and its server."""
    server = await private_redis()
    client = connect(RedisTarget(url=server.url))
    accounting = AccountingService(database, client)
    yield (
        await ShowQuota(accounting).make(burst=6),
        await ShowQuota(accounting).make(managed=False, name="goose", burst=6),
        server,
    )
    await client.aclose()


async def test_redis_crash_blocks_managed_shows_only_and_one_pass_recovers_all(private_shows):
    duck, goose, server = private_shows
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
    assert duck.accounting.unseeded.is_set()
    await duck.maintenance().seed_lagging_shows()
    assert await duck.agrees()
    outcome = await duck.book(range(4, 9))
    assert (outcome.booked, outcome.refusal) == ([4, 5], Refusal(Level.SUBSCRIPTION, Resource.CORES, 500, 500, 100))
    assert (await goose.book(range(104, 110))).booked == [104, 105, 106]


async def test_booking_made_before_a_redis_crash_cannot_be_inserted_after_it(private_shows, monkeypatch):
    duck, _, server = private_shows
    await duck.book(range(3))
    async with paused_at(monkeypatch, allocations, "insert", duck.book(range(3, 6))) as booking:
        await server.kill()
        await server.restart()
        await duck.maintenance().seed_lagging_shows()
        assert (await duck.book(range(10, 16))).booked == [10, 11, 12]
    assert booking.result().refused == [3, 4, 5]
    assert await duck.over_cap() == []
    assert await duck.agrees()


async def test_nothing_is_booked_while_redis_is_being_seeded(quota, monkeypatch):
    await quota.book(range(4))
    await quota.live.client.flushdb()
    async with paused_at(monkeypatch, allocations, "page_groups", quota.maintenance().seed_lagging_shows(), after=True):
        assert (await quota.book([4])).declined == {4: DeclineReason.UNSEEDED}
        assert await quota.release([0]) == [0]
    assert (await quota.book(range(4, 9))).booked == [4, 5]
    assert (await quota.reconcile()).released == 1
    assert (await quota.book([9, 10])).booked == [9]
    assert await quota.agrees()


async def tables(quota):
    return await quota.accounting.transactional.counters(quota.show)


async def test_booking_in_flight_when_its_show_leaves_redis_is_booked_in_the_tables(quota, monkeypatch):
    await quota.book(range(3))
    async with paused_at(monkeypatch, allocations, "insert", quota.book(range(3, 8))) as booking:
        await quota.flip(False)
        assert await tables(quota) == await quota.held()
        assert (await quota.book([20])).booked == [20]
    assert (booking.result().booked, booking.result().refused) == ([3, 4], [5, 6, 7])
    assert await tables(quota) == await quota.held()
    assert await quota.over_cap() == []


async def test_flip_to_redis_writes_no_hashes_of_ended_jobs(quota):
    await quota.flip(False)
    await quota.database.run(ENDED_JOBS, quota.show, 500)
    await quota.book([1])
    await quota.flip(True)
    assert len(await names_in_redis(quota)) < 10
    assert (await quota.book([2])).booked == [2]
    assert await quota.agrees()


async def names_in_redis(quota):
    return await live_reader.names_in_use(quota.live.client, quota.live.keys.show_keys(str(quota.show)))


async def test_flip_with_many_ended_jobs_takes_no_longer_and_answers_when_any_process_can_book(quota, database, redis):
    """With 100,000 it took 7 s, and answered before the show could be booked. The CPU time of this process is compared,
    not the wall clock: it grew with the hashes written to Redis. The timeout bounds what PostgreSQL and Redis do."""
    tokens = itertools.count(1)
    await quota.burst(100)
    took_s = {}
    for ended in (0, ENDED):
        await quota.flip(False)
        if ended:
            await quota.database.run(ENDED_JOBS, quota.show, ended)
        took_s[ended] = []
        for managed in (True, False, True, False):
            other = copy(quota)
            other.accounting = AccountingService(database, redis)
            began_s = time.process_time()
            async with asyncio.timeout(FLIP_MAX_S):
                await quota.flip(managed)
            took_s[ended].append(time.process_time() - began_s)
            for caller in (other, quota):
                token = next(tokens)
                assert (await caller.book([token])).booked == [token]
        await quota.flip(True)
        assert len(await names_in_redis(quota)) < 10
        assert await quota.agrees()
    # The first of them had the rows of all ended jobs before it.
    assert took_s[ENDED][0] < 2 * max(took_s[0]) + 0.01


async def test_flip_to_redis_that_another_process_seeds_answers_when_the_show_can_be_booked(quota, monkeypatch):
    await quota.flip(False)
    superseded = asyncio.Event()

    async def seed(*_args):
        superseded.set()

    monkeypatch.setattr(service, "seed", seed)
    flip = asyncio.create_task(quota.flip(True))
    await superseded.wait()
    done, _ = await asyncio.wait({flip}, timeout=4 * service.SEEDED_POLL_INTERVAL_S)
    assert not done, "it must not answer before the show can be booked"
    await seeding.seed(quota.live, quota.show)
    await flip
    assert (await quota.book([1])).booked == [1]


async def test_release_in_flight_when_its_show_leaves_redis_is_applied_once(quota):
    await quota.book(range(6))
    deleted = await allocations.delete(quota.database, quota.show, [0, 1])
    await quota.flip(False)
    await quota.accounting.publisher.publish(quota.show, deleted)
    assert await tables(quota) == await quota.held()
    assert await quota.release(range(6)) == [2, 3, 4, 5]
    assert await tables(quota) == {}


async def test_show_that_becomes_managed_brings_its_counters_and_caps(database, redis):
    quota = await ShowQuota(AccountingService(database, redis)).make(managed=False, burst=6)
    await quota.book(range(5), gpus=1)
    await quota.flip(True)
    assert await quota.agrees()
    outcome = await quota.book([5, 6])
    assert (outcome.booked, outcome.refusal) == ([5], FULL)
    assert await quota.release(range(5)) == [0, 1, 2, 3, 4]
    assert (await quota.count(), await quota.count(field="int_gpus")) == ("1", "0")


async def test_show_made_managed_during_an_outage_is_not_booked_before_it_is_seeded(proxied):
    quota, outage = proxied
    await quota.flip(False)
    await quota.book(range(5))
    with outage:
        await quota.flip(True)
    assert (await quota.book([5])).declined == {5: DeclineReason.UNSEEDED}
    await quota.maintenance().seed_lagging_shows()
    assert (await quota.book([5, 6])).booked == [5]
    assert await quota.over_cap() == []


async def test_redis_keys_of_an_unmanaged_show_are_harmless_and_removed_by_one_reseed(proxied):
    quota, outage = proxied
    await quota.book(range(5))
    with outage:
        await quota.flip(False)
    assert await quota.count() == "5"
    assert await quota.release([0, 1]) == [0, 1]
    assert (await quota.book(range(5, 10))).booked == [5, 6, 7]
    assert (await quota.count(), await tables(quota)) == ("5", await quota.held())
    await quota.reconcile()
    await quota.maintenance().seed_lagging_shows()
    assert (await quota.book([10])).refusal == FULL
    await quota.maintenance().reseed_limits()
    assert await quota.live.client.keys("acct:*") == [b"acct:seq"]


async def test_process_that_does_not_publish_inflates_redis_counters_until_one_reconciliation(quota):
    without_redis = quota.other_service()
    await quota.book(range(6))
    with capture_logs() as logged:
        assert not await without_redis.check_publishing()
    assert [line["event"] for line in logged] == ["redis_publish_misconfigured"]
    assert await quota.release([0, 1], by=without_redis) == [0, 1]
    assert MISCONFIGURED._value.get() == 1
    assert (await quota.book([6])).refusal == FULL
    assert (await quota.reconcile(grace_s=HOURS_S)).released == 2
    assert (await quota.book([6, 7, 8])).booked == [6, 7]
    assert await quota.agrees()


async def test_process_without_redis_declines_managed_shows_and_reports_existing_bookings(quota):
    await quota.book([0])
    outcome = await quota.book([0, 1], by=quota.other_service())
    assert outcome == outcome_of(already=[0], declined={1: DeclineReason.REDIS_OFF})
    assert await quota.count() == "1"


async def test_tables_of_a_managed_show_are_updated_by_one_recompute(quota):
    await quota.book(range(3), gpus=1)
    await quota.maintenance().recompute()
    shared = {key: usage for key, usage in (await quota.held()).items() if key[0] not in (Level.JOB, Level.LAYER)}
    assert await tables(quota) == shared
    await quota.release(range(3))
    await quota.maintenance().recompute()
    assert await tables(quota) == {}


async def test_concurrent_second_reconciliation_does_no_harm(quota, monkeypatch):
    await quota.book(range(4))
    async with paused_at(monkeypatch, allocations, "tokens", quota.reconcile(), after=True) as first:
        assert (await quota.reconcile()).clean
        await quota.book([4])
    assert first.result() is None
    assert await quota.agrees()


async def test_superseded_reconciliation_does_not_use_the_others_shadow(quota, monkeypatch):
    await quota.book(range(4))
    overtaking = AsyncExitStack()
    async with paused_at(monkeypatch, allocations, "tokens", quota.reconcile(), after=True) as first:
        begun = paused_at(monkeypatch, reconcile._ShowReconciler, "_reconcile_buckets", quota.reconcile())
        second = await overtaking.enter_async_context(begun)
    assert first.result() is None
    assert await quota.count() == "4"
    await overtaking.aclose()
    assert second.result().clean
    assert await quota.agrees()


@pytest.mark.parametrize("known", [[], [1]], ids=["new tokens", "one token of an earlier call"])
async def test_release_lost_by_an_insert_that_postgres_refused_is_made_up_for(quota, monkeypatch, known):
    """A lock timeout, a deadlock or a full disk: PostgreSQL answers that it inserted nothing."""
    if known:
        await quota.book(known)

    async def refused(*_call):
        raise PostgresBusy("could not extend file: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(allocations, "insert", refused)
        with pytest.raises(PostgresBusy):
            await quota.book([1, 2, 3])
    assert await quota.count() == str(len(known)), "the refused frames count against the quota"
    assert await quota.agrees()
    again = await quota.book([1, 2, 3])
    assert sorted([*again.booked, *again.already]) == [1, 2, 3]

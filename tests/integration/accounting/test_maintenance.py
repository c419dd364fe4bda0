"""Keeping the books as a service: who leads, when it is ready, what it mends without being asked."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from rota.accounting import allocations, maintenance
from rota.accounting.ledger import DeclineReason
from rota.accounting.live import seeding
from rota.accounting.live.release_publisher import MISCONFIGURED
from rota.accounting.service import AccountingService
from rota.infra.redis import RedisTarget, connect
from rota.infra.service import Service, ServiceState
from rota.model.errors import RedisUnavailable
from rota.model.quota import Level
from tests.contract.ledger_suite import outcome_of, sql
from tests.integration.accounting.accounting_support import Farm
from tests.support.waiting import until

GRAVES = sql("SELECT count(*) FROM rota.proc_grave")
SPOIL = sql("UPDATE rota.subscription SET int_cores = 77777")
NEVER_S = 3600


@pytest.fixture
async def farm(database, redis):
    return await Farm(AccountingService(database, redis)).make(burst=6)


@asynccontextmanager
async def running(*upkeeps):
    """Services over these, ended afterwards."""
    services = [Service("books", each.run) for each in upkeeps]
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for service in services:
            service.start(tasks)
        try:
            yield services
        finally:
            for service in services:
                await service.stop(1.0)


def gated(monkeypatch, owner, name):
    """Lets the calls of an async function wait for the event that comes back; a second one tells that one waits."""
    gate, waits, real = asyncio.Event(), asyncio.Event(), getattr(owner, name)

    async def wait(*args, **more):
        answer = await real(*args, **more)
        waits.set()
        await gate.wait()
        return answer

    monkeypatch.setattr(owner, name, wait)
    return gate, waits


async def test_it_is_ready_when_every_managed_show_can_be_booked_and_not_before(farm, monkeypatch):
    goose = await Farm(farm.books).make(name="goose")
    await farm.book(range(4))
    await farm.live.client.flushdb()
    gate, waits = gated(monkeypatch, allocations, "page_groups")
    async with running(farm.upkeep()) as [service]:
        await waits.wait()
        assert service.state is ServiceState.STARTING
        gate.set()
        await service.wait_for(ServiceState.READY)
        assert (await farm.book(range(4, 9))).booked == [4, 5]
        assert (await goose.book([11])).booked == [11]


async def test_of_two_one_works_and_the_other_takes_over(farm):
    one, two = farm.upkeep(owner="one"), farm.upkeep(owner="two")
    looks = {one: 0, two: 0}
    for each in (one, two):

        async def look(each=each, real=each.seed_lagging_shows):
            looks[each] += 1
            await real()

        each.seed_lagging_shows = look
    async with running(one, two) as services:
        for service in services:
            await service.wait_for(ServiceState.READY)
        await until(lambda: looks[one] or looks[two], what="a look of the leader")
        leader, other = (one, two) if one.leadership.is_leader else (two, one)
        assert (other.leadership.is_leader, looks[other]) == (False, 0)
        await services[0 if leader is one else 1].stop(1.0)
        await other.leadership.elected.wait()
        await farm.live.client.flushdb()
        await until(lambda: booked(farm, [1]), what="a seeding by the other")
    assert looks[other] > 0


async def test_an_emptied_redis_is_filled_without_help(farm):
    await farm.book(range(4))
    async with running(farm.upkeep()) as [service]:
        await service.wait_for(ServiceState.READY)
        await farm.live.client.flushdb()
        await until(farm.agrees, within_s=2 * maintenance.POLL_INTERVAL_S + 3, what="the books in Redis")

        async def some():
            return (await farm.book(range(4, 9))).booked

        assert await until(some, what="a show that is open again") == [4, 5]


async def test_a_booking_that_meets_an_unseeded_show_has_it_looked_at_at_once(farm, monkeypatch):
    monkeypatch.setattr(maintenance, "POLL_INTERVAL_S", NEVER_S)
    async with running(farm.upkeep()) as [service]:
        await service.wait_for(ServiceState.READY)
        await farm.live.client.flushdb()
        assert (await farm.book([1])).declined == {1: DeclineReason.UNSEEDED}
        await until(lambda: booked(farm, [1]), within_s=5, what="a booking")


async def booked(farm, tokens):
    return (await farm.book(tokens)).all_booked == tokens


async def test_bookings_under_way_in_one_show_do_not_keep_others_unseeded(farm, monkeypatch):
    """The recount after a seeding gives them a grace; nobody else waits for it."""
    goose = await Farm(farm.books).make(name="goose")
    real = seeding.seed

    async def seed(live, show):
        seeded = await real(live, show)
        each = farm if show == farm.show else goose
        await live._book(show, [each.group([show.int % 1000])], "limits")
        return seeded

    monkeypatch.setattr(seeding, "seed", seed)
    await farm.live.client.flushdb()
    async with asyncio.timeout(5):
        await farm.upkeep(grace_s=NEVER_S).seed_lagging_shows()
    assert all([await booked(farm, [2000]), await booked(goose, [2001])])


async def test_what_ended_while_redis_was_filled_is_given_back_soon_after(farm, monkeypatch):
    await farm.book(range(4))
    await farm.live.client.flushdb()
    gate, waits = gated(monkeypatch, allocations, "page_groups")
    async with running(farm.upkeep(recompute_interval_seconds=NEVER_S)) as [service]:
        await waits.wait()
        await farm.release([0])
        gate.set()
        await service.wait_for(ServiceState.READY)
        await until(farm.agrees, within_s=5, what="a recount after the seeding")


async def test_a_new_leader_repairs_a_release_lost_by_a_server_that_died(farm):
    await farm.book(range(4))
    await farm.release([0, 1], by=farm.colleague())  # committed in PostgreSQL, never said to Redis
    assert not await farm.agrees()
    async with running(farm.upkeep(recompute_interval_seconds=NEVER_S)) as [service]:
        await service.wait_for(ServiceState.READY)
        await until(farm.agrees, within_s=5, what="a recount by the new leader")


async def test_a_recount_that_was_due_at_once_and_failed_is_tried_again_in_a_moment(monkeypatch):
    monkeypatch.setattr(maintenance, "POLL_INTERVAL_S", 0.01)
    tried, soon = [], asyncio.Event()

    async def work():
        tried.append(len(tried))
        if len(tried) < 3:
            raise RedisUnavailable("gone", address="nowhere")

    soon.set()
    rounds = asyncio.create_task(maintenance._run_every(NEVER_S, "recompute", work, soon))
    await until(lambda: len(tried) == 3, what="a round that ends well")
    assert not soon.is_set()
    rounds.cancel()
    await asyncio.wait([rounds])


async def test_without_redis_it_warns_sets_the_metric_and_serves_what_it_can(farm):
    goose = await Farm(farm.books).make(managed=False, name="goose")
    await farm.book([1])
    silent = Farm(farm.colleague())
    try:
        with capture_logs() as logged:
            async with running(silent.upkeep()) as [service]:
                await service.wait_for(ServiceState.READY)
                assert MISCONFIGURED._value.get() == 1
                assert (await goose.book([11], by=silent.books)).booked == [11]
                assert (await farm.book([2], by=silent.books)).declined == {2: DeclineReason.REDIS_OFF}
                assert await farm.release([1], by=silent.books) == [1]
        [told] = [line for line in logged if line["event"] == "redis_publish_misconfigured"]
        assert (told["log_level"], told["managed_shows"]) == ("warning", 1)
        assert "accounting.redis.enabled" in told["remedy"]
    finally:
        await farm.books.check_publishing()
    assert MISCONFIGURED._value.get() == 0


async def test_without_redis_and_without_managed_shows_there_is_nothing_to_warn_of(database):
    await Farm(AccountingService(database, None)).make(managed=False)
    with capture_logs() as logged:
        assert await AccountingService(database, None).check_publishing()
    assert (logged, MISCONFIGURED._value.get()) == ([], 0)


async def test_a_redis_that_goes_and_comes_back_empty_ends_rounds_and_not_the_service(database, private_redis):
    server = await private_redis()
    client = connect(RedisTarget(url=server.url))
    farm = await Farm(AccountingService(database, client)).make(burst=6)
    await farm.book(range(4))
    with capture_logs() as logged:
        async with running(farm.upkeep()) as [service]:
            await service.wait_for(ServiceState.READY)
            await server.kill()
            farm.books.unseeded.set()
            await until(lambda: "accounting_round_failed" in [line["event"] for line in logged], what="a failed round")
            await server.restart()
            await until(farm.agrees, within_s=5, what="the books in Redis")
            assert (await farm.book(range(4, 9))).booked == [4, 5]
            assert service.state is ServiceState.READY
    await client.aclose()


async def test_while_redis_is_away_it_is_alive_and_not_ready(database, private_redis):
    server = await private_redis()
    client = connect(RedisTarget(url=server.url))
    farm = await Farm(AccountingService(database, client)).make()
    await server.kill()
    async with running(farm.upkeep()) as [service]:
        await service.wait_for(ServiceState.RESTARTING)
        await server.restart()
        await service.wait_for(ServiceState.READY)
        assert (await farm.book([1])).booked == [1]
    await client.aclose()


async def test_a_round_that_fails_in_the_moment_it_is_cancelled_ends():
    async def fail():
        rounds.cancel()
        raise RedisUnavailable("gone", address="nowhere")

    async def work():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())

    soon = asyncio.Event()
    soon.set()
    rounds = asyncio.create_task(maintenance._run_every(NEVER_S, "recompute", work, soon))
    done, _ = await asyncio.wait([rounds], timeout=5)
    rounds.cancel()
    assert done == {rounds}
    assert rounds.cancelled()


async def test_many_graves_raise_the_fence_and_go(farm, monkeypatch):
    monkeypatch.setattr(maintenance, "TOMBSTONES_MAX", 2)
    await farm.book(range(0, 12, 2))
    await farm.release([0, 4, 8])
    fence = await farm.fence()
    await farm.upkeep().prune_tombstones()
    assert (await farm.fence(), await farm.database.value(GRAVES)) == (fence + 1, 0)
    assert await farm.live.is_seeded(farm.show, fence + 1)
    assert (await farm.book([20])).booked == [20]
    assert await farm.book([2]) == outcome_of(already=[2])
    assert await farm.agrees()


async def test_tables_of_unmanaged_shows_are_recalculated_and_those_of_managed_ones_mirrored(farm):
    goose = await Farm(farm.books).make(managed=False, name="goose")
    await farm.book([1])
    await goose.book([11])
    await farm.database.run(SPOIL)
    with capture_logs() as logged:
        await farm.upkeep().recalculate()
    assert [line["event"] for line in logged] == ["quota_tables_repaired"]
    tables = farm.books.transactional.counters
    assert (await tables(goose.show))[Level.SUBSCRIPTION, goose.pool].cores == 100
    assert (await tables(farm.show))[Level.SUBSCRIPTION, farm.pool].cores == 77777
    await farm.upkeep().recompute()
    assert (await tables(farm.show))[Level.SUBSCRIPTION, farm.pool].cores == 100

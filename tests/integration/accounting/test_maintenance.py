"""Accounting maintenance as a service: leadership, readiness, and automatic repairs."""

import asyncio
from contextlib import asynccontextmanager, suppress
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from rota.accounting import allocations, maintenance
from rota.accounting.changed_limits import LIMITS_CHANNEL
from rota.accounting.ledger import DeclineReason
from rota.accounting.live import reconcile, seeding
from rota.accounting.live.release_publisher import MISCONFIGURED
from rota.accounting.service import AccountingService
from rota.infra.lease import leader_loop
from rota.infra.redis import RedisTarget, connect
from rota.infra.service import Service, ServiceState
from rota.model.backoff import Backoff
from rota.model.errors import PostgresBusy, RedisUnavailable
from rota.model.quota import Level
from tests.contract.ledger_suite import outcome_of, sql
from tests.integration.accounting.accounting_support import ShowQuota
from tests.support.waiting import until

TOMBSTONES = sql("SELECT count(*) FROM rota.proc_grave")
OLD_TOMBSTONES = sql(
    """INSERT INTO rota.proc_grave (pk_show, token_first, token_last, int_fence)
       SELECT $1::uuid, 2 * n, 2 * n, 0 FROM generate_series(1, $2::integer) AS n"""
)
SPOIL = sql("UPDATE rota.subscription SET int_cores = 77777")
SET_BURST = sql("UPDATE rota.subscription SET int_burst = $2 WHERE pk_show = $1")
NEVER_S = 3600


@pytest.fixture
async def quota(database, redis):
    return await ShowQuota(AccountingService(database, redis)).make(burst=6)


@asynccontextmanager
async def running(*maintainers):
    """Run each as a service; stop them at the end."""
    services = [Service("books", each.run) for each in maintainers]
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        for service in services:
            service.start(tasks)
        try:
            yield services
        finally:
            for service in services:
                await service.stop(1.0)


def gated(monkeypatch, owner, name):
    """Block calls of an async function at their end until the first event is set; the second: a call waits."""
    gate, waits, real = asyncio.Event(), asyncio.Event(), getattr(owner, name)

    async def wait(*args, **more):
        answer = await real(*args, **more)
        waits.set()
        await gate.wait()
        return answer

    monkeypatch.setattr(owner, name, wait)
    return gate, waits


async def test_maintenance_is_ready_only_when_every_managed_show_is_bookable(quota, monkeypatch):
    goose = await ShowQuota(quota.accounting).make(name="goose")
    await quota.book(range(4))
    await quota.live.client.flushdb()
    gate, waits = gated(monkeypatch, allocations, "page_groups")
    async with running(quota.maintenance()) as [service]:
        await waits.wait()
        assert service.state is ServiceState.STARTING
        gate.set()
        await service.wait_for(ServiceState.READY)
        assert (await quota.book(range(4, 9))).booked == [4, 5]
        assert (await goose.book([11])).booked == [11]


async def test_one_of_two_maintenance_services_works_and_the_other_takes_over(quota):
    one, two = quota.maintenance(owner="one"), quota.maintenance(owner="two")
    passes = {one: 0, two: 0}
    for each in (one, two):

        async def count_pass(each=each, real=each.seed_lagging_shows):
            passes[each] += 1
            await real()

        each.seed_lagging_shows = count_pass
    async with running(one, two) as services:
        for service in services:
            await service.wait_for(ServiceState.READY)
        await until(lambda: passes[one] or passes[two], what="a pass of the leader")
        leader, other = (one, two) if one.leadership.is_leader else (two, one)
        assert (other.leadership.is_leader, passes[other]) == (False, 0)
        await services[0 if leader is one else 1].stop(1.0)
        await other.leadership.elected.wait()
        await quota.live.client.flushdb()
        await until(lambda: booked(quota, [1]), what="a seeding by the other service")
    assert passes[other] > 0


async def test_emptied_redis_is_seeded_automatically(quota):
    await quota.book(range(4))
    async with running(quota.maintenance()) as [service]:
        await service.wait_for(ServiceState.READY)
        await quota.live.client.flushdb()
        await until(quota.agrees, within_s=2 * maintenance.POLL_INTERVAL_S + 3, what="Redis to be seeded")

        assert await until(lambda: newly_booked(quota, range(4, 9)), what="the show to be bookable") == [4, 5]


async def test_booking_on_an_unseeded_show_triggers_a_seeding_immediately(quota, monkeypatch):
    monkeypatch.setattr(maintenance, "POLL_INTERVAL_S", NEVER_S)
    async with running(quota.maintenance()) as [service]:
        await service.wait_for(ServiceState.READY)
        await quota.live.client.flushdb()
        assert (await quota.book([1])).declined == {1: DeclineReason.UNSEEDED}
        await until(lambda: booked(quota, [1]), within_s=5, what="a booking")


async def newly_booked(quota, tokens):
    return (await quota.book(tokens)).booked


async def booked(quota, tokens):
    return (await quota.book(tokens)).all_booked == tokens


async def test_bookings_in_flight_in_one_show_do_not_delay_seeding_of_others(quota, monkeypatch):
    """The reconciliation after a seeding grants them a grace; the seeding of other shows does not wait for it."""
    goose = await ShowQuota(quota.accounting).make(name="goose")
    real = seeding.seed

    async def seed(live, show):
        seeded = await real(live, show)
        each = quota if show == quota.show else goose
        await live._book(show, [each.group([show.int % 1000])], "limits")
        return seeded

    monkeypatch.setattr(seeding, "seed", seed)
    await quota.live.client.flushdb()
    async with asyncio.timeout(5):
        await quota.maintenance(grace_s=NEVER_S).seed_lagging_shows()
    assert all([await booked(quota, [2000]), await booked(goose, [2001])])


async def test_frames_ended_during_seeding_are_released_soon_after(quota, monkeypatch):
    await quota.book(range(4))
    await quota.live.client.flushdb()
    gate, waits = gated(monkeypatch, allocations, "page_groups")
    async with running(quota.maintenance(recompute_interval_seconds=NEVER_S)) as [service]:
        await waits.wait()
        await quota.release([0])
        gate.set()
        await service.wait_for(ServiceState.READY)
        await until(quota.agrees, within_s=5, what="a reconciliation after the seeding")


async def test_new_leader_repairs_a_release_lost_by_a_crashed_server(quota):
    await quota.book(range(4))
    await quota.release([0, 1], by=quota.other_service())  # committed in PostgreSQL, never published to Redis
    assert not await quota.agrees()
    async with running(quota.maintenance(recompute_interval_seconds=NEVER_S)) as [service]:
        await service.wait_for(ServiceState.READY)
        await until(quota.agrees, within_s=5, what="a reconciliation by the new leader")


async def test_failed_immediate_reconciliation_is_retried_shortly_after(quota, monkeypatch):
    monkeypatch.setattr(leader_loop, "RETRY_BACKOFF", Backoff(first_s=0.01, longest_s=0.01))
    real, tried = reconcile.reconcile_show, []

    async def reconcile_show(*args, **more):
        tried.append(len(tried))
        if len(tried) < 3:
            raise RedisUnavailable("gone", address="nowhere")
        return await real(*args, **more)

    monkeypatch.setattr(reconcile, "reconcile_show", reconcile_show)
    monkeypatch.setattr(quota.accounting, "release_lost", lambda: asyncio.sleep(0))  # it would repair this one earlier
    await quota.book(range(4))
    await quota.release([0, 1], by=quota.other_service())  # committed in PostgreSQL, never published to Redis
    async with running(quota.maintenance(recompute_interval_seconds=NEVER_S)):
        await until(quota.agrees, within_s=5, what="a successful reconciliation")
    assert len(tried) == 3


async def test_maintenance_without_redis_warns_sets_the_metric_and_serves_unmanaged_shows(quota):
    goose = await ShowQuota(quota.accounting).make(managed=False, name="goose")
    await quota.book([1])
    without_redis = ShowQuota(quota.other_service())
    try:
        with capture_logs() as logged:
            async with running(without_redis.maintenance()) as [service]:
                await service.wait_for(ServiceState.READY)
                assert MISCONFIGURED._value.get() == 1
                assert (await goose.book([11], by=without_redis.accounting)).booked == [11]
                assert (await quota.book([2], by=without_redis.accounting)).declined == {2: DeclineReason.REDIS_OFF}
                assert await quota.release([1], by=without_redis.accounting) == [1]
        [warning] = [line for line in logged if line["event"] == "redis_publish_misconfigured"]
        assert (warning["log_level"], warning["managed_shows"]) == ("warning", 1)
        assert "accounting.redis.enabled" in warning["remedy"]
    finally:
        await quota.accounting.check_publishing()
    assert MISCONFIGURED._value.get() == 0


async def test_no_redis_and_no_managed_shows_gives_no_warning(database):
    await ShowQuota(AccountingService(database, None)).make(managed=False)
    with capture_logs() as logged:
        assert await AccountingService(database, None).check_publishing()
    assert (logged, MISCONFIGURED._value.get()) == ([], 0)


async def test_redis_restart_without_data_fails_rounds_but_not_the_service(database, private_redis):
    server = await private_redis()
    client = connect(RedisTarget(url=server.url))
    quota = await ShowQuota(AccountingService(database, client)).make(burst=6)
    await quota.book(range(4))
    with capture_logs() as logged:
        async with running(quota.maintenance()) as [service]:
            await service.wait_for(ServiceState.READY)
            await server.kill()
            quota.accounting.unseeded.set()
            await until(lambda: "accounting_round_failed" in [line["event"] for line in logged], what="a failed round")
            await server.restart()
            assert await until(lambda: newly_booked(quota, range(4, 9)), what="a seeded show") == [4, 5]
            await until(quota.agrees, within_s=5, what="a reconciliation")
            assert service.state is ServiceState.READY
    await client.aclose()


async def test_maintenance_is_alive_and_not_ready_while_redis_is_down(database, private_redis):
    server = await private_redis()
    client = connect(RedisTarget(url=server.url))
    quota = await ShowQuota(AccountingService(database, client)).make()
    await server.kill()
    async with running(quota.maintenance()) as [service]:
        await service.wait_for(ServiceState.RESTARTING)
        await server.restart()
        await service.wait_for(ServiceState.READY)
        assert (await quota.book([1])).booked == [1]
    await client.aclose()


async def test_too_many_tombstones_raise_the_fence_and_are_pruned(quota, monkeypatch):
    monkeypatch.setattr(maintenance, "TOMBSTONES_MAX", 2)
    await quota.book(range(0, 12, 2))
    await quota.release([0, 4, 8])
    fence = await quota.fence()
    await quota.maintenance().prune_tombstones()
    assert (await quota.fence(), await quota.database.value(TOMBSTONES)) == (fence + 1, 0)
    assert await quota.live.is_seeded(quota.show, fence + 1)
    assert (await quota.book([20])).booked == [20]
    assert await quota.book([2]) == outcome_of(already=[2])
    assert await quota.agrees()


async def test_any_number_of_obsolete_tombstones_is_pruned_in_one_round(quota):
    await quota.database.run(OLD_TOMBSTONES, quota.show, 101_000)
    await quota.maintenance().prune_tombstones()
    assert await quota.database.value(TOMBSTONES) == 0


def nodes(plan):
    yield plan
    for inner in plan.get("Plans", ()):
        yield from nodes(inner)


async def test_prune_of_obsolete_tombstones_reads_each_of_them_once(quota):
    """A page that read the table from its start would read all rows that the pages before it have deleted."""
    await quota.database.run(OLD_TOMBSTONES, quota.show, 20_000)
    await quota.database.run(sql("ANALYZE rota.proc_grave"))
    async with quota.database.transaction() as tx:
        await tx.run(sql("SET LOCAL plan_cache_mode = force_generic_plan"))
        statement = await tx.connection.prepare(allocations.PRUNE_TOMBSTONES.text)
        [plan] = await statement.explain(5000, UUID(int=0), -1, -1)
    reads = [each["Node Type"] for each in nodes(plan["Plan"]) if each.get("Relation Name") == "proc_grave"]
    assert sorted(set(reads) - {"ModifyTable"}) == ["Index Scan", "Tid Scan"]
    assert await allocations.prune_tombstones(quota.database, most=3000) == 20_000


async def lose_releases(quota, tokens):
    """As a server that dies between the end of frames in PostgreSQL and their release in Redis."""
    await allocations.delete(quota.database, quota.show, tokens)
    assert not await quota.agrees()


async def test_release_lost_by_a_dead_server_is_repaired_at_the_start_of_another(quota):
    await quota.book(range(6))
    await lose_releases(quota, [0, 1, 5])
    with capture_logs() as logged:
        async with running(quota.maintenance(recompute_interval_seconds=NEVER_S)) as [service]:
            await service.wait_for(ServiceState.READY)
            assert await quota.agrees()
    [line] = [line for line in logged if line["event"] == "lost_releases_repaired"]
    assert line["tokens"] == 3


def recorded(monkeypatch, owner, name):
    """The results of an async function, as a list that grows with each call."""
    results, real = [], getattr(owner, name)

    async def record():
        results.append(await real())
        return results[-1]

    monkeypatch.setattr(owner, name, record)
    return results


async def test_release_lost_by_a_server_that_did_not_lead_is_repaired_when_it_left(quota, monkeypatch):
    goose = await ShowQuota(quota.accounting).make(name="goose")
    await quota.book(range(6))
    await goose.book([11, 12])
    leader = quota.maintenance(recompute_interval_seconds=NEVER_S)
    releases = recorded(monkeypatch, quota.accounting, "release_lost")
    reconciliations = recorded(monkeypatch, leader, "recompute")
    async with running(leader):
        await until(lambda: len(releases) == 2 and len(reconciliations) == 1, what="the steps after the election")
        await lose_releases(quota, [2, 3])
        await lose_releases(goose, [12])
        quota.accounting.note_server_left()
        await until(quota.agrees, within_s=5, what="the repair of the first show")
        await until(goose.agrees, within_s=5, what="the repair of the second show")
    assert (await quota.book([20, 21])).booked == [20, 21]


async def test_lock_timeout_in_one_show_does_not_hold_up_the_seeding_of_others(quota, monkeypatch):
    goose = await ShowQuota(quota.accounting).make(name="goose")
    await quota.live.client.flushdb()
    seed = seeding.seed

    async def seed_unless_locked(live, show):
        if show == min(quota.show, goose.show):
            raise PostgresBusy("canceling statement due to lock timeout")
        return await seed(live, show)

    monkeypatch.setattr(seeding, "seed", seed_unless_locked)
    with pytest.raises(PostgresBusy):
        await quota.maintenance().seed_lagging_shows()
    other = max(quota.show, goose.show)
    assert other not in await quota.maintenance().lagging_shows()


async def test_tables_of_unmanaged_shows_are_recalculated_and_of_managed_ones_mirrored(quota):
    goose = await ShowQuota(quota.accounting).make(managed=False, name="goose")
    await quota.book([1])
    await goose.book([11])
    await quota.database.run(SPOIL)
    with capture_logs() as logged:
        await quota.maintenance().recalculate()
    assert [line["event"] for line in logged] == ["quota_tables_repaired"]
    tables = quota.accounting.transactional.counters
    assert (await tables(goose.show))[Level.SUBSCRIPTION, goose.pool].cores == 100
    assert (await tables(quota.show))[Level.SUBSCRIPTION, quota.pool].cores == 77777
    await quota.maintenance().recompute()
    assert (await tables(quota.show))[Level.SUBSCRIPTION, quota.pool].cores == 100


@asynccontextmanager
async def after_push_at_start(quota):
    """Run the maintenance without its periodic copies of limits; the body begins when it has copied them once."""
    service = quota.maintenance(limit_reseed_interval_seconds=NEVER_S)
    async with quota.database.listen(LIMITS_CHANNEL) as told, running(service):
        assert await anext(told) == f"pushed:{quota.show}"
        yield


async def raise_burst_without_a_push(quota, monkeypatch, burst, error):
    """Raise the limit; the push to Redis ends with this error."""

    async def push(*_args, **_more):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(quota.accounting.live.limits, "push", push)
        await quota.burst(burst)


@pytest.mark.parametrize("error", [RedisUnavailable("gone", address="nowhere"), asyncio.CancelledError()], ids=repr)
async def test_raised_limit_whose_push_failed_is_pushed_again_at_once(quota, monkeypatch, error):
    async with after_push_at_start(quota):
        with suppress(asyncio.CancelledError):
            await raise_burst_without_a_push(quota, monkeypatch, 8, error)
        await until(lambda: is_burst(quota, "8"), within_s=5, what="the raised limit in Redis")


async def test_raised_limit_that_a_dead_server_did_not_push_is_pushed_when_it_left(quota):
    async with after_push_at_start(quota):
        dead = ShowQuota(AccountingService(quota.database, None))
        dead.name = quota.name
        await dead.burst(9)
        assert await quota.count(field="burst") == "6"
        quota.accounting.note_server_left()
        await until(lambda: is_burst(quota, "9"), within_s=5, what="the raised limit in Redis")


async def test_limit_changed_in_sql_is_copied_by_the_leader(quota):
    """As is one whose process, perhaps a command, died right after the commit."""
    async with after_push_at_start(quota):
        await quota.database.run(SET_BURST, quota.show, 900)
        await until(lambda: is_burst(quota, "9"), within_s=5, what="the changed limit in Redis")


async def is_burst(quota, burst):
    return await quota.count(field="burst") == burst

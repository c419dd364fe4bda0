"""Leader election on a real server: terms, takeover, and errors of the leader's work and of its campaign."""

import asyncio
from urllib.parse import urlsplit

import pytest

from rota.infra.lease import Leadership, Leases
from rota.infra.lease.lease_context import ATTEMPTS_MAX
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.service import Lifecycle
from rota.model.errors import LeaseHeld, LeaseLost, PostgresUnavailable, StaleFence
from tests.integration.infra.lease_support import EXPIRE, LONG_S, QUICK_BACKOFF, forever, leading, sql, take, write
from tests.support.waiting import until


@pytest.fixture
def leases(database):
    return Leases(database, owner="me")


@pytest.fixture
def others(database):
    return Leases(database, owner="others")


async def test_one_of_two_candidates_leads_and_the_other_takes_over_when_it_stops(leases, others):
    terms = []

    async def lead(lease):
        terms.append(lease.fence)
        await forever()

    one = Leadership(leases, "chair", lead, kind="test", ttl_s=LONG_S)
    two = Leadership(others, "chair", lead, kind="test", ttl_s=LONG_S)
    async with leading(one) as [task]:
        await one.elected.wait()
        async with leading(two):
            await until(lambda: leases.database.value(sql("SELECT wanted FROM rota.lease WHERE name = 'chair'")))
            assert (one.is_leader, two.is_leader) == (True, False)
            task.cancel()
            await two.elected.wait()
            assert (one.is_leader, two.is_leader) == (False, True)
    assert terms == [1, 2]


async def test_leader_that_loses_its_lease_stops_and_campaigns_again(leases, database):
    ends = []

    async def lead(lease):
        try:
            await forever()
        finally:
            ends.append(lease.fence)

    leader = Leadership(leases, "chair", lead, kind="test", ttl_s=0.6, pauses=QUICK_BACKOFF)
    async with leading(leader):
        for term in (1, 2):
            await leader.elected.wait()
            await database.run(EXPIRE, "chair")
            await until(lambda term=term: ends[-1:] == [term], what="the end of the term")
        await leader.elected.wait()
    assert not leader.is_leader


async def test_leader_whose_work_fails_releases_the_lease_and_raises(leases, others):
    async def lead(_):
        raise LookupError("bug")

    leader = Leadership(leases, "chair", lead, kind="test", ttl_s=LONG_S)
    with pytest.raises(LookupError):
        await leader.run()
    assert await take(others, "chair")


async def test_leader_that_lost_postgresql_campaigns_again(leases):
    terms = []

    async def lead(lease):
        terms.append(lease.fence)
        if len(terms) == 1:
            raise PostgresUnavailable("gone")
        await forever()

    leader = Leadership(leases, "chair", lead, kind="test", ttl_s=LONG_S, pauses=QUICK_BACKOFF)
    async with leading(leader):
        await until(lambda: len(terms) == 2)
    assert terms == sorted(set(terms))


@pytest.mark.parametrize(
    "failure",
    [
        LeaseHeld("an inner lock is taken", lease="inner"),
        LeaseLost("an inner lock was lost", lease="inner"),
        StaleFence("an inner lock was lost", leases=["inner"]),
        FileNotFoundError("no such file"),
        TimeoutError("the duty's own"),
    ],
    ids=lambda failure: type(failure).__name__,
)
async def test_error_of_the_leaders_work_is_not_treated_as_a_campaign_error(leases, failure):
    terms = []

    async def lead(lease):
        terms.append(lease)
        raise failure

    with pytest.raises(type(failure)) as caught:
        async with asyncio.timeout(5):
            await Leadership(leases, "chair", lead, kind="test", ttl_s=LONG_S, pauses=QUICK_BACKOFF).run()
    assert caught.value is failure
    assert len(terms) == 1


async def test_leader_whose_guarded_write_is_refused_campaigns_again(leases, database):
    terms = []

    async def lead(lease):
        terms.append(lease.fence)
        if len(terms) == 1:
            await database.run(EXPIRE, "chair")
            await write(leases, lease)
        await forever()

    leader = Leadership(leases, "chair", lead, kind="test", ttl_s=LONG_S, pauses=QUICK_BACKOFF)
    async with leading(leader):
        await until(lambda: len(terms) == 2)


@pytest.mark.new_connections
async def test_candidate_keeps_campaigning_while_the_database_is_read_only(database_url, database, monkeypatch):
    name = urlsplit(database_url).path[1:]
    await database.run(sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on"))
    read_only = await Database.open(PostgresTarget(url=database_url, pool_max=1))
    leases = Leases(read_only)
    acquire, acquire_calls = leases.acquire, []

    async def counted(*args, **more):
        acquire_calls.append(args)
        return await acquire(*args, **more)

    monkeypatch.setattr(leases, "acquire", counted)
    leader = Leadership(leases, "chair", lambda _: forever(), kind="test", pauses=QUICK_BACKOFF)
    try:
        async with leading(leader):
            await until(lambda: len(acquire_calls) > 2 * ATTEMPTS_MAX, what="a third campaign")
            await database.run(sql(f"ALTER DATABASE {name} RESET default_transaction_read_only"))
            await leader.elected.wait()
    finally:
        await database.run(sql(f"ALTER DATABASE {name} RESET default_transaction_read_only"))
        await read_only.close()


async def test_leader_service_releases_the_lease_on_drain(leases, others):
    draining = asyncio.Event()
    leader = Leadership(leases, "chair", lambda _: forever(), kind="test", ttl_s=LONG_S)
    async with asyncio.timeout(10):
        serving = asyncio.create_task(leader.serve(Lifecycle(draining, lambda: None)))
        await leader.elected.wait()
        draining.set()
        await serving
    assert await take(others, "chair")


async def test_leader_service_raises_the_error_of_its_work(leases):
    async def lead(_):
        raise LookupError("bug")

    with pytest.raises(LookupError):
        async with asyncio.timeout(10):
            await Leadership(leases, "chair", lead, kind="test").serve(Lifecycle(asyncio.Event(), lambda: None))


async def test_leader_whose_work_fails_while_draining_does_not_campaign_again(leases):
    terms, draining = [], asyncio.Event()

    async def lead(lease):
        terms.append(lease.fence)
        try:
            await forever()
        except asyncio.CancelledError:
            raise PostgresUnavailable("gone") from None

    leader = Leadership(leases, "chair", lead, kind="test", ttl_s=LONG_S, pauses=QUICK_BACKOFF)
    async with asyncio.timeout(10):
        serving = asyncio.create_task(leader.serve(Lifecycle(draining, lambda: None)))
        await leader.elected.wait()
        draining.set()
        await serving
    assert terms == [1]


async def test_cancelled_leader_service_stops_leading_before_it_ends(leases, others):
    leader = Leadership(leases, "chair", lambda _: forever(), kind="test", ttl_s=LONG_S)
    async with asyncio.timeout(10):
        serving = asyncio.create_task(leader.serve(Lifecycle(asyncio.Event(), lambda: None)))
        await leader.elected.wait()
        serving.cancel()
        await asyncio.wait({serving})
    assert not leader.is_leader
    assert await take(others, "chair")

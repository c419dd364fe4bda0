"""Work under a lease on a real server: how it waits, how the lease is kept, lost and given back."""

import asyncio
import random
import time

import psycopg
import pytest

from rota.infra.lease import Leases
from rota.infra.lease import lease_context as hold_module
from rota.infra.lease.grant import LEASES_LOST
from rota.infra.postgres import Database, PostgresTarget
from rota.model.errors import LeaseHeld, LeaseLost, LoginRefused
from tests.integration.infra.lease_support import EXPIRE, LONG_S, count, forever, sql, take
from tests.support.waiting import until


@pytest.fixture
def leases(database):
    return Leases(database, owner="me")


@pytest.fixture
def others(database):
    return Leases(database, owner="others")


async def test_a_release_wakes_who_waits(leases, others, monkeypatch):
    monkeypatch.setattr(hold_module, "POLL_MAX_S", LONG_S)
    lease = await take(leases)
    acquire, refused = others.acquire, []

    async def counted(*args, **more):
        attempt = await acquire(*args, **more)
        refused.extend(attempt.left_s)
        return attempt

    async def wait_for_it():
        async with others.hold("door", kind="test", ttl_s=LONG_S, wait_s=LONG_S) as mine:
            return mine.fence

    monkeypatch.setattr(others, "acquire", counted)
    waiter = asyncio.create_task(wait_for_it())
    # It asks once at once, and once more when it listens; from then on only the notification can wake it.
    await until(lambda: len(refused) == 2)
    await leases.release([lease])
    async with asyncio.timeout(5):
        assert await waiter > lease.fence


async def test_who_waits_takes_over_when_the_time_of_the_holder_is_over(leases, others):
    lease = await take(leases, ttl_s=0.05)
    async with others.hold("door", kind="test", ttl_s=LONG_S, wait_s=LONG_S) as mine:
        assert mine.fence > lease.fence


async def test_who_waits_in_vain_is_told_that_somebody_holds_it(leases, others):
    await take(leases)
    with pytest.raises(LeaseHeld, match="held by another process"):
        async with others.hold("door", kind="test", ttl_s=1, wait_s=0.02):
            pytest.fail("entered")
    with pytest.raises(LeaseHeld):
        async with others.hold("door", kind="test", ttl_s=1):
            pytest.fail("entered")


async def test_a_lease_is_released_at_the_end_also_when_the_work_failed(leases, others):
    with pytest.raises(LookupError):
        async with leases.hold("door", kind="test", ttl_s=LONG_S):
            raise LookupError
    async with others.hold("door", kind="test", ttl_s=LONG_S):
        pass


async def test_a_lease_kept_until_its_time_is_over_lets_nobody_repeat_the_work(leases, others):
    async with leases.hold("tick", kind="test", ttl_s=0.2, release=False):
        pass
    with pytest.raises(LeaseHeld):
        async with others.hold("tick", kind="test", ttl_s=0.2):
            pytest.fail("entered")
    async with others.hold("tick", kind="test", ttl_s=0.2, wait_s=LONG_S):
        pass


async def test_a_held_lease_outlives_its_time_to_live_by_renewals(leases, others, database):
    async with leases.hold("door", kind="test", ttl_s=0.6) as lease:
        first = await database.value(sql("SELECT expires_at FROM rota.lease"))
        later = sql("SELECT expires_at > $1::timestamptz + interval '0.1s' FROM rota.lease")
        await until(lambda: database.value(later, first))
        async with database.transaction() as tx:
            await leases.guard(tx, lease)


async def lose(leases, database, body=forever, name="door", ttl_s=0.6):
    """Work under a lease that is taken away as soon as the work has begun."""
    async with leases.hold(name, kind="test", ttl_s=ttl_s):
        await database.run(EXPIRE, name)
        await body()


async def test_losing_a_lease_cancels_the_work_and_is_counted(leases, database):
    before = count(LEASES_LOST)
    with pytest.raises(LeaseLost, match="refused to renew"):
        await lose(leases, database)
    assert count(LEASES_LOST) == before + 1
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)


async def test_three_renewals_that_fail_in_a_row_cancel_the_work_before_the_lease_runs_out(leases, monkeypatch):
    tried = []

    async def unreachable(_):
        tried.append(asyncio.get_running_loop().time())
        raise ConnectionResetError

    monkeypatch.setattr(leases, "renew", unreachable)
    with pytest.raises(LeaseLost, match="3 renewals failed"):
        async with leases.hold("door", kind="test", ttl_s=0.3):
            await forever()
    assert len(tried) == 3


async def test_two_renewals_may_fail_when_the_third_succeeds(leases, monkeypatch):
    renew, tried = leases.renew, []
    succeeded = asyncio.Event()

    async def flaky(held):
        tried.append(held)
        if len(tried) in (1, 2, 4):
            raise ConnectionResetError
        if len(tried) == 5:
            succeeded.set()
        return await renew(held)

    monkeypatch.setattr(leases, "renew", flaky)
    async with asyncio.timeout(15), leases.hold("door", kind="test", ttl_s=1.5):
        await succeeded.wait()


async def test_a_server_that_does_not_answer_renewals_costs_the_lease_in_time(leases, monkeypatch):
    monkeypatch.setattr(leases, "renew", lambda _: forever())
    lease = leases.hold("door", kind="test", ttl_s=0.3)
    with pytest.raises(LeaseLost, match="3 renewals failed"):
        async with lease:
            await forever()
    assert leases.clock.monotonic() < lease._valid_until


async def test_a_process_that_was_blocked_past_its_time_does_not_even_ask(leases, monkeypatch):
    async def never(_):
        pytest.fail("renewed")

    monkeypatch.setattr(leases, "renew", never)
    now = leases.clock.monotonic

    async def jump_in_time():
        monkeypatch.setattr(leases.clock, "monotonic", lambda: now() + 1)
        await forever()

    async with asyncio.timeout(5):
        with pytest.raises(LeaseLost, match="expired"):
            async with leases.hold("door", kind="test", ttl_s=0.3):
                await jump_in_time()


async def test_work_that_ends_in_the_moment_of_the_loss_is_not_reported_as_done(leases, database):
    hold = leases.hold("door", kind="test", ttl_s=LONG_S)

    async def end_when_lost():
        async with hold:
            hold._abort_as_lost("it expired")

    with pytest.raises(LeaseLost):
        await end_when_lost()
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)


async def test_the_works_own_error_is_not_hidden_by_a_loss(leases, database):
    async def fail_when_cancelled():
        try:
            await forever()
        except asyncio.CancelledError:
            raise LookupError from None

    with pytest.raises(LookupError):
        await lose(leases, database, fail_when_cancelled)
    assert asyncio.current_task().cancelling() == 0


async def test_a_cancellation_by_somebody_else_stays_one_and_frees_the_lease(leases, others):
    entered = asyncio.Event()

    async def work():
        async with leases.hold("door", kind="test", ttl_s=LONG_S):
            entered.set()
            await forever()

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await take(others)


async def test_a_timeout_around_a_lease_stays_a_timeout(leases):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), leases.hold("door", kind="test", ttl_s=LONG_S):
            await forever()


async def test_a_cancellation_together_with_a_loss_is_a_cancellation(leases):
    hold = leases.hold("door", kind="test", ttl_s=LONG_S)

    async def work():
        async with hold:
            hold._abort_as_lost("it expired")
            asyncio.current_task().cancel()
            await forever()

    task = asyncio.create_task(work())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_renewal_that_breaks_is_a_loss_and_leaves_no_cancellation_behind(leases, monkeypatch):
    refused = LoginRefused("the password was changed")

    async def renew(_):
        raise refused

    monkeypatch.setattr(leases, "renew", renew)
    with pytest.raises(LeaseLost, match="LoginRefused") as caught:
        async with leases.hold("door", kind="test", ttl_s=0.6):
            await forever()
    assert caught.value.__cause__ is refused
    assert asyncio.current_task().cancelling() == 0


async def test_a_timeout_that_fires_while_a_lost_lease_is_left_stays_a_timeout(leases):
    hold = leases.hold("door", kind="test", ttl_s=LONG_S)

    async def work():
        async with asyncio.timeout(LONG_S) as patience, hold:
            hold._abort_as_lost("it expired")
            patience.reschedule(0)

    task = asyncio.create_task(work())
    await asyncio.wait([task])
    assert not task.cancelled(), "nobody cancelled it"
    assert isinstance(task.exception(), TimeoutError)


@pytest.mark.parametrize("seed", range(2))
async def test_losses_and_timeouts_at_any_moment_are_told_as_such_and_leave_no_cancellation_behind(leases, seed):
    chance = random.Random(seed)
    wrong = []

    async def turns(most):
        for _ in range(chance.randint(0, most)):
            await asyncio.sleep(0)

    async def lose(hold):
        await turns(40)
        if hasattr(hold, "_renewal") and hold._lost is None and not hold._renewal.cancelling():
            hold._abort_as_lost("chance")

    async def work(outer, inner):
        async with asyncio.timeout(chance.random() * 0.02), outer:
            await turns(6)
            async with inner:
                await turns(6)

    async def one(number):
        holds = [leases.hold(f"{part}{number}", kind="test", ttl_s=LONG_S) for part in ("outer", "inner")]
        losing = [asyncio.create_task(lose(hold)) for hold in holds if chance.random() < 0.6]
        task = asyncio.create_task(work(*holds))
        await asyncio.wait([task, *losing])
        if task.cancelled() or task.cancelling() or not isinstance(task.exception(), LeaseLost | TimeoutError | None):
            wrong.append((number, task))

    for start in range(0, 160, 20):
        await asyncio.gather(*(one(start + n) for n in range(20)))
    assert not wrong


@pytest.mark.parametrize("release", [True, False])
async def test_a_holder_blocked_past_its_time_learns_of_the_loss_although_its_work_ended_at_once(
    leases, database_url, release
):
    take_over = "SELECT fence FROM rota.lease_acquire('{door}', 'other', interval '60 s', false)"

    async def work():
        async with leases.hold("door", kind="test", ttl_s=0.1, release=release) as mine:
            time.sleep(0.15)  # noqa: ASYNC251 - this is what is tested: the process does not get to run
            with psycopg.connect(database_url, autocommit=True) as other:
                assert other.execute(take_over).fetchone()[0] > mine.fence

    with pytest.raises(LeaseLost, match="expired"):
        await work()


async def test_a_holder_whose_lease_is_gone_when_it_gives_it_back_is_told(leases, others, database):
    before = count(LEASES_LOST)

    async def work():
        async with leases.hold("door", kind="test", ttl_s=LONG_S):
            await database.run(EXPIRE, "door")
            await take(others)

    with pytest.raises(LeaseLost, match="no longer held"):
        await work()
    assert count(LEASES_LOST) == before + 1


async def cancelled_while(work):
    task = asyncio.create_task(work())
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_cancellation_in_the_moment_the_work_ends_frees_the_lease(leases, others):
    async def work():
        async with leases.hold("door", kind="test", ttl_s=LONG_S):
            asyncio.current_task().cancel()

    await cancelled_while(work)
    assert await take(others)


async def test_a_cancellation_while_the_lease_is_given_back_frees_it_all_the_same(leases, others, monkeypatch):
    release = leases.release

    async def work():
        async with leases.hold("door", kind="test", ttl_s=LONG_S):
            pass

    async def cancel_and_release(held):
        task.cancel()
        await asyncio.sleep(0)
        return await release(held)

    monkeypatch.setattr(leases, "release", cancel_and_release)
    task = asyncio.create_task(work())
    await asyncio.wait([task])
    assert task.cancelled()
    assert await take(others)


async def test_renewals_do_not_queue_behind_the_work_that_keeps_the_pool_busy(database_url):
    database = await Database.open(PostgresTarget(url=database_url, pool_max=1))
    leases = Leases(database)
    try:
        async with leases.hold("door", kind="test", ttl_s=0.6) as lease, database.transaction() as tx:
            await leases.guard(tx, lease)
            first = await tx.value(sql("SELECT expires_at FROM rota.lease"))
            later = sql("SELECT expires_at > $1::timestamptz + interval '0.3s' FROM rota.lease")
            await until(lambda: tx.value(later, first))
    finally:
        await database.close()


async def test_of_nested_leases_only_the_lost_one_ends(leases, database):
    async with leases.hold("outer", kind="test", ttl_s=LONG_S):
        with pytest.raises(LeaseLost, match="inner"):
            await lose(leases, database, name="inner")
        await asyncio.sleep(0)


async def test_losing_the_outer_of_nested_leases_ends_both_and_frees_the_inner(leases, others, database):
    async def inner():
        async with leases.hold("inner", kind="test", ttl_s=LONG_S):
            await forever()

    with pytest.raises(LeaseLost, match="outer"):
        await lose(leases, database, inner, name="outer")
    assert await take(others, "inner")

"""Work under a lease on a real server: waiting, renewal, loss and release."""

import asyncio
import random
import time
from contextlib import AsyncExitStack

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


async def test_release_wakes_a_waiting_holder(leases, others, monkeypatch):
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
    # It tries immediately and again after LISTEN; from then on only the notification can wake it.
    await until(lambda: len(refused) == 2)
    await leases.release([lease])
    async with asyncio.timeout(5):
        assert await waiter > lease.fence


async def test_waiting_holder_takes_over_when_the_lease_expires(leases, others):
    lease = await take(leases, ttl_s=0.05)
    async with others.hold("door", kind="test", ttl_s=LONG_S, wait_s=LONG_S) as mine:
        assert mine.fence > lease.fence


async def test_waiting_past_the_limit_raises_lease_held(leases, others):
    await take(leases)
    with pytest.raises(LeaseHeld, match="held by another process"):
        async with others.hold("door", kind="test", ttl_s=1, wait_s=0.02):
            pytest.fail("entered")
    with pytest.raises(LeaseHeld):
        async with others.hold("door", kind="test", ttl_s=1):
            pytest.fail("entered")


async def test_lease_is_released_at_exit_even_when_the_work_fails(leases, others):
    with pytest.raises(LookupError):
        async with leases.hold("door", kind="test", ttl_s=LONG_S):
            raise LookupError
    async with others.hold("door", kind="test", ttl_s=LONG_S):
        pass


async def test_lease_kept_until_expiry_prevents_a_repetition_of_the_work(leases, others):
    async with leases.hold("tick", kind="test", ttl_s=0.2, release=False):
        pass
    with pytest.raises(LeaseHeld):
        async with others.hold("tick", kind="test", ttl_s=0.2):
            pytest.fail("entered")
    async with others.hold("tick", kind="test", ttl_s=0.2, wait_s=LONG_S):
        pass


async def test_held_lease_is_renewed_beyond_its_ttl(leases, others, database):
    async with leases.hold("door", kind="test", ttl_s=0.6) as lease:
        first = await database.value(sql("SELECT expires_at FROM rota.lease"))
        later = sql("SELECT expires_at > $1::timestamptz + interval '0.1s' FROM rota.lease")
        await until(lambda: database.value(later, first))
        async with database.transaction() as tx:
            await leases.guard(tx, lease)


async def test_leases_of_one_ttl_are_renewed_in_one_statement(leases, monkeypatch):
    renew, renewals = leases.renew, []

    async def counted(batch):
        renewals.append(sorted(lease.name for lease in batch))
        return await renew(batch)

    monkeypatch.setattr(leases, "renew", counted)
    async with AsyncExitStack() as held:
        for name in ("attic", "door", "gate"):
            await held.enter_async_context(leases.hold(name, kind="test", ttl_s=3.0))
        # The first renewals may come while some are still being acquired.
        await until(lambda: renewals.count(["attic", "door", "gate"]) >= 2)
    assert len(renewals) <= 5


async def test_renewal_of_one_lease_outlives_the_cancellation_of_another(leases, database):
    async with AsyncExitStack() as held:
        door, gate = [
            await held.enter_async_context(leases.hold(n, kind="test", ttl_s=LONG_S)) for n in ("door", "gate")
        ]
        leaver = asyncio.create_task(leases.renew_together(door, LONG_S))
        stayer = asyncio.create_task(leases.renew_together(gate, LONG_S))
        await asyncio.sleep(0)  # both have asked
        leaver.cancel()
        assert await stayer
        assert leaver.cancelled()
        await database.run(EXPIRE, "gate")
        assert not await leases.renew_together(gate, LONG_S)


async def test_older_grant_of_a_lease_is_not_renewed_with_the_newer_one(leases, database):
    old = await take(leases, ttl_s=LONG_S)
    await database.run(EXPIRE, "door")
    new = await take(leases, ttl_s=LONG_S)
    held = await asyncio.gather(*(leases.renew_together(each, LONG_S) for each in (old, new)))
    assert held == [False, True]


async def test_renewals_go_on_after_one_that_was_cancelled(leases):
    lease = await take(leases, ttl_s=LONG_S)
    cancelled = asyncio.create_task(leases.renew_together(lease, LONG_S))
    await asyncio.sleep(0)  # it has asked
    leases._batches[LONG_S].task.cancel()
    await asyncio.wait([cancelled])
    assert await leases.renew_together(lease, LONG_S)


async def lose(leases, database, body=forever, name="door", ttl_s=0.6):
    """Run `body` under a lease that expires as soon as the work has begun."""
    async with leases.hold(name, kind="test", ttl_s=ttl_s):
        await database.run(EXPIRE, name)
        await body()


async def test_lease_loss_cancels_the_work_and_is_counted(leases, database):
    before = count(LEASES_LOST)
    with pytest.raises(LeaseLost, match="refused to renew"):
        await lose(leases, database)
    assert count(LEASES_LOST) == before + 1
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)


async def test_three_consecutive_failed_renewals_cancel_the_work_before_expiry(leases, monkeypatch):
    tried = []

    async def unreachable(_):
        tried.append(asyncio.get_running_loop().time())
        raise ConnectionResetError

    monkeypatch.setattr(leases, "renew", unreachable)
    with pytest.raises(LeaseLost, match="3 renewals failed"):
        async with leases.hold("door", kind="test", ttl_s=0.3):
            await forever()
    assert len(tried) == 3


async def test_two_failed_renewals_are_tolerated_when_the_third_succeeds(leases, monkeypatch):
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


async def test_unanswered_renewals_lose_the_lease_before_expiry(leases, monkeypatch):
    monkeypatch.setattr(leases, "renew", lambda _: forever())
    lease = leases.hold("door", kind="test", ttl_s=0.3)
    with pytest.raises(LeaseLost, match="3 renewals failed"):
        async with lease:
            await forever()
    assert leases.clock.monotonic() < lease._valid_until


async def test_process_blocked_past_expiry_does_not_try_to_renew(leases, monkeypatch):
    async def never(_):
        pytest.fail("renewed")

    monkeypatch.setattr(leases, "renew", never)
    now = leases.clock.monotonic

    async def advance_clock():
        monkeypatch.setattr(leases.clock, "monotonic", lambda: now() + 1)
        await forever()

    async with asyncio.timeout(5):
        with pytest.raises(LeaseLost, match="expired"):
            async with leases.hold("door", kind="test", ttl_s=0.3):
                await advance_clock()


async def test_work_ending_at_the_moment_of_lease_loss_is_not_reported_as_done(leases, database):
    hold = leases.hold("door", kind="test", ttl_s=LONG_S)

    async def end_when_lost():
        async with hold:
            hold._abort_as_lost("it expired")

    with pytest.raises(LeaseLost):
        await end_when_lost()
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)


async def test_error_of_the_work_is_not_hidden_by_lease_loss(leases, database):
    async def fail_when_cancelled():
        try:
            await forever()
        except asyncio.CancelledError:
            raise LookupError from None

    with pytest.raises(LookupError):
        await lose(leases, database, fail_when_cancelled)
    assert asyncio.current_task().cancelling() == 0


async def test_outside_cancellation_stays_a_cancellation_and_releases_the_lease(leases, others):
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


async def test_timeout_around_a_lease_stays_a_timeout(leases):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), leases.hold("door", kind="test", ttl_s=LONG_S):
            await forever()


async def test_cancellation_together_with_lease_loss_is_a_cancellation(leases):
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


async def test_renewal_error_loses_the_lease_and_leaves_no_pending_cancellation(leases, monkeypatch):
    refused = LoginRefused("the password was changed")

    async def renew(_):
        raise refused

    monkeypatch.setattr(leases, "renew", renew)
    with pytest.raises(LeaseLost, match="LoginRefused") as caught:
        async with leases.hold("door", kind="test", ttl_s=0.6):
            await forever()
    assert caught.value.__cause__ is refused
    assert asyncio.current_task().cancelling() == 0


async def test_timeout_during_exit_from_a_lost_lease_stays_a_timeout(leases):
    hold = leases.hold("door", kind="test", ttl_s=LONG_S)

    async def work():
        async with asyncio.timeout(LONG_S) as deadline, hold:
            hold._abort_as_lost("it expired")
            deadline.reschedule(0)

    task = asyncio.create_task(work())
    await asyncio.wait([task])
    assert not task.cancelled(), "no caller cancelled it"
    assert isinstance(task.exception(), TimeoutError)


@pytest.mark.parametrize("seed", range(2))
async def test_random_losses_and_timeouts_are_reported_as_such_and_leave_no_cancellation(leases, seed):
    rng = random.Random(seed)
    unexpected = []

    async def yield_randomly(most):
        for _ in range(rng.randint(0, most)):
            await asyncio.sleep(0)

    async def lose(hold):
        await yield_randomly(40)
        if hasattr(hold, "_renewal") and hold._lost is None and not hold._renewal.cancelling():
            hold._abort_as_lost("chance")

    async def work(outer, inner):
        async with asyncio.timeout(rng.random() * 0.02), outer:
            await yield_randomly(6)
            async with inner:
                await yield_randomly(6)

    async def one(number):
        holds = [leases.hold(f"{part}{number}", kind="test", ttl_s=LONG_S) for part in ("outer", "inner")]
        losing = [asyncio.create_task(lose(hold)) for hold in holds if rng.random() < 0.6]
        task = asyncio.create_task(work(*holds))
        await asyncio.wait([task, *losing])
        if task.cancelled() or task.cancelling() or not isinstance(task.exception(), LeaseLost | TimeoutError | None):
            unexpected.append((number, task))

    for start in range(0, 160, 20):
        await asyncio.gather(*(one(start + n) for n in range(20)))
    assert not unexpected


@pytest.mark.parametrize("release", [True, False])
async def test_holder_blocked_past_expiry_learns_of_the_loss_even_if_its_work_ended(leases, database_url, release):
    take_over = "SELECT fence FROM rota.lease_acquire('{door}', 'other', interval '60 s', false)"

    async def work():
        async with leases.hold("door", kind="test", ttl_s=0.1, release=release) as mine:
            time.sleep(0.15)  # noqa: ASYNC251 - the test blocks the event loop on purpose
            with psycopg.connect(database_url, autocommit=True) as other:
                assert other.execute(take_over).fetchone()[0] > mine.fence

    with pytest.raises(LeaseLost, match="expired"):
        await work()


async def test_holder_whose_lease_is_gone_at_release_gets_lease_lost(leases, others, database):
    before = count(LEASES_LOST)

    async def work():
        async with leases.hold("door", kind="test", ttl_s=LONG_S):
            await database.run(EXPIRE, "door")
            await take(others)

    with pytest.raises(LeaseLost, match="no longer held"):
        await work()
    assert count(LEASES_LOST) == before + 1


async def assert_cancelled(work):
    task = asyncio.create_task(work())
    await asyncio.wait([task])
    assert task.cancelled()


async def test_cancellation_at_the_end_of_the_work_releases_the_lease(leases, others):
    async def work():
        async with leases.hold("door", kind="test", ttl_s=LONG_S):
            asyncio.current_task().cancel()

    await assert_cancelled(work)
    assert await take(others)


async def test_cancellation_while_acquiring_releases_a_lease_granted_meanwhile(leases, others, monkeypatch):
    acquire = leases.acquire

    async def cancelled_after_the_grant(*args, **more):
        grant = await acquire(*args, **more)
        task.cancel()  # its caller is cancelled before the reply arrives
        await asyncio.sleep(0)
        return grant

    async def work():
        async with leases.hold("door", kind="test", ttl_s=LONG_S):
            pytest.fail("it was cancelled before")

    monkeypatch.setattr(leases, "acquire", cancelled_after_the_grant)
    task = asyncio.create_task(work())
    await asyncio.wait([task])
    assert task.cancelled()
    assert await take(others)


async def test_cancellation_while_acquiring_from_an_unresponsive_server_is_not_delayed_for_long(leases, monkeypatch):
    monkeypatch.setattr(hold_module, "RELEASE_TIMEOUT_S", 0.01)
    requested = asyncio.Event()

    async def unanswered(*_args, **_more):
        requested.set()
        await forever()

    async def work():
        async with leases.hold("door", kind="test", ttl_s=LONG_S):
            pytest.fail("it was cancelled before")

    monkeypatch.setattr(leases, "acquire", unanswered)
    task = asyncio.create_task(work())
    await requested.wait()
    task.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait([task])
    assert task.cancelled()


async def test_cancellation_during_release_still_releases_the_lease(leases, others, monkeypatch):
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


async def test_renewals_do_not_wait_for_a_busy_connection_pool(database_url):
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


async def test_loss_of_the_inner_nested_lease_does_not_end_the_outer(leases, database):
    async with leases.hold("outer", kind="test", ttl_s=LONG_S):
        with pytest.raises(LeaseLost, match="inner"):
            await lose(leases, database, name="inner")
        await asyncio.sleep(0)


async def test_loss_of_the_outer_nested_lease_ends_both_and_releases_the_inner(leases, others, database):
    async def inner():
        async with leases.hold("inner", kind="test", ttl_s=LONG_S):
            await forever()

    with pytest.raises(LeaseLost, match="outer"):
        await lose(leases, database, inner, name="outer")
    assert await take(others, "inner")

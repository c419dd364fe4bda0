"""Leases on a real server: who gets them, how they are lost, and that a stale holder cannot write."""

import asyncio
import random

import pytest

from rota.infra import faults
from rota.infra.lease import Leadership, Leases
from rota.infra.lease import hold as hold_module
from rota.infra.lease.grant import FENCED, LOST
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.postgres.sql import parse_query
from rota.model.errors import LeaseHeld, LeaseLost, PostgresUnavailable, StaleFence
from tests.ground.databases import cleaned_by, one_database
from tests.ground.waiting import until
from tests.integration.lease_holder import NOTE

HOLDER = "tests.integration.lease_holder"
LONG_S = 60.0
"""A time to live that no test waits for."""


def sql(text):
    return parse_query("test", f"-- Test.\n{text}")


EXPIRE = sql("UPDATE rota.lease SET expires_at = clock_timestamp() WHERE name = $1")
NOTES = sql("SELECT fence FROM rota.note ORDER BY n")
MAKE_NOTES = sql("CREATE TABLE rota.note (n bigint GENERATED ALWAYS AS IDENTITY, fence bigint)")


shared_database_url = one_database()
database_url = cleaned_by(
    "TRUNCATE rota.lease; ALTER SEQUENCE rota.lease_fence RESTART; DROP TABLE IF EXISTS rota.note"
)


@pytest.fixture
def leases(database):
    return Leases(database, owner="me")


@pytest.fixture
def others(database):
    return Leases(database, owner="others")


@pytest.fixture
async def notes(database):
    await database.run(MAKE_NOTES)

    async def read():
        return [row["fence"] for row in await database.rows(NOTES)]

    return read


async def take(leases, name="door", ttl_s=LONG_S, **more):
    attempt = await leases.acquire([name], kind="test", ttl_s=ttl_s, **more)
    return attempt.granted[0] if attempt.granted else None


async def taken_over(leases, name="door", ttl_s=LONG_S):
    """Take the lease as soon as it can be had."""
    return await until(lambda: take(leases, name, ttl_s), what="taking over")


async def write(leases, lease):
    async with leases.database.transaction() as tx:
        await leases.guard(tx, lease)
        await tx.run(NOTE, lease.fence)


def count(metric, kind="test"):
    return metric.labels(kind)._value.get()


async def forever():
    await asyncio.Event().wait()


async def test_only_one_gets_it_and_the_others_learn_for_how_long(leases, others):
    lease = await take(leases)
    assert lease.holder.startswith("me/")
    attempt = await others.acquire(["door"], kind="test", ttl_s=1)
    assert attempt.granted == []
    assert 0 < attempt.left_s["door"] <= LONG_S


async def test_fences_only_rise_after_release_after_expiry_and_after_a_prune(leases, others, database):
    fences = []
    for step in (
        lambda lease: leases.release([lease]),
        lambda _: database.run(EXPIRE, "door"),
        lambda lease: leases.release([lease]),
        lambda lease: leases.release([lease]),
    ):
        lease = await take(random.choice([leases, others]))
        fences.append(lease.fence)
        await step(lease)
        if len(fences) == 3:
            assert await leases.prune(older_than_s=0) == 1
    assert fences == sorted(set(fences))


async def test_prune_forgets_only_what_nobody_has_held_for_long(leases):
    kept, freed = await take(leases, "kept"), await take(leases, "freed")
    await leases.release([freed])
    assert await leases.prune(older_than_s=3600) == 0
    assert await leases.prune(older_than_s=0) == 1
    assert await leases.renew([kept]) == {"kept"}


async def test_many_are_taken_renewed_and_released_in_one_call_each(leases, others):
    await take(others, "b")
    attempt = await leases.acquire(["c", "a", "b", "a"], kind="test", ttl_s=LONG_S)
    assert sorted(lease.name for lease in attempt.granted) == ["a", "c"]
    assert set(attempt.left_s) == {"b"}
    assert await leases.renew(attempt.granted) == {"a", "c"}
    assert await leases.release(attempt.granted) == {"a", "c"}
    assert await leases.release(attempt.granted) == set()
    assert await leases.renew(attempt.granted) == set()


async def test_asking_again_in_the_same_name_after_a_lost_reply_finds_the_same_grant(leases):
    holder = leases.new_holder()
    first = await take(leases, holder=holder)
    assert await take(leases, holder=holder) == first
    assert await take(leases) is None


async def test_a_lost_reply_to_acquire_costs_neither_the_lease_nor_a_fence(database_url, database, spawn):
    env = {"URL": database_url, "LOST_REPLY_AT": "lease.acquire"}
    process = await spawn(HOLDER, "door", LONG_S, env=env)
    held = await process.line()
    assert held == f"held {await database.value(sql('SELECT last_value FROM rota.lease_fence'))}"
    assert held == "held 1"


async def test_a_renewal_gives_the_full_time_again_but_never_to_a_lease_that_ran_out(leases, others, database):
    lease = await take(leases, ttl_s=0.2)
    await database.run(sql("UPDATE rota.lease SET expires_at = clock_timestamp() + interval '0.1s'"))
    assert await leases.renew([lease]) == {"door"}
    assert (await others.acquire(["door"], kind="test", ttl_s=1)).left_s["door"] > 0.1
    await database.run(EXPIRE, "door")
    assert await leases.renew([lease]) == set()
    assert await take(others)


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
    with pytest.raises(LeaseHeld, match="held by somebody else"):
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
    async with leases.hold("door", kind="test", ttl_s=0.3) as lease:
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
    before = count(LOST)
    with pytest.raises(LeaseLost, match="refused to renew"):
        await lose(leases, database)
    assert count(LOST) == before + 1
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
    async with asyncio.timeout(5), leases.hold("door", kind="test", ttl_s=0.6):
        await succeeded.wait()


async def test_a_server_that_does_not_answer_renewals_costs_the_lease_in_time(leases, monkeypatch):
    monkeypatch.setattr(leases, "renew", lambda _: forever())
    lease = leases.hold("door", kind="test", ttl_s=0.3)
    with pytest.raises(LeaseLost, match="3 renewals failed"):
        async with lease:
            await forever()
    assert leases.clock.monotonic() < lease._believed_until


async def test_a_process_that_was_blocked_past_its_time_does_not_even_ask(leases, monkeypatch):
    async def never(_):
        pytest.fail("renewed")

    monkeypatch.setattr(leases, "renew", never)
    now = leases.clock.monotonic

    async def jump_in_time():
        monkeypatch.setattr(leases.clock, "monotonic", lambda: now() + 1)
        await forever()

    async with asyncio.timeout(5):
        with pytest.raises(LeaseLost, match="ran out"):
            async with leases.hold("door", kind="test", ttl_s=0.3):
                await jump_in_time()


async def test_work_that_ends_in_the_moment_of_the_loss_is_not_reported_as_done(leases, database):
    hold = leases.hold("door", kind="test", ttl_s=LONG_S)

    async def end_when_lost():
        async with hold:
            hold._lose("it ran out")

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
            hold._lose("it ran out")
            asyncio.current_task().cancel()
            await forever()

    task = asyncio.create_task(work())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


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


async def test_a_guarded_write_passes_while_the_lease_is_held(leases, notes):
    lease = await take(leases)
    await write(leases, lease)
    assert await notes() == [lease.fence]


async def test_a_guarded_write_is_refused_after_the_time_is_over_even_if_nobody_took_over(leases, database, notes):
    lease, before = await take(leases), count(FENCED)
    await database.run(EXPIRE, "door")
    with pytest.raises(StaleFence, match="door"):
        await write(leases, lease)
    assert await notes() == []
    assert count(FENCED) == before + 1


async def test_a_guarded_write_is_refused_after_release_take_over_or_prune(leases, others, notes):
    lease = await take(leases)
    await leases.release([lease])
    with pytest.raises(StaleFence):
        await write(leases, lease)
    await leases.prune(0)
    with pytest.raises(StaleFence):
        await write(leases, lease)
    newer = await take(others)
    with pytest.raises(StaleFence):
        await write(leases, lease)
    await write(others, newer)
    assert await notes() == [newer.fence]


async def test_one_stale_lease_among_many_refuses_the_write(leases, database):
    good, stale = await take(leases, "good"), await take(leases, "stale")
    await database.run(EXPIRE, "stale")

    async def write_under_both():
        async with database.transaction() as tx:
            await leases.guard(tx, good, stale)

    with pytest.raises(StaleFence):
        await write_under_both()


async def test_nobody_takes_over_while_a_guarded_transaction_is_open_but_its_holder_may_renew(leases, others, database):
    lease = await take(leases)
    async with database.transaction() as tx:
        await leases.guard(tx, lease)
        assert await leases.renew([lease]) == {"door"}
        await database.run(EXPIRE, "door")
        assert await take(others) is None
    assert await take(others)


async def test_a_paused_holder_cannot_write_after_another_took_over_and_learns_that_it_lost(
    database_url, leases, notes, spawn
):
    process = await spawn(HOLDER, "door", 0.6, env={"URL": database_url})
    old = int((await process.line()).removeprefix("held "))
    await process.say("write")
    assert await process.line() == "wrote"
    process.pause()
    mine = await taken_over(leases)
    await process.say("write")
    process.resume()
    assert {await process.line(), await process.line()} == {"stale_fence", "lost"}
    await write(leases, mine)
    assert await notes() == [old, mine.fence]


async def test_a_holder_paused_inside_a_guarded_transaction_delays_the_next_by_its_ttl_and_its_write_is_undone(
    database_url, leases, notes, spawn
):
    env = {"URL": database_url, "PAUSE_AT": "lease.after_guard"}
    process = await spawn(HOLDER, "door", 0.6, env=env)
    await process.line()
    await process.say("write")
    mine = await taken_over(leases)
    process.resume()
    assert {await process.line(), await process.line()} == {"postgres_unavailable", "lost"}
    await write(leases, mine)
    assert await notes() == [mine.fence]


async def test_a_lease_whose_holder_died_right_after_acquiring_is_free_when_its_time_is_over(
    database_url, leases, spawn
):
    env = {"URL": database_url, "CRASH_AT": "lease.after_acquire"}
    process = await spawn(HOLDER, "door", 0.5, env=env)
    assert await process.wait() == faults.CRASHED
    attempt = await leases.acquire(["door"], kind="test", ttl_s=1)
    assert attempt.granted == []
    async with leases.hold("door", kind="test", ttl_s=1, wait_s=LONG_S) as lease:
        assert lease.fence == 2


async def test_contenders_are_never_inside_together_and_everybody_gets_in(database):
    inside, fences = [], []

    async def contend(number):
        leases = Leases(database, owner=str(number))
        for _ in range(4):
            async with leases.hold("door", kind="test", ttl_s=LONG_S, wait_s=LONG_S) as lease:
                inside.append(number)
                await database.value(sql("SELECT 1"))
                assert inside == [number]
                fences.append(lease.fence)
                inside.remove(number)

    await asyncio.gather(*(contend(number) for number in range(4)))
    assert len(fences) == 16
    assert fences == sorted(set(fences))


@pytest.mark.parametrize("seed", range(3))
async def test_however_slow_holders_are_accepted_writes_follow_the_order_of_the_fences(database_url, seed):
    chance = random.Random(seed)
    database = await Database.open(PostgresTarget(url=database_url, pool_max=6))
    await database.run(MAKE_NOTES)
    outcomes = []

    async def contend(number):
        leases = Leases(database, owner=str(number))
        for _ in range(12):
            if lease := await take(leases, ttl_s=chance.choice([0.002, 0.01, 0.03])):
                await asyncio.sleep(chance.random() * 0.012)
                try:
                    await write(leases, lease)
                    outcomes.append("accepted")
                except StaleFence:
                    outcomes.append("refused")
            await asyncio.sleep(chance.random() * 0.004)

    await asyncio.gather(*(contend(number) for number in range(5)))
    written = [row["fence"] for row in await database.rows(NOTES)]
    await database.close()
    assert written == sorted(written)
    assert {"accepted", "refused"} <= set(outcomes), "the test must see both"


async def test_one_of_two_candidates_leads_and_the_other_takes_over_when_it_stops(leases, others):
    terms = []

    async def lead(lease):
        terms.append(lease.fence)
        await forever()

    one = Leadership(leases, "chair", lead, kind="test", ttl_s=LONG_S)
    two = Leadership(others, "chair", lead, kind="test", ttl_s=LONG_S)
    async with asyncio.timeout(10):
        await one.start()
        await one.elected.wait()
        await two.start()
        await until(lambda: leases.database.value(sql("SELECT wanted FROM rota.lease WHERE name = 'chair'")))
        assert (one.is_leader, two.is_leader) == (True, False)
        await one.stop()
        await two.elected.wait()
        assert (one.is_leader, two.is_leader) == (False, True)
        await two.stop()
        await two.stop()
    assert terms == [1, 2]


async def test_a_deposed_leader_stops_leading_and_campaigns_again(leases, database):
    ends = []

    async def lead(lease):
        try:
            await forever()
        finally:
            ends.append(lease.fence)

    leader = Leadership(leases, "chair", lead, kind="test", ttl_s=0.6, pause_s=0.01)
    async with asyncio.timeout(10):
        await leader.start()
        for term in (1, 2):
            await leader.elected.wait()
            await database.run(EXPIRE, "chair")
            await leader.deposed.wait()
            assert ends[-1] == term
        await leader.elected.wait()
        await leader.stop()
    assert not leader.is_leader


async def test_a_leader_whose_duty_fails_gives_the_lease_back_and_says_so(leases, others):
    async def lead(_):
        raise LookupError("bug")

    leader = Leadership(leases, "chair", lead, kind="test", ttl_s=LONG_S)
    with pytest.raises(LookupError):
        await leader.run()
    assert await take(others, "chair")


async def test_a_leader_that_lost_postgresql_campaigns_again(leases):
    terms = []

    async def lead(lease):
        terms.append(lease.fence)
        if len(terms) == 1:
            raise PostgresUnavailable("gone")
        await forever()

    leader = Leadership(leases, "chair", lead, kind="test", ttl_s=LONG_S, pause_s=0.01)
    await leader.start()
    await until(lambda: len(terms) == 2)
    await leader.stop()
    assert terms == sorted(set(terms))

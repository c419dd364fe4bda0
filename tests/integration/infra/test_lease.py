"""Leases on a real server: who gets them, and that a stale holder cannot write."""

import asyncio
import random

import pytest

from rota.infra import failpoints
from rota.infra.lease import Leases
from rota.infra.lease.grant import FENCE_REJECTIONS
from rota.model.errors import StaleFence
from tests.integration.infra.lease_support import EXPIRE, LONG_S, MAKE_NOTES, NOTES, count, sql, take, taken_over, write

HOLDER = "tests.integration.infra.lease_holder"


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


async def test_a_guarded_write_passes_while_the_lease_is_held(leases, notes):
    lease = await take(leases)
    await write(leases, lease)
    assert await notes() == [lease.fence]


async def test_a_guarded_write_is_refused_after_the_time_is_over_even_if_nobody_took_over(leases, database, notes):
    lease, before = await take(leases), count(FENCE_REJECTIONS)
    await database.run(EXPIRE, "door")
    with pytest.raises(StaleFence, match="door"):
        await write(leases, lease)
    assert await notes() == []
    assert count(FENCE_REJECTIONS) == before + 1


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


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_a_guard_refuses_a_transaction_that_would_look_at_an_old_snapshot_of_the_lease(
    leases, database, isolation
):
    lease = await take(leases)

    async def write_with_a_snapshot():
        async with database.transaction(isolation) as tx:
            await leases.guard(tx, lease)

    with pytest.raises(AssertionError, match="read committed"):
        await write_with_a_snapshot()


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
    database_url, database, leases, spawn
):
    env = {"URL": database_url, "CRASH_AT": "lease.after_acquire"}
    process = await spawn(HOLDER, "door", LONG_S, env=env)
    assert await process.wait() == failpoints.CRASH_EXIT_STATUS
    attempt = await leases.acquire(["door"], kind="test", ttl_s=1)
    assert attempt.granted == []
    await database.run(EXPIRE, "door")
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
async def test_however_slow_holders_are_accepted_writes_follow_the_order_of_the_fences(database, seed):
    chance = random.Random(seed)
    await database.run(MAKE_NOTES)
    outcomes = []

    async def contend(number):
        leases = Leases(database, owner=str(number))
        tries = 0
        while tries < 12 or set(outcomes) != {"accepted", "refused"}:
            tries += 1
            if lease := await take(leases):
                if chance.random() < 0.5:  # its time is over before it writes, and others may come first
                    await database.run(EXPIRE, "door")
                await turns(chance.randrange(40))
                try:
                    await write(leases, lease)
                    outcomes.append("accepted")
                except StaleFence:
                    outcomes.append("refused")
                await database.run(EXPIRE, "door")
            await turns(chance.randrange(10))

    await asyncio.gather(*(contend(number) for number in range(5)))
    written = [row["fence"] for row in await database.rows(NOTES)]
    assert len(written) == outcomes.count("accepted")
    assert written == sorted(written)


async def turns(count):
    """Let others go first for a while."""
    for _ in range(count):
        await asyncio.sleep(0)

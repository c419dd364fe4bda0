"""Leases on a real server: who acquires them, and that a stale holder cannot write."""

import asyncio
import random

import pytest

from rota.infra import failpoints
from rota.infra.lease import Leases
from rota.infra.lease.grant import FENCE_REJECTIONS
from rota.model.errors import StaleFence
from tests.integration.infra.lease_support import (
    EXPIRE,
    LONG_S,
    MAKE_NOTES,
    NOTES,
    acquire_when_free,
    count,
    sql,
    take,
    write,
)

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


async def test_lease_is_granted_to_one_holder_and_others_get_the_remaining_time(leases, others):
    lease = await take(leases)
    assert lease.holder.startswith("me/")
    attempt = await others.acquire(["door"], kind="test", ttl_s=1)
    assert attempt.granted == []
    assert 0 < attempt.left_s["door"] <= LONG_S


async def test_fences_increase_after_release_expiry_and_prune(leases, others, database):
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


async def test_prune_deletes_only_leases_unheld_for_the_given_time(leases):
    kept, freed = await take(leases, "kept"), await take(leases, "freed")
    await leases.release([freed])
    assert await leases.prune(older_than_s=3600) == 0
    assert await leases.prune(older_than_s=0) == 1
    assert await leases.renew([kept]) == {"kept"}


async def test_leases_are_acquired_renewed_and_released_in_batches(leases, others):
    await take(others, "b")
    attempt = await leases.acquire(["c", "a", "b", "a"], kind="test", ttl_s=LONG_S)
    assert sorted(lease.name for lease in attempt.granted) == ["a", "c"]
    assert set(attempt.left_s) == {"b"}
    assert await leases.renew(attempt.granted) == {"a", "c"}
    assert await leases.release(attempt.granted) == {"a", "c"}
    assert await leases.release(attempt.granted) == set()
    assert await leases.renew(attempt.granted) == set()


async def test_acquire_repeated_by_the_same_holder_returns_the_same_grant(leases):
    holder = leases.new_holder()
    first = await take(leases, holder=holder)
    assert await take(leases, holder=holder) == first
    assert await take(leases) is None


async def test_lost_acquire_reply_costs_neither_the_lease_nor_a_fence(database_url, database, spawn):
    env = {"URL": database_url, "LOST_REPLY_AT": "lease.acquire"}
    process = await spawn(HOLDER, "door", LONG_S, env=env)
    held = await process.line()
    assert held == f"held {await database.value(sql('SELECT last_value FROM rota.lease_fence'))}"
    assert held == "held 1"


async def test_renewal_restores_the_full_ttl_but_never_revives_an_expired_lease(leases, others, database):
    lease = await take(leases, ttl_s=0.2)
    await database.run(sql("UPDATE rota.lease SET expires_at = clock_timestamp() + interval '0.1s'"))
    assert await leases.renew([lease]) == {"door"}
    assert (await others.acquire(["door"], kind="test", ttl_s=1)).left_s["door"] > 0.1
    await database.run(EXPIRE, "door")
    assert await leases.renew([lease]) == set()
    assert await take(others)


async def test_guarded_write_under_a_held_lease_commits(leases, notes):
    lease = await take(leases)
    await write(leases, lease)
    assert await notes() == [lease.fence]


async def test_guarded_write_after_lease_expiry_is_refused_even_without_a_new_holder(leases, database, notes):
    lease, before = await take(leases), count(FENCE_REJECTIONS)
    await database.run(EXPIRE, "door")
    with pytest.raises(StaleFence, match="door"):
        await write(leases, lease)
    assert await notes() == []
    assert count(FENCE_REJECTIONS) == before + 1


async def test_guarded_write_after_release_takeover_or_prune_is_refused(leases, others, notes):
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


async def test_guarded_write_with_one_stale_lease_among_several_is_refused(leases, database):
    good, stale = await take(leases, "good"), await take(leases, "stale")
    await database.run(EXPIRE, "stale")

    async def write_under_both():
        async with database.transaction() as tx:
            await leases.guard(tx, good, stale)

    with pytest.raises(StaleFence):
        await write_under_both()


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_guard_refuses_a_transaction_with_a_fixed_snapshot(leases, database, isolation):
    lease = await take(leases)

    async def write_with_a_snapshot():
        async with database.transaction(isolation) as tx:
            await leases.guard(tx, lease)

    with pytest.raises(AssertionError, match="read committed"):
        await write_with_a_snapshot()


async def test_open_guarded_transaction_blocks_takeover_but_not_renewal(leases, others, database):
    lease = await take(leases)
    async with database.transaction() as tx:
        await leases.guard(tx, lease)
        assert await leases.renew([lease]) == {"door"}
        await database.run(EXPIRE, "door")
        assert await take(others) is None
    assert await take(others)


async def test_paused_holder_cannot_write_after_takeover_and_learns_of_the_loss(database_url, leases, notes, spawn):
    process = await spawn(HOLDER, "door", 0.6, env={"URL": database_url})
    old = int((await process.line()).removeprefix("held "))
    await process.write_line("write")
    assert await process.line() == "wrote"
    process.pause()
    mine = await acquire_when_free(leases)
    await process.write_line("write")
    process.resume()
    assert {await process.line(), await process.line()} == {"stale_fence", "lost"}
    await write(leases, mine)
    assert await notes() == [old, mine.fence]


async def test_holder_paused_in_a_guarded_transaction_delays_takeover_by_the_ttl_and_rolls_back(
    database_url, leases, notes, spawn
):
    env = {"URL": database_url, "PAUSE_AT": "lease.after_guard"}
    process = await spawn(HOLDER, "door", 0.6, env=env)
    await process.line()
    await process.write_line("write")
    mine = await acquire_when_free(leases)
    process.resume()
    assert {await process.line(), await process.line()} == {"postgres_unavailable", "lost"}
    await write(leases, mine)
    assert await notes() == [mine.fence]


async def test_lease_of_a_holder_that_crashed_after_acquire_is_free_after_expiry(database_url, database, leases, spawn):
    env = {"URL": database_url, "CRASH_AT": "lease.after_acquire"}
    process = await spawn(HOLDER, "door", LONG_S, env=env)
    assert await process.wait() == failpoints.CRASH_EXIT_STATUS
    attempt = await leases.acquire(["door"], kind="test", ttl_s=1)
    assert attempt.granted == []
    await database.run(EXPIRE, "door")
    async with leases.hold("door", kind="test", ttl_s=1, wait_s=LONG_S) as lease:
        assert lease.fence == 2


async def test_contending_holders_are_mutually_exclusive_and_all_get_the_lease(database):
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
async def test_accepted_writes_follow_fence_order_however_slow_the_holders(database, seed):
    rng = random.Random(seed)
    await database.run(MAKE_NOTES)
    outcomes = []

    async def contend(number):
        leases = Leases(database, owner=str(number))
        tries = 0
        while tries < 12 or set(outcomes) != {"accepted", "refused"}:
            tries += 1
            if lease := await take(leases):
                if rng.random() < 0.5:  # it expires before the write, so another holder may write first
                    await database.run(EXPIRE, "door")
                await yield_times(rng.randrange(40))
                try:
                    await write(leases, lease)
                    outcomes.append("accepted")
                except StaleFence:
                    outcomes.append("refused")
                await database.run(EXPIRE, "door")
            await yield_times(rng.randrange(10))

    await asyncio.gather(*(contend(number) for number in range(5)))
    written = [row["fence"] for row in await database.rows(NOTES)]
    assert len(written) == outcomes.count("accepted")
    assert written == sorted(written)


async def yield_times(count):
    """Yield to other tasks `count` times."""
    for _ in range(count):
        await asyncio.sleep(0)

"""Swarms in the live ledger: caps that come at any moment, releases, a recount beside them, and what is counted."""

from uuid import uuid4

import pytest
from msgspec.structs import replace

from rota.accounting import allocations
from rota.accounting.ledger import NIL_UUID, DeclineReason, SingleFrameBatch
from rota.accounting.live import ledger as live
from rota.accounting.live import release_publisher
from rota.accounting.live.release_publisher import KeysRequiredReply, StaleFenceReply, TokensReleasedReply
from rota.accounting.live.script_args import SPAN
from rota.accounting.service import AccountingService
from rota.infra.telemetry import metrics
from rota.model.errors import RedisUnavailable
from rota.model.quota import Level
from tests.contract.ledger_suite import LIMITS, MAKE_JOB, plain
from tests.integration.accounting.accounting_support import Farm, stopped
from tests.support.single_frame_batches import as_swarms


@pytest.fixture
async def farm(database, redis):
    return await Farm(AccountingService(database, redis)).make()


@pytest.fixture
def replies(monkeypatch):
    """What the scripts answered, in order."""
    seen = []
    for owner, name in ((live, "BOOK"), (release_publisher, "RELEASE")):
        real = getattr(owner, name)

        async def call(client, real=real, **given):
            seen.append(await real(client, **given))
            return seen[-1]

        monkeypatch.setattr(owner, name, call)
    return seen


def swarm(farm, tokens, **other):
    tokens = list(tokens)
    charge = farm.charge(**{"job": NIL_UUID, "layer": NIL_UUID} | other)
    return SingleFrameBatch(charge, farm.host, tokens, [uuid4() for _ in tokens], [uuid4() for _ in tokens])


async def book(farm, *batch):
    return [plain(outcome) for outcome in await farm.books.book(farm.show, batch)]


async def release(farm, tokens):
    """Told to Redis as swarms; what was told."""
    deleted = as_swarms(await allocations.delete(farm.database, farm.show, tokens))
    await farm.live.publisher.publish(farm.show, deleted)
    return deleted


async def cap(farm, job, cores):
    """In PostgreSQL alone, as of a change whose news is late."""
    await farm.database.run(MAKE_JOB, job, farm.show)
    await farm.database.run(LIMITS[Level.JOB], farm.show, job, cores, None)


async def exact(farm):
    return await farm.agrees() and await farm.decides_right()


async def test_a_swarm_is_released_at_once_and_once(farm, replies):
    await book(farm, swarm(farm, [*range(0, 900, 90), 91]), swarm(farm, [92, 93], cores=33))
    deleted = await release(farm, [91, 93, 90, 810])
    assert [len(each.tokens) for each in deleted.swarms] in ([1, 3], [3, 1])
    await farm.live.publisher.publish(farm.show, deleted)
    assert [each.tokens for each in replies if isinstance(each, TokensReleasedReply)] == [4, 0]
    assert await exact(farm)


async def test_a_swarm_of_an_older_fence_is_not_released(farm, replies):
    await book(farm, swarm(farm, range(4)))
    deleted = as_swarms(await allocations.delete(farm.database, farm.show, [1, 2]))
    await farm.books.raise_fence(farm.show)
    await farm.live.publisher.publish(farm.show, deleted)
    assert isinstance(replies[-1], StaleFenceReply)
    assert (await farm.recount()).buried == 2
    assert await exact(farm)


async def test_a_job_that_got_a_cap_while_it_ran_is_released_from_it(farm, replies):
    asked = swarm(farm, range(5))
    await book(farm, asked)
    await farm.cap_job(asked.jobs[3], max_cores=2)
    assert (await farm.hash(farm.keys.counter_key(f"job:{asked.jobs[3]}")))["int_cores"] == "1"
    await release(farm, [0, 3])
    assert [type(each) for each in replies[-2:]] == [KeysRequiredReply, TokensReleasedReply]
    assert (await farm.hash(farm.keys.counter_key(f"job:{asked.jobs[3]}")))["int_cores"] == "0"
    assert await exact(farm)


async def test_a_cap_of_another_job_leaves_a_swarm_whole(farm, replies):
    await farm.book([90])
    await farm.cap_job(max_cores=2)
    asked = swarm(farm, range(5))
    await book(farm, asked)
    await release(farm, asked.tokens)
    assert [type(each) for each in replies[-2:]] == [live.BookedReply, TokensReleasedReply]
    assert await exact(farm)


@pytest.mark.parametrize(("cores", "outcome"), [(50, ([0, 2], {1: DeclineReason.CAPPED})), (100, ([0, 1, 2], {}))])
async def test_a_cap_that_redis_has_not_heard_of_is_asked_before_a_swarm_is_booked(farm, cores, outcome):
    asked = swarm(farm, range(3))
    await cap(farm, asked.jobs[1], cores)
    [told] = await book(farm, asked)
    assert (sorted(told.booked), told.declined) == outcome
    assert await farm.over() == []
    assert await exact(farm)


async def test_a_cap_that_comes_between_redis_and_postgresql_is_asked_anew(farm, monkeypatch):
    asked = swarm(farm, range(3))
    async with stopped(monkeypatch, allocations, "insert", book(farm, asked)) as booking:
        await cap(farm, asked.jobs[0], 99)
    [told] = booking.result()
    assert (sorted(told.booked), told.declined) == ([1, 2], {0: DeclineReason.CAPPED})
    assert await exact(farm)


async def test_a_cap_is_found_among_many(farm):
    for _ in range(70):
        await cap(farm, uuid4(), 100)
    asked = swarm(farm, range(3))
    await cap(farm, asked.jobs[2], 50)
    assert await farm.live.sync_limits(farm.show)
    [told] = await book(farm, asked)
    assert (told.booked, told.declined) == ([0, 1], {2: DeclineReason.CAPPED})
    assert (await book(farm, swarm(farm, range(7, 9))))[0].booked == [7, 8]
    assert await exact(farm)


async def test_what_postgresql_refuses_of_a_swarm_is_given_back(farm):
    asked = swarm(farm, range(6))
    await book(farm, asked.subset([4, 1]))
    await release(farm, [4, 1])
    [told] = await book(farm, asked)
    assert told.booked == [0, 2, 3, 5]
    assert told.declined == {1: DeclineReason.TOMBSTONED, 4: DeclineReason.TOMBSTONED}
    assert await exact(farm)


async def test_a_swarm_left_behind_under_an_older_fence_is_decided_anew(farm):
    asked = swarm(farm, range(4))
    assert await farm.live._book(farm.show, [asked.subset([2, 1])], "limits")  # who asked died before the insert
    await farm.burst(3)
    [told] = await book(farm, asked)
    assert (len(told.booked), len(told.refused), told.declined) == (3, 1, {})
    assert await exact(farm)


async def test_swarms_on_both_sides_of_the_mark_of_a_recount_are_counted(farm, monkeypatch):
    await book(farm, swarm(farm, range(0, 8 * SPAN, 16)))
    read, turns = allocations.tokens, []

    async def tokens(*given):
        turn = len(turns)
        turns.append(turn)
        both = [bucket * SPAN + 1 + turn for bucket in range(8)]
        await book(farm, swarm(farm, both))
        await release(farm, [*both[::2], *range(16 * turn, 8 * SPAN, 16 * 7)])
        return await read(*given)

    monkeypatch.setattr(allocations, "tokens", tokens)
    found = await farm.recount()
    assert (found.clean, len(turns) > 3) == (True, True)
    assert await exact(farm)


async def test_a_release_of_a_swarm_that_redis_missed_is_told_when_it_is_back(farm, monkeypatch):
    await book(farm, swarm(farm, range(4)))
    publishes = farm.live.publisher
    failed = metrics.REGISTRY.get_sample_value("rota_accounting_publish_failures_total")

    async def away(*_, **__):
        raise RedisUnavailable("Redis is away.")

    with monkeypatch.context() as patched:
        patched.setattr(release_publisher, "RELEASE", away)
        await release(farm, [1, 2])
        assert not await publishes.flush_pending()
    assert metrics.REGISTRY.get_sample_value("rota_accounting_publish_failures_total") == failed + 2
    assert not await farm.agrees()
    assert await publishes.flush_pending()
    assert not publishes._pending
    assert await exact(farm)


def counted():
    """What the metrics of the live ledger say, by name and labels."""
    names = ("rota_accounting_booked", "rota_accounting_limit_exceeded", "rota_accounting_declined")
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "ledger")): sample.value
        for metric in metrics.REGISTRY.collect()
        if metric.name in names
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.labels.get("ledger") == "live"
    }


async def test_each_frame_of_a_swarm_is_counted_once_in_the_metrics(farm, redis):
    asked = swarm(farm, range(6))
    await farm.burst(3)
    await cap(farm, asked.jobs[0], 50)
    assert await farm.live.sync_limits(farm.show)
    before = counted()
    await book(farm, asked)
    await redis.flushdb()
    await book(farm, swarm(farm, range(10, 14)))
    gained = {key: value - before.get(key, 0) for key, value in counted().items() if value != before.get(key, 0)}
    assert gained == {
        ("rota_accounting_booked_total",): 3,
        ("rota_accounting_limit_exceeded_total", "subscription", "cores"): 2,
        ("rota_accounting_declined_total", "capped"): 1,
        ("rota_accounting_declined_total", "unseeded"): 4,
    }


async def test_a_swarm_that_no_ledger_decides_is_declined_whole(farm):
    asked = swarm(farm, range(3))
    await book(farm, asked.subset([1]))
    [told] = await farm.colleague().book(farm.show, [asked])
    assert (told.already, told.declined) == ([1], {0: DeclineReason.REDIS_OFF, 2: DeclineReason.REDIS_OFF})
    [told] = await farm.colleague().book(farm.show, [replace(asked, host=uuid4())])
    assert told.declined[1] is DeclineReason.DUPLICATE


async def test_a_swarm_goes_to_the_ledger_that_keeps_the_show_now(farm, redis):
    other = farm.colleague(redis)
    asked = swarm(farm, range(4))
    [told] = await other.book(farm.show, [asked.subset([3, 1])])
    assert told.all_booked == [3, 1]
    await farm.flip(False)
    [told] = await other.book(farm.show, [asked])
    assert (sorted(told.already), sorted(told.booked)) == ([1, 3], [0, 2])
    assert await farm.books.transactional.counters(farm.show) == await farm.held()

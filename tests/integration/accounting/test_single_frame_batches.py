"""Single-frame batches in the live ledger: caps set at any time, releases, concurrent reconciliation, and metrics."""

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
from tests.integration.accounting.accounting_support import ShowQuota, paused_at
from tests.support.single_frame_batches import with_single_frame_batches


@pytest.fixture
async def quota(database, redis):
    return await ShowQuota(AccountingService(database, redis)).make()


@pytest.fixture
def replies(monkeypatch):
    """Replies of the scripts, in order."""
    seen = []
    for owner, name in ((live, "BOOK"), (release_publisher, "RELEASE")):
        real = getattr(owner, name)

        async def call(client, real=real, **given):
            seen.append(await real(client, **given))
            return seen[-1]

        monkeypatch.setattr(owner, name, call)
    return seen


def single_frames(quota, tokens, **other):
    tokens = list(tokens)
    charge = quota.charge(**{"job": NIL_UUID, "layer": NIL_UUID} | other)
    return SingleFrameBatch(charge, quota.host, tokens, [uuid4() for _ in tokens], [uuid4() for _ in tokens])


async def book(quota, *batch):
    return [plain(outcome) for outcome in await quota.accounting.book(quota.show, batch)]


async def release(quota, tokens):
    """Delete rows and publish their release as single-frame batches; returns what was published."""
    deleted = with_single_frame_batches(await allocations.delete(quota.database, quota.show, tokens))
    await quota.live.publisher.publish(quota.show, deleted)
    return deleted


async def cap(quota, job, cores):
    """Set a cap in PostgreSQL only, like a change that is not pushed yet."""
    await quota.database.run(MAKE_JOB, job, quota.show)
    await quota.database.run(LIMITS[Level.JOB], quota.show, job, cores, None)


async def exact(quota):
    return await quota.agrees() and await quota.hashes_agree()


async def test_single_frame_batch_is_released_immediately_and_once(quota, replies):
    await book(quota, single_frames(quota, [*range(0, 900, 90), 91]), single_frames(quota, [92, 93], cores=33))
    deleted = await release(quota, [91, 93, 90, 810])
    assert [len(each.tokens) for each in deleted.swarms] in ([1, 3], [3, 1])
    await quota.live.publisher.publish(quota.show, deleted)
    assert [each.tokens for each in replies if isinstance(each, TokensReleasedReply)] == [4, 0]
    assert await exact(quota)


async def test_single_frame_batch_of_an_older_fence_is_not_released(quota, replies):
    await book(quota, single_frames(quota, range(4)))
    deleted = with_single_frame_batches(await allocations.delete(quota.database, quota.show, [1, 2]))
    await quota.accounting.raise_fence(quota.show)
    await quota.live.publisher.publish(quota.show, deleted)
    assert isinstance(replies[-1], StaleFenceReply)
    assert (await quota.reconcile()).buried == 2
    assert await exact(quota)


async def test_job_capped_while_running_is_released_from_its_cap(quota, replies):
    frames = single_frames(quota, range(5))
    await book(quota, frames)
    await quota.cap_job(frames.jobs[3], max_cores=2)
    assert (await quota.hash(quota.keys.counter_key(f"job:{frames.jobs[3]}")))["int_cores"] == "1"
    await release(quota, [0, 3])
    assert [type(each) for each in replies[-2:]] == [KeysRequiredReply, TokensReleasedReply]
    assert (await quota.hash(quota.keys.counter_key(f"job:{frames.jobs[3]}")))["int_cores"] == "0"
    assert await exact(quota)


async def test_cap_of_another_job_does_not_split_a_single_frame_batch(quota, replies):
    await quota.book([90])
    await quota.cap_job(max_cores=2)
    frames = single_frames(quota, range(5))
    await book(quota, frames)
    await release(quota, frames.tokens)
    assert [type(each) for each in replies[-2:]] == [live.BookedReply, TokensReleasedReply]
    assert await exact(quota)


@pytest.mark.parametrize(("cores", "outcome"), [(50, ([0, 2], {1: DeclineReason.CAPPED})), (100, ([0, 1, 2], {}))])
async def test_cap_not_yet_in_redis_is_checked_before_a_single_frame_batch_is_booked(quota, cores, outcome):
    frames = single_frames(quota, range(3))
    await cap(quota, frames.jobs[1], cores)
    [result] = await book(quota, frames)
    assert (sorted(result.booked), result.declined) == outcome
    assert await quota.over_cap() == []
    assert await exact(quota)


async def test_cap_set_between_redis_and_postgresql_is_checked_again(quota, monkeypatch):
    frames = single_frames(quota, range(3))
    async with paused_at(monkeypatch, allocations, "insert", book(quota, frames)) as booking:
        await cap(quota, frames.jobs[0], 99)
    [result] = booking.result()
    assert (sorted(result.booked), result.declined) == ([1, 2], {0: DeclineReason.CAPPED})
    assert await exact(quota)


async def test_cap_is_found_among_many(quota):
    for _ in range(70):
        await cap(quota, uuid4(), 100)
    frames = single_frames(quota, range(3))
    await cap(quota, frames.jobs[2], 50)
    assert await quota.live.sync_limits(quota.show)
    [result] = await book(quota, frames)
    assert (result.booked, result.declined) == ([0, 1], {2: DeclineReason.CAPPED})
    assert (await book(quota, single_frames(quota, range(7, 9))))[0].booked == [7, 8]
    assert await exact(quota)


async def test_frames_of_a_batch_refused_by_postgresql_are_rolled_back(quota):
    frames = single_frames(quota, range(6))
    await book(quota, frames.subset([4, 1]))
    await release(quota, [4, 1])
    [result] = await book(quota, frames)
    assert result.booked == [0, 2, 3, 5]
    assert result.declined == {1: DeclineReason.TOMBSTONED, 4: DeclineReason.TOMBSTONED}
    assert await exact(quota)


async def test_single_frame_batch_left_under_an_older_fence_is_decided_again(quota):
    frames = single_frames(quota, range(4))
    assert await quota.live._book(quota.show, [frames.subset([2, 1])], "limits")  # the booker crashed before the insert
    await quota.burst(3)
    [result] = await book(quota, frames)
    assert (len(result.booked), len(result.refused), result.declined) == (3, 1, {})
    assert await exact(quota)


async def test_single_frame_batches_on_both_sides_of_the_reconciliation_marker_are_counted(quota, monkeypatch):
    await book(quota, single_frames(quota, range(0, 8 * SPAN, 16)))
    read, turns = allocations.tokens, []

    async def tokens(*given):
        turn = len(turns)
        turns.append(turn)
        both = [bucket * SPAN + 1 + turn for bucket in range(8)]
        await book(quota, single_frames(quota, both))
        await release(quota, [*both[::2], *range(16 * turn, 8 * SPAN, 16 * 7)])
        return await read(*given)

    monkeypatch.setattr(allocations, "tokens", tokens)
    found = await quota.reconcile()
    assert (found.clean, len(turns) > 3) == (True, True)
    assert await exact(quota)


async def test_single_frame_batch_release_missed_by_redis_is_published_when_it_returns(quota, monkeypatch):
    await book(quota, single_frames(quota, range(4)))
    publisher = quota.live.publisher
    failed = metrics.REGISTRY.get_sample_value("rota_accounting_publish_failures_total")

    async def unavailable(*_, **__):
        raise RedisUnavailable("Redis is away.")

    with monkeypatch.context() as patched:
        patched.setattr(release_publisher, "RELEASE", unavailable)
        await release(quota, [1, 2])
        assert not await publisher.flush_pending()
    assert metrics.REGISTRY.get_sample_value("rota_accounting_publish_failures_total") == failed + 2
    assert not await quota.agrees()
    assert await publisher.flush_pending()
    assert not publisher._pending
    assert await exact(quota)


def metric_values():
    """Values of the live ledger's metrics, by name and labels."""
    names = ("rota_accounting_booked", "rota_accounting_limit_exceeded", "rota_accounting_declined")
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "ledger")): sample.value
        for metric in metrics.REGISTRY.collect()
        if metric.name in names
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.labels.get("ledger") == "live"
    }


async def test_each_frame_of_a_single_frame_batch_is_counted_once_in_metrics(quota, redis):
    frames = single_frames(quota, range(6))
    await quota.burst(3)
    await cap(quota, frames.jobs[0], 50)
    assert await quota.live.sync_limits(quota.show)
    before = metric_values()
    await book(quota, frames)
    await redis.flushdb()
    await book(quota, single_frames(quota, range(10, 14)))
    gained = {key: value - before.get(key, 0) for key, value in metric_values().items() if value != before.get(key, 0)}
    assert gained == {
        ("rota_accounting_booked_total",): 3,
        ("rota_accounting_limit_exceeded_total", "subscription", "cores"): 2,
        ("rota_accounting_declined_total", "capped"): 1,
        ("rota_accounting_declined_total", "unseeded"): 4,
    }


async def test_single_frame_batch_without_a_deciding_ledger_is_declined_entirely(quota):
    frames = single_frames(quota, range(3))
    await book(quota, frames.subset([1]))
    [result] = await quota.other_service().book(quota.show, [frames])
    assert (result.already, result.declined) == ([1], {0: DeclineReason.REDIS_OFF, 2: DeclineReason.REDIS_OFF})
    [result] = await quota.other_service().book(quota.show, [replace(frames, host=uuid4())])
    assert result.declined[1] is DeclineReason.DUPLICATE


async def test_single_frame_batch_goes_to_the_current_ledger_of_the_show(quota, redis):
    other = quota.other_service(redis)
    frames = single_frames(quota, range(4))
    [result] = await other.book(quota.show, [frames.subset([3, 1])])
    assert result.all_booked == [3, 1]
    await quota.flip(False)
    [result] = await other.book(quota.show, [frames])
    assert (sorted(result.already), sorted(result.booked)) == ([1, 3], [0, 2])
    assert await quota.accounting.transactional.counters(quota.show) == await quota.held()

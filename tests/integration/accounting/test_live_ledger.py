"""The live ledger in detail: the content of its keys, what changes them, and what is published.

Coverage: each requirement with its tests, without `test_`. `contract` is tests/contract/ledger_suite.py, `model` the
state machine of tests/property/test_live_ledger.py; in this folder, `races` is test_seed_races.py, `failures`
test_failures.py, `tables` test_transactional_ledger.py and `hot` test_hot_subscription.py. Tests without a prefix are
in this file; `...` stands for the rest of a name.

| requirement | tests |
|---|---|
| a booking changes all five keys, and the sequence once | booked_frame_changes_ten_fields..., sequence_increases... |
| burst 0 or missing refuses and writes nothing | contract |
| refusals of all levels, cores and GPUs: table, current, limit | contract |
| equality fits, the order of checks, 0 and -1 | contract |
| a GPU cap does not affect frames without GPUs | contract |
| force ignores limits of cores and GPUs | contract; forced_booking_ignores_gpu_limits |
| booking and release cancel out | release_restores_redis... |
| a reseed alone and with a concurrent booking | races: booking_after_the_snapshot... |
| reconciliation writes cores, at the keys of bookings | booked_frame_changes_ten_fields..., reconciliation_sums... |
| shared keys sum over jobs, jobs over pools, each subscription alone | reconciliation_sums_shared_keys... |
| drained keys become 0, layers too, others are counted once | reconciliation_sets_drained_keys... |
| limits in cores, -1 unchanged, GPUs unchanged | redis_hashes_show_the_configured_limits |
| managed shows: read on first use, a copy, own changes immediately | managed_shows_are_read..., own_changes... |
| | outdated_managed_flag... |
| seeded before booked; one show changes although another fails | show_is_not_booked..., show_leaves_redis... |
| publishing: off, exact, unknown script, errors | release_subtracts_exactly..., publisher_is_not_called... |
| | publisher_continues..., publisher_error... |
| a release changes only the tables of unmanaged shows | release_changes_the_tables... |
| the transactional ledger leaves managed shows unchanged | tables: managed_show_is_declined... |
| | tables: recompute_sets_drained_keys... |
| an unseeded Redis refuses | failures: redis_crash_blocks..., nothing_is_booked_while... |
| caps hold under concurrency | contract; hot: two_processes_fill... |
| reconciliation keeps bookings in flight or after its snapshot | races: booking_after_the_snapshot... |
| | failures: booking_inserted_within_the_reconciliation_grace... |
| a failed insert is rolled back | failures: booking_in_flight_when_a_cap_is_lowered... |
| a lost release is repaired | failures: unpublished_release... |
| a show that becomes managed brings counters and caps | failures: show_that_becomes_managed... |
| a change of limits applies immediately | failures: changed_cap_is_in_redis... |
| all of it together, in any order | model |
"""

import asyncio
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from rota.accounting import allocations
from rota.accounting.ledger import DeclineReason
from rota.accounting.live import reader as live_reader
from rota.accounting.live.reconcile import HEALED
from rota.accounting.live.release_publisher import FAILED, RELEASE
from rota.accounting.live.seeding import seed
from rota.accounting.resources import CapsUpdate
from rota.accounting.service import AccountingService
from rota.infra.redis import RedisTarget, connect
from rota.infra.redis.script import LOADS
from rota.model.errors import RedisUnavailable, ScriptFailed
from rota.model.quota import Level, Refusal, Resource, Usage
from tests.contract.ledger_suite import outcome_of, sql
from tests.integration.accounting.accounting_support import PLENTY, ShowQuota, paused_at

FINISH_JOB = sql("DELETE FROM rota.job_resource WHERE pk_job = $1")
FINISH_LAYER = sql("DELETE FROM rota.layer_resource WHERE pk_layer = $1")
LEVELS = ("sub", "folder", "job", "layer", "point")


@pytest.fixture
async def quota(database, redis):
    return await ShowQuota(AccountingService(database, redis)).make()


@pytest.fixture
async def capped(quota):
    """A job and a layer with limits and no frames, so that all five levels have a hash."""
    await quota.book([10**6])
    await quota.cap_job(max_cores=900)
    await quota.cap_layer(max_cores=900)
    await quota.release([10**6])
    return quota


async def everything(quota):
    """Content of every key except the sequence, and except the `charges` that a booking leaves behind."""
    client, found = quota.live.client, {}
    for key in sorted(await client.keys("acct:*")):
        if await client.type(key) == b"hash":
            found[key] = {name: value for name, value in (await client.hgetall(key)).items() if name != b"charges"}
        elif await client.type(key) == b"zset":
            found[key] = await client.zrange(key, 0, -1, withscores=True)
    return found


def changed(before, after):
    """Fields that differ, by kind of key: {"sub": {"int_cores": ("0", "4")}}."""
    differences = {}
    for key in before.keys() | after.keys():
        old, new = before.get(key, {}), after.get(key, {})
        if isinstance(old, dict) and isinstance(new, dict):
            fields = {f.decode(): (old.get(f, b"").decode(), new.get(f, b"").decode()) for f in old.keys() | new.keys()}
            differ = {name: pair for name, pair in fields.items() if pair[0] != pair[1]}
            if differ:
                differences[key.decode().split(":")[1]] = differ
    return differences


async def test_redis_hashes_show_the_configured_limits(quota):
    await quota.change("change_subscription", "duck", "duck-main", size=100, burst="150.5", gpu_burst=4)
    await quota.cap_folder(CapsUpdate(min_cores=2, max_cores="12.25", min_gpus=1, max_gpus=-1))
    await quota.cap_point(CapsUpdate(min_cores="0.5", max_cores=-1, max_gpus=3))
    await quota.book([1])
    await quota.cap_job(max_cores="7.5", max_gpus=2)
    await quota.cap_layer(max_cores=0, max_gpus=1)
    used = {"int_cores": "1", "int_gpus": "0"}
    expected = {
        f"acct:sub:{quota.show}:{quota.pool}": {"size": "100", "burst": "150.5", "gpu_burst": "4"},
        f"acct:folder:{quota.folder}": {
            "int_min_cores": "2",
            "int_max_cores": "12.25",
            "int_min_gpus": "1",
            "int_max_gpus": "-1",
            "show_id": str(quota.show),
        },
        f"acct:job:{quota.job}": {"int_max_cores": "7.5", "int_max_gpus": "2", "int_priority": "1"},
        f"acct:layer:{quota.layer}": {"int_max_cores": "0", "int_max_gpus": "1"},
        f"acct:point:{quota.dept}:{quota.show}": {
            "int_min_cores": "0.5",
            "int_max_cores": "-1",
            "int_min_gpus": "0",
            "int_max_gpus": "3",
        },
    }
    for _ in ("pushed change by change", "seeded from PostgreSQL"):
        for key, limits in expected.items():
            assert await quota.hash(key) == limits | used, key
        await quota.live.client.flushdb()
        assert await seed(quota.live, quota.show)


async def test_shared_levels_have_counters_before_the_first_booking(quota):
    for name, thing in (("sub", quota.pool), ("folder", quota.folder), ("point", quota.dept)):
        found = await quota.hash(quota.keys.counter_key(f"{name}:{thing}"))
        assert (found["int_cores"], found["int_gpus"]) == ("0", "0")


async def test_booked_frame_changes_ten_fields_in_cores(capped):
    before = await everything(capped)
    await capped.book([1], cores=150, gpus=2)
    changes = changed(before, await everything(capped))
    ten = {"int_cores": ("0", "1.5"), "int_gpus": ("0", "2")}
    assert {name: changes[name] for name in LEVELS} == dict.fromkeys(LEVELS, ten)
    assert set(changes) - set(LEVELS) == {"tokens", "charges"}


async def test_release_subtracts_exactly_its_amounts_from_exactly_its_keys(capped):
    await capped.book([1, 2], cores=400, gpus=1)
    await capped.book([3], cores=33, alloc=await another_pool(capped), job=uuid4(), layer=uuid4())
    before = await everything(capped)
    await capped.release([1])
    changes = changed(before, await everything(capped))
    once = {"int_cores": ("8", "4"), "int_gpus": ("2", "1")}
    shared = {"int_cores": ("8.33", "4.33"), "int_gpus": ("2", "1")}
    assert {name: changes[name] for name in LEVELS} == dict.fromkeys(LEVELS, once) | {"folder": shared, "point": shared}


async def another_pool(quota, name="other"):
    pool = (await quota.change("create_pool", name)).after.id
    await quota.change("create_subscription", "duck", name, size=1, burst=PLENTY)
    return pool


async def test_release_restores_redis_to_the_state_before_the_booking(capped):
    before = await everything(capped)
    await capped.book([*range(3), *range(126, 131)], cores=33, gpus=1)
    await capped.book([200], cores=1, force=True, capped=False, job=uuid4(), layer=uuid4())
    assert await everything(capped) != before
    await capped.release([*range(3), *range(126, 131), 200])
    assert await everything(capped) == before


async def test_sequence_increases_with_every_change_and_only_then(quota):
    await quota.burst(2)
    steps = {
        "booked": (quota.book([1, 2], capped=False), 1),
        "refused": (quota.book([3], capped=False), 0),
        "booked again": (quota.book([1, 2], capped=False), 0),
        "an unknown folder": (quota.book([4], capped=False, folder=uuid4()), None),
        "released": (quota.release([1]), 1),
        "released again": (quota.release([1]), 0),
        "changed": (quota.burst(3), 1),
        "reconciled": (quota.reconcile(), None),
        "reseeded": (quota.live.sync_limits(quota.show), None),
        "flipped": (quota.flip(False), None),
    }
    for what, (step, moves) in steps.items():
        before = await quota.seq()
        await step
        moved = await quota.seq() - before
        assert moved == moves if moves is not None else moved > 0, what


async def test_forced_booking_ignores_gpu_limits(capped):
    await capped.burst(0, gpus=0)
    await capped.cap_job(max_gpus=1)
    assert (await capped.book([1], gpus=5)).refusal.table == "subscription"
    assert (await capped.book([1], gpus=5, force=True)).booked == [1]
    assert await capped.count("job", "int_gpus") == "5"


async def test_centicores_reach_a_cap_exactly(capped):
    await capped.cap_job(max_cores="1.23")
    outcome = await capped.book(range(200), cores=1)
    assert (len(outcome.booked), outcome.refusal) == (123, Refusal(Level.JOB, Resource.CORES, 123, 123, 1))
    assert await capped.count("job") == "1.23"
    await capped.release(range(23))
    assert await capped.count("job") == "1"


async def test_highest_tokens_are_stored_beside_others_without_confusion(capped):
    last = 2**53 - 1
    groups = [capped.group(range(last - 40, last - 20), cores=1), capped.group([last - 3, last - 1, last], cores=2)]
    for what in ("booked", "already"):
        outcomes = await capped.accounting.book(capped.show, groups)
        assert [list(getattr(outcome, what)) for outcome in outcomes] == [list(group.tokens) for group in groups]
    assert await capped.release([*range(last - 40, last - 20), last - 1]) == [*range(last - 40, last - 20), last - 1]
    assert await capped.agrees()


async def test_reconciliation_sums_shared_keys_over_jobs_and_jobs_over_pools_per_subscription(capped):
    pool, job, layer = await another_pool(capped), uuid4(), uuid4()
    await capped.book([1], cores=100)
    await capped.book([2], cores=50, alloc=pool)
    await capped.book([3], cores=25, job=job, layer=layer)
    held = await capped.counters()
    names = await live_reader.names_in_use(capped.live.client, capped.keys)
    for name in names:
        if await capped.live.client.exists(capped.keys.counter_key(name)):
            await capped.live.client.hset(capped.keys.counter_key(name), mapping={"int_cores": "77", "int_gpus": "7"})
    found = await capped.reconcile()
    assert found.drifted == {
        Level.SUBSCRIPTION: 2,
        Level.FOLDER: 1,
        Level.JOB: 1,
        Level.LAYER: 1,
        Level.POINT: 1,
    }
    assert await capped.counters() == held == await capped.held()
    assert [await capped.count(name) for name in LEVELS] == ["1.25", "1.75", "1.5", "1.5", "1.75"]
    assert (await capped.hash(f"acct:sub:{capped.show}:{pool}"))["int_cores"] == "0.5"


async def test_reconciliation_sets_drained_keys_to_zero_and_leaves_others(capped):
    await capped.book([1], job=uuid4(), layer=uuid4())
    for name, thing in (("job", capped.job), ("layer", capped.layer)):
        await capped.live.client.hset(capped.keys.counter_key(f"{name}:{thing}"), "int_cores", "9")
    assert (await capped.reconcile()).drifted == {Level.JOB: 1, Level.LAYER: 1}
    assert [await capped.count(name) for name in LEVELS] == ["1", "1", "0", "0", "1"]
    assert (await capped.reconcile()).clean


async def test_row_whose_token_redis_lost_is_adopted_and_counted(quota):
    await quota.book([1, 2])
    await quota.live.publisher.release(quota.show, await quota.fence(), [quota.group([1])])
    assert await quota.count() == "1"
    healed = HEALED.labels("adopted")._value.get()
    assert (await quota.reconcile()).adopted == 1
    assert HEALED.labels("adopted")._value.get() == healed + 1
    assert await quota.agrees()


async def test_jobs_and_layers_without_limits_have_no_hash_and_the_audit_shows_their_usage(quota):
    await quota.book([1, 2], gpus=1)
    assert await quota.live.client.keys("acct:job:*") == await quota.live.client.keys("acct:layer:*") == []
    lines = {(line.level, line.id): line for line in (await quota.audit()).lines}
    for key in ((Level.JOB, quota.job), (Level.LAYER, quota.layer)):
        assert (lines[key].redis, lines[key].procs, lines[key].problem) == (Usage(200, 2), Usage(200, 2), None)


async def test_keys_of_finished_jobs_are_removed_by_one_reseed_of_limits(capped):
    await capped.database.run(FINISH_JOB, capped.job)
    await capped.database.run(FINISH_LAYER, capped.layer)
    await capped.maintenance().reseed_limits()
    assert await capped.live.client.keys("acct:job:*") == await capped.live.client.keys("acct:layer:*") == []
    assert [name for name in await capped.hash(capped.keys.limits) if name.startswith(("job", "layer"))] == []


async def test_job_that_loses_its_limits_while_running_leaves_no_counter(capped):
    await capped.book([1, 2])
    await capped.database.run(FINISH_JOB, capped.job)
    await capped.maintenance().reseed_limits()
    await capped.release([1])
    assert await capped.live.client.keys("acct:job:*") == []
    assert (await capped.audit()).ok
    await capped.release([2])
    assert await capped.agrees()


async def test_job_that_regains_limits_counts_its_running_frames(capped):
    await capped.book(range(4))
    await capped.database.run(FINISH_JOB, capped.job)
    await capped.maintenance().reseed_limits()
    await capped.cap_job(max_cores=5)
    assert await capped.count("job") == "4"
    assert (await capped.book([5, 6])).booked == [5]


@pytest.mark.parametrize("caps", [{"max_cores": 6}, {"max_cores": -1}, {"max_gpus": 0}])
async def test_first_limits_of_a_running_job_count_all_its_frames(quota, caps):
    await quota.book(range(4), capped=False)
    await quota.cap_job(**caps)
    assert await quota.count("job") == "4"
    assert await quota.agrees()
    assert len((await quota.book(range(4, 9), capped=False)).booked) == (2 if caps == {"max_cores": 6} else 5)


async def test_recreated_subscription_is_bookable_immediately(quota):
    pool = await another_pool(quota)
    await quota.change("delete_subscription", "duck", "other")
    assert (await quota.book([1], alloc=pool)).refusal == Refusal(Level.SUBSCRIPTION, Resource.CORES, 0, 0, 100)
    await quota.change("create_subscription", "duck", "other", size=1, burst=2)
    assert (await quota.book(range(4), alloc=pool)).booked == [0, 1]
    assert (await quota.audit()).ok


async def test_retried_tokens_keep_their_order(quota):
    outdated = quota.other_service(quota.live.client, remember_s=1e9)
    await quota.flip(False)
    assert not await outdated.is_managed(quota.show)
    await quota.flip(True)
    await quota.burst(2)
    assert (await quota.book([9, 4, 5, 1], by=outdated)).booked == [9, 4]


class ManualClock:
    """A clock that only the test moves."""

    def __init__(self):
        self.at_s = 1000.0

    def monotonic(self):
        return self.at_s

    def now_ms(self):
        return 1_700_000_000_000


async def test_own_changes_are_known_immediately_and_others_after_the_cache_time(quota):
    clock = ManualClock()
    other = quota.other_service(quota.live.client, remember_s=30.0, clock=clock)
    assert await other.is_managed(quota.show)
    assert await quota.accounting.is_managed(quota.show)
    await quota.flip(False)
    assert not await quota.accounting.is_managed(quota.show)
    assert await other.is_managed(quota.show)
    clock.at_s += 31
    assert not await other.is_managed(quota.show)


async def test_outdated_managed_flag_costs_only_a_round_trip(quota):
    other = quota.other_service(quota.live.client, remember_s=1e9)
    assert await other.is_managed(quota.show)
    await quota.flip(False)
    assert (await quota.book([1, 2], by=other)).booked == [1, 2]
    assert not await other.is_managed(quota.show)
    await quota.flip(True)
    assert await quota.book([2, 3], by=other) == outcome_of(already=[2], booked=[3])
    assert await quota.release([1, 2, 3], by=other) == [1, 2, 3]
    assert await quota.counters() == {}


async def test_managed_shows_are_read_on_first_use_and_returned_as_a_copy(quota):
    other = await ShowQuota(quota.accounting).make(managed=False, name="goose")
    fresh = quota.other_service(quota.live.client)
    assert (await fresh.is_managed(quota.show), await fresh.is_managed(other.show)) == (True, False)
    shows = await fresh.managed_shows()
    assert list(shows) == [quota.show]
    shows.clear()
    assert await fresh.is_managed(quota.show)


async def test_show_is_not_booked_by_any_process_before_it_is_seeded(quota, monkeypatch):
    other = quota.other_service(quota.live.client)
    await quota.flip(False)
    await quota.burst(5)
    await quota.book(range(4))
    async with paused_at(monkeypatch, allocations, "page_groups", quota.flip(True), after=True):
        assert (await quota.book([5, 6], by=other)).declined == {5: DeclineReason.UNSEEDED, 6: DeclineReason.UNSEEDED}
    assert (await quota.book([5, 6], by=other)).booked == [5]


async def test_show_leaves_redis_although_another_cannot_be_seeded(quota, monkeypatch):
    other = await ShowQuota(quota.accounting).make(managed=False, name="goose")

    async def broken(*_, **__):
        raise ScriptFailed("The script is broken.")

    with monkeypatch.context() as patched:
        patched.setattr("rota.accounting.service.seed", broken)
        with pytest.raises(ScriptFailed):
            await other.flip(True)
    await quota.flip(False)
    assert (await quota.book([1])).booked == [1]
    assert (await other.book([2])).declined == {2: DeclineReason.UNSEEDED}
    await quota.maintenance().seed_lagging_shows()
    assert (await other.book([2])).booked == [2]


async def test_release_changes_the_tables_of_unmanaged_shows_only(quota):
    other = await ShowQuota(quota.accounting).make(managed=False, name="goose")
    await quota.book([1])
    await other.book([11])
    await quota.maintenance().recompute()
    await quota.release([1])
    await other.release([11])
    duck, goose = [await quota.accounting.transactional.counters(each.show) for each in (quota, other)]
    assert duck[Level.SUBSCRIPTION, quota.pool] == Usage(100)
    assert goose == {}


async def test_publisher_is_not_called_for_unmanaged_shows_or_empty_releases(quota, monkeypatch):
    async def called(*_, **__):
        pytest.fail("nothing was released that Redis counts")

    monkeypatch.setattr(quota.live.publisher, "release", called)
    assert await quota.release([1, 2, 3]) == []
    await quota.flip(False)
    await quota.book([1])
    assert await quota.release([1, 2, 3]) == [1]


async def test_publisher_continues_after_redis_forgets_its_scripts(database, private_redis):
    server = await private_redis()  # on the shared one a concurrent test may load the script
    client = connect(RedisTarget(url=server.url))
    quota = await ShowQuota(AccountingService(database, client)).make()
    await quota.book(range(40), capped=False)
    loads = LOADS.labels("release")._value.get()
    await quota.live.client.script_flush()
    released = await asyncio.gather(*(quota.release([token]) for token in range(20)))
    booked = await asyncio.gather(*(quota.book([100 + token], capped=False) for token in range(20)))
    assert [token for tokens in released for token in tokens] == list(range(20))
    assert all(outcome.booked for outcome in booked)
    assert LOADS.labels("release")._value.get() == loads + 1
    assert await quota.agrees()
    await client.aclose()


async def test_publisher_error_is_counted_logged_and_suppressed(quota, monkeypatch):
    await quota.book(range(3))
    failed = FAILED._value.get()

    async def broken(*_, **__):
        raise ScriptFailed("The script is broken.")

    with monkeypatch.context() as patched, capture_logs() as logged:
        patched.setattr(type(RELEASE), "__call__", broken)
        assert await quota.release([0, 1]) == [0, 1]
    assert FAILED._value.get() == failed + 2
    assert [line["event"] for line in logged if line["log_level"] == "warning"] == ["release_publish_failed"]
    assert (await quota.reconcile()).released == 2
    assert await quota.agrees()


async def test_releases_missed_by_redis_are_published_when_it_returns(quota, monkeypatch):
    await quota.book(range(5))

    async def unavailable(*_, **__):
        raise RedisUnavailable("Redis is away: wait.")

    with monkeypatch.context() as patched:
        patched.setattr(type(RELEASE), "__call__", unavailable)
        assert await quota.release([0, 1]) == [0, 1]
        assert await quota.release([3]) == [3]
        assert not await quota.live.publisher.flush_pending()
    assert not await quota.agrees()
    assert await quota.live.publisher.flush_pending()
    assert await quota.agrees()
    assert await quota.live.publisher.flush_pending(), "nothing is pending"

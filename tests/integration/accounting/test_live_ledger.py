"""The live ledger in particulars: what its keys hold, what moves them, who is told.

What a ledger of this kind must be tested for, and by which tests, named by their first words. `contract` is
tests/contract/ledger_suite.py, `races` test_seed_races.py, `failures` test_books_failures.py, `tables`
test_transactional_ledger.py, `model` the state machine of tests/property/test_live_ledger.py; all others are here.

| what | tests |
|---|---|
| a booking moves all five keys, and the sequence once | one_frame_counts, the_sequence_moves |
| burst 0 or missing refuses, writes nothing | contract: a_burst_of_0, a_missing_subscription, a_refusal |
| refusals of all levels, cores and GPUs: table, current, limit | contract: reaching_a_limit |
| equality fits, the order of checks, 0 and -1 | contract: reaching_a_limit, the_first_limit, 0_and_minus_1 |
| a GPU cap is nothing to frames without GPUs | contract: a_gpu_limit_that_is_used_up |
| force asks no limit, of cores or GPUs | contract: force_asks_no_limit; force_asks_no_gpu_limit |
| booked and released nets to nothing | a_release_leaves_redis_as_it_was |
| a reseed alone, one met by a booking, the trace t0 to t6 | races: a_booking_after_the_look |
| a recount writes cores, at the keys of bookings | one_frame_counts, a_recount_sums |
| shared keys sum over jobs, jobs over pools, subscriptions apart | a_recount_sums |
| drained keys come to 0, layers too, others are counted once | a_recount_brings_drained_keys |
| limits in cores, -1 kept, GPUs as they are | redis_shows_what_was_typed |
| managed shows: read at first, a copy, own writes at once | managed_shows, own_changes, an_old_memory |
| seeded before booked; one goes although another fails | a_show_is_not_booked, a_flip_away |
| publishing: off, exact, unknown script, errors | a_release_takes_exactly, the_publisher, an_error_of_the_publisher |
| a release changes the tables of unmanaged shows alone | a_release_changes_the_tables |
| the tables' ledger leaves managed shows alone | tables: a_managed_show_is_declined, recompute_sets_drained |
| an unseeded Redis refuses | failures: when_redis_dies, nothing_is_booked_while |
| caps hold for many at once | contract: many_bookers; test_hot_subscription.py |
| a recount keeps what is under way or came after its look | races; failures: a_booking_that_gets_its_row |
| a failed insert is undone | failures: a_booking_under_way_when_a_cap_is_lowered |
| a lost release heals | failures: a_release_that_is_not_published |
| a flip brings counters and caps | failures: a_show_that_comes_to_redis |
| a change of limits applies at once | failures: a_cap_is_known |
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
from rota.infra.redis.script import LOADS
from rota.model.errors import RedisUnavailable, ScriptFailed
from rota.model.quota import Level, Refusal, Resource, Usage
from tests.contract.ledger_suite import outcome_of, sql
from tests.integration.accounting.accounting_support import PLENTY, Farm, stopped

FINISH_JOB = sql("DELETE FROM rota.job_resource WHERE pk_job = $1")
FINISH_LAYER = sql("DELETE FROM rota.layer_resource WHERE pk_layer = $1")
LEVELS = ("sub", "folder", "job", "layer", "point")


@pytest.fixture
async def farm(database, redis):
    return await Farm(AccountingService(database, redis)).make()


@pytest.fixture
async def capped(farm):
    """A job and a layer with limits and no frames: so all five levels have their hash."""
    await farm.book([10**6])
    await farm.cap_job(max_cores=900)
    await farm.cap_layer(max_cores=900)
    await farm.release([10**6])
    return farm


async def everything(farm):
    """Every key but the sequence, as it is; of the show's own what a booking may leave behind is left out."""
    client, found = farm.live.client, {}
    for key in sorted(await client.keys("acct:*")):
        if await client.type(key) == b"hash":
            found[key] = {name: value for name, value in (await client.hgetall(key)).items() if name != b"charges"}
        elif await client.type(key) == b"zset":
            found[key] = await client.zrange(key, 0, -1, withscores=True)
    return found


def changed(before, after):
    """Fields that differ, by key without what varies: {"sub": {"int_cores": ("0", "4")}}."""
    told = {}
    for key in before.keys() | after.keys():
        old, new = before.get(key, {}), after.get(key, {})
        if isinstance(old, dict) and isinstance(new, dict):
            fields = {f.decode(): (old.get(f, b"").decode(), new.get(f, b"").decode()) for f in old.keys() | new.keys()}
            differ = {name: pair for name, pair in fields.items() if pair[0] != pair[1]}
            if differ:
                told[key.decode().split(":")[1]] = differ
    return told


async def test_redis_shows_what_was_typed(farm):
    await farm.change("change_subscription", "duck", "duck-main", size=100, burst="150.5", gpu_burst=4)
    await farm.cap_folder(CapsUpdate(min_cores=2, max_cores="12.25", min_gpus=1, max_gpus=-1))
    await farm.cap_point(CapsUpdate(min_cores="0.5", max_cores=-1, max_gpus=3))
    await farm.book([1])
    await farm.cap_job(max_cores="7.5", max_gpus=2)
    await farm.cap_layer(max_cores=0, max_gpus=1)
    used = {"int_cores": "1", "int_gpus": "0"}
    expected = {
        f"acct:sub:{farm.show}:{farm.pool}": {"size": "100", "burst": "150.5", "gpu_burst": "4"},
        f"acct:folder:{farm.folder}": {
            "int_min_cores": "2",
            "int_max_cores": "12.25",
            "int_min_gpus": "1",
            "int_max_gpus": "-1",
            "show_id": str(farm.show),
        },
        f"acct:job:{farm.job}": {"int_max_cores": "7.5", "int_max_gpus": "2", "int_priority": "1"},
        f"acct:layer:{farm.layer}": {"int_max_cores": "0", "int_max_gpus": "1"},
        f"acct:point:{farm.dept}:{farm.show}": {
            "int_min_cores": "0.5",
            "int_max_cores": "-1",
            "int_min_gpus": "0",
            "int_max_gpus": "3",
        },
    }
    for _ in ("told change by change", "seeded from PostgreSQL"):
        for key, limits in expected.items():
            assert await farm.hash(key) == limits | used, key
        await farm.live.client.flushdb()
        assert await seed(farm.live, farm.show)


async def test_a_key_of_every_other_level_is_there_before_the_first_booking(farm):
    for name, thing in (("sub", farm.pool), ("folder", farm.folder), ("point", farm.dept)):
        found = await farm.hash(farm.keys.counter_key(f"{name}:{thing}"))
        assert (found["int_cores"], found["int_gpus"]) == ("0", "0")


async def test_one_frame_counts_in_ten_fields_in_cores(capped):
    before = await everything(capped)
    await capped.book([1], cores=150, gpus=2)
    told = changed(before, await everything(capped))
    ten = {"int_cores": ("0", "1.5"), "int_gpus": ("0", "2")}
    assert {name: told[name] for name in LEVELS} == dict.fromkeys(LEVELS, ten)
    assert set(told) - set(LEVELS) == {"tokens", "charges"}


async def test_a_release_takes_exactly_its_amounts_from_exactly_its_keys(capped):
    await capped.book([1, 2], cores=400, gpus=1)
    await capped.book([3], cores=33, alloc=await another_pool(capped), job=uuid4(), layer=uuid4())
    before = await everything(capped)
    await capped.release([1])
    told = changed(before, await everything(capped))
    once = {"int_cores": ("8", "4"), "int_gpus": ("2", "1")}
    shared = {"int_cores": ("8.33", "4.33"), "int_gpus": ("2", "1")}
    assert {name: told[name] for name in LEVELS} == dict.fromkeys(LEVELS, once) | {"folder": shared, "point": shared}


async def another_pool(farm, name="other"):
    pool = (await farm.change("create_pool", name)).after.id
    await farm.change("create_subscription", "duck", name, size=1, burst=PLENTY)
    return pool


async def test_a_release_leaves_redis_as_it_was_before_the_booking(capped):
    before = await everything(capped)
    await capped.book([*range(3), *range(126, 131)], cores=33, gpus=1)
    await capped.book([200], cores=1, force=True, capped=False, job=uuid4(), layer=uuid4())
    assert await everything(capped) != before
    await capped.release([*range(3), *range(126, 131), 200])
    assert await everything(capped) == before


async def test_the_sequence_moves_with_every_change_and_with_nothing_else(farm):
    await farm.burst(2)
    steps = {
        "booked": (farm.book([1, 2], capped=False), 1),
        "refused": (farm.book([3], capped=False), 0),
        "booked again": (farm.book([1, 2], capped=False), 0),
        "an unknown folder": (farm.book([4], capped=False, folder=uuid4()), None),
        "released": (farm.release([1]), 1),
        "released again": (farm.release([1]), 0),
        "changed": (farm.burst(3), 1),
        "recounted": (farm.recount(), None),
        "reseeded": (farm.live.sync_limits(farm.show), None),
        "flipped": (farm.flip(False), None),
    }
    for what, (step, moves) in steps.items():
        before = await farm.seq()
        await step
        moved = await farm.seq() - before
        assert moved == moves if moves is not None else moved > 0, what


async def test_force_asks_no_gpu_limit(capped):
    await capped.burst(0, gpus=0)
    await capped.cap_job(max_gpus=1)
    assert (await capped.book([1], gpus=5)).refusal.table == "subscription"
    assert (await capped.book([1], gpus=5, force=True)).booked == [1]
    assert await capped.count("job", "int_gpus") == "5"


async def test_half_cores_and_hundredths_meet_a_cap_exactly(capped):
    await capped.cap_job(max_cores="1.23")
    outcome = await capped.book(range(200), cores=1)
    assert (len(outcome.booked), outcome.refusal) == (123, Refusal(Level.JOB, Resource.CORES, 123, 123, 1))
    assert await capped.count("job") == "1.23"
    await capped.release(range(23))
    assert await capped.count("job") == "1"


async def test_the_last_tokens_there_are_lie_beside_others_without_being_mistaken(capped):
    last = 2**53 - 1
    groups = [capped.group(range(last - 40, last - 20), cores=1), capped.group([last - 3, last - 1, last], cores=2)]
    for what in ("booked", "already"):
        outcomes = await capped.books.book(capped.show, groups)
        assert [list(getattr(outcome, what)) for outcome in outcomes] == [list(group.tokens) for group in groups]
    assert await capped.release([*range(last - 40, last - 20), last - 1]) == [*range(last - 40, last - 20), last - 1]
    assert await capped.agrees()


async def test_a_recount_sums_shared_keys_over_jobs_and_jobs_over_pools_and_keeps_subscriptions_apart(capped):
    pool, job, layer = await another_pool(capped), uuid4(), uuid4()
    await capped.book([1], cores=100)
    await capped.book([2], cores=50, alloc=pool)
    await capped.book([3], cores=25, job=job, layer=layer)
    held = await capped.counters()
    names = await live_reader.names_in_use(capped.live.client, capped.keys)
    for name in names:
        if await capped.live.client.exists(capped.keys.counter_key(name)):
            await capped.live.client.hset(capped.keys.counter_key(name), mapping={"int_cores": "77", "int_gpus": "7"})
    found = await capped.recount()
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


async def test_a_recount_brings_drained_keys_to_0_and_leaves_others(capped):
    await capped.book([1], job=uuid4(), layer=uuid4())
    for name, thing in (("job", capped.job), ("layer", capped.layer)):
        await capped.live.client.hset(capped.keys.counter_key(f"{name}:{thing}"), "int_cores", "9")
    assert (await capped.recount()).drifted == {Level.JOB: 1, Level.LAYER: 1}
    assert [await capped.count(name) for name in LEVELS] == ["1", "1", "0", "0", "1"]
    assert (await capped.recount()).clean


async def test_a_row_whose_token_redis_lost_is_counted_again_and_told(farm):
    await farm.book([1, 2])
    await farm.live.publisher.release(farm.show, await farm.fence(), [farm.group([1])])
    assert await farm.count() == "1"
    healed = HEALED.labels("adopted")._value.get()
    assert (await farm.recount()).adopted == 1
    assert HEALED.labels("adopted")._value.get() == healed + 1
    assert await farm.agrees()


async def test_jobs_and_layers_without_limits_have_no_hash_and_the_audit_shows_what_they_hold(farm):
    await farm.book([1, 2], gpus=1)
    assert await farm.live.client.keys("acct:job:*") == await farm.live.client.keys("acct:layer:*") == []
    lines = {(line.level, line.id): line for line in (await farm.audit()).lines}
    for key in ((Level.JOB, farm.job), (Level.LAYER, farm.layer)):
        assert (lines[key].redis, lines[key].procs, lines[key].problem) == (Usage(200, 2), Usage(200, 2), None)


async def test_keys_of_finished_jobs_go_with_one_reseed_of_limits(capped):
    await capped.database.run(FINISH_JOB, capped.job)
    await capped.database.run(FINISH_LAYER, capped.layer)
    await capped.upkeep().reseed_limits()
    assert await capped.live.client.keys("acct:job:*") == await capped.live.client.keys("acct:layer:*") == []
    assert [name for name in await capped.hash(capped.keys.limits) if name.startswith(("job", "layer"))] == []


async def test_a_job_that_loses_its_limits_while_frames_hold_it_leaves_no_counter_behind(capped):
    await capped.book([1, 2])
    await capped.database.run(FINISH_JOB, capped.job)
    await capped.upkeep().reseed_limits()
    await capped.release([1])
    assert await capped.live.client.keys("acct:job:*") == []
    assert (await capped.audit()).ok
    await capped.release([2])
    assert await capped.agrees()


async def test_a_job_that_is_given_limits_again_counts_what_it_holds(capped):
    await capped.book(range(4))
    await capped.database.run(FINISH_JOB, capped.job)
    await capped.upkeep().reseed_limits()
    await capped.cap_job(max_cores=5)
    assert await capped.count("job") == "4"
    assert (await capped.book([5, 6])).booked == [5]


@pytest.mark.parametrize("caps", [{"max_cores": 6}, {"max_cores": -1}, {"max_gpus": 0}])
async def test_the_first_limits_of_a_running_job_count_all_its_frames_at_once(farm, caps):
    await farm.book(range(4), capped=False)
    await farm.cap_job(**caps)
    assert await farm.count("job") == "4"
    assert await farm.agrees()
    assert len((await farm.book(range(4, 9), capped=False)).booked) == (2 if caps == {"max_cores": 6} else 5)


async def test_a_share_that_was_removed_and_made_again_is_booked_at_once(farm):
    pool = await another_pool(farm)
    await farm.change("delete_subscription", "duck", "other")
    assert (await farm.book([1], alloc=pool)).refusal == Refusal(Level.SUBSCRIPTION, Resource.CORES, 0, 0, 100)
    await farm.change("create_subscription", "duck", "other", size=1, burst=2)
    assert (await farm.book(range(4), alloc=pool)).booked == [0, 1]
    assert (await farm.audit()).ok


async def test_what_is_tried_again_keeps_its_order(farm):
    late = farm.colleague(farm.live.client, remember_s=1e9)
    await farm.flip(False)
    assert not await late.is_managed(farm.show)
    await farm.flip(True)
    await farm.burst(2)
    assert (await farm.book([9, 4, 5, 1], by=late)).booked == [9, 4]


class Hours:
    """A clock that stands still."""

    def __init__(self):
        self.at_s = 1000.0

    def monotonic(self):
        return self.at_s

    def now_ms(self):
        return 1_700_000_000_000


async def test_own_changes_are_known_at_once_and_those_of_others_after_a_while(farm):
    clock = Hours()
    other = farm.colleague(farm.live.client, remember_s=30.0, clock=clock)
    assert await other.is_managed(farm.show)
    assert await farm.books.is_managed(farm.show)
    await farm.flip(False)
    assert not await farm.books.is_managed(farm.show)
    assert await other.is_managed(farm.show)
    clock.at_s += 31
    assert not await other.is_managed(farm.show)


async def test_an_old_memory_costs_a_round_trip_and_nothing_else(farm):
    other = farm.colleague(farm.live.client, remember_s=1e9)
    assert await other.is_managed(farm.show)
    await farm.flip(False)
    assert (await farm.book([1, 2], by=other)).booked == [1, 2]
    assert not await other.is_managed(farm.show)
    await farm.flip(True)
    assert await farm.book([2, 3], by=other) == outcome_of(already=[2], booked=[3])
    assert await farm.release([1, 2, 3], by=other) == [1, 2, 3]
    assert await farm.counters() == {}


async def test_managed_shows_are_read_at_first_and_told_as_a_copy(farm):
    other = await Farm(farm.books).make(managed=False, name="goose")
    fresh = farm.colleague(farm.live.client)
    assert (await fresh.is_managed(farm.show), await fresh.is_managed(other.show)) == (True, False)
    told = await fresh.managed_shows()
    assert list(told) == [farm.show]
    told.clear()
    assert await fresh.is_managed(farm.show)


async def test_a_show_is_not_booked_by_anybody_before_it_is_seeded(farm, monkeypatch):
    other = farm.colleague(farm.live.client)
    await farm.flip(False)
    await farm.burst(5)
    await farm.book(range(4))
    async with stopped(monkeypatch, allocations, "page_groups", farm.flip(True), after=True):
        assert (await farm.book([5, 6], by=other)).declined == {5: DeclineReason.UNSEEDED, 6: DeclineReason.UNSEEDED}
    assert (await farm.book([5, 6], by=other)).booked == [5]


async def test_a_flip_away_from_redis_stands_although_another_cannot_be_seeded(farm, monkeypatch):
    other = await Farm(farm.books).make(managed=False, name="goose")

    async def broken(*_, **__):
        raise ScriptFailed("The script is broken.")

    with monkeypatch.context() as patched:
        patched.setattr("rota.accounting.service.seed", broken)
        with pytest.raises(ScriptFailed):
            await other.flip(True)
    await farm.flip(False)
    assert (await farm.book([1])).booked == [1]
    assert (await other.book([2])).declined == {2: DeclineReason.UNSEEDED}
    await farm.upkeep().seed_lagging_shows()
    assert (await other.book([2])).booked == [2]


async def test_a_release_changes_the_tables_of_unmanaged_shows_alone(farm):
    other = await Farm(farm.books).make(managed=False, name="goose")
    await farm.book([1])
    await other.book([11])
    await farm.upkeep().recompute()
    await farm.release([1])
    await other.release([11])
    duck, goose = [await farm.books.transactional.counters(each.show) for each in (farm, other)]
    assert duck[Level.SUBSCRIPTION, farm.pool] == Usage(100)
    assert goose == {}


async def test_the_publisher_is_not_called_for_unmanaged_shows_nor_for_nothing(farm, monkeypatch):
    async def called(*_, **__):
        pytest.fail("nothing was released that Redis counts")

    monkeypatch.setattr(farm.live.publisher, "release", called)
    assert await farm.release([1, 2, 3]) == []
    await farm.flip(False)
    await farm.book([1])
    assert await farm.release([1, 2, 3]) == [1]


async def test_the_publisher_goes_on_when_redis_knows_no_script_any_more(farm):
    await farm.book(range(40), capped=False)
    loads = LOADS.labels("release")._value.get()
    await farm.live.client.script_flush()
    released = await asyncio.gather(*(farm.release([token]) for token in range(20)))
    booked = await asyncio.gather(*(farm.book([100 + token], capped=False) for token in range(20)))
    assert [token for tokens in released for token in tokens] == list(range(20))
    assert all(outcome.booked for outcome in booked)
    # Once, unless a test beside this one flushes the same server; test_redis_script.py counts alone.
    assert LOADS.labels("release")._value.get() > loads
    assert await farm.agrees()


async def test_an_error_of_the_publisher_is_counted_told_and_swallowed(farm, monkeypatch):
    await farm.book(range(3))
    failed = FAILED._value.get()

    async def broken(*_, **__):
        raise ScriptFailed("The script is broken.")

    with monkeypatch.context() as patched, capture_logs() as logged:
        patched.setattr(type(RELEASE), "__call__", broken)
        assert await farm.release([0, 1]) == [0, 1]
    assert FAILED._value.get() == failed + 2
    assert [line["event"] for line in logged if line["log_level"] == "warning"] == ["release_publish_failed"]
    assert (await farm.recount()).released == 2
    assert await farm.agrees()


async def test_releases_that_redis_missed_are_told_when_it_is_back(farm, monkeypatch):
    await farm.book(range(5))

    async def away(*_, **__):
        raise RedisUnavailable("Redis is away: wait.")

    with monkeypatch.context() as patched:
        patched.setattr(type(RELEASE), "__call__", away)
        assert await farm.release([0, 1]) == [0, 1]
        assert await farm.release([3]) == [3]
        assert not await farm.live.publisher.flush_pending()
    assert not await farm.agrees()
    assert await farm.live.publisher.flush_pending()
    assert await farm.agrees()
    assert await farm.live.publisher.flush_pending(), "there is nothing left to tell"

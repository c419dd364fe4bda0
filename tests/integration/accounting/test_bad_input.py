"""Invalid input is refused by the live and the transactional ledger alike, and changes nothing."""

from uuid import uuid4

import pytest

from rota.accounting.ledger import BATCH_MAX, GPUS_MAX, DeclineReason
from rota.accounting.resources import CapsUpdate
from rota.accounting.service import AccountingService
from rota.model.errors import InvalidInput, Refused
from rota.model.quota import Level, Refusal, Resource
from rota.model.units import CENTICORES_MAX
from tests.contract.ledger_suite import outcome_of
from tests.integration.accounting.accounting_support import ShowQuota


@pytest.fixture(params=[True, False], ids=["managed", "unmanaged"])
async def quota(request, database, redis):
    quota = await ShowQuota(AccountingService(database, redis)).make(burst=6, managed=request.param)
    quota.managed = request.param
    return quota


async def counters(quota):
    return await quota.counters() if quota.managed else await quota.accounting.transactional.counters(quota.show)


async def test_booking_for_an_unknown_show_is_declined(quota):
    [outcome] = await quota.accounting.book(uuid4(), [quota.group([1])])
    assert outcome.declined == {1: DeclineReason.UNKNOWN_SHOW}
    assert await quota.accounting.release(uuid4(), [1]) == []


@pytest.mark.parametrize(
    ("field", "why"), [("folder", DeclineReason.UNKNOWN_FOLDER), ("dept", DeclineReason.UNKNOWN_DEPT)]
)
async def test_booking_with_unknown_folder_or_department_is_declined_and_the_rest_booked(quota, field, why):
    lost, good = await quota.accounting.book(quota.show, [quota.group([1], **{field: uuid4()}), quota.group([2])])
    assert (dict(lost.declined), list(good.booked)) == ({1: why}, [2])
    assert await counters(quota) == await quota.held()


async def test_booking_on_a_folder_of_another_show_is_declined(quota):
    other = await ShowQuota(quota.accounting).make(name="goose", managed=quota.managed)
    await other.book([11], cores=30)
    assert (await quota.book([1], folder=other.folder)).declined == {1: DeclineReason.UNKNOWN_FOLDER}
    assert (await quota.book([1], folder=other.folder, force=True)).declined == {1: DeclineReason.UNKNOWN_FOLDER}
    assert await quota.tokens() == []
    await other.cap_folder(CapsUpdate(max_cores="0.3"))
    assert (await other.book([12], cores=1)).refusal == Refusal(Level.FOLDER, Resource.CORES, 30, 30, 1)


async def test_negative_or_absurd_booking_is_refused(quota):
    for tokens, cores, gpus in (
        ([1], -100, 0),
        ([1], 100, -1),
        ([1], 0, 0),
        ([1], CENTICORES_MAX + 1, 0),
        ([1], 100, GPUS_MAX + 1),
        ([1], 2**70, 0),
        ([1, 1], 100, 0),
        ([-1], 100, 0),
        ([2**53], 100, 0),
        ([2**70], 100, 0),
        (range(BATCH_MAX + 1), 100, 0),
    ):
        with pytest.raises(InvalidInput):
            await quota.book(tokens, cores, gpus)
    assert (await quota.tokens(), await counters(quota)) == ([], {})


async def test_release_of_invalid_tokens_is_refused(quota):
    await quota.book([1])
    for tokens in ([-1], [2**53], [2**70], [1, -(2**70)], range(2**53 - 1, 2**53 + 1)):
        with pytest.raises(InvalidInput, match="token"):
            await quota.release(tokens)
    assert await quota.tokens() == [1]


async def test_largest_booking_fits_the_largest_burst_exactly(quota):
    await quota.burst(CENTICORES_MAX / 100, gpus=GPUS_MAX)
    assert (await quota.book([2**53 - 1], cores=CENTICORES_MAX, gpus=GPUS_MAX)).booked == [2**53 - 1]
    refusal = Refusal(Level.SUBSCRIPTION, Resource.CORES, CENTICORES_MAX, CENTICORES_MAX, 1)
    assert (await quota.book([1], cores=1)).refusal == refusal
    assert await counters(quota) == await quota.held()


async def test_cap_below_use_admits_nothing_until_enough_frames_ended(quota):
    await quota.book(range(5))
    await quota.burst(2)
    for ended in range(4):
        assert (await quota.book([10 + ended])).refusal == Refusal(
            Level.SUBSCRIPTION, Resource.CORES, 500 - 100 * ended, 200, 100
        )
        await quota.release([ended])
    assert (await quota.book([20, 21])).booked == [20]


async def test_resource_with_running_frames_cannot_be_deleted(quota):
    await quota.book(range(3))
    for action, *names in (
        ("delete_show", "duck"),
        ("delete_folder", "duck", "shots"),
        ("delete_subscription", "duck", "duck-main"),
        ("delete_point", "duck", "duck-fx"),
    ):
        with pytest.raises(Refused, match="3 frames run"):
            await quota.change(action, *names)
    assert (await quota.book([3])).booked == [3]
    await quota.release(range(4))
    await quota.change("delete_folder", "duck", "shots")
    assert (await quota.book([4])).declined == {4: DeclineReason.UNKNOWN_FOLDER}


async def test_deleted_show_leaves_no_keys_in_redis(quota):
    await quota.book([1])
    await quota.release([1])
    await quota.change("delete_show", "duck")
    assert [key for key in await quota.live.client.keys("acct:*") if key != b"acct:seq"] == []
    assert (await quota.book([2])).declined == {2: DeclineReason.UNKNOWN_SHOW}


async def test_invalid_changes_change_nothing(quota):
    before = await quota.fence(), await quota.hash(quota.keys.counter_key(f"sub:{quota.pool}"))
    for action, args, more in (
        ("set_managed", ("dukc", True), {}),
        ("change_subscription", ("duck", "mian"), {"burst": 1}),
        ("change_folder", ("duck", "shot", CapsUpdate(max_cores=1)), {}),
        ("change_point", ("duck", "f", CapsUpdate(max_cores=1)), {}),
        ("change_job", ("duck", uuid4()), {"max_cores": 1}),
        ("change_layer", ("duck", uuid4()), {"max_cores": 1}),
        ("change_subscription", ("duck", "duck-main"), {"burst": -1}),
        ("change_subscription", ("duck", "duck-main"), {"burst": "1e9"}),
        ("change_subscription", ("duck", "duck-main"), {"gpu_burst": -2}),
        ("change_folder", ("duck", "shots", CapsUpdate(min_cores=5, max_cores=4)), {}),
        ("create_folder", ("duck", "a b"), {}),
    ):
        with pytest.raises(InvalidInput):
            await quota.change(action, *args, **more)
    assert (await quota.fence(), await quota.hash(quota.keys.counter_key(f"sub:{quota.pool}"))) == before


async def test_empty_batch_changes_nothing(quota):
    assert await quota.accounting.book(quota.show, []) == []
    assert await quota.book([]) == outcome_of()
    assert await quota.release([]) == []

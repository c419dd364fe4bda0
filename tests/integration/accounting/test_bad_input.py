"""What makes no sense is told as such, by Redis's ledger and PostgreSQL's alike, and changes nothing."""

from uuid import uuid4

import pytest

from rota.accounting.ledger import BATCH_MAX, GPUS_MAX, DeclineReason
from rota.accounting.resources import CapsUpdate
from rota.accounting.service import AccountingService
from rota.model.errors import InvalidInput, Refused
from rota.model.quota import Level, Refusal, Resource
from rota.model.units import CENTICORES_MAX
from tests.contract.ledger_suite import outcome_of
from tests.integration.accounting.accounting_support import Farm


@pytest.fixture(params=[True, False], ids=["managed", "unmanaged"])
async def farm(request, database, redis):
    farm = await Farm(AccountingService(database, redis)).make(burst=6, managed=request.param)
    farm.managed = request.param
    return farm


async def counters(farm):
    return await farm.counters() if farm.managed else await farm.books.transactional.counters(farm.show)


async def test_an_unknown_show_is_declined(farm):
    [outcome] = await farm.books.book(uuid4(), [farm.group([1])])
    assert outcome.declined == {1: DeclineReason.UNKNOWN_SHOW}
    assert await farm.books.release(uuid4(), [1]) == []


@pytest.mark.parametrize(
    ("field", "why"), [("folder", DeclineReason.UNKNOWN_FOLDER), ("dept", DeclineReason.UNKNOWN_DEPT)]
)
async def test_an_unknown_folder_or_department_is_declined_and_the_rest_booked(farm, field, why):
    lost, good = await farm.books.book(farm.show, [farm.group([1], **{field: uuid4()}), farm.group([2])])
    assert (dict(lost.declined), list(good.booked)) == ({1: why}, [2])
    assert await counters(farm) == await farm.held()


async def test_a_folder_of_another_show_is_declined(farm):
    other = await Farm(farm.books).make(name="goose", managed=farm.managed)
    await other.book([11], cores=30)
    assert (await farm.book([1], folder=other.folder)).declined == {1: DeclineReason.UNKNOWN_FOLDER}
    assert (await farm.book([1], folder=other.folder, force=True)).declined == {1: DeclineReason.UNKNOWN_FOLDER}
    assert await farm.tokens() == []
    await other.cap_folder(CapsUpdate(max_cores="0.3"))
    assert (await other.book([12], cores=1)).refusal == Refusal(Level.FOLDER, Resource.CORES, 30, 30, 1)


async def test_negative_and_absurd_asks_are_refused(farm):
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
            await farm.book(tokens, cores, gpus)
    assert (await farm.tokens(), await counters(farm)) == ([], {})


async def test_tokens_that_cannot_be_are_not_released(farm):
    await farm.book([1])
    for tokens in ([-1], [2**53], [2**70], [1, -(2**70)], range(2**53 - 1, 2**53 + 1)):
        with pytest.raises(InvalidInput, match="token"):
            await farm.release(tokens)
    assert await farm.tokens() == [1]


async def test_the_largest_ask_fits_the_largest_burst_exactly(farm):
    await farm.burst(CENTICORES_MAX / 100, gpus=GPUS_MAX)
    assert (await farm.book([2**53 - 1], cores=CENTICORES_MAX, gpus=GPUS_MAX)).booked == [2**53 - 1]
    refusal = Refusal(Level.SUBSCRIPTION, Resource.CORES, CENTICORES_MAX, CENTICORES_MAX, 1)
    assert (await farm.book([1], cores=1)).refusal == refusal
    assert await counters(farm) == await farm.held()


async def test_a_cap_below_use_adds_nothing_until_enough_ended(farm):
    await farm.book(range(5))
    await farm.burst(2)
    for ended in range(4):
        assert (await farm.book([10 + ended])).refusal == Refusal(
            Level.SUBSCRIPTION, Resource.CORES, 500 - 100 * ended, 200, 100
        )
        await farm.release([ended])
    assert (await farm.book([20, 21])).booked == [20]


async def test_what_has_frames_is_not_deleted(farm):
    await farm.book(range(3))
    for action, *names in (
        ("delete_show", "duck"),
        ("delete_folder", "duck", "shots"),
        ("delete_subscription", "duck", "duck-main"),
        ("delete_point", "duck", "duck-fx"),
    ):
        with pytest.raises(Refused, match="3 frames run"):
            await farm.change(action, *names)
    assert (await farm.book([3])).booked == [3]
    await farm.release(range(4))
    await farm.change("delete_folder", "duck", "shots")
    assert (await farm.book([4])).declined == {4: DeclineReason.UNKNOWN_FOLDER}


async def test_a_deleted_show_leaves_nothing_in_redis(farm):
    await farm.book([1])
    await farm.release([1])
    await farm.change("delete_show", "duck")
    assert [key for key in await farm.live.client.keys("acct:*") if key != b"acct:seq"] == []
    assert (await farm.book([2])).declined == {2: DeclineReason.UNKNOWN_SHOW}


async def test_changes_that_make_no_sense_change_nothing_anywhere(farm):
    before = await farm.fence(), await farm.hash(farm.keys.counter_key(f"sub:{farm.pool}"))
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
            await farm.change(action, *args, **more)
    assert (await farm.fence(), await farm.hash(farm.keys.counter_key(f"sub:{farm.pool}"))) == before


async def test_an_empty_batch_is_nothing(farm):
    assert await farm.books.book(farm.show, []) == []
    assert await farm.book([]) == outcome_of()
    assert await farm.release([]) == []

"""Changing what shows may use: names, limits, fences, versions and the audit trail."""

import asyncio
import json
from uuid import uuid4

import pytest

from rota.accounting import allocations
from rota.accounting.admin import QuotaAdmin
from rota.accounting.ledger import BookingGroup, Charge, DeclineReason
from rota.accounting.resources import CapsUpdate
from rota.accounting.transactional import TransactionalLedger
from rota.infra import audit
from rota.model.errors import InvalidInput, Refused
from tests.contract.ledger_suite import sql

TRAIL = sql("SELECT actor, action, target, detail FROM rota.audit ORDER BY seq")


class By:
    """An `Admin` whose every change is made by ann."""

    def __init__(self, admin):
        self.admin = admin

    def __getattr__(self, name):
        method = getattr(self.admin, name)
        changes = name.startswith(("create", "rename", "change", "delete", "set"))
        return (lambda *args, **more: method(*args, actor="ann", **more)) if changes else method


@pytest.fixture
def ann(database):
    return By(QuotaAdmin(database))


@pytest.fixture
async def farm(ann):
    """A show with a share of a pool, a folder and a department."""
    await ann.create_show("duck")
    await ann.create_pool("main")
    await ann.create_dept("fx")
    await ann.create_subscription("duck", "main", size=10, burst=20)
    await ann.create_folder("duck", "shots")
    await ann.create_point("duck", "fx")
    return ann


async def trail(database):
    return [
        (row["actor"], row["action"], row["target"], json.loads(row["detail"])) for row in await database.rows(TRAIL)
    ]


async def charge_in(ann, cores=100):
    [pool], [folder], [dept] = await ann.subscriptions("duck"), await ann.folders("duck"), await ann.points("duck")
    show = await ann.show("duck")
    return Charge(pool.id, folder.id, show.id, show.id, dept.id, cores)


async def book(ann, tokens, cores=100):
    show = await ann.show("duck")
    group = BookingGroup(await charge_in(ann, cores), show.id, tokens)
    [outcome] = await TransactionalLedger(ann.admin.database).book(show.id, [group])
    return outcome


async def test_a_new_show_is_unmanaged_and_can_be_used_at_once(farm):
    show = await farm.show("duck")
    assert (show.managed, show.fence) == (False, 1)
    assert len((await book(farm, range(30))).booked) == 20


async def test_limits_are_given_in_cores_and_kept_in_hundredths(farm):
    await farm.change_subscription("duck", "main", size="2.5", burst=7.25, gpu_burst=3)
    change = await farm.change_folder("duck", "shots", CapsUpdate(min_cores=1, max_cores="12.5", max_gpus=-1))
    [share] = await farm.subscriptions("duck")
    assert share.limits == {"int_size": 250, "int_burst": 725, "int_gpu_burst": 3}
    expected = {"int_min_cores": 100, "int_max_cores": 1250, "int_min_gpus": 0, "int_max_gpus": -1}
    assert change.after.limits == expected


async def test_what_is_not_given_is_kept(farm):
    await farm.change_point("duck", "fx", CapsUpdate(max_cores=8, min_gpus=1))
    change = await farm.change_point("duck", "fx", CapsUpdate(max_gpus=4))
    assert change.after.limits == {"int_min_cores": 0, "int_max_cores": 800, "int_min_gpus": 1, "int_max_gpus": 4}
    assert change.before.limits["int_max_gpus"] == -1


async def test_lowering_any_cap_raises_the_fence_and_raising_it_does_not(farm):
    changes = [
        await farm.change_subscription("duck", "main", burst=15),
        await farm.change_subscription("duck", "main", burst=30),
        await farm.change_subscription("duck", "main", size=3),
        await farm.change_subscription("duck", "main", gpu_burst=0),
        await farm.change_folder("duck", "shots", CapsUpdate(max_cores=10)),
        await farm.change_folder("duck", "shots", CapsUpdate(max_cores=0)),
        await farm.change_folder("duck", "shots", CapsUpdate(min_cores=5)),
        await farm.change_point("duck", "fx", CapsUpdate(max_gpus=1)),
        await farm.change_point("duck", "fx", CapsUpdate(max_gpus=-1)),
    ]
    assert [change.show.fence for change in changes] == [2, 2, 2, 3, 4, 4, 4, 5, 5]


async def test_every_change_has_a_higher_version_also_when_a_thing_is_removed_and_made_again(farm):
    changes = [
        await farm.change_subscription("duck", "main", burst=15),
        await farm.delete_subscription("duck", "main"),
        await farm.create_subscription("duck", "main", size=1, burst=1),
        await farm.change_folder("duck", "shots", CapsUpdate(max_cores=10)),
        await farm.rename_show("duck", "drake"),
    ]
    versions = [change.version for change in changes]
    assert versions == sorted(set(versions))


async def test_a_booking_made_under_the_old_cap_cannot_be_inserted_after_it_was_lowered(farm):
    change = await farm.set_managed("duck", True)
    group = BookingGroup(await charge_in(farm), change.show.id, [1])
    lowered = await farm.change_folder("duck", "shots", CapsUpdate(max_cores=1))
    told = await allocations.insert(farm.admin.database, change.show.id, change.show.fence, [group])
    assert told.refused == {1: DeclineReason.STALE_FENCE}
    assert not (await allocations.insert(farm.admin.database, change.show.id, lowered.show.fence, [group])).refused


async def test_caps_of_jobs_and_layers_can_be_changed(farm):
    await book(farm, [1])
    show = await farm.show("duck")
    change = await farm.change_job("duck", show.id, max_cores=1)
    assert (change.after.limits, change.show.fence) == ({"int_max_cores": 100, "int_max_gpus": -1}, 2)
    assert (await book(farm, [2])).refusal.table == "job"
    await farm.change_job("duck", show.id, max_cores=-1)
    await farm.change_layer("duck", show.id, max_cores="1.5")
    assert (await book(farm, [2])).refusal.table == "layer"


async def test_the_flag_can_be_set_both_ways_and_again(farm):
    there = await farm.set_managed("duck", True)
    assert (there.before.managed, there.after.managed, there.show.fence) == (False, True, 2)
    again = await farm.set_managed("duck", True)
    assert again.show.fence == 2
    back = await farm.set_managed("duck", False)
    assert (back.after.managed, back.show.fence) == (False, 3)
    assert [action for _, action, _, _ in (await trail(farm.admin.database))[-2:]] == ["show.set_managed"] * 2


async def test_a_raised_fence_is_told(farm):
    show = await farm.show("duck")
    assert await farm.raise_fence(show.id) == 2
    with pytest.raises(InvalidInput, match="deleted"):
        await farm.raise_fence(uuid4())


async def test_nothing_with_procs_is_deleted(farm):
    await book(farm, range(3))
    for delete in (
        farm.delete_show("duck"),
        farm.delete_folder("duck", "shots"),
        farm.delete_subscription("duck", "main"),
        farm.delete_point("duck", "fx"),
    ):
        with pytest.raises(Refused, match="3 frames run"):
            await delete
    for delete in (farm.delete_pool("main"), farm.delete_dept("fx")):
        with pytest.raises(Refused, match=r"\(duck\)"):
            await delete
    show = await farm.show("duck")
    await TransactionalLedger(farm.admin.database).release(show.id, range(3))
    await farm.delete_folder("duck", "shots")
    change = await farm.delete_show("duck")
    assert (change.show, change.after, change.before.name) == (None, None, "duck")
    await farm.delete_pool("main")
    await farm.delete_dept("fx")
    assert await farm.shows() == await farm.pools() == await farm.depts() == []


async def test_removing_a_share_raises_the_fence_since_redis_may_have_booked_on_it(farm):
    assert (await farm.delete_subscription("duck", "main")).show.fence == 2
    assert (await farm.delete_folder("duck", "shots")).show.fence == 3
    assert (await farm.delete_point("duck", "fx")).show.fence == 4


async def test_things_can_be_renamed(farm):
    await farm.rename_show("duck", "drake")
    await farm.rename_pool("main", "big")
    await farm.rename_dept("fx", "sims")
    change = await farm.rename_folder("drake", "shots", "assets")
    assert (change.before.name, change.after.name) == ("shots", "assets")
    assert [share.name for share in await farm.subscriptions("drake")] == ["big"]
    assert [point.name for point in await farm.points("drake")] == ["sims"]


async def test_a_name_nobody_knows_is_answered_with_the_nearest(farm):
    for call, nearest in (
        (farm.delete_show("dukc"), "duck"),
        (farm.folders("dck"), "duck"),
        (farm.change_folder("duck", "shot", CapsUpdate(max_cores=1)), "shots"),
        (farm.create_subscription("duck", "mian", size=1, burst=1), "main"),
        (farm.create_point("duck", "f", caps=None), "fx"),
        (farm.change_subscription("duck", "mainn", burst=1), "main"),
    ):
        with pytest.raises(InvalidInput, match=f"did you mean {nearest}"):
            await call
    with pytest.raises(InvalidInput, match="there are duck"):
        await farm.show("zzz")


async def test_a_name_that_is_taken_is_refused(farm):
    for call in (
        farm.create_show("duck"),
        farm.create_pool("main"),
        farm.create_folder("duck", "shots"),
        farm.create_subscription("duck", "main", size=1, burst=1),
        farm.create_point("duck", "fx"),
    ):
        with pytest.raises(InvalidInput, match="already"):
            await call


@pytest.mark.parametrize("name", ["", " ", "a b", "x" * 65, "a/b", "-a", "ä", "a\0b", "a:b"])
async def test_names_that_cannot_be_typed_safely_are_refused(ann, name):
    with pytest.raises(InvalidInput, match="cannot be the name"):
        await ann.create_show(name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"burst": -1},
        {"size": -1},
        {"burst": "many"},
        {"burst": 1e12},
        {"size": 0.001},
        {"gpu_burst": -2},
        {"gpu_burst": 2**40},
        {"gpu_burst": 1.5},
        {"gpu_burst": True},
    ],
)
async def test_negative_and_absurd_limits_are_refused(farm, wrong):
    before = await farm.subscriptions("duck")
    with pytest.raises(InvalidInput):
        await farm.change_subscription("duck", "main", **wrong)
    assert await farm.subscriptions("duck") == before


@pytest.mark.parametrize(
    "caps",
    [
        CapsUpdate(max_cores=-2),
        CapsUpdate(min_cores=-1),
        CapsUpdate(min_gpus=-1),
        CapsUpdate(max_gpus="4"),
        CapsUpdate(min_cores=5, max_cores=4),
    ],
)
async def test_caps_that_make_no_sense_are_refused(farm, caps):
    with pytest.raises(InvalidInput):
        await farm.change_folder("duck", "shots", caps)
    assert (await farm.folders("duck"))[0].limits["int_max_cores"] == -1


async def test_every_change_is_in_the_trail_with_what_was_before_and_after(farm):
    await farm.change_subscription("duck", "main", burst="7.5")
    database = farm.admin.database
    actor, action, target, detail = (await trail(database))[-1]
    assert (actor, action, target) == ("ann", "subscription.change", "subscription:duck/main")
    assert detail["before"] == {"name": "main", "int_size": "10", "int_burst": "20", "int_gpu_burst": -1}
    assert detail["after"] == detail["before"] | {"int_burst": "7.5"}
    assert [entry[1] for entry in await trail(database)][:3] == ["show.create", "pool.create", "dept.create"]
    assert (await audit.verify(database)).ok


async def test_what_is_refused_and_what_changes_nothing_is_not_in_the_trail(farm):
    entries = len(await trail(farm.admin.database))
    with pytest.raises(InvalidInput):
        await farm.change_folder("duck", "shots", CapsUpdate(min_cores=5, max_cores=4))
    await farm.change_folder("duck", "shots", CapsUpdate(max_cores=-1))
    await farm.set_managed("duck", False)
    assert len(await trail(farm.admin.database)) == entries


async def test_changes_and_bookings_at_once_neither_deadlock_nor_pass_a_cap(farm):
    show = await farm.show("duck")
    group = await charge_in(farm)
    ledger = TransactionalLedger(farm.admin.database)
    await farm.change_subscription("duck", "main", burst=6)

    async def booker(number):
        for turn in range(20):
            first = (number * 100 + turn) * 10
            await ledger.book(show.id, [BookingGroup(group, show.id, range(first, first + 3))])
            await ledger.release(show.id, [first])

    async def changer():
        for turn in range(12):
            await farm.change_folder("duck", "shots", CapsUpdate(max_cores=5 + turn % 3))
            await farm.change_subscription("duck", "main", burst=6 + turn % 2)

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(booker(number))
        tasks.create_task(changer())
    counters = await ledger.counters(show.id)
    assert max(usage.cores for usage in counters.values()) <= 700
    assert await ledger.recompute(show.id) == {}

"""Changes of shows, pools and limits: names, limits, fences, versions and the audit log."""

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

AUDIT_ENTRIES = sql("SELECT actor, action, target, detail FROM rota.audit ORDER BY seq")


class AdminAsAnn:
    """A `QuotaAdmin` that makes every change as ann."""

    def __init__(self, admin):
        self.admin = admin

    def __getattr__(self, name):
        method = getattr(self.admin, name)
        changes = name.startswith(("create", "rename", "change", "delete", "set"))
        return (lambda *args, **more: method(*args, actor="ann", **more)) if changes else method


@pytest.fixture
def ann(database):
    return AdminAsAnn(QuotaAdmin(database))


@pytest.fixture
async def quota(ann):
    """A show with a subscription, a folder and a department."""
    await ann.create_show("duck")
    await ann.create_pool("main")
    await ann.create_dept("fx")
    await ann.create_subscription("duck", "main", size=10, burst=20)
    await ann.create_folder("duck", "shots")
    await ann.create_point("duck", "fx")
    return ann


async def audit_entries(database):
    return [
        (row["actor"], row["action"], row["target"], json.loads(row["detail"]))
        for row in await database.rows(AUDIT_ENTRIES)
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


async def test_new_show_is_unmanaged_and_usable_immediately(quota):
    show = await quota.show("duck")
    assert (show.managed, show.fence) == (False, 1)
    assert len((await book(quota, range(30))).booked) == 20


async def test_limits_are_given_in_cores_and_stored_in_centicores(quota):
    await quota.change_subscription("duck", "main", size="2.5", burst=7.25, gpu_burst=3)
    change = await quota.change_folder("duck", "shots", CapsUpdate(min_cores=1, max_cores="12.5", max_gpus=-1))
    [subscription] = await quota.subscriptions("duck")
    assert subscription.limits == {"int_size": 250, "int_burst": 725, "int_gpu_burst": 3}
    expected = {"int_min_cores": 100, "int_max_cores": 1250, "int_min_gpus": 0, "int_max_gpus": -1}
    assert change.after.limits == expected


async def test_omitted_limits_are_unchanged(quota):
    await quota.change_point("duck", "fx", CapsUpdate(max_cores=8, min_gpus=1))
    change = await quota.change_point("duck", "fx", CapsUpdate(max_gpus=4))
    assert change.after.limits == {"int_min_cores": 0, "int_max_cores": 800, "int_min_gpus": 1, "int_max_gpus": 4}
    assert change.before.limits["int_max_gpus"] == -1


async def test_lowering_a_cap_raises_the_fence_and_raising_it_does_not(quota):
    changes = [
        await quota.change_subscription("duck", "main", burst=15),
        await quota.change_subscription("duck", "main", burst=30),
        await quota.change_subscription("duck", "main", size=3),
        await quota.change_subscription("duck", "main", gpu_burst=0),
        await quota.change_folder("duck", "shots", CapsUpdate(max_cores=10)),
        await quota.change_folder("duck", "shots", CapsUpdate(max_cores=0)),
        await quota.change_folder("duck", "shots", CapsUpdate(min_cores=5)),
        await quota.change_point("duck", "fx", CapsUpdate(max_gpus=1)),
        await quota.change_point("duck", "fx", CapsUpdate(max_gpus=-1)),
    ]
    assert [change.show.fence for change in changes] == [2, 2, 2, 3, 4, 4, 4, 5, 5]


async def test_every_change_has_a_higher_version_even_after_delete_and_create(quota):
    changes = [
        await quota.change_subscription("duck", "main", burst=15),
        await quota.delete_subscription("duck", "main"),
        await quota.create_subscription("duck", "main", size=1, burst=1),
        await quota.change_folder("duck", "shots", CapsUpdate(max_cores=10)),
        await quota.rename_show("duck", "drake"),
    ]
    versions = [change.version for change in changes]
    assert versions == sorted(set(versions))


async def test_booking_under_the_old_cap_cannot_be_inserted_after_the_cap_was_lowered(quota):
    change = await quota.set_managed("duck", True)
    group = BookingGroup(await charge_in(quota), change.show.id, [1])
    lowered = await quota.change_folder("duck", "shots", CapsUpdate(max_cores=1))
    result = await allocations.insert(quota.admin.database, change.show.id, change.show.fence, [group])
    assert result.refused == {1: DeclineReason.STALE_FENCE}
    assert not (await allocations.insert(quota.admin.database, change.show.id, lowered.show.fence, [group])).refused


async def test_job_and_layer_caps_can_be_changed(quota):
    await book(quota, [1])
    show = await quota.show("duck")
    change = await quota.change_job("duck", show.id, max_cores=1)
    assert (change.after.limits, change.show.fence) == ({"int_max_cores": 100, "int_max_gpus": -1}, 2)
    assert (await book(quota, [2])).refusal.table == "job"
    await quota.change_job("duck", show.id, max_cores=-1)
    await quota.change_layer("duck", show.id, max_cores="1.5")
    assert (await book(quota, [2])).refusal.table == "layer"


async def test_managed_flag_can_be_set_both_ways_and_repeatedly(quota):
    there = await quota.set_managed("duck", True)
    assert (there.before.managed, there.after.managed, there.show.fence) == (False, True, 2)
    again = await quota.set_managed("duck", True)
    assert again.show.fence == 2
    back = await quota.set_managed("duck", False)
    assert (back.after.managed, back.show.fence) == (False, 3)
    assert [action for _, action, _, _ in (await audit_entries(quota.admin.database))[-2:]] == ["show.set_managed"] * 2


async def test_raise_fence_returns_the_new_fence(quota):
    show = await quota.show("duck")
    assert await quota.raise_fence(show.id) == 2
    with pytest.raises(InvalidInput, match="deleted"):
        await quota.raise_fence(uuid4())


async def test_resource_with_procs_cannot_be_deleted(quota):
    await book(quota, range(3))
    for delete in (
        quota.delete_show("duck"),
        quota.delete_folder("duck", "shots"),
        quota.delete_subscription("duck", "main"),
        quota.delete_point("duck", "fx"),
    ):
        with pytest.raises(Refused, match="3 frames run"):
            await delete
    for delete in (quota.delete_pool("main"), quota.delete_dept("fx")):
        with pytest.raises(Refused, match=r"\(duck\)"):
            await delete
    show = await quota.show("duck")
    await TransactionalLedger(quota.admin.database).release(show.id, range(3))
    await quota.delete_folder("duck", "shots")
    change = await quota.delete_show("duck")
    assert (change.show, change.after, change.before.name) == (None, None, "duck")
    await quota.delete_pool("main")
    await quota.delete_dept("fx")
    assert await quota.shows() == await quota.pools() == await quota.depts() == []


async def test_deleting_a_subscription_folder_or_point_raises_the_fence(quota):
    assert (await quota.delete_subscription("duck", "main")).show.fence == 2
    assert (await quota.delete_folder("duck", "shots")).show.fence == 3
    assert (await quota.delete_point("duck", "fx")).show.fence == 4


async def test_resources_can_be_renamed(quota):
    await quota.rename_show("duck", "drake")
    await quota.rename_pool("main", "big")
    await quota.rename_dept("fx", "sims")
    change = await quota.rename_folder("drake", "shots", "assets")
    assert (change.before.name, change.after.name) == ("shots", "assets")
    assert [subscription.name for subscription in await quota.subscriptions("drake")] == ["big"]
    assert [point.name for point in await quota.points("drake")] == ["sims"]


async def test_unknown_name_is_refused_with_the_nearest_match(quota):
    for call, nearest in (
        (quota.delete_show("dukc"), "duck"),
        (quota.folders("dck"), "duck"),
        (quota.change_folder("duck", "shot", CapsUpdate(max_cores=1)), "shots"),
        (quota.create_subscription("duck", "mian", size=1, burst=1), "main"),
        (quota.create_point("duck", "f", caps=None), "fx"),
        (quota.change_subscription("duck", "mainn", burst=1), "main"),
    ):
        with pytest.raises(InvalidInput, match=f"did you mean {nearest}"):
            await call
    with pytest.raises(InvalidInput, match="there are duck"):
        await quota.show("zzz")


async def test_duplicate_name_is_refused(quota):
    for call in (
        quota.create_show("duck"),
        quota.create_pool("main"),
        quota.create_folder("duck", "shots"),
        quota.create_subscription("duck", "main", size=1, burst=1),
        quota.create_point("duck", "fx"),
    ):
        with pytest.raises(InvalidInput, match="already"):
            await call


@pytest.mark.parametrize("name", ["", " ", "a b", "x" * 65, "a/b", "-a", "ä", "a\0b", "a:b"])
async def test_invalid_name_is_refused(ann, name):
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
async def test_negative_or_absurd_limit_is_refused(quota, wrong):
    before = await quota.subscriptions("duck")
    with pytest.raises(InvalidInput):
        await quota.change_subscription("duck", "main", **wrong)
    assert await quota.subscriptions("duck") == before


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
async def test_inconsistent_caps_are_refused(quota, caps):
    with pytest.raises(InvalidInput):
        await quota.change_folder("duck", "shots", caps)
    assert (await quota.folders("duck"))[0].limits["int_max_cores"] == -1


async def test_every_change_is_audited_with_its_values_before_and_after(quota):
    await quota.change_subscription("duck", "main", burst="7.5")
    database = quota.admin.database
    actor, action, target, detail = (await audit_entries(database))[-1]
    assert (actor, action, target) == ("ann", "subscription.change", "subscription:duck/main")
    assert detail["before"] == {"name": "main", "int_size": "10", "int_burst": "20", "int_gpu_burst": -1}
    assert detail["after"] == detail["before"] | {"int_burst": "7.5"}
    assert [entry[1] for entry in await audit_entries(database)][:3] == ["show.create", "pool.create", "dept.create"]
    assert (await audit.verify(database)).ok


async def test_refused_or_ineffective_change_is_not_audited(quota):
    entries = len(await audit_entries(quota.admin.database))
    with pytest.raises(InvalidInput):
        await quota.change_folder("duck", "shots", CapsUpdate(min_cores=5, max_cores=4))
    await quota.change_folder("duck", "shots", CapsUpdate(max_cores=-1))
    await quota.set_managed("duck", False)
    assert len(await audit_entries(quota.admin.database)) == entries


async def test_concurrent_changes_and_bookings_neither_deadlock_nor_exceed_a_cap(quota):
    show = await quota.show("duck")
    group = await charge_in(quota)
    ledger = TransactionalLedger(quota.admin.database)
    await quota.change_subscription("duck", "main", burst=6)

    async def booker(number):
        for turn in range(20):
            first = (number * 100 + turn) * 10
            await ledger.book(show.id, [BookingGroup(group, show.id, range(first, first + 3))])
            await ledger.release(show.id, [first])

    async def changer():
        for turn in range(12):
            await quota.change_folder("duck", "shots", CapsUpdate(max_cores=5 + turn % 3))
            await quota.change_subscription("duck", "main", burst=6 + turn % 2)

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(booker(number))
        tasks.create_task(changer())
    counters = await ledger.counters(show.id)
    assert max(usage.cores for usage in counters.values()) <= 700
    assert await ledger.recompute(show.id) == {}

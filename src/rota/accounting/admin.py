"""Administration of quota: shows, pools, folders, subscriptions, departments and caps.

- Every change is one transaction with its audit entry.
- Changes to a show take its lock exclusive, before any row: bookings of the show wait, none is in flight meanwhile, and
  a single lock order rules out deadlocks.
- A lowered limit or a removed share raises the fence of the show in the same transaction, by trigger (see the
  migration), so bookings made under the old limit can no longer be inserted.
- Items that procs are charged to cannot be deleted; checked under the same lock.

The caller pushes the returned `QuotaChange`, which holds versions and the fence, to Redis after the commit. If it dies
before the push, the next limit reseed brings the change; a lowered limit is safe meanwhile because of the fence.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, cast
from uuid import UUID

import asyncpg
import msgspec

from rota.accounting.resources import (
    CapsUpdate,
    ChangeAction,
    CoresInput,
    QuotaChange,
    QuotaItem,
    QuotaKind,
    Show,
    audit_view,
    find_contradiction,
    optional_cores,
    optional_cores_limit,
    optional_gpus,
    unknown_name_error,
    validate_name,
)
from rota.infra import audit, failpoints
from rota.infra.audit import AuditEntry
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, Query, Record, Transaction, query
from rota.model.errors import InvalidInput, NotFound, Refused
from rota.model.ids import ENTROPY_BYTES, JobId, LayerId, ShowId, uuid7
from rota.model.quota import Usage

SHOW_LIST = query(__package__, "show_list")
SHOW_LOCK = query(__package__, "show_lock")
SHOW_GET = query(__package__, "show_get")
SHOW_CREATE = query(__package__, "show_create")
SHOW_RENAME = query(__package__, "show_rename")
SHOW_CHANGE = query(__package__, "show_change")
SHOW_DELETE = query(__package__, "show_delete")
SHOW_SET_MANAGED = query(__package__, "show_set_managed")
SHOW_RAISE_FENCE = query(__package__, "show_raise_fence")
NEXT_LIMIT_VERSION = query(__package__, "limit_version")
PROC_COUNT = query(__package__, "proc_count")

LIST: Final[dict[QuotaKind, Query]] = {
    "pool": query(__package__, "pool_list"),
    "dept": query(__package__, "dept_list"),
    "folder": query(__package__, "folder_list"),
    "subscription": query(__package__, "subscription_list"),
    "point": query(__package__, "point_list"),
}
CREATE: Final[dict[QuotaKind, Query]] = {
    "pool": query(__package__, "pool_create"),
    "dept": query(__package__, "dept_create"),
    "folder": query(__package__, "folder_create"),
    "subscription": query(__package__, "subscription_create"),
    "point": query(__package__, "point_create"),
}
DELETE: Final[dict[QuotaKind, Query]] = {
    "pool": query(__package__, "pool_delete"),
    "dept": query(__package__, "dept_delete"),
    "folder": query(__package__, "folder_delete"),
    "subscription": query(__package__, "subscription_delete"),
    "point": query(__package__, "point_delete"),
}
RENAME: Final[dict[QuotaKind, Query]] = {
    "pool": query(__package__, "pool_rename"),
    "dept": query(__package__, "dept_rename"),
}
FOLDER_RENAME = query(__package__, "folder_rename")
REFERENCING_SHOWS: Final[dict[QuotaKind, Query]] = {
    "pool": query(__package__, "pool_users"),
    "dept": query(__package__, "dept_users"),
}
CHANGE: Final[dict[QuotaKind, Query]] = {
    "folder": query(__package__, "folder_change"),
    "subscription": query(__package__, "subscription_change"),
    "point": query(__package__, "point_change"),
    "job": query(__package__, "job_change"),
    "layer": query(__package__, "layer_change"),
}
ENSURE: Final[dict[QuotaKind, Query]] = {
    "job": query(__package__, "job_ensure"),
    "layer": query(__package__, "layer_ensure"),
}
GET: Final[dict[QuotaKind, Query]] = {"job": query(__package__, "job_get"), "layer": query(__package__, "layer_get")}


class QuotaAdmin:
    """Changes limits on behalf of `actor`, who is recorded in the audit log."""

    def __init__(self, database: Database, clock: Clock | None = None) -> None:
        self.database = database
        self.clock = clock or SystemClock()

    async def change_together(
        self, work: Callable[[QuotaAdmin], Awaitable[Sequence[QuotaChange]]]
    ) -> Sequence[QuotaChange]:
        """Changes that take effect together or not at all: `work` gets an admin of one transaction."""
        async with self.database.transaction() as tx:
            return await work(QuotaAdmin(cast("Database", _DatabaseOfTransaction(tx)), self.clock))

    async def shows(self) -> list[Show]:
        return [_show_from_row(row) for row in await self.database.rows(SHOW_LIST)]

    async def show(self, name: str) -> Show:
        async with self.database.transaction(readonly=True) as tx:
            return await _find_show(tx, name)

    async def create_show(self, name: str, *, actor: str, managed: bool = False) -> QuotaChange:
        """A managed show accepts bookings once it is seeded in Redis."""
        validate_name("show", name)
        async with self._transaction("show", name) as tx:
            show = ShowId(self._new_id())
            await tx.run(SHOW_CREATE, show, name, managed)
            return await _record_change(tx, actor, "show", "create", await _get_show(tx, show))

    async def rename_show(self, name: str, new: str, *, actor: str) -> QuotaChange:
        validate_name("show", new)
        async with self._transaction("show", new) as tx:
            show = await _lock_show(tx, name)
            await tx.run(SHOW_RENAME, show.id, new)
            return await _record_change(tx, actor, "show", "rename", await _get_show(tx, show.id), show)

    async def change_show(self, name: str, *, max_jobs: int, actor: str) -> QuotaChange:
        """Limit the number of concurrently running jobs; -1 means no limit. Running jobs continue."""
        if not -1 <= max_jobs < 2**31:
            raise InvalidInput(f"{max_jobs} is not a valid number of jobs: give 0 or more, or -1 for no limit.")
        async with self.database.transaction() as tx:
            show = await _lock_show(tx, name)
            await tx.run(SHOW_CHANGE, show.id, max_jobs)
            return await _record_change(tx, actor, "show", "change", await _get_show(tx, show.id), show)

    async def delete_show(self, name: str, *, actor: str) -> QuotaChange:
        async with self.database.transaction() as tx:
            show = await _lock_show(tx, name)
            await _check_no_procs(tx, show, f"The show {name}", (None, None, None))
            await tx.run(SHOW_DELETE, show.id)
            return await _record_change(tx, actor, "show", "delete", None, show)

    async def set_managed(self, name: str, managed: bool, *, actor: str) -> QuotaChange:
        """Move the accounting of a show to Redis, or back to PostgreSQL; a no-op if the flag is already set so.

        Towards Redis, bookings are declined until the show is seeded under the new fence. Back from it, the five tables
        are exact when the flag becomes visible.
        """
        async with self.database.transaction() as tx:
            show = await _lock_show(tx, name)
            await tx.row(SHOW_SET_MANAGED, show.id, managed)
            failpoints.hit("admin.after_flip")
            after = await _get_show(tx, show.id)
            return await _record_change(tx, actor, "show", "set_managed", after, show)

    async def raise_fence(self, show: ShowId) -> int:
        """Invalidate bookings made in Redis before now, because Redis was found empty. Returns the new fence."""
        fence = await self.database.value(SHOW_RAISE_FENCE, show)
        if fence is None:
            raise NotFound(f"There is no show {show}: it was deleted.")
        return int(fence)

    async def pools(self) -> list[QuotaItem]:
        return [_item_from_row(row) for row in await self.database.rows(LIST["pool"])]

    async def depts(self) -> list[QuotaItem]:
        return [_item_from_row(row) for row in await self.database.rows(LIST["dept"])]

    async def create_pool(self, name: str, *, actor: str) -> QuotaChange:
        return await self._create("pool", name, actor)

    async def rename_pool(self, name: str, new: str, *, actor: str) -> QuotaChange:
        return await self._rename("pool", name, new, actor)

    async def delete_pool(self, name: str, *, actor: str) -> QuotaChange:
        """Refused while a show has a subscription to it."""
        return await self._delete("pool", name, actor, "subscriptions to it")

    async def create_dept(self, name: str, *, actor: str) -> QuotaChange:
        return await self._create("dept", name, actor)

    async def rename_dept(self, name: str, new: str, *, actor: str) -> QuotaChange:
        return await self._rename("dept", name, new, actor)

    async def delete_dept(self, name: str, *, actor: str) -> QuotaChange:
        """Refused while a show has a point of it."""
        return await self._delete("dept", name, actor, "points of it")

    async def folders(self, show: str) -> list[QuotaItem]:
        return await self._list_of_show("folder", show)

    async def create_folder(self, show: str, name: str, *, actor: str, caps: CapsUpdate | None = None) -> QuotaChange:
        validate_name("folder", name)
        columns = (caps or CapsUpdate()).columns()
        async with self._transaction("folder", name) as tx:
            locked = await _lock_show(tx, show)
            folder = self._new_id()
            await tx.run(CREATE["folder"], locked.id, folder, name)
            return await _write_limits(tx, actor, "folder", "create", locked, None, folder, columns)

    async def change_folder(self, show: str, name: str, caps: CapsUpdate, *, actor: str) -> QuotaChange:
        columns = caps.columns()
        async with self.database.transaction() as tx:
            locked = await _lock_show(tx, show)
            folder = await _find_item(tx, "folder", name, locked)
            return await _write_limits(tx, actor, "folder", "change", locked, folder, folder.id, columns)

    async def rename_folder(self, show: str, name: str, new: str, *, actor: str) -> QuotaChange:
        validate_name("folder", new)
        async with self._transaction("folder", new) as tx:
            locked = await _lock_show(tx, show)
            folder = await _find_item(tx, "folder", name, locked)
            await tx.run(FOLDER_RENAME, folder.id, new)
            return await _record_change(
                tx, actor, "folder", "rename", await _find_item(tx, "folder", new, locked), folder, locked
            )

    async def delete_folder(self, show: str, name: str, *, actor: str) -> QuotaChange:
        return await self._delete_of_show("folder", show, name, actor)

    async def subscriptions(self, show: str) -> list[QuotaItem]:
        return await self._list_of_show("subscription", show)

    async def create_subscription(
        self, show: str, pool: str, *, actor: str, size: CoresInput, burst: CoresInput, gpu_burst: int = -1
    ) -> QuotaChange:
        columns = (optional_cores(size), optional_cores(burst), optional_gpus(gpu_burst, lowest=-1))
        async with self._transaction("subscription", pool) as tx:
            locked = await _lock_show(tx, show)
            found = await _find_item(tx, "pool", pool)
            await tx.run(CREATE["subscription"], locked.id, found.id, self._new_id())
            return await _write_limits(tx, actor, "subscription", "create", locked, None, found.id, columns)

    async def change_subscription(
        self,
        show: str,
        pool: str,
        *,
        actor: str,
        size: CoresInput | None = None,
        burst: CoresInput | None = None,
        gpu_burst: int | None = None,
    ) -> QuotaChange:
        columns = (optional_cores(size), optional_cores(burst), optional_gpus(gpu_burst, lowest=-1))
        async with self.database.transaction() as tx:
            locked = await _lock_show(tx, show)
            share = await _find_item(tx, "subscription", pool, locked)
            return await _write_limits(tx, actor, "subscription", "change", locked, share, share.id, columns)

    async def delete_subscription(self, show: str, pool: str, *, actor: str) -> QuotaChange:
        return await self._delete_of_show("subscription", show, pool, actor)

    async def points(self, show: str) -> list[QuotaItem]:
        return await self._list_of_show("point", show)

    async def create_point(self, show: str, dept: str, *, actor: str, caps: CapsUpdate | None = None) -> QuotaChange:
        columns = (caps or CapsUpdate()).columns()
        async with self._transaction("point", dept) as tx:
            locked = await _lock_show(tx, show)
            found = await _find_item(tx, "dept", dept)
            await tx.run(CREATE["point"], locked.id, found.id)
            return await _write_limits(tx, actor, "point", "create", locked, None, found.id, columns)

    async def change_point(self, show: str, dept: str, caps: CapsUpdate, *, actor: str) -> QuotaChange:
        columns = caps.columns()
        async with self.database.transaction() as tx:
            locked = await _lock_show(tx, show)
            point = await _find_item(tx, "point", dept, locked)
            return await _write_limits(tx, actor, "point", "change", locked, point, point.id, columns)

    async def delete_point(self, show: str, dept: str, *, actor: str) -> QuotaChange:
        return await self._delete_of_show("point", show, dept, actor)

    async def change_job(
        self, show: str, job: JobId, *, actor: str, max_cores: CoresInput | None = None, max_gpus: int | None = None
    ) -> QuotaChange:
        return await self._change_caps("job", show, job, actor, max_cores, max_gpus)

    async def change_layer(
        self, show: str, layer: LayerId, *, actor: str, max_cores: CoresInput | None = None, max_gpus: int | None = None
    ) -> QuotaChange:
        return await self._change_caps("layer", show, layer, actor, max_cores, max_gpus)

    async def _change_caps(
        self, kind: QuotaKind, show: str, key: UUID, actor: str, max_cores: CoresInput | None, max_gpus: int | None
    ) -> QuotaChange:
        columns = (optional_cores_limit(max_cores), optional_gpus(max_gpus, lowest=-1))
        async with self.database.transaction() as tx:
            locked = await _lock_show(tx, show)
            # Create the row without caps first: setting a cap is then an update, which raises the fence.
            await tx.run(ENSURE[kind], locked.id, key)
            before = await _get_item(tx, kind, locked, key)
            return await _write_limits(tx, actor, kind, "change", locked, before, key, columns)

    async def _create(self, kind: QuotaKind, name: str, actor: str) -> QuotaChange:
        validate_name(kind, name)
        async with self._transaction(kind, name) as tx:
            await tx.run(CREATE[kind], self._new_id(), name)
            return await _record_change(tx, actor, kind, "create", await _find_item(tx, kind, name))

    async def _rename(self, kind: QuotaKind, name: str, new: str, actor: str) -> QuotaChange:
        validate_name(kind, new)
        async with self._transaction(kind, new) as tx:
            before = await _find_item(tx, kind, name)
            await tx.run(RENAME[kind], before.id, new)
            return await _record_change(tx, actor, kind, "rename", await _find_item(tx, kind, new), before)

    async def _delete(self, kind: QuotaKind, name: str, actor: str, what: str) -> QuotaChange:
        async with self.database.transaction() as tx:
            before = await _find_item(tx, kind, name)
            try:
                async with tx.savepoint():
                    await tx.run(DELETE[kind], before.id)
            except asyncpg.ForeignKeyViolationError as error:
                users = ", ".join(row["name"] for row in await tx.rows(REFERENCING_SHOWS[kind], before.id))
                raise Refused(
                    f"The {kind} {name} cannot be deleted while shows have {what} ({users}): delete those first.",
                    kind=kind,
                    name=name,
                ) from error
            return await _record_change(tx, actor, kind, "delete", None, before)

    async def _delete_of_show(self, kind: QuotaKind, show: str, name: str, actor: str) -> QuotaChange:
        async with self.database.transaction() as tx:
            locked = await _lock_show(tx, show)
            before = await _find_item(tx, kind, name, locked)
            charged = tuple(before.id if kind == each else None for each in ("subscription", "folder", "point"))
            await _check_no_procs(tx, locked, f"The {kind} {name} of show {show}", charged)
            await tx.run(DELETE[kind], locked.id, before.id)
            return await _record_change(tx, actor, kind, "delete", None, before, locked)

    async def _list_of_show(self, kind: QuotaKind, show: str) -> list[QuotaItem]:
        async with self.database.transaction("repeatable read", readonly=True) as tx:
            found = await _find_show(tx, show)
            return [_item_from_row(row) for row in await tx.rows(LIST[kind], found.id)]

    @asynccontextmanager
    async def _transaction(self, kind: QuotaKind, name: str) -> AsyncIterator[Transaction]:
        """A transaction that assigns a unique name, and reports a conflict as invalid input."""
        try:
            async with self.database.transaction() as tx:
                yield tx
        except asyncpg.UniqueViolationError as error:
            raise InvalidInput(f"The {kind} {name} already exists: change it, or choose another name.") from error

    def _new_id(self) -> UUID:
        return uuid7(self.clock.now_ms(), secrets.token_bytes(ENTROPY_BYTES))


class _DatabaseOfTransaction:
    """Takes the place of a database: its transactions are parts of one."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        async with self._tx.savepoint():
            yield self._tx


async def _find_show(tx: Transaction, name: str) -> Show:
    shows = {row["name"]: _show_from_row(row) for row in await tx.rows(SHOW_LIST)}
    if name not in shows:
        raise unknown_name_error("show", name, shows)
    return shows[name]


async def _lock_show(tx: Transaction, name: str) -> Show:
    """The show, read under its exclusive lock."""
    found = await _find_show(tx, name)
    row = await tx.row(SHOW_LOCK, found.id)
    if row is None:
        raise InvalidInput(f"The show {name} was deleted by another request: check the name.")
    return _show_from_row(row)


async def _get_show(tx: Transaction, show: ShowId) -> Show | None:
    row = await tx.row(SHOW_GET, show)
    return _show_from_row(row) if row else None


async def _find_item(tx: Transaction, kind: QuotaKind, name: str, show: Show | None = None) -> QuotaItem:
    items = {row["name"]: _item_from_row(row) for row in await tx.rows(LIST[kind], *([show.id] if show else []))}
    if name not in items:
        raise unknown_name_error(f"{kind} of show {show.name}" if show else kind, name, items)
    return items[name]


async def _get_item(tx: Transaction, kind: QuotaKind, show: Show, key: UUID) -> QuotaItem:
    if kind in GET:
        rows = await tx.rows(GET[kind], show.id, key)
    else:
        rows = [row for row in await tx.rows(LIST[kind], show.id) if row["id"] == key]
    if not rows:
        raise InvalidInput(f"The show {show.name} has no {kind} {key}: check the id.", kind=kind)
    return _item_from_row(rows[0])


async def _write_limits(
    tx: Transaction,
    actor: str,
    kind: QuotaKind,
    action: ChangeAction,
    show: Show,
    before: QuotaItem | None,
    key: UUID,
    columns: tuple[int | None, ...],
) -> QuotaChange:
    """Write the given limits and record the change."""
    await tx.run(CHANGE[kind], show.id, key, *columns)
    after = await _get_item(tx, kind, show, key)
    if wrong := find_contradiction(after.limits):
        raise InvalidInput(f"The limits of {kind} {after.name} contradict each other: {wrong}.", kind=kind)
    return await _record_change(tx, actor, kind, action, after, before, show)


async def _check_no_procs(tx: Transaction, show: Show, what: str, charged: tuple[UUID | None, ...]) -> None:
    procs = await tx.value(PROC_COUNT, show.id, *charged)
    if procs:
        raise Refused(
            f"{what} cannot be deleted while {procs} frames run on it: cancel its jobs or wait for them.", procs=procs
        )


async def _record_change(
    tx: Transaction,
    actor: str,
    kind: QuotaKind,
    action: ChangeAction,
    after: Show | QuotaItem | None,
    before: Show | QuotaItem | None = None,
    show: Show | None = None,
) -> QuotaChange:
    """Append the audit entry last, because appends serialize all writers; an unchanged item gets none."""
    raised = 0
    if isinstance(after or before, Show):
        show = after if isinstance(after, Show) else None
    elif show is not None and (now := await _get_show(tx, show.id)):
        raised = now.fence if now.fence > show.fence else 0
        show = now
    version = after.version if after is not None else int(await tx.value(NEXT_LIMIT_VERSION))
    if audit_view(before) != audit_view(after):
        name = (after or before).name  # type: ignore[union-attr]
        path = f"{show.name}/{name}" if show is not None and kind != "show" else name
        owner = show or next((each for each in (after, before) if isinstance(each, Show)), None)
        detail = {"before": audit_view(before), "after": audit_view(after)} | ({"show": str(owner.id)} if owner else {})
        await audit.append(tx, [AuditEntry(actor, f"{kind}.{action}", f"{kind}:{path}", detail)])
    return QuotaChange(kind=kind, action=action, show=show, before=before, after=after, version=version, raised=raised)


def _show_from_row(row: Record) -> Show:
    return Show(ShowId(row["id"]), row["name"], row["managed"], row["fence"], row["version"], row["max_jobs"])


def _item_from_row(row: Record) -> QuotaItem:
    if "limits" not in row.keys():  # noqa: SIM118 - a Record iterates over values
        return QuotaItem(row["id"], row["name"], row["version"])
    limits = msgspec.json.decode(row["limits"], type=dict[str, int])
    return QuotaItem(row["id"], row["name"], row["version"], limits, Usage(row["cores"], row["gpus"]))

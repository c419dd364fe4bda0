"""Quota tables: bars and tables for people, plain values for JSON. No I/O.

People see cores as they typed them and `unlimited` where nothing limits, by the same rule that decides bookings
(`rota.model.quota.effective_limit`). Programs get the stored limits as numbers in cores, -1 included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from rota.accounting.resources import QuotaItem, QuotaKind, Show
from rota.model.quota import Level, Limit, Resource, effective_limit
from rota.model.units import Centicores, format_cores

BAR_CELLS: Final = 16
UNLIMITED_TEXT: Final = "unlimited"
LIMIT_LABELS: Final = {
    "int_size": "size",
    "int_burst": "burst",
    "int_gpu_burst": "GPU burst",
    "int_min_cores": "min cores",
    "int_max_cores": "max cores",
    "int_min_gpus": "min GPUs",
    "int_max_gpus": "max GPUs",
}
NO_SUBSCRIPTION: Final = (
    "The show {show} has no subscription, so none of its jobs can run: "
    "`rota sub create {show} POOL --size CORES --burst CORES` gives it a share of a pool."
)
STALE_USAGE_NOTE: Final = "Usage is as of the last reconciliation: Redis does not answer."
EMPTY_MESSAGES: Final = {
    "show": "There is no show yet: `rota show create NAME` creates one.",
    "pool": "There is no pool yet: `rota pool create NAME` creates one.",
    "dept": "There is no department yet: `rota dept create NAME` creates one.",
    "folder": "The show {show} has no folder yet: `rota folder create {show} NAME` creates one.",
    "point": "The show {show} has no department yet: `rota dept add {show} DEPT` adds one.",
}

ItemsByShow = Mapping[str, Sequence[QuotaItem]]
"""Subscriptions or points by name of the show."""


class Table(msgspec.Struct, frozen=True):
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    wide: Sequence[str] = ()
    """Columns shown only with `-o wide`."""

    def without_wide_columns(self) -> Table:
        kept = [at for at, column in enumerate(self.columns) if column not in self.wide]
        rows = [[row[at] for at in kept] for row in self.rows]
        return Table([self.columns[at] for at in kept], rows)


class CliPage(msgspec.Struct, frozen=True):
    """The result of a command in both forms: `data` for JSON and YAML, `parts` for people."""

    data: object
    parts: Sequence[str | Table]


def shows_page(shows: Sequence[Show], shares: ItemsByShow) -> CliPage:
    rows, data = [], []
    for show in shows:
        size, burst, used = _totals(shares[show.name])
        numbers = (show.fence, cores_text(size), cores_text(burst), cores_text(used))
        rows.append((show.name, accounting_store(show), *numbers, usage_bar(used, burst, size)))
        data.append(show_data(show) | _totals_data(size, burst, used))
    columns = ("show", "books kept by", "fence", "size", "burst", "used", "of burst")
    return CliPage(data, [Table(columns, rows) if rows else EMPTY_MESSAGES["show"]])


def pools_page(pools: Sequence[QuotaItem], shares: ItemsByShow) -> CliPage:
    rows, data = [], []
    for pool in pools:
        users = {show: share for show, items in shares.items() for share in items if share.id == pool.id}
        size, burst, used = _totals(list(users.values()))
        rows.append((pool.name, cores_text(size), cores_text(burst), cores_text(used), ", ".join(users) or "none"))
        data.append(item_data(pool) | _totals_data(size, burst, used) | {"shows": list(users)})
    return CliPage(data, [Table(("pool", "size", "burst", "used", "shows"), rows) if rows else EMPTY_MESSAGES["pool"]])


def depts_page(depts: Sequence[QuotaItem], points: ItemsByShow) -> CliPage:
    rows, data = [], []
    for dept in depts:
        users = [show for show, items in points.items() if any(point.id == dept.id for point in items)]
        rows.append((dept.name, ", ".join(users) or "none"))
        data.append(item_data(dept) | {"shows": users})
    return CliPage(data, [Table(("dept", "shows"), rows) if rows else EMPTY_MESSAGES["dept"]])


def subscriptions_page(show: str, shares: Sequence[QuotaItem], *, is_old: bool = False) -> CliPage:
    part = _subscription_table(shares) if shares else NO_SUBSCRIPTION.format(show=show)
    return CliPage([item_data(share) for share in shares], [part, *([STALE_USAGE_NOTE] if is_old else [])])


def caps_page(kind: QuotaKind, show: str, items: Sequence[QuotaItem], *, is_old: bool = False) -> CliPage:
    """Folders or points of a show."""
    part = _cap_table(kind, items) if items else EMPTY_MESSAGES[kind].format(show=show)
    return CliPage([item_data(item) for item in items], [part, *([STALE_USAGE_NOTE] if is_old else [])])


def show_info_page(
    show: Show, shares: Sequence[QuotaItem], folders: Sequence[QuotaItem], points: Sequence[QuotaItem], *, is_old: bool
) -> CliPage:
    pages = {
        "subscriptions": subscriptions_page(show.name, shares),
        "folders": caps_page("folder", show.name, folders),
        "depts": caps_page("point", show.name, points),
    }
    parts: list[str | Table] = [
        f"{show.name}: accounting in {accounting_store(show)} (fence {show.fence}, id {show.id})."
    ]
    for page in pages.values():
        parts += ["", *page.parts]
    data = show_data(show) | {"use_is_live": not is_old} | {name: page.data for name, page in pages.items()}
    return CliPage(data, [*parts, *(["", STALE_USAGE_NOTE] if is_old else [])])


def _subscription_table(shares: Sequence[QuotaItem]) -> Table:
    rows = []
    for share in shares:
        size, burst, used = _totals([share])
        numbers = (cores_text(size), cores_text(burst), cores_text(used))
        rows.append(
            (share.name, *numbers, usage_bar(used, burst, size), _gpus_text("subscription", "int_gpu_burst", share))
        )
    return Table(("pool", "size", "burst", "used", "of burst", "GPUs"), rows)


def _cap_table(kind: QuotaKind, items: Sequence[QuotaItem]) -> Table:
    rows = []
    for item in items:
        least, most = (limit_text(kind, field, item.limits) for field in ("int_min_cores", "int_max_cores"))
        filled = usage_bar(item.usage.cores, cap_of_field(kind, "int_max_cores", item.limits))
        gpus = _gpus_text(kind, "int_max_gpus", item)
        rows.append((item.name, least, most, cores_text(item.usage.cores), filled, gpus))
    return Table(("dept" if kind == "point" else kind, "min", "max", "used", "of max", "GPUs"), rows)


def _gpus_text(kind: QuotaKind, field: str, item: QuotaItem) -> str:
    least = item.limits.get("int_min_gpus", 0)
    return f"{item.usage.gpus} of {limit_text(kind, field, item.limits)}{f' (min {least})' if least else ''}"


def _totals(shares: Sequence[QuotaItem]) -> tuple[int, int, int]:
    """Total size, burst and usage of the subscriptions."""
    size, burst = (sum(share.limits[field] for share in shares) for field in ("int_size", "int_burst"))
    return size, burst, sum(share.usage.cores for share in shares)


def _totals_data(size: int, burst: int, used: int) -> dict[str, object]:
    return {"size": _cores_number(size), "burst": _cores_number(burst), "used_cores": _cores_number(used)}


def usage_bar(used: int, most: int | None, size: int = 0) -> str:
    """A bar of `used` in `most` with a divider at the guaranteed `size`; empty when there is no limit.

    Any usage fills at least one cell; the last cell is filled only at 100 %.
    """
    if most is None:
        return ""
    if most == 0:
        return "nothing may run"
    filled = min(BAR_CELLS, max(used * BAR_CELLS // most, int(used > 0)))
    cells = "█" * filled + "░" * (BAR_CELLS - filled)
    end = size * BAR_CELLS // most if 0 < size < most else BAR_CELLS
    return f"{cells[:end]}│{cells[end:]} {used * 100 // most} %"


def cores_text(amount: int) -> str:
    return format_cores(Centicores(amount))


def accounting_store(show: Show) -> str:
    return "Redis" if show.managed else "PostgreSQL"


def cap_of_field(kind: QuotaKind, field: str, limits: Mapping[str, int]) -> int | None:
    """The limit that a booking is checked against; None when there is none."""
    if field in ("int_size", "int_min_cores", "int_min_gpus"):
        return limits[field]
    resource = Resource.GPUS if "gpu" in field else Resource.CORES
    return effective_limit(Level(kind), resource, Limit(limits[field], limits[field]))


def limit_text(kind: QuotaKind, field: str, limits: Mapping[str, int]) -> str:
    value = cap_of_field(kind, field, limits)
    if value is None:
        return UNLIMITED_TEXT
    return str(value) if "gpu" in field else cores_text(value)


def show_data(show: Show) -> dict[str, object]:
    data: dict[str, object] = {"id": show.id, "name": show.name, "managed": show.managed, "fence": show.fence}
    return data | ({"max_jobs": show.max_jobs} if show.max_jobs >= 0 else {})


def item_data(item: QuotaItem) -> dict[str, object]:
    """Limits are named after the options that set them."""
    data: dict[str, object] = {"id": item.id, "name": item.name}
    for field in LIMIT_LABELS:
        if field in item.limits:
            value = item.limits[field]
            data[field.removeprefix("int_")] = value if "gpu" in field else _cores_number(value)
    used = {"used_cores": _cores_number(item.usage.cores), "used_gpus": item.usage.gpus}
    return data | used if item.limits else data


def _cores_number(amount: int) -> float:
    """Cores from centicores. A float's shortest decimal form is exact to far more than two digits."""
    if amount < 0:
        return amount
    return amount // 100 if amount % 100 == 0 else amount / 100

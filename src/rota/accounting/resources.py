"""Values of the quota administration: shows, items with limits, and changes. No I/O.

Limits are named after their columns and use their units (hundredths of a core), because the limits publisher needs
those; people enter and read cores.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Literal
from uuid import UUID

import msgspec

from rota.accounting.ledger import GPUS_MAX
from rota.model.errors import InvalidInput, NotFound
from rota.model.ids import ShowId
from rota.model.quota import Usage
from rota.model.units import Centicores, format_cores_limit, parse_cores, parse_cores_limit

QuotaKind = Literal["show", "pool", "dept", "folder", "subscription", "point", "job", "layer"]
ChangeAction = Literal["create", "rename", "change", "delete", "set_managed"]
CoresInput = str | float | Decimal

_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)


class Show(msgspec.Struct, frozen=True):
    id: ShowId
    name: str
    managed: bool
    fence: int
    version: int
    max_jobs: int = -1
    """Maximum number of concurrently running jobs; -1 means no limit."""


class QuotaItem(msgspec.Struct, frozen=True):
    """An item other than a show. The id of a subscription is its pool, that of a point its department."""

    id: UUID
    name: str
    version: int
    limits: Mapping[str, int] = {}
    usage: Usage = Usage()


class QuotaChange(msgspec.Struct, frozen=True, kw_only=True):
    """One committed change, for the publisher that brings it to Redis.

    `show` is the show after the change, with its current fence; `before` and `after` are None where the item did not
    exist. `version` is above every version published before, also for a removal. `raised` is the fence that this change
    raised the show to, 0 if it did not: only the push of this change may move the fence in Redis there.
    """

    kind: QuotaKind
    action: ChangeAction
    show: Show | None
    before: Show | QuotaItem | None
    after: Show | QuotaItem | None
    version: int
    raised: int = 0


class CapsUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Limits to change; None keeps the current value. A maximum of -1 or 0 means no limit."""

    min_cores: CoresInput | None = None
    max_cores: CoresInput | None = None
    min_gpus: int | None = None
    max_gpus: int | None = None

    def columns(self) -> tuple[int | None, int | None, int | None, int | None]:
        return (
            optional_cores(self.min_cores),
            optional_cores_limit(self.max_cores),
            optional_gpus(self.min_gpus, lowest=0),
            optional_gpus(self.max_gpus, lowest=-1),
        )


def validate_name(kind: QuotaKind, name: str) -> str:
    if not _NAME_PATTERN.fullmatch(name):
        shown = repr(name if len(name) <= 40 else f"{name[:37]}...")
        raise InvalidInput(
            f"{shown} cannot be the name of a {kind}: use up to 64 letters, digits, dots, hyphens and underscores."
        )
    return name


def unknown_name_error(kind: str, name: str, known: Iterable[str]) -> NotFound:
    """The error for an unknown name, with the closest known one."""
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if nearest:
        hint = f"did you mean {nearest[0]}?"
    else:
        hint = (
            f"there are {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}." if names else "there is none yet."
        )
    return NotFound(f"There is no {kind} {name[:64]!r}: {hint}", kind=kind, nearest=nearest[0] if nearest else None)


def optional_cores(cores: CoresInput | None) -> int | None:
    return None if cores is None else parse_cores(cores)


def optional_cores_limit(cores: CoresInput | None) -> int | None:
    return None if cores is None else parse_cores_limit(cores)


def optional_gpus(number: int | None, *, lowest: int) -> int | None:
    if number is None or (type(number) is int and lowest <= number <= GPUS_MAX):
        return number
    unlimited = ", or -1 for no limit" if lowest < 0 else ""
    raise InvalidInput(
        f"{str(number)[:40]} is not a valid number of GPUs: give a whole number from 0 to {GPUS_MAX}{unlimited}."
    )


def find_contradiction(limits: Mapping[str, int]) -> str | None:
    """The contradiction between the limits of one item, or None."""
    for resource in ("cores", "gpus"):
        minimum, maximum = limits.get(f"int_min_{resource}", 0), limits.get(f"int_max_{resource}", -1)
        if 0 < maximum < minimum:
            return f"its minimum of {resource} is above its maximum: lower the minimum or raise the maximum"
    return None


def audit_view(item: Show | QuotaItem | None) -> Mapping[str, object] | None:
    """The audit entry of an item: limits in cores, without counters, which no change sets."""
    match item:
        case None:
            return None
        case Show():
            limit = {"max_jobs": item.max_jobs} if item.max_jobs >= 0 else {}
            return {"name": item.name, "managed": item.managed, "fence": item.fence} | limit
        case QuotaItem():
            return {"name": item.name} | {field: _format_limit(field, value) for field, value in item.limits.items()}


def _format_limit(field: str, value: int) -> str | int:
    return value if "gpu" in field else format_cores_limit(Centicores(value))

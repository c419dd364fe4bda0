"""Formats a quota change: the new state, the previous one, and notes about unexpected effects. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from rota.accounting.resources import QuotaChange, QuotaItem, QuotaKind, Show, audit_view
from rota.cli.core.tables import (
    LIMIT_LABELS,
    CliPage,
    accounting_store,
    cap_of_field,
    cores_text,
    item_data,
    limit_text,
    show_data,
)
from rota.model.quota import RESOURCES, Resource

_KIND_NAMES: Final[Mapping[QuotaKind, str]] = {"dept": "department", "point": "department"}
_SUBSCRIPTION_CAPS: Final = ("int_burst", "int_gpu_burst")
_CAPS: Final = ("int_max_cores", "int_max_gpus")


def change_page(change: QuotaChange) -> CliPage:
    changed, notes = audit_view(change.before) != audit_view(change.after), list(_notes(change))
    data = {
        "kind": change.kind,
        "action": change.action,
        "changed": changed,
        "show": change.show.name if change.show else None,
        "before": _data(change.before),
        "after": _data(change.after),
        "notes": notes,
    }
    return CliPage(data, [_sentence(change) if changed else _unchanged_sentence(change), *notes])


def _data(thing: Show | QuotaItem | None) -> dict[str, object] | None:
    match thing:
        case Show():
            return show_data(thing)
        case QuotaItem():
            return item_data(thing)
        case None:
            return None


def _sentence(change: QuotaChange) -> str:
    before, after = change.before, change.after
    match change.action:
        case "create":
            return f"Created {_subject(change)}{_limits_text(change)}."
        case "delete":
            return f"Deleted {_subject(change)}."
        case "rename":
            assert after is not None, "a rename keeps the object"
            return f"Renamed {_subject_text(change, before)} to {after.name}."
        case "set_managed":
            return f"The accounting of {_subject(change)} is now in {_accounting_store(after)}."
        case "change":
            return f"Changed {_subject(change)}: {_difference(change)}."


def _unchanged_sentence(change: QuotaChange) -> str:
    if change.action == "set_managed":
        return f"Nothing changed: the accounting of {_subject(change)} is already in {_accounting_store(change.after)}."
    return f"Nothing changed: {_subject(change)} is as it was{_limits_text(change)}."


def _accounting_store(thing: Show | QuotaItem | None) -> str:
    assert isinstance(thing, Show), "only shows have accounts"
    return accounting_store(thing)


def _subject(change: QuotaChange) -> str:
    return _subject_text(change, change.after or change.before)


def _subject_text(change: QuotaChange, thing: Show | QuotaItem | None) -> str:
    assert thing is not None, "a change has a subject"
    inside = f" of show {change.show.name}" if change.show and change.kind != "show" else ""
    return f"{_KIND_NAMES.get(change.kind, change.kind)} {thing.name}{inside}"


def _limits_text(change: QuotaChange) -> str:
    match change.after:
        case Show() as show:
            return f"; accounting in {accounting_store(show)}"
        case QuotaItem(limits=limits) if limits:
            fields = [field for field in LIMIT_LABELS if field in limits]
            return ": " + ", ".join(
                f"{LIMIT_LABELS[field]} {limit_text(change.kind, field, limits)}" for field in fields
            )
        case _:
            return ""


def _difference(change: QuotaChange) -> str:
    before, after = change.before, change.after
    if isinstance(before, Show) and isinstance(after, Show):
        return f"{_max_jobs_text(after)} concurrently (was {_max_jobs_text(before)})"
    assert isinstance(before, QuotaItem), "an object with limits is not a show"
    assert isinstance(after, QuotaItem), "an object with limits is not a show"
    return ", ".join(
        f"{label} {limit_text(change.kind, field, after.limits)} (was {limit_text(change.kind, field, before.limits)})"
        for field, label in LIMIT_LABELS.items()
        if after.limits.get(field) != before.limits.get(field)
    )


def _max_jobs_text(show: Show) -> str:
    return f"{show.max_jobs} jobs" if show.max_jobs >= 0 else "any number of jobs"


def _notes(change: QuotaChange) -> Iterator[str]:
    """Notes about valid limits with effects that may surprise."""
    after = change.after
    if not isinstance(after, QuotaItem) or not after.limits:
        return
    is_share = change.kind == "subscription"
    for resource, field in zip(RESOURCES, _SUBSCRIPTION_CAPS if is_share else _CAPS, strict=True):
        limit, used = cap_of_field(change.kind, field, after.limits), after.usage.of(resource)
        if limit is not None and used > limit:
            amount = f"{cores_text(used)} cores" if resource is Resource.CORES else f"{used} GPUs"
            yield f"{amount} are in use, above this limit: they continue, and nothing starts until usage is below it."
    if is_share and after.limits["int_size"] > after.limits["int_burst"]:
        yield "Its size is above its burst, so the size can never be fully used."

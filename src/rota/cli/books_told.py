"""What a change did, in the words of the commands: what is there now, what was there before, what to expect of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from rota.accounting.items import Change, Item, Kind, Show, shown
from rota.cli.books_view import FIELDS, Page, cores, in_force, item_data, keeper, limit_text, show_data
from rota.model.quota import RESOURCES, Resource

_KINDS: Final[Mapping[Kind, str]] = {"dept": "department", "point": "department"}
_SHARE_CAPS: Final = ("int_burst", "int_gpu_burst")
_CAPS: Final = ("int_max_cores", "int_max_gpus")


def change_page(change: Change) -> Page:
    changed, notes = shown(change.before) != shown(change.after), list(_notes(change))
    data = {
        "kind": change.kind,
        "action": change.action,
        "changed": changed,
        "show": change.show.name if change.show else None,
        "before": _data(change.before),
        "after": _data(change.after),
        "notes": notes,
    }
    return Page(data, [_sentence(change) if changed else _unchanged(change), *notes])


def _data(thing: Show | Item | None) -> dict[str, object] | None:
    match thing:
        case Show():
            return show_data(thing)
        case Item():
            return item_data(thing)
        case None:
            return None


def _sentence(change: Change) -> str:
    before, after = change.before, change.after
    match change.action:
        case "create":
            return f"Created {_what(change)}{_having(change)}."
        case "delete":
            return f"Deleted {_what(change)}."
        case "rename":
            assert after is not None, "what is renamed stays"
            return f"Renamed {_named(change, before)} to {after.name}."
        case "set_managed":
            return f"{_keeper(after)} keeps the books of {_what(change)} now."
        case "change":
            return f"Changed {_what(change)}: {_difference(change)}."


def _unchanged(change: Change) -> str:
    if change.action == "set_managed":
        return f"Nothing changed: {_keeper(change.after)} keeps the books of {_what(change)} already."
    return f"Nothing changed: {_what(change)} is as it was{_having(change)}."


def _keeper(thing: Show | Item | None) -> str:
    assert isinstance(thing, Show), "only shows have books"
    return keeper(thing)


def _what(change: Change) -> str:
    return _named(change, change.after or change.before)


def _named(change: Change, thing: Show | Item | None) -> str:
    assert thing is not None, "a change is of something"
    inside = f" of show {change.show.name}" if change.show and change.kind != "show" else ""
    return f"{_KINDS.get(change.kind, change.kind)} {thing.name}{inside}"


def _having(change: Change) -> str:
    match change.after:
        case Show() as show:
            return f"; {keeper(show)} keeps its books"
        case Item(limits=limits) if limits:
            fields = [field for field in FIELDS if field in limits]
            return ": " + ", ".join(f"{FIELDS[field]} {limit_text(change.kind, field, limits)}" for field in fields)
        case _:
            return ""


def _difference(change: Change) -> str:
    before, after = change.before, change.after
    if isinstance(before, Show) and isinstance(after, Show):
        return f"{_jobs(after)} at once (was {_jobs(before)})"
    assert isinstance(before, Item), "what has limits is no show"
    assert isinstance(after, Item), "what has limits is no show"
    return ", ".join(
        f"{word} {limit_text(change.kind, field, after.limits)} (was {limit_text(change.kind, field, before.limits)})"
        for field, word in FIELDS.items()
        if after.limits.get(field) != before.limits.get(field)
    )


def _jobs(show: Show) -> str:
    return f"{show.max_jobs} jobs" if show.max_jobs >= 0 else "any number of jobs"


def _notes(change: Change) -> Iterator[str]:
    """Limits that are allowed, and do what not everybody expects."""
    after = change.after
    if not isinstance(after, Item) or not after.limits:
        return
    is_share = change.kind == "subscription"
    for resource, field in zip(RESOURCES, _SHARE_CAPS if is_share else _CAPS, strict=True):
        limit, used = in_force(change.kind, field, after.limits), after.usage.of(resource)
        if limit is not None and used > limit:
            amount = f"{cores(used)} cores" if resource is Resource.CORES else f"{used} GPUs"
            yield f"{amount} are in use, more than this allows: they go on, and nothing is added until enough ended."
    if is_share and after.limits["int_size"] > after.limits["int_burst"]:
        yield "Its size lies above its burst, so the whole of the size can never be used."

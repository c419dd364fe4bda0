"""How dead letters and failed frames look. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from rota.cli.books_view import Page, Table
from rota.cli.dlq_piles import Removed
from rota.model.job import Reopened
from rota.queue import DeadLetter, FailedFrame

Item = DeadLetter | FailedFrame

ERROR_CHARS: Final = 60
PAYLOAD_CHARS: Final = 2000
JOBS_SHOWN: Final = 20
NONE: Final = "No {} agrees with that."


def list_page(items: Sequence[Item], agreeing: int, noun: str) -> Page:
    """`agreeing` is how many there are on all pages."""
    data = [{name: value for name, value in fields(item).items() if name != "payload"} for item in items]
    if not items:
        return Page(data, [NONE.format(noun)])
    parts: list[str | Table] = [_table(items)]
    if agreeing > len(items):
        last = fields(items[-1])["id"]
        parts.append(f"{len(items)} of {several(agreeing, noun)}; `--after {last}` shows the next, `--limit` more.")
    return Page(data, parts)


def _table(items: Sequence[Item]) -> Table:
    columns = ("id", "kind", "reason", "queue", "job", "frame", "attempt", "since", "error")
    rows = []
    for item in items:
        told = fields(item)
        since, error = moment(told["since"]), first_line(told["error"])
        rows.append((*("-" if told[name] is None else told[name] for name in columns[:7]), since, error))
    return Table(columns, rows)


def one_page(item: Item) -> Page:
    told = fields(item)
    shown = told | {"since": moment(told["since"]), "payload": payload_text(item.payload)}
    return Page(told, [f"{name:<8} {value}" for name, value in shown.items() if value is not None])


def act_page(action: str, noun: str, matched: int, chosen: int, done: Removed | None, sentence: str) -> Page:
    """`done` is None when nothing was tried."""
    jobs = done.jobs if done is not None else ()
    data = {
        "action": action,
        "of": f"{noun.replace(' ', '_')}s",
        "matched": matched,
        "chosen": chosen,
        "done": len(done.gone) if done is not None else 0,
        "dry_run": done is None and chosen > 0,
    }
    if action == "retry":
        data["jobs"] = [{"job": each.job, "retry_of": each.old, "frames": each.frames} for each in jobs]
    if not matched:
        return Page(data, [NONE.format(noun)])
    return Page(data, [sentence, *([_jobs(jobs)] if jobs else [])])


def _jobs(jobs: Sequence[Reopened]) -> str | Table:
    rows: list[tuple[object, ...]] = [(each.job, each.frames, each.old) for each in jobs[:JOBS_SHOWN]]
    if len(jobs) > JOBS_SHOWN:
        rows.append((f"and {len(jobs) - JOBS_SHOWN} more, all with --json", "", ""))
    return Table(("new job", "frames", "retry of"), rows)


def fields(item: Item) -> dict[str, object]:
    """The same for both, by the names that the columns have."""
    told = msgspec.structs.asdict(item)
    if isinstance(item, FailedFrame):
        return {"id": told.pop("token"), "kind": "frame", "since": told.pop("failed_at")} | told
    return {"id": told.pop("id"), "kind": told.pop("kind"), "since": told.pop("created_at")} | told


def moment(when: object) -> str:
    assert isinstance(when, datetime), when
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def first_line(error: object) -> str:
    line = str(error or "").strip().partition("\n")[0]
    return line if len(line) <= ERROR_CHARS else f"{line[: ERROR_CHARS - 1]}…"


def payload_text(payload: bytes | None) -> str | None:
    """Text as text, anything else by its size."""
    if payload is None:
        return None
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return f"{len(payload)} bytes that are no text; --json shows them in base64"
    return text if len(text) <= PAYLOAD_CHARS else f"{text[:PAYLOAD_CHARS]}… ({len(payload)} bytes)"


def several(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"

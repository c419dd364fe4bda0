"""How dead letters and failed frames look. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from rota.cli.core.tables import CliPage, Table
from rota.cli.dlq.groups import DlqActionResult
from rota.model.jobs.submission import ResubmitResult
from rota.queue import DeadLetter, FailedFrame

DlqEntry = DeadLetter | FailedFrame

ERROR_CHARS_MAX: Final = 60
PAYLOAD_CHARS_MAX: Final = 2000
JOBS_SHOWN_MAX: Final = 20
NO_MATCH: Final = "No {} agrees with that."


def list_page(items: Sequence[DlqEntry], agreeing: int, noun: str) -> CliPage:
    """`agreeing` is how many there are on all pages."""
    data = [{name: value for name, value in entry_fields(item).items() if name != "payload"} for item in items]
    if not items:
        return CliPage(data, [NO_MATCH.format(noun)])
    parts: list[str | Table] = [_table(items)]
    if agreeing > len(items):
        last = entry_fields(items[-1])["id"]
        parts.append(f"{len(items)} of {pluralize(agreeing, noun)}; `--after {last}` shows the next, `--limit` more.")
    return CliPage(data, parts)


def _table(items: Sequence[DlqEntry]) -> Table:
    columns = ("id", "kind", "reason", "queue", "job", "frame", "attempt", "since", "error")
    rows = []
    for item in items:
        told = entry_fields(item)
        since, error = format_time(told["since"]), first_error_line(told["error"])
        rows.append((*("-" if told[name] is None else told[name] for name in columns[:7]), since, error))
    return Table(columns, rows)


def entry_page(item: DlqEntry) -> CliPage:
    told = entry_fields(item)
    shown = told | {"since": format_time(told["since"]), "payload": payload_text(item.payload)}
    return CliPage(told, [f"{name:<8} {value}" for name, value in shown.items() if value is not None])


def action_page(
    action: str, noun: str, matched: int, chosen: int, done: DlqActionResult | None, sentence: str
) -> CliPage:
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
        return CliPage(data, [NO_MATCH.format(noun)])
    return CliPage(data, [sentence, *([_jobs_table(jobs)] if jobs else [])])


def _jobs_table(jobs: Sequence[ResubmitResult]) -> str | Table:
    rows: list[tuple[object, ...]] = [(each.job, each.frames, each.old) for each in jobs[:JOBS_SHOWN_MAX]]
    if len(jobs) > JOBS_SHOWN_MAX:
        rows.append((f"and {len(jobs) - JOBS_SHOWN_MAX} more, all with --json", "", ""))
    return Table(("new job", "frames", "retry of"), rows)


def entry_fields(item: DlqEntry) -> dict[str, object]:
    """The same for both, by the names that the columns have."""
    told = msgspec.structs.asdict(item)
    if isinstance(item, FailedFrame):
        return {"id": told.pop("token"), "kind": "frame", "since": told.pop("failed_at")} | told
    return {"id": told.pop("id"), "kind": told.pop("kind"), "since": told.pop("created_at")} | told


def format_time(when: object) -> str:
    assert isinstance(when, datetime), when
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def first_error_line(error: object) -> str:
    line = str(error or "").strip().partition("\n")[0]
    return line if len(line) <= ERROR_CHARS_MAX else f"{line[: ERROR_CHARS_MAX - 1]}…"


def payload_text(payload: bytes | None) -> str | None:
    """Text as text, anything else by its size."""
    if payload is None:
        return None
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return f"{len(payload)} bytes that are no text; --json shows them in base64"
    return text if len(text) <= PAYLOAD_CHARS_MAX else f"{text[:PAYLOAD_CHARS_MAX]}… ({len(payload)} bytes)"


def pluralize(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"

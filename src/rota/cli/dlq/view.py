"""Formats dead letters and failed frames. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from rota.api.admin import DeadLetter
from rota.cli.core.tables import CliPage, Table
from rota.cli.dlq.groups import DlqActionResult
from rota.model.jobs.submission import ResubmitResult
from rota.queue import FailedFrame

DlqEntry = DeadLetter | FailedFrame

ERROR_CHARS_MAX: Final = 60
PAYLOAD_CHARS_MAX: Final = 2000
JOBS_SHOWN_MAX: Final = 20
NO_MATCH: Final = "No {} matches."


def list_page(items: Sequence[DlqEntry], matched: int, noun: str) -> CliPage:
    """`matched` is the number on all pages."""
    data = [{name: value for name, value in entry_fields(item).items() if name != "payload"} for item in items]
    if not items:
        return CliPage(data, [NO_MATCH.format(noun)])
    parts: list[str | Table] = [_table(items)]
    if matched > len(items):
        last = entry_fields(items[-1])["id"]
        parts.append(f"{len(items)} of {pluralize(matched, noun)}; `--after {last}` shows the next, `--limit` more.")
    return CliPage(data, parts)


def _table(items: Sequence[DlqEntry]) -> Table:
    columns = ("id", "kind", "reason", "queue", "job", "frame", "attempt", "since", "error")
    rows = []
    for item in items:
        fields = entry_fields(item)
        since, error = format_time(fields["since"]), first_error_line(fields["error"])
        rows.append((*("-" if fields[name] is None else fields[name] for name in columns[:7]), since, error))
    return Table(columns, rows)


def entry_page(item: DlqEntry) -> CliPage:
    fields = entry_fields(item)
    shown = fields | {"since": format_time(fields["since"]), "payload": payload_text(item.payload)}
    return CliPage(fields, [f"{name:<8} {value}" for name, value in shown.items() if value is not None])


def action_page(
    action: str, noun: str, matched: int, chosen: int, done: DlqActionResult | None, sentence: str
) -> CliPage:
    """`done` is None when nothing was attempted."""
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
    """The same fields for both kinds of entry, named as the columns."""
    fields = msgspec.structs.asdict(item)
    if isinstance(item, FailedFrame):
        return {"id": fields.pop("token"), "kind": "frame", "since": fields.pop("failed_at")} | fields
    return {"id": fields.pop("id"), "kind": fields.pop("kind"), "since": fields.pop("created_at")} | fields


def format_time(when: object) -> str:
    assert isinstance(when, datetime), when
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def first_error_line(error: object) -> str:
    line = str(error or "").strip().partition("\n")[0]
    return line if len(line) <= ERROR_CHARS_MAX else f"{line[: ERROR_CHARS_MAX - 1]}…"


def payload_text(payload: bytes | None) -> str | None:
    """UTF-8 payloads as text, others by size."""
    if payload is None:
        return None
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return f"{len(payload)} bytes of binary data; --json shows them in base64"
    return text if len(text) <= PAYLOAD_CHARS_MAX else f"{text[:PAYLOAD_CHARS_MAX]}… ({len(payload)} bytes)"


def pluralize(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"

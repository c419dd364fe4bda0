"""`rota outputs`: each command is one change with its audit entry, or one read, straight in PostgreSQL.

Whoever loses the reply may give the same command again: what is released or redacted stays so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from rota.accounting.admin import Admin
from rota.cli import db
from rota.cli.books import actor, print_page
from rota.cli.books_view import Page, Table
from rota.cli.dlq_view import moment
from rota.cli.form import Form
from rota.cli.jobs_view import decoded
from rota.cli.local import with_store
from rota.cli.naming import find
from rota.engine.engine import store_target
from rota.engine.jobs import Jobs
from rota.engine.outputs_desk import Decider, OutputDesk, OutputState
from rota.infra.postgres import Database, check_current
from rota.infra.store import Store
from rota.model.output import Check, OutputChanged, OutputLine, OutputTold
from rota.model.settings import Settings
from rota.queue import Queue

NONE: Final = "No output is kept back."


class At(msgspec.Struct, frozen=True):
    """Where commands work."""

    database: Database
    desk: OutputDesk
    who: Decider


def run(settings: Settings, work: Callable[[At], Awaitable[Page]], *, form: Form) -> None:
    async def done() -> Page:
        async with db.opened(settings) as database:
            await check_current(database)
            store = Store(database, store_target(with_store(settings)))
            who = Decider(actor(), (actor(),))
            return await work(At(database, OutputDesk(database, store, Queue(database)), who))

    print_page(asyncio.run(done()), form=form)


async def listed(
    at: At, show: str | None, job: str | None, state: OutputState | None, limit: int, after: int | None
) -> Page:
    shows = None if show is None else [(await Admin(at.database).show(show)).id]
    of = await find(Jobs(at.database), job) if job else None
    lines = await at.desk.page(shows=shows, state=state, job=of, after=after, most=limit)
    data = [msgspec.to_builtins(line) for line in lines]
    return Page(data, [_table(lines)] if lines else [NONE])


async def shown(at: At, output: int, *, reveal: bool) -> Page:
    told = await at.desk.get(output)
    data = msgspec.to_builtins(told.line) | {"checks": msgspec.to_builtins(told.checks), "artifacts": told.artifacts}
    parts: list[str | Table] = [*_told(told), _findings(told.checks)]
    if reveal:
        value = decoded(await at.desk.content(output, at.who))
        data["value"] = value
        parts.append(f"value    {value}")
    return Page(data, parts)


async def released(at: At, output: int, reason: str) -> Page:
    return _changed(await at.desk.release(output, at.who, reason), "Released")


async def redacted(at: At, output: int, reason: str, *, whole: bool) -> Page:
    return _changed(await at.desk.redact(output, at.who, reason, whole=whole), "Redacted")


def _changed(told: OutputChanged, act: str) -> Page:
    sentence = f"{act} output {told.id} of job {told.job}." if told.changed else f"Output {told.id} was so already."
    return Page(msgspec.to_builtins(told), [sentence])


def _table(lines: Sequence[OutputLine]) -> Table:
    columns = ("output", "state", "severity", "rule", "job", "frame", "bytes", "since")
    rows = [
        (one.id, one.state, one.severity or "-", one.rule or "-", one.job, one.frame, one.bytes, moment(one.at))
        for one in lines
    ]
    return Table(columns, rows)


def _told(told: OutputTold) -> list[str]:
    line = told.line
    shown = {
        "output": line.id,
        "state": line.state,
        "job": line.job,
        "frame": f"{line.frame} of layer {line.layer}, attempt {line.attempt}",
        "show": line.show,
        "topic": line.topic,
        "reason": line.reason or None,
        "files": ", ".join(told.artifacts) or None,
    }
    return [f"{name:<8} {value}" for name, value in shown.items() if value is not None]


def _findings(checks: Sequence[Check]) -> str | Table:
    rows: list[tuple[object, ...]] = []
    for check in checks:
        said = (check.phase, check.says, check.rule or "-", check.by)
        found: list[tuple[object, ...]] = [(each.name, each.where, each.offset, each.length) for each in check.findings]
        rows += [(*said, *each) for each in found or [("-", "-", "-", "-")]]
    return Table(("check", "says", "rule", "by", "found", "where", "offset", "length"), rows) if rows else "No check."

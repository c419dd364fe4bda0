"""`rota outputs`: reads directly from PostgreSQL; decides over the HTTP API, as the principal of the key it finds.

After a lost reply the same command can be repeated: release and redaction are idempotent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from rota.accounting.admin import QuotaAdmin
from rota.cli.core.api import api_client
from rota.cli.core.output_format import OutputFormat
from rota.cli.core.resolve_ids import find_job
from rota.cli.core.tables import CliPage, Table
from rota.cli.db import commands as db_commands
from rota.cli.dlq.view import format_time
from rota.cli.jobs.view import decode_value
from rota.cli.local.up import with_local_store
from rota.cli.quota.actions import current_actor, print_page
from rota.client.resource import url_path
from rota.engine.engine import store_target
from rota.engine.outputs.review import OutputReview, ReviewState
from rota.engine.queries.jobs import JobQueries
from rota.infra.blob_store import BlobStore
from rota.infra.postgres import Database, check_current
from rota.model.policy.outputs import OutputCheck, OutputReviewRequest, OutputReviewResult, OutputSummary, OutputView
from rota.model.settings import Settings
from rota.queue import Queue
from rota.runtime import build_completions

NO_OUTPUTS: Final = "No output matches."


class OutputContext(msgspec.Struct, frozen=True):
    """The dependencies of the commands."""

    database: Database
    desk: OutputReview


def run(settings: Settings, work: Callable[[OutputContext], Awaitable[CliPage]], *, form: OutputFormat) -> None:
    async def done() -> CliPage:
        async with db_commands.open_database(settings) as database:
            await check_current(database)
            store = BlobStore(database, store_target(with_local_store(settings)))
            review = OutputReview(database, store, Queue(database), build_completions(database))
            return await work(OutputContext(database, review))

    print_page(asyncio.run(done()), form=form)


async def list_outputs(
    at: OutputContext, show: str | None, job: str | None, state: ReviewState | None, limit: int, after: int | None
) -> CliPage:
    shows = None if show is None else [(await QuotaAdmin(at.database).show(show)).id]
    of = await find_job(JobQueries(at.database), job) if job else None
    lines = await at.desk.page(shows=shows, state=state, job=of, after=after, most=limit)
    data = [msgspec.to_builtins(line) for line in lines]
    return CliPage(data, [_outputs_table(lines)] if lines else [NO_OUTPUTS])


async def show_output(at: OutputContext, output: int, *, reveal: bool) -> CliPage:
    view = await at.desk.get(output)
    data = msgspec.to_builtins(view.line) | {"checks": msgspec.to_builtins(view.checks), "artifacts": view.artifacts}
    parts: list[str | Table] = [*_output_lines(view), _findings_table(view.checks)]
    if reveal:
        value = decode_value(await at.desk.content(output, current_actor()))
        data["value"] = value
        parts.append(f"value    {value}")
    return CliPage(data, parts)


def release_output(settings: Settings, output: int, reason: str, *, form: OutputFormat) -> None:
    body = OutputReviewRequest(reason=reason)
    print_page(_change_page(asyncio.run(_decide(settings, output, "release", body)), "Released"), form=form)


def redact_output(settings: Settings, output: int, reason: str, *, whole: bool, form: OutputFormat) -> None:
    body = OutputReviewRequest(reason=reason, whole=whole)
    print_page(_change_page(asyncio.run(_decide(settings, output, "redact", body)), "Redacted"), form=form)


async def _decide(settings: Settings, output: int, act: str, body: OutputReviewRequest) -> OutputReviewResult:
    path = url_path("outputs", str(output), act)
    async with api_client(settings) as client:
        return await client.call("POST", path, OutputReviewResult, idempotent=True, body=body)


def _change_page(view: OutputReviewResult, verb: str) -> CliPage:
    sentence = (
        f"{verb} output {view.id} of job {view.job}."
        if view.changed
        else f"Nothing changed: output {view.id} was {verb.lower()} before."
    )
    return CliPage(msgspec.to_builtins(view), [sentence])


def _outputs_table(lines: Sequence[OutputSummary]) -> Table:
    columns = ("output", "state", "severity", "rule", "job", "frame", "bytes", "since")
    rows = [
        (one.id, one.state, one.severity or "-", one.rule or "-", one.job, one.frame, one.bytes, format_time(one.at))
        for one in lines
    ]
    return Table(columns, rows)


def _output_lines(view: OutputView) -> list[str]:
    line = view.line
    shown = {
        "output": line.id,
        "state": line.state,
        "job": line.job,
        "frame": f"{line.frame} of layer {line.layer}, attempt {line.attempt}",
        "show": line.show,
        "topic": line.topic,
        "reason": line.reason or None,
        "files": ", ".join(view.artifacts) or None,
    }
    return [f"{name:<8} {value}" for name, value in shown.items() if value is not None]


def _findings_table(checks: Sequence[OutputCheck]) -> str | Table:
    rows: list[tuple[object, ...]] = []
    for check in checks:
        check_cells = (check.phase, check.says, check.rule or "-", check.by)
        found: list[tuple[object, ...]] = [(each.name, each.where, each.offset, each.length) for each in check.findings]
        rows += [(*check_cells, *each) for each in found or [("-", "-", "-", "-")]]
    return Table(("check", "says", "rule", "by", "found", "where", "offset", "length"), rows) if rows else "No check."

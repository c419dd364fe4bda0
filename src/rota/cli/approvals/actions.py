"""`rota approvals`: reads directly from PostgreSQL; votes over the HTTP API, as the principal of the key it finds.

A user of the operating system is not a principal: that vote could be the submitter's, who used a key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

import msgspec

from rota.api.jobs import JobView
from rota.cli.core.api import api_client
from rota.cli.core.output_format import OutputFormat
from rota.cli.core.tables import CliPage, Table
from rota.cli.db import commands as db_commands
from rota.cli.jobs.view import decode_value, job_page, json_text
from rota.cli.quota.actions import print_page
from rota.client.resource import url_path
from rota.engine.admission.approvals import Approver
from rota.engine.admission.controller import AdmissionController
from rota.engine.queries.jobs import JobQueries
from rota.infra.postgres import Database, check_current
from rota.infra.telemetry.redaction import redact
from rota.model.approvals import Approval, ApprovalState, ApprovalView, VoteReply, VoteRequest, approval_view
from rota.model.errors import InvalidInput, NotFound
from rota.model.ids import JobId, parse_id
from rota.model.settings import Settings
from rota.model.units import humanize_duration
from rota.model.workflows.approval_steps import StepApprovalView
from rota.runtime import build_completions
from rota.workflow.definitions import Definitions
from rota.workflow.step_approvals import StepApprovals

NO_APPROVALS: Final = "Nothing waits for an approval."
TEXT_CHARS_MAX: Final = 2000


class ApprovalContext:
    def __init__(self, database: Database) -> None:
        self.approver = Approver(database, AdmissionController(database, build_completions(database)))
        self.jobs = JobQueries(database)
        self.steps = StepApprovals(Definitions(database), asyncio.Event())


def run(settings: Settings, work: Callable[[ApprovalContext], Awaitable[CliPage]], *, form: OutputFormat) -> None:
    async def done() -> CliPage:
        async with db_commands.open_database(settings) as database:
            await check_current(database)
            return await work(ApprovalContext(database))

    print_page(asyncio.run(done()), form=form)


async def list_approvals(approvals: ApprovalContext, state: str, limit: int) -> CliPage:
    found = await approvals.approver.approvals.list(state=_parse_state(state), most=limit)
    data = [msgspec.to_builtins(approval_view(each)) for each in found]
    if not found:
        return CliPage(data, [NO_APPROVALS if state == "pending" else "No approval matches."])
    columns = ("id", "show", "what", "rule", "state", "agreed", "waits", "left", "submitted by")
    return CliPage(data, [Table(columns, [_row(each) for each in found])])


async def show_approval(approvals: ApprovalContext, which: str) -> CliPage:
    found = await approvals.approver.find(which)
    lines: list[str | Table] = [*_summary_lines(found)]
    data: dict[str, object] = {"approval": msgspec.to_builtins(approval_view(found)), "job": None, "step": None}
    if found.kind == "step":
        step = await approvals.steps.step_approval_view(found)
        lines += ["", *_step_lines(step)] if step is not None else ["The run was deleted."]
        data["step"] = msgspec.to_builtins(step)
    else:
        try:
            job = await approvals.jobs.get(parse_id(JobId, found.subject))
        except NotFound:
            lines.append("The job was deleted.")
        else:
            page = job_page(job)
            lines += ["", "What is approved:", *page.parts, *_layer_lines(job)]
            data["job"] = page.data
    return CliPage(data, lines)


def approve(settings: Settings, which: str, reason: str, *, form: OutputFormat) -> None:
    page = asyncio.run(_vote(settings, which, "approve", reason, "Nothing changed: you already approved it."))
    print_page(page, form=form)


def reject(settings: Settings, which: str, reason: str, *, form: OutputFormat) -> None:
    page = asyncio.run(_vote(settings, which, "reject", reason, "Nothing changed: it was already rejected."))
    print_page(page, form=form)


async def _vote(settings: Settings, which: str, vote: str, reason: str, unchanged: str) -> CliPage:
    path, body = url_path("approvals", which, vote), VoteRequest(reason=reason)
    async with api_client(settings) as client:
        reply = await client.call("POST", path, VoteReply, idempotent=True, body=body)
    return CliPage(msgspec.to_builtins(reply), [_outcome_text(reply.approval) if reply.changed else unchanged])


def _outcome_text(approval: ApprovalView) -> str:
    what = f"{approval.kind} {approval.subject}"
    match approval.state:
        case ApprovalState.GRANTED:
            if approval.kind == "step":
                return f"Approved: {what} continues."
            return f"Approved: {what} continues after another policy decision."
        case ApprovalState.REJECTED:
            return f"Rejected: {what} is denied."
        case _:
            return f"Recorded: {approval.agreed} of {approval.quorum} have approved {what}."


def _parse_state(text: str) -> ApprovalState | None:
    if text == "all":
        return None
    try:
        return ApprovalState(text)
    except ValueError as error:
        names = ", ".join(state.value for state in ApprovalState)
        raise InvalidInput(f"{text[:40]!r} is not a valid state of an approval: use {names}, or all.") from error


def _row(approval: Approval) -> tuple[object, ...]:
    return (
        approval.id,
        approval.show,
        f"{approval.kind} {approval.title or approval.subject}",
        approval.rule,
        approval.state.value,
        f"{approval.agreed} of {approval.quorum}",
        _age_text(approval),
        _remaining_text(approval),
        approval.principal or approval.actor,
    )


def _age_text(approval: Approval) -> str:
    return humanize_duration(
        max(0.0, ((approval.decided_at or datetime.now(UTC)) - approval.requested_at).total_seconds())
    )


def _remaining_text(approval: Approval) -> str:
    if approval.expires_at is None or approval.state is not ApprovalState.PENDING:
        return ""
    return humanize_duration(max(0.0, (approval.expires_at - datetime.now(UTC)).total_seconds()))


def _summary_lines(approval: Approval) -> list[str]:
    by = f"rule {approval.rule}" if approval.rule else "the policy"
    by += f" of snapshot {approval.snapshot[:12]}" if approval.snapshot else ""
    by, verb = ("its workflow", "started") if approval.kind == "step" else (by, "submitted")
    who = ", ".join(approval.approvers) or f"every operator of {approval.show}"
    lines = [
        f"Approval {approval.id} of {approval.kind} {approval.subject}: {approval.state}",
        f"  required by {by}{f': {approval.reason}' if approval.reason else ''}",
        f"  {verb} by {approval.principal or approval.actor or 'unknown'}, {_age_text(approval)} ago",
        f"  {approval.agreed} of {approval.quorum} have approved; approvers: {who}",
    ]
    if left := _remaining_text(approval):
        lines.append(f"  {left} left until it is denied")
    lines.append(f"  hash {approval.hash.hex()}")
    for vote in approval.votes:
        vote_text = "approved" if vote.agrees else "rejected"
        lines.append(f"  {vote.voter} {vote_text}{f': {vote.reason}' if vote.reason else ''}")
    return lines


def _step_lines(step: StepApprovalView) -> list[str]:
    lines = [
        "What is approved:",
        f"  {step.text}",
        f"  step {step.step} of run {step.run} ({step.workflow}, version {step.version})",
    ]
    if step.input:
        lines.append(f"    with {_truncate(json_text(redact(step.input)))}")
    lines.append(f"  run input {_truncate(json_text(redact(step.run_input)))}")
    return lines


def _layer_lines(job: JobView) -> list[str]:
    """Input and environment of each layer, with secrets masked."""
    lines = []
    for layer in job.layers:
        lines.append(f"  {layer.name} runs {layer.work.task or ' '.join(layer.work.argv)}")
        if layer.input is not None:
            lines.append(f"    with {_truncate(json_text(redact(decode_value(layer.input))))}")
        elif layer.input_at is not None:
            lines.append(f"    with the stored input {layer.input_at}")
        if layer.work.env:
            lines.append(f"    env {_truncate(json_text(redact(layer.work.env)))}")
    return lines


def _truncate(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}... ({len(text)} characters)"

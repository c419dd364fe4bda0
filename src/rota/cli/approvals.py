"""`rota approvals`: works on PostgreSQL, as the user of this process, who is an operator of every show."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

import msgspec

from rota.accounting.books import Books
from rota.cli import db
from rota.cli.books import actor, print_page
from rota.cli.books_view import Page, Table
from rota.cli.form import Form
from rota.cli.jobs_view import as_text, decoded, job_page
from rota.engine.approving import Approver, Said
from rota.engine.finish import Finisher
from rota.engine.gatekeeper import Gatekeeper
from rota.engine.jobs import Job, Jobs
from rota.infra.postgres import Database, check_current
from rota.infra.telemetry.redaction import redact
from rota.model.approval import Approval, ApprovalState, Voter, view
from rota.model.errors import InvalidInput, NotFound
from rota.model.ids import JobId, parse_id
from rota.model.settings import Settings
from rota.model.units import span
from rota.model.workflow_approval import StepAsked
from rota.queue import Queue
from rota.workflow.approving import StepApprovals
from rota.workflow.definitions import Definitions

NOTHING: Final = "Nothing waits for an approval."
SHOWN_CHARS: Final = 2000


class Desk:
    def __init__(self, database: Database) -> None:
        # What is approved or denied here was never queued, so nothing is booked, and Redis need not hear of it.
        finisher = Finisher(database, Queue(database), Books(database, None))
        self.approver = Approver(database, Gatekeeper(database, finisher))
        self.jobs = Jobs(database)
        self.steps = StepApprovals(Definitions(database))
        self.approver.subjects["step"] = self.steps
        self.voter = Voter(actor(), actor(), is_operator=True)


def run(settings: Settings, work: Callable[[Desk], Awaitable[Page]], *, form: Form) -> None:
    async def done() -> Page:
        async with db.opened(settings) as database:
            await check_current(database)
            return await work(Desk(database))

    print_page(asyncio.run(done()), form=form)


async def listed(desk: Desk, state: str, limit: int) -> Page:
    found = await desk.approver.approvals.list(state=_state(state), most=limit)
    data = [msgspec.to_builtins(view(each)) for each in found]
    if not found:
        return Page(data, [NOTHING if state == "pending" else "There is no such approval."])
    columns = ("id", "show", "what", "rule", "state", "agreed", "waits", "left", "submitted by")
    return Page(data, [Table(columns, [_row(each) for each in found])])


async def shown(desk: Desk, which: str) -> Page:
    found = await desk.approver.find(which)
    lines: list[str | Table] = [*_lines(found)]
    data: dict[str, object] = {"approval": msgspec.to_builtins(view(found)), "job": None, "step": None}
    if found.kind == "step":
        step = await desk.steps.asked(found)
        lines += ["", *_step(step)] if step is not None else ["The run is not kept any more."]
        data["step"] = msgspec.to_builtins(step)
    else:
        try:
            job = await desk.jobs.get(parse_id(JobId, found.subject))
        except NotFound:
            lines.append("The job is not kept any more.")
        else:
            page = job_page(job)
            lines += ["", "What is approved:", *page.parts, *_contents(job)]
            data["job"] = page.data
    return Page(data, lines)


async def approved(desk: Desk, which: str, reason: str) -> Page:
    said = await desk.approver.approve(await desk.approver.find(which), desk.voter, reason)
    return _said(said, "Nothing changed: that was said before.")


async def rejected(desk: Desk, which: str, reason: str) -> Page:
    said = await desk.approver.reject(await desk.approver.find(which), desk.voter, reason)
    return _said(said, "Nothing changed: it was refused before.")


def _said(said: Said, unchanged: str) -> Page:
    data = {"approval": msgspec.to_builtins(view(said.approval)), "changed": said.changed}
    return Page(data, [_outcome(said.approval) if said.changed else unchanged])


def _outcome(approval: Approval) -> str:
    what = f"{approval.kind} {approval.subject}"
    match approval.state:
        case ApprovalState.GRANTED:
            if approval.kind == "step":
                return f"Approved: {what} goes on."
            return f"Approved: {what} goes on once the policy has been asked again."
        case ApprovalState.REJECTED:
            return f"Rejected: {what} is denied."
        case _:
            return f"Noted: {approval.agreed} of {approval.quorum} have agreed to {what}."


def _state(text: str) -> ApprovalState | None:
    if text == "all":
        return None
    try:
        return ApprovalState(text)
    except ValueError as error:
        names = ", ".join(state.value for state in ApprovalState)
        raise InvalidInput(f"{text[:40]!r} is no state of an approval: give {names}, or all.") from error


def _row(approval: Approval) -> tuple[object, ...]:
    return (
        approval.id,
        approval.show,
        f"{approval.kind} {approval.title or approval.subject}",
        approval.rule,
        approval.state.value,
        f"{approval.agreed} of {approval.quorum}",
        _ago(approval),
        _left(approval),
        approval.principal or approval.actor,
    )


def _ago(approval: Approval) -> str:
    return span(max(0.0, ((approval.decided_at or datetime.now(UTC)) - approval.requested_at).total_seconds()))


def _left(approval: Approval) -> str:
    if approval.expires_at is None or approval.state is not ApprovalState.PENDING:
        return ""
    return span(max(0.0, (approval.expires_at - datetime.now(UTC)).total_seconds()))


def _lines(approval: Approval) -> list[str]:
    by = f"rule {approval.rule}" if approval.rule else "the policy"
    by += f" of snapshot {approval.snapshot[:12]}" if approval.snapshot else ""
    by, did = ("its workflow", "started") if approval.kind == "step" else (by, "submitted")
    who = ", ".join(approval.approvers) or f"every operator of {approval.show}"
    lines = [
        f"Approval {approval.id} of {approval.kind} {approval.subject}: {approval.state}",
        f"  asked for by {by}{f': {approval.reason}' if approval.reason else ''}",
        f"  {did} by {approval.principal or approval.actor or 'nobody who is known'}, {_ago(approval)} ago",
        f"  {approval.agreed} of {approval.quorum} have agreed; may: {who}",
    ]
    if left := _left(approval):
        lines.append(f"  {left} left, then it is denied")
    lines.append(f"  hash {approval.hash.hex()}")
    for vote in approval.votes:
        said = "agrees" if vote.agrees else "refuses"
        lines.append(f"  {vote.voter} {said}{f': {vote.reason}' if vote.reason else ''}")
    return lines


def _step(step: StepAsked) -> list[str]:
    lines = [
        "What is approved:",
        f"  {step.text}",
        f"  step {step.step} of run {step.run} ({step.workflow}, version {step.version})",
    ]
    if step.input:
        lines.append(f"    with {_cut(as_text(redact(step.input)))}")
    lines.append(f"  the run was given {_cut(as_text(redact(step.run_input)))}")
    return lines


def _contents(job: Job) -> list[str]:
    """What its layers are called with; secrets in it are masked, here as everywhere."""
    lines = []
    for layer in job.layers:
        lines.append(f"  {layer.name} runs {layer.work.task or ' '.join(layer.work.argv)}")
        if layer.input is not None:
            lines.append(f"    with {_cut(as_text(redact(decoded(layer.input))))}")
        elif layer.input_at is not None:
            lines.append(f"    with what is stored as {layer.input_at}")
        if layer.work.env:
            lines.append(f"    env {_cut(as_text(redact(layer.work.env)))}")
    return lines


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}... ({len(text)} characters)"

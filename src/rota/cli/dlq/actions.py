"""`rota dlq`: lists dead letters and failed frames, and retries, moves, discards or purges them.

An action counts the entries, asks for confirmation and then applies, with no connection open while it waits for the
answer. It never touches entries newer than the count, nor more of them; entries that another process removed in the
meantime are reported.

With filters it runs in batches, each one transaction with its audit entry: after a crash or a lost reply between two
batches, the same command does the rest. Entries named by id are changed in one transaction, all or none.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final, Literal

import msgspec

from rota.accounting.resources import unknown_name_error
from rota.api.admin import DeadLetterKind
from rota.cli.core.output_format import OutputFormat
from rota.cli.core.resolve_ids import find_job, parse_full_id
from rota.cli.core.tables import CliPage
from rota.cli.dlq import view as dlq_view
from rota.cli.dlq.groups import DeadLetterGroup, DlqActionResult, FailedFrameGroup, group_for
from rota.cli.queue.actions import open_queue
from rota.cli.quota.actions import current_actor, print_page
from rota.engine.queries.jobs import JobQueries
from rota.infra import audit, failpoints
from rota.infra.audit import AuditEntry
from rota.model.errors import InvalidInput
from rota.model.settings import Settings
from rota.model.units import parse_duration
from rota.queue import DeadLetterFilter, FailedFilter, Queue, storage_report
from rota.queue.dead_letters import REMOVE_MAX
from rota.queue.entries import check_count, check_queue_name

AGE_MAX_S: Final = 100 * 366 * 86_400.0
ID_LIMIT: Final = 2**63
IDS_IN_AUDIT: Final = 100
_ID_PATTERN = re.compile(r"[0-9]{1,19}", re.ASCII)

DlqActionName = Literal["retry", "move", "discard", "purge"]


class DlqAction(msgspec.Struct, frozen=True):
    """An action and its texts: the question, the dry-run result and the result."""

    name: DlqActionName
    question: str
    would: str
    done: str
    needs_filter: bool = False


DLQ_ACTIONS: Final[Mapping[DlqActionName, DlqAction]] = {
    "retry": DlqAction("retry", "Retry {}?", "{} would be retried.", "Retried {}: queued again with all attempts."),
    "move": DlqAction("move", "Move {} to the dead letters?", "{} would be moved.", "Moved {} to the dead letters."),
    "discard": DlqAction(
        "discard", "Discard {}?", "{} would be discarded.", "Discarded {}: no longer counted.", needs_filter=True
    ),
    "purge": DlqAction("purge", "Purge {}?", "{} would be purged.", "Purged {}.", needs_filter=True),
}


class DlqSelection(msgspec.Struct, frozen=True, kw_only=True):
    """The selection as typed."""

    ids: Sequence[str] | None = None
    queue: str | None = None
    kind: DeadLetterKind | None = None
    reason: str | None = None
    job: str | None = None
    older_than: str | None = None
    limit: int | None = None

    @property
    def filters(self) -> dict[str, object]:
        """Filters that are set, without `limit`, which selects nothing."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value and name != "limit"}


class DlqRequest(msgspec.Struct, frozen=True):
    act: DlqAction
    given: DlqSelection
    failed: bool
    everything: bool = False


class DlqMatchCount(msgspec.Struct, frozen=True):
    """The action applies to `number` of the `matched` entries that match `which`."""

    which: DeadLetterFilter | FailedFilter
    matched: int
    number: int


def show_list(
    settings: Settings, selection: DlqSelection, *, failed: bool, after: str | None, form: OutputFormat
) -> None:
    start = _parse_entry_id(after) if after is not None else -1
    limit = selection.limit or 0
    check_count("entries to list", limit, REMOVE_MAX)

    async def load() -> CliPage:
        async with open_queue(settings) as queue:
            group = group_for(settings, queue, await _build_filter(queue, selection, failed=failed))
            return dlq_view.list_page(await group.find(start, limit), await group.count(), group.noun)

    print_page(asyncio.run(load()), form=form)


def show_entry(settings: Settings, text: str, *, failed: bool, form: OutputFormat) -> None:
    entry_id = _parse_entry_id(text)

    async def load() -> CliPage:
        async with open_queue(settings) as queue:
            group = group_for(
                settings, queue, FailedFilter(tokens=[entry_id]) if failed else DeadLetterFilter(ids=[entry_id])
            )
            for each in await group.find(-1, 1):
                return dlq_view.entry_page(each)
            raise await group.missing_error()

    print_page(asyncio.run(load()), form=form)


def run_action(settings: Settings, request: DlqRequest, *, yes: bool, dry_run: bool, form: OutputFormat) -> int:
    """Returns the exit status: 1 when the user declined."""
    _check_selection(request)
    counted = asyncio.run(_count_matches(settings, request))
    done = None
    if counted.number and not dry_run:
        if not yes and not _confirm(request.act.question.format(_amount_text(request, counted))):
            sys.stderr.write("Nothing was changed.\n")
            return 1
        done = asyncio.run(_apply(settings, request, counted))
    noun = _noun(request)
    text = (
        request.act.would.format(_amount_text(request, counted))
        if done is None
        else _done_text(request, counted, len(done.gone))
    )
    page = dlq_view.action_page(request.act.name, noun, counted.matched, counted.number, done, text)
    print_page(page, form=form)
    return 0


def _check_selection(request: DlqRequest) -> None:
    if request.given.limit is not None:
        check_count(f"{_noun(request)}s", request.given.limit, ID_LIMIT)
        if request.given.ids:
            raise InvalidInput("--limit applies to filters only: omit it when you name ids.")
    if request.given.filters or request.everything:
        return
    options = "--queue, --reason, --job or --older-than"
    if request.act.name == "purge":
        options = f"--kind, {options}"
    more = "" if request.act.needs_filter else ", or use --all"
    raise InvalidInput(
        f"No {_noun(request)}s are selected to {request.act.name}: name ids, or filter by {options}{more}."
    )


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        words = question[0].lower() + question[1:-1]
        raise InvalidInput(
            f"Cannot ask whether to {words} without a terminal: use --yes, or --dry-run to change nothing."
        )
    sys.stderr.write(f"{question} [y/N] ")  # standard output is for the result
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


async def _count_matches(settings: Settings, request: DlqRequest) -> DlqMatchCount:
    async with open_queue(settings) as queue:
        which = await _build_filter(queue, request.given, failed=request.failed)
        if request.act.name == "retry" and isinstance(which, DeadLetterFilter):
            which = _retry_filter(which)
        group = group_for(settings, queue, which)
        matched = await group.count()
        if matched < len(group.named):
            raise await group.missing_error()
        return DlqMatchCount(which, matched, min(matched, request.given.limit or matched))


def _retry_filter(which: DeadLetterFilter) -> DeadLetterFilter:
    if which.kind not in (None, "frame", "job"):
        raise InvalidInput(f"Dead letters of kind {which.kind} cannot be retried here: use --kind frame or --kind job.")
    return msgspec.structs.replace(which, kind=which.kind or "frame")


async def _apply(settings: Settings, request: DlqRequest, counted: DlqMatchCount) -> DlqActionResult:
    """Remove matching entries in batches; every pass removes some or is the last."""
    done = DlqActionResult()
    async with open_queue(settings) as queue:
        group = group_for(settings, queue, counted.which)
        while len(done.gone) < counted.number:
            async with queue.database.transaction() as tx:
                most = min(REMOVE_MAX, counted.number - len(done.gone))
                removed = await group.remove(request.act.name, most, tx)
                if group.named and len(removed.gone) < counted.number:
                    raise await group.missing_error()
                if removed.gone:
                    await audit.append(tx, [_audit_entry(request, removed)])
                failpoints.hit("dlq.after_batch_before_commit")
            done = DlqActionResult([*done.gone, *removed.gone], [*done.jobs, *removed.jobs])
            if not removed.gone:
                break
    return done


def _audit_entry(request: DlqRequest, removed: DlqActionResult) -> AuditEntry:
    filters = {name: value for name, value in request.given.filters.items() if name != "ids"}
    detail = {"given": filters, "number": len(removed.gone), "first_ids": removed.gone[:IDS_IN_AUDIT]}
    if removed.jobs:
        detail["jobs"] = [str(each.job) for each in removed.jobs[:IDS_IN_AUDIT]]
    return AuditEntry(current_actor(), f"dlq.{request.act.name}", f"{_noun(request).replace(' ', '_')}s", detail)


async def _build_filter(queue: Queue, selection: DlqSelection, *, failed: bool) -> DeadLetterFilter | FailedFilter:
    """The filter, limited to entries up to now by PostgreSQL's clock."""
    ids = sorted({_parse_entry_id(text) for text in selection.ids}) if selection.ids else None
    if ids:
        check_count("ids", len(ids), REMOVE_MAX)
    job = None
    if selection.job is not None:
        job = parse_full_id(selection.job) or await find_job(JobQueries(queue.database), selection.job)
    age_s = _parse_age_s(selection.older_than) if selection.older_than is not None else 0.0
    before = (await storage_report.storage_state(queue.database)).as_of - timedelta(seconds=age_s)
    if selection.reason is not None and not 0 < len(selection.reason) <= 100:
        raise InvalidInput("The reason is not valid: use a code of 1 to 100 characters, as in `rota dlq list`.")
    if selection.queue is not None:
        await _check_queue(queue, selection.queue)
    if not failed:
        return DeadLetterFilter(
            ids=ids, kind=selection.kind, reason=selection.reason, queue=selection.queue, job=job, before=before
        )
    if selection.kind is not None and selection.kind != "frame":
        raise InvalidInput(f"--failed selects frames only: omit it for dead letters of kind {selection.kind}.")
    return FailedFilter(tokens=ids, reason=selection.reason, queue=selection.queue, job=job, before=before)


async def _check_queue(queue: Queue, name: str) -> None:
    """Raise, with the closest name, unless the queue exists or a dead letter names it (those may be foreign)."""
    check_queue_name(name)
    names = [info.queue for info in await queue.queues()]
    if name not in names and not await queue.dead_letters.count(DeadLetterFilter(queue=name)):
        raise unknown_name_error("queue", name, names)


def _parse_entry_id(text: str) -> int:
    if not _ID_PATTERN.fullmatch(text) or not 0 < int(text) < ID_LIMIT:
        raise InvalidInput(f"{text[:40]!r} is not a valid id: use a whole number from 1, as in `rota dlq list`.")
    return int(text)


def _parse_age_s(text: str) -> float:
    age_s = parse_duration(text)
    if not 0 < age_s <= AGE_MAX_S:
        raise InvalidInput(f"{text[:40]!r} is not a valid age: use a duration above 0, such as 30min, 12h or 7d.")
    return age_s


def _noun(request: DlqRequest) -> str:
    return FailedFrameGroup.noun if request.failed else DeadLetterGroup.noun


def _amount_text(request: DlqRequest, counted: DlqMatchCount) -> str:
    if counted.number < counted.matched:
        return f"{counted.number} of {dlq_view.pluralize(counted.matched, _noun(request))}"
    return dlq_view.pluralize(counted.number, _noun(request))


def _done_text(request: DlqRequest, counted: DlqMatchCount, done: int) -> str:
    text = request.act.done.format(dlq_view.pluralize(done, _noun(request)))
    return (
        text
        if done == counted.number
        else f"{text} {counted.number - done} were removed by another process in the meantime."
    )

"""`rota dlq`: look at what was given up, and decide what becomes of it.

An act is counted, asked for and done, in three steps with no connection open while a person thinks. It touches nothing
that came after the count and never more than was counted; what somebody else took meanwhile is told. It is done in
batches, each with its audit entry: whoever dies, or loses the reply, between two has done a part, and the same command
does the rest. What is named by id is done in one transaction, all of it or nothing.
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
from rota.queue.dead_letters import REMOVE_MAX, DeadLetterKind
from rota.queue.entries import check_count, check_queue_name

AGE_MAX_S: Final = 100 * 366 * 86_400.0
ID_LIMIT: Final = 2**63
IDS_IN_AUDIT: Final = 100
_ID_PATTERN = re.compile(r"[0-9]{1,19}", re.ASCII)

DlqActionName = Literal["retry", "move", "discard", "purge"]


class DlqAction(msgspec.Struct, frozen=True):
    """What can be done, in the words in which it is asked for and told."""

    name: DlqActionName
    question: str
    would: str
    done: str
    needs_filter: bool = False


DLQ_ACTIONS: Final[Mapping[DlqActionName, DlqAction]] = {
    "retry": DlqAction(
        "retry", "Retry {}?", "{} would be retried.", "Retried {}: queued again, with all attempts ahead."
    ),
    "move": DlqAction("move", "Move {} to the dead letters?", "{} would be moved.", "Moved {} to the dead letters."),
    "discard": DlqAction(
        "discard", "Discard {}?", "{} would be discarded.", "Discarded {}: no longer counted.", needs_filter=True
    ),
    "purge": DlqAction("purge", "Purge {}?", "{} would be purged.", "Purged {}.", needs_filter=True),
}


class DlqSelection(msgspec.Struct, frozen=True, kw_only=True):
    """What was typed to say which."""

    ids: Sequence[str] | None = None
    queue: str | None = None
    kind: DeadLetterKind | None = None
    reason: str | None = None
    job: str | None = None
    older_than: str | None = None
    limit: int | None = None

    @property
    def filters(self) -> dict[str, object]:
        """What is set, without the limit, which chooses nothing."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value and name != "limit"}


class DlqRequest(msgspec.Struct, frozen=True):
    act: DlqAction
    given: DlqSelection
    failed: bool
    everything: bool = False


class DlqMatchCount(msgspec.Struct, frozen=True):
    """`number` of the `matched` would be touched; `which` is what they agree with."""

    which: DeadLetterFilter | FailedFilter
    matched: int
    number: int


def show_list(settings: Settings, given: DlqSelection, *, failed: bool, after: str | None, form: OutputFormat) -> None:
    start = _parse_entry_id(after) if after is not None else -1
    limit = given.limit or 0
    check_count("entries to list", limit, REMOVE_MAX)

    async def found() -> CliPage:
        async with open_queue(settings) as queue:
            pile = group_for(settings, queue, await _build_filter(queue, given, failed=failed))
            return dlq_view.list_page(await pile.find(start, limit), await pile.count(), pile.noun)

    print_page(asyncio.run(found()), form=form)


def show_entry(settings: Settings, text: str, *, failed: bool, form: OutputFormat) -> None:
    one = _parse_entry_id(text)

    async def found() -> CliPage:
        async with open_queue(settings) as queue:
            pile = group_for(settings, queue, FailedFilter(tokens=[one]) if failed else DeadLetterFilter(ids=[one]))
            for each in await pile.find(-1, 1):
                return dlq_view.entry_page(each)
            raise await pile.missing_error()

    print_page(asyncio.run(found()), form=form)


def run_action(settings: Settings, asked: DlqRequest, *, yes: bool, dry_run: bool, form: OutputFormat) -> int:
    """The exit status: 1 when it was declined."""
    _check_selection(asked)
    counted = asyncio.run(_count_matches(settings, asked))
    done = None
    if counted.number and not dry_run:
        if not yes and not _confirm(asked.act.question.format(_amount_text(asked, counted))):
            sys.stderr.write("Nothing was changed.\n")
            return 1
        done = asyncio.run(_apply(settings, asked, counted))
    noun = _noun(asked)
    told = (
        asked.act.would.format(_amount_text(asked, counted))
        if done is None
        else _done_text(asked, counted, len(done.gone))
    )
    page = dlq_view.action_page(asked.act.name, noun, counted.matched, counted.number, done, told)
    print_page(page, form=form)
    return 0


def _check_selection(asked: DlqRequest) -> None:
    if asked.given.limit is not None:
        check_count(f"{_noun(asked)}s", asked.given.limit, ID_LIMIT)
        if asked.given.ids:
            raise InvalidInput("--limit goes with filters: ids that are named are all meant.")
    if asked.given.filters or asked.everything:
        return
    options = "--queue, --reason, --job or --older-than"
    if asked.act.name == "purge":
        options = f"--kind, {options}"
    more = "" if asked.act.needs_filter else ", or take --all"
    raise InvalidInput(f"Say which {_noun(asked)}s to {asked.act.name}: name ids, or filter by {options}{more}.")


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        words = question[0].lower() + question[1:-1]
        raise InvalidInput(f"Nobody is there to be asked whether to {words}: say --yes, or --dry-run to only see that.")
    sys.stderr.write(f"{question} [y/N] ")  # not on standard output, which is the answer's
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


async def _count_matches(settings: Settings, asked: DlqRequest) -> DlqMatchCount:
    async with open_queue(settings) as queue:
        which = await _build_filter(queue, asked.given, failed=asked.failed)
        if asked.act.name == "retry" and isinstance(which, DeadLetterFilter):
            which = _retry_filter(which)
        pile = group_for(settings, queue, which)
        matched = await pile.count()
        if matched < len(pile.named):
            raise await pile.missing_error()
        return DlqMatchCount(which, matched, min(matched, asked.given.limit or matched))


def _retry_filter(which: DeadLetterFilter) -> DeadLetterFilter:
    if which.kind not in (None, "frame", "job"):
        raise InvalidInput(
            f"Dead letters of kind {which.kind} cannot be queued again from here: only frames and jobs can."
        )
    return msgspec.structs.replace(which, kind=which.kind or "frame")


async def _apply(settings: Settings, asked: DlqRequest, counted: DlqMatchCount) -> DlqActionResult:
    """What was touched; each turn of the loop removes some or is the last."""
    done = DlqActionResult()
    async with open_queue(settings) as queue:
        pile = group_for(settings, queue, counted.which)
        while len(done.gone) < counted.number:
            async with queue.database.transaction() as tx:
                most = min(REMOVE_MAX, counted.number - len(done.gone))
                removed = await pile.remove(asked.act.name, most, tx)
                if pile.named and len(removed.gone) < counted.number:
                    raise await pile.missing_error()
                if removed.gone:
                    await audit.append(tx, [_audit_entry(asked, removed)])
                failpoints.hit("dlq.after_batch_before_commit")
            done = DlqActionResult([*done.gone, *removed.gone], [*done.jobs, *removed.jobs])
            if not removed.gone:
                break
    return done


def _audit_entry(asked: DlqRequest, removed: DlqActionResult) -> AuditEntry:
    given = {name: value for name, value in asked.given.filters.items() if name != "ids"}
    detail = {"given": given, "number": len(removed.gone), "first_ids": removed.gone[:IDS_IN_AUDIT]}
    if removed.jobs:
        detail["jobs"] = [str(each.job) for each in removed.jobs[:IDS_IN_AUDIT]]
    return AuditEntry(current_actor(), f"dlq.{asked.act.name}", f"{_noun(asked).replace(' ', '_')}s", detail)


async def _build_filter(queue: Queue, given: DlqSelection, *, failed: bool) -> DeadLetterFilter | FailedFilter:
    """By the clock of PostgreSQL, and nothing that came after this moment."""
    ids = sorted({_parse_entry_id(text) for text in given.ids}) if given.ids else None
    if ids:
        check_count("ids", len(ids), REMOVE_MAX)
    job = None
    if given.job is not None:
        job = parse_full_id(given.job) or await find_job(JobQueries(queue.database), given.job)
    age_s = _parse_age_s(given.older_than) if given.older_than is not None else 0.0
    before = (await storage_report.storage_state(queue.database)).as_of - timedelta(seconds=age_s)
    if given.reason is not None and not 0 < len(given.reason) <= 100:
        raise InvalidInput("A reason is a code of 1 to 100 characters, as `rota dlq list` shows it.")
    if given.queue is not None:
        await _check_queue(queue, given.queue)
    if not failed:
        return DeadLetterFilter(
            ids=ids, kind=given.kind, reason=given.reason, queue=given.queue, job=job, before=before
        )
    if given.kind is not None and given.kind != "frame":
        raise InvalidInput(
            f"Only frames fail and are kept: leave out --failed to see dead letters of kind {given.kind}."
        )
    return FailedFilter(tokens=ids, reason=given.reason, queue=given.queue, job=job, before=before)


async def _check_queue(queue: Queue, name: str) -> None:
    """Refused, with the nearest name, unless there is such a queue; what is no frame may name one that is not ours."""
    check_queue_name(name)
    names = [info.queue for info in await queue.queues()]
    if name not in names and not await queue.dead_letters.count(DeadLetterFilter(queue=name)):
        raise unknown_name_error("queue", name, names)


def _parse_entry_id(text: str) -> int:
    if not _ID_PATTERN.fullmatch(text) or not 0 < int(text) < ID_LIMIT:
        raise InvalidInput(f"{text[:40]!r} is no id: give a whole number from 1 as `rota dlq list` shows it.")
    return int(text)


def _parse_age_s(text: str) -> float:
    age_s = parse_duration(text)
    if not 0 < age_s <= AGE_MAX_S:
        raise InvalidInput(f"{text[:40]!r} is no age: give a time above 0 such as 30min, 12h or 7d.")
    return age_s


def _noun(asked: DlqRequest) -> str:
    return FailedFrameGroup.noun if asked.failed else DeadLetterGroup.noun


def _amount_text(asked: DlqRequest, counted: DlqMatchCount) -> str:
    if counted.number < counted.matched:
        return f"{counted.number} of {dlq_view.pluralize(counted.matched, _noun(asked))}"
    return dlq_view.pluralize(counted.number, _noun(asked))


def _done_text(asked: DlqRequest, counted: DlqMatchCount, done: int) -> str:
    told = asked.act.done.format(dlq_view.pluralize(done, _noun(asked)))
    return told if done == counted.number else f"{told} {counted.number - done} had left meanwhile."

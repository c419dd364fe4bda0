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

from rota.accounting.items import unknown
from rota.cli import dlq_view as view
from rota.cli.books import actor, print_page
from rota.cli.books_view import Page
from rota.cli.dlq_piles import FailedPile, LetterPile, Removed, pile_of
from rota.cli.form import Form
from rota.cli.naming import find, whole
from rota.cli.queue import opened
from rota.engine.jobs import Jobs
from rota.infra import audit, faults
from rota.infra.audit import AuditEntry
from rota.model.errors import InvalidInput
from rota.model.settings import Settings
from rota.model.units import parse_duration
from rota.queue import DeadLetterFilter, FailedFilter, Queue, report
from rota.queue.dead_letters import REMOVE_MAX, Kind
from rota.queue.entries import check_count, check_queue

AGE_MAX_S: Final = 100 * 366 * 86_400.0
ID_END: Final = 2**63
IDS_IN_AUDIT: Final = 100
_ID = re.compile(r"[0-9]{1,19}", re.ASCII)

ActName = Literal["retry", "move", "discard", "purge"]


class Act(msgspec.Struct, frozen=True):
    """What can be done, in the words in which it is asked for and told."""

    name: ActName
    question: str
    would: str
    done: str
    needs_filter: bool = False


ACTS: Final[Mapping[ActName, Act]] = {
    "retry": Act("retry", "Retry {}?", "{} would be retried.", "Retried {}: queued again, with all attempts ahead."),
    "move": Act("move", "Move {} to the dead letters?", "{} would be moved.", "Moved {} to the dead letters."),
    "discard": Act(
        "discard", "Discard {}?", "{} would be discarded.", "Discarded {}: no longer counted.", needs_filter=True
    ),
    "purge": Act("purge", "Purge {}?", "{} would be purged.", "Purged {}.", needs_filter=True),
}


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """What was typed to say which."""

    ids: Sequence[str] | None = None
    queue: str | None = None
    kind: Kind | None = None
    reason: str | None = None
    job: str | None = None
    older_than: str | None = None
    limit: int | None = None

    @property
    def filters(self) -> dict[str, object]:
        """What is set, without the limit, which chooses nothing."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value and name != "limit"}


class Asked(msgspec.Struct, frozen=True):
    act: Act
    given: Given
    failed: bool
    everything: bool = False


class Counted(msgspec.Struct, frozen=True):
    """`number` of the `matched` would be touched; `which` is what they agree with."""

    which: DeadLetterFilter | FailedFilter
    matched: int
    number: int


def show_list(settings: Settings, given: Given, *, failed: bool, after: str | None, form: Form) -> None:
    start = _id(after) if after is not None else -1
    limit = given.limit or 0
    check_count("entries to list", limit, REMOVE_MAX)

    async def found() -> Page:
        async with opened(settings) as queue:
            pile = pile_of(settings, queue, await _which(queue, given, failed=failed))
            return view.list_page(await pile.find(start, limit), await pile.count(), pile.noun)

    print_page(asyncio.run(found()), form=form)


def show_one(settings: Settings, text: str, *, failed: bool, form: Form) -> None:
    one = _id(text)

    async def found() -> Page:
        async with opened(settings) as queue:
            pile = pile_of(settings, queue, FailedFilter(tokens=[one]) if failed else DeadLetterFilter(ids=[one]))
            for each in await pile.find(-1, 1):
                return view.one_page(each)
            raise await pile.missing()

    print_page(asyncio.run(found()), form=form)


def act(settings: Settings, asked: Asked, *, yes: bool, dry_run: bool, form: Form) -> int:
    """The exit status: 1 when it was declined."""
    _check_named(asked)
    counted = asyncio.run(_count(settings, asked))
    done = None
    if counted.number and not dry_run:
        if not yes and not _agreed(asked.act.question.format(_amount(asked, counted))):
            sys.stderr.write("Nothing was changed.\n")
            return 1
        done = asyncio.run(_do(settings, asked, counted))
    noun = _noun(asked)
    told = asked.act.would.format(_amount(asked, counted)) if done is None else _told(asked, counted, len(done.gone))
    page = view.act_page(asked.act.name, noun, counted.matched, counted.number, done, told)
    print_page(page, form=form)
    return 0


def _check_named(asked: Asked) -> None:
    if asked.given.limit is not None:
        check_count(f"{_noun(asked)}s", asked.given.limit, ID_END)
        if asked.given.ids:
            raise InvalidInput("--limit goes with filters: ids that are named are all meant.")
    if asked.given.filters or asked.everything:
        return
    options = "--queue, --reason, --job or --older-than"
    if asked.act.name == "purge":
        options = f"--kind, {options}"
    more = "" if asked.act.needs_filter else ", or take --all"
    raise InvalidInput(f"Say which {_noun(asked)}s to {asked.act.name}: name ids, or filter by {options}{more}.")


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        words = question[0].lower() + question[1:-1]
        raise InvalidInput(f"Nobody is there to be asked whether to {words}: say --yes, or --dry-run to only see that.")
    sys.stderr.write(f"{question} [y/N] ")  # not on standard output, which is the answer's
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


async def _count(settings: Settings, asked: Asked) -> Counted:
    async with opened(settings) as queue:
        which = await _which(queue, asked.given, failed=asked.failed)
        if asked.act.name == "retry" and isinstance(which, DeadLetterFilter):
            which = _frames_of(which)
        pile = pile_of(settings, queue, which)
        matched = await pile.count()
        if matched < len(pile.named):
            raise await pile.missing()
        return Counted(which, matched, min(matched, asked.given.limit or matched))


def _frames_of(which: DeadLetterFilter) -> DeadLetterFilter:
    if which.kind not in (None, "frame", "job"):
        raise InvalidInput(
            f"Dead letters of kind {which.kind} cannot be queued again from here: only frames and jobs can."
        )
    return msgspec.structs.replace(which, kind=which.kind or "frame")


async def _do(settings: Settings, asked: Asked, counted: Counted) -> Removed:
    """What was touched; each turn of the loop removes some or is the last."""
    done = Removed()
    async with opened(settings) as queue:
        pile = pile_of(settings, queue, counted.which)
        while len(done.gone) < counted.number:
            async with queue.database.transaction() as tx:
                most = min(REMOVE_MAX, counted.number - len(done.gone))
                removed = await pile.remove(asked.act.name, most, tx)
                if pile.named and len(removed.gone) < counted.number:
                    raise await pile.missing()
                if removed.gone:
                    await audit.append(tx, [_entry(asked, removed)])
                faults.at("dlq.after_batch_before_commit")
            done = Removed([*done.gone, *removed.gone], [*done.jobs, *removed.jobs])
            if not removed.gone:
                break
    return done


def _entry(asked: Asked, removed: Removed) -> AuditEntry:
    given = {name: value for name, value in asked.given.filters.items() if name != "ids"}
    detail = {"given": given, "number": len(removed.gone), "first_ids": removed.gone[:IDS_IN_AUDIT]}
    if removed.jobs:
        detail["jobs"] = [str(each.job) for each in removed.jobs[:IDS_IN_AUDIT]]
    return AuditEntry(actor(), f"dlq.{asked.act.name}", f"{_noun(asked).replace(' ', '_')}s", detail)


async def _which(queue: Queue, given: Given, *, failed: bool) -> DeadLetterFilter | FailedFilter:
    """By the clock of PostgreSQL, and nothing that came after this moment."""
    ids = sorted({_id(text) for text in given.ids}) if given.ids else None
    if ids:
        check_count("ids", len(ids), REMOVE_MAX)
    job = None
    if given.job is not None:
        job = whole(given.job) or await find(Jobs(queue.database), given.job)
    age_s = _age_s(given.older_than) if given.older_than is not None else 0.0
    before = (await report.state(queue.database)).as_of - timedelta(seconds=age_s)
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
    check_queue(name)
    names = [info.queue for info in await queue.queues()]
    if name not in names and not await queue.dead_letters.count(DeadLetterFilter(queue=name)):
        raise unknown("queue", name, names)


def _id(text: str) -> int:
    if not _ID.fullmatch(text) or not 0 < int(text) < ID_END:
        raise InvalidInput(f"{text[:40]!r} is no id: give a whole number from 1 as `rota dlq list` shows it.")
    return int(text)


def _age_s(text: str) -> float:
    age_s = parse_duration(text)
    if not 0 < age_s <= AGE_MAX_S:
        raise InvalidInput(f"{text[:40]!r} is no age: give a time above 0 such as 30min, 12h or 7d.")
    return age_s


def _noun(asked: Asked) -> str:
    return FailedPile.noun if asked.failed else LetterPile.noun


def _amount(asked: Asked, counted: Counted) -> str:
    if counted.number < counted.matched:
        return f"{counted.number} of {view.several(counted.matched, _noun(asked))}"
    return view.several(counted.number, _noun(asked))


def _told(asked: Asked, counted: Counted, done: int) -> str:
    told = asked.act.done.format(view.several(done, _noun(asked)))
    return told if done == counted.number else f"{told} {counted.number - done} had left meanwhile."

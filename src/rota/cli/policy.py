"""`rota policy`: each command is one question, or one word to those who decide."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rota.cli import db
from rota.cli.books import actor
from rota.cli.books_view import Page, Table
from rota.cli.dlq_view import several
from rota.cli.naming import find
from rota.cli.output import Styled
from rota.engine.jobs import Jobs
from rota.engine.policy_desk import PolicyDesk, Simulated, Why, asked_about, kernel_by, why
from rota.infra.postgres import check_current
from rota.model.errors import InvalidInput, InvalidSetting
from rota.model.job import Submission
from rota.model.policy import Says
from rota.model.settings import Settings
from rota.policy import cases, checking, opening
from rota.policy.evaluate import Fate, Finding
from rota.policy.kernel import PolicyKernel
from rota.policy.reading import Reader, text_of, tree
from rota.policy.watch import PolicyFile, nudge

COLOURS = {Fate.DECIDED: "bold", Fate.FAILED: "red", Fate.UNMET: "dim"}
TOLD = {
    Fate.DECIDED: "decides",
    Fate.MATCHED: "is for it, another decides",
    Fate.COUNTS: "counts it",
    Fate.FAILED: "gives no answer",
    Fate.UNMET: "is not for it",
}


def checked(file: Path) -> Page:
    found = checking.checked(text_of(file), str(file))
    limits = f", {several(found.velocity_limits, 'velocity limit')}" if found.velocity_limits else ""
    told = (
        f"{file} is a policy of {several(found.rules, 'rule')}{limits}; what no rule is for is {_verb(found.default)}."
    )
    return Page(msgspec.to_builtins(found), [told, f"Snapshot {found.snapshot}.", *found.notes])


def tested(file: Path, beside: Path | None) -> tuple[Page, bool]:
    """And whether every case passed."""
    beside = beside or file.with_name(f"{file.stem}.cases.yaml")
    found = cases.tried(text_of(file), text_of(beside), str(file), str(beside))
    failed = [case for case in found.cases if not case.passed]
    rows = [
        (f"{beside}:{case.line}", case.name, case.expected, f"{case.said} by {case.rule or 'the default'}", case.reason)
        for case in failed
    ]
    parts: list[str | Table] = [Table(("case", "name", "expected", "said", "reason"), rows)] if rows else []
    parts.append(f"{found.passed} of {len(found.cases)} cases pass.")
    return Page(msgspec.to_builtins(found), parts), not failed


async def simulated(settings: Settings, file: Path, hours: float, most: int) -> Page:
    text = text_of(file)
    async with db.opened(settings) as database:
        await check_current(database)
        found = await PolicyDesk(database).simulate(text, hours, most, str(file))
    return Page(msgspec.to_builtins(found), [*_simulated(found)])


def _simulated(found: Simulated) -> Iterator[str | Table]:
    which = "all jobs" if found.is_all else "newest jobs"
    yield f"Of {found.jobs} {which} of the last {found.hours:g} h it says something else of {found.changed}."
    if found.changes:
        columns = ("jobs", "show", "topic", "was", "would be", "by rule", "such as")
        yield Table(columns, [_change(each) for each in found.changes])


def _change(each: Any) -> tuple[object, ...]:
    return (each.jobs, each.show, each.topic, each.was, each.would, each.rule or "the default", each.example)


async def explained(settings: Settings, job: str, submission: Path | None, file: Path | None) -> Page:
    kernel = _kernel(settings, file)
    try:
        if submission is not None:
            asked = asked_about(_submission(submission))
            return _explained(why(asked, await kernel.explain(asked)))
        async with db.opened(settings) as database:
            await check_current(database)
            return _explained(await PolicyDesk(database).explain(kernel, await find(Jobs(database), job)))
    finally:
        await kernel.close()


def _kernel(settings: Settings, file: Path | None) -> PolicyKernel:
    """The one that is set; a file of ours is read by this process, as servers read theirs."""
    if file is not None:
        return kernel_by(text_of(file), str(file))
    found = opening.opened(settings, None)
    if found is None:
        raise InvalidSetting(
            "There is no policy: set policy.file or safety_kernel.addr, or name one with --policy FILE."
        )
    return found


def _submission(path: Path) -> Submission:
    reader = Reader(str(path))
    node = tree(text_of(path), str(path))
    if node is None:
        raise InvalidInput(f"{path} is empty: write a submission.")
    try:
        return msgspec.convert(reader.plain(node), Submission)
    except msgspec.ValidationError as wrong:
        raise reader.wrong(node, str(wrong)) from None


def _explained(told: Why) -> Page:
    word = told.word
    lines = [f"It is {_verb(word.says)} by {_by(word.rule)}: {word.reason}.", *_more(told)]
    if (was := told.was) is not None and (was.says, was.rule) != (word.says, word.rule):
        lines.append(f"When it was decided it was {_verb(was.says)} by {_by(was.rule)}: {was.reason}.")
    rows = [_finding(each) for each in told.findings]
    return Page(msgspec.to_builtins(told), [*lines, Table(("rule", "line", "decision", "it", "because"), rows)])


def _by(rule: str) -> str:
    return f"rule {rule}" if rule else "the default"


def _more(told: Why) -> Iterator[str]:
    if told.word.constraints:
        yield f"Constraints: {msgspec.json.encode(told.word.constraints).decode()}."
    if told.approval is not None:
        expires = f", within {told.approval.expires_s:g} s" if told.approval.expires_s else ""
        yield f"Approval of {told.approval.quorum}{expires}."
    for each in told.word.remediations:
        yield f"Instead: {each.title or each.id} {each.summary}".rstrip() + "."


def _finding(each: Finding) -> tuple[object, ...]:
    style = COLOURS.get(each.fate, "")
    because = f"of {each.why}" if each.fate is Fate.UNMET else each.why
    return (Styled(each.rule, style), each.line, each.says.lower(), Styled(TOLD[each.fate], style), because)


def _verb(says: Says) -> str:
    return {
        Says.ALLOW: "allowed",
        Says.ALLOW_WITH_CONSTRAINTS: "allowed with constraints",
        Says.REQUIRE_APPROVAL: "held for approval",
        Says.THROTTLE: "throttled",
        Says.DENY: "denied",
    }[says]


async def reloaded(settings: Settings) -> Page:
    if settings.safety_kernel.addr:
        return await _reloaded_kernel(settings)
    file = PolicyFile.of(settings)
    if file is None:
        raise InvalidSetting("There is no policy to reload: set policy.file or safety_kernel.addr.")
    found = file.read()
    assert found is not None, "nothing was known before"
    async with db.opened(settings) as database:
        await check_current(database)
        await nudge(database, actor())
    told = f"Every server reads {file.path} now: {several(found.size, 'rule')}, snapshot {found.snapshot}."
    return Page({"snapshot": found.snapshot, "changed": None}, [told])


async def _reloaded_kernel(settings: Settings) -> Page:
    from rota.policy.client import RemoteKernel

    kernel = RemoteKernel(settings, None)
    try:
        changed = await kernel.reload()
        [now, *_] = await kernel.listed()
    finally:
        await kernel.close()
    told = "reads another policy" if changed else "has the same policy as before"
    return Page(
        {"snapshot": now.id, "changed": changed},
        [f"The kernel {told}: {several(now.rules, 'rule')}, snapshot {now.id}."],
    )

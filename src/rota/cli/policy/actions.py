"""`rota policy`: each command is one read, or one reload request to the servers or the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rota.cli.core.output import StyledText
from rota.cli.core.resolve_ids import find_job
from rota.cli.core.tables import CliPage, Table
from rota.cli.db import commands as db_commands
from rota.cli.dlq.view import pluralize
from rota.cli.quota.actions import current_actor
from rota.engine.admission.policy_queries import (
    JobPolicyExplanation,
    PolicyQueries,
    PolicySimulation,
    job_policy_explanation,
    kernel_from_text,
    submission_policy_request,
)
from rota.engine.queries.jobs import JobQueries
from rota.infra.postgres import check_current
from rota.infra.yaml_reader import YamlReader, parse_yaml, read_text
from rota.model.errors import InvalidInput, InvalidSetting
from rota.model.jobs.submission import Submission
from rota.model.policy.decision import PolicyEffect
from rota.model.settings import Settings
from rota.policy import factory, lint, policy_tests
from rota.policy.evaluate import RuleResult, RuleStatus
from rota.policy.file_watch import PolicyFile, request_reload
from rota.policy.kernel import PolicyKernel

FATE_STYLES = {RuleStatus.DECIDED: "bold", RuleStatus.FAILED: "red", RuleStatus.UNMET: "dim"}
FATE_TEXTS = {
    RuleStatus.DECIDED: "decides",
    RuleStatus.MATCHED: "matches, another rule decides",
    RuleStatus.COUNTS: "counts it",
    RuleStatus.FAILED: "failed to evaluate",
    RuleStatus.UNMET: "does not match",
}


def check_policy_file(file: Path) -> CliPage:
    found = lint.lint_policy(read_text(file), str(file))
    limits = f", {pluralize(found.velocity_limits, 'velocity limit')}" if found.velocity_limits else ""
    rules = f"{pluralize(found.rules, 'rule')}{limits}"
    text = f"{file} is a valid policy: {rules}; jobs that match no rule are {_effect_text(found.default)}."
    return CliPage(msgspec.to_builtins(found), [text, f"Snapshot {found.snapshot}.", *found.notes])


def run_policy_cases(file: Path, cases: Path | None) -> tuple[CliPage, bool]:
    """The page, and whether every case passed."""
    cases = cases or file.with_name(f"{file.stem}.cases.yaml")
    found = policy_tests.run_cases(read_text(file), read_text(cases), str(file), str(cases))
    failed = [case for case in found.cases if not case.passed]
    rows = [
        (f"{cases}:{case.line}", case.name, case.expected, f"{case.said} by {case.rule or 'the default'}", case.reason)
        for case in failed
    ]
    parts: list[str | Table] = [Table(("case", "name", "expected", "said", "reason"), rows)] if rows else []
    parts.append(f"{found.passed} of {len(found.cases)} cases pass.")
    return CliPage(msgspec.to_builtins(found), parts), not failed


async def simulate_policy(settings: Settings, file: Path, hours: float, most: int) -> CliPage:
    text = read_text(file)
    async with db_commands.open_database(settings) as database:
        await check_current(database)
        found = await PolicyQueries(database).simulate(text, hours, most, str(file))
    return CliPage(msgspec.to_builtins(found), [*_simulation_parts(found)])


def _simulation_parts(found: PolicySimulation) -> Iterator[str | Table]:
    which = "all jobs" if found.is_all else "newest jobs"
    yield f"For {found.changed} of {found.jobs} {which} of the last {found.hours:g} h the decision would differ."
    if found.changes:
        columns = ("jobs", "show", "topic", "was", "would be", "by rule", "such as")
        yield Table(columns, [_change_row(each) for each in found.changes])


def _change_row(each: Any) -> tuple[object, ...]:
    return (each.jobs, each.show, each.topic, each.was, each.would, each.rule or "the default", each.example)


async def explain_policy(settings: Settings, job: str, submission: Path | None, file: Path | None) -> CliPage:
    kernel = _kernel(settings, file)
    try:
        if submission is not None:
            request = submission_policy_request(_read_submission(submission))
            return _explain_page(job_policy_explanation(request, await kernel.explain(request)))
        async with db_commands.open_database(settings) as database:
            await check_current(database)
            return _explain_page(
                await PolicyQueries(database).explain(kernel, await find_job(JobQueries(database), job))
            )
    finally:
        await kernel.close()


def _kernel(settings: Settings, file: Path | None) -> PolicyKernel:
    """The configured policy engine, or one for `file` that runs in this process."""
    if file is not None:
        return kernel_from_text(read_text(file), str(file))
    found = factory.open_kernel(settings, None)
    if found is None:
        raise InvalidSetting("There is no policy: set policy.file or safety_kernel.addr, or use --policy FILE.")
    return found


def _read_submission(path: Path) -> Submission:
    reader = YamlReader(str(path))
    node = parse_yaml(read_text(path), str(path))
    if node is None:
        raise InvalidInput(f"{path} is empty: name a file with a submission.")
    try:
        return msgspec.convert(reader.to_builtins(node), Submission)
    except msgspec.ValidationError as error:
        raise reader.error(node, str(error)) from None


def _explain_page(explanation: JobPolicyExplanation) -> CliPage:
    decision = explanation.word
    lines = [
        f"It is {_effect_text(decision.says)} by {_rule_text(decision.rule)}: {decision.reason}.",
        *_extra_lines(explanation),
    ]
    if (was := explanation.was) is not None and (was.says, was.rule) != (decision.says, decision.rule):
        lines.append(f"The recorded decision was {_effect_text(was.says)} by {_rule_text(was.rule)}: {was.reason}.")
    rows = [_finding_row(each) for each in explanation.findings]
    return CliPage(
        msgspec.to_builtins(explanation), [*lines, Table(("rule", "line", "decision", "it", "because"), rows)]
    )


def _rule_text(rule: str) -> str:
    return f"rule {rule}" if rule else "the default"


def _extra_lines(explanation: JobPolicyExplanation) -> Iterator[str]:
    decision, approval = explanation.word, explanation.approval
    if decision.constraints:
        yield f"Constraints: {msgspec.json.encode(decision.constraints).decode()}."
    if approval is not None:
        expires = f", within {approval.expires_s:g} s" if approval.expires_s else ""
        yield f"Approval of {approval.quorum}{expires}."
    for each in decision.remediations:
        yield f"Instead: {each.title or each.id} {each.summary}".rstrip() + "."


def _finding_row(each: RuleResult) -> tuple[object, ...]:
    style = FATE_STYLES.get(each.fate, "")
    because = f"of {each.why}" if each.fate is RuleStatus.UNMET else each.why
    return (
        StyledText(each.rule, style),
        each.line,
        each.says.lower(),
        StyledText(FATE_TEXTS[each.fate], style),
        because,
    )


def _effect_text(effect: PolicyEffect) -> str:
    return {
        PolicyEffect.ALLOW: "allowed",
        PolicyEffect.ALLOW_WITH_CONSTRAINTS: "allowed with constraints",
        PolicyEffect.REQUIRE_APPROVAL: "held for approval",
        PolicyEffect.THROTTLE: "throttled",
        PolicyEffect.DENY: "denied",
    }[effect]


async def reload_policy(settings: Settings) -> CliPage:
    if settings.safety_kernel.addr:
        return await _reload_kernel(settings)
    file = PolicyFile.of(settings)
    if file is None:
        raise InvalidSetting("There is no policy to reload: set policy.file or safety_kernel.addr.")
    found = file.read()
    assert found is not None, "nothing was known before"
    async with db_commands.open_database(settings) as database:
        await check_current(database)
        await request_reload(database, current_actor())
    text = f"All servers reload {file.path}: {pluralize(found.size, 'rule')}, snapshot {found.snapshot}."
    return CliPage({"snapshot": found.snapshot, "changed": None}, [text])


async def _reload_kernel(settings: Settings) -> CliPage:
    from rota.policy.grpc.client import RemoteKernel

    kernel = RemoteKernel(settings, None)
    try:
        changed = await kernel.reload()
        [now, *_] = await kernel.list_snapshots()
    finally:
        await kernel.close()
    text = "loaded a changed policy" if changed else "has the same policy as before"
    return CliPage(
        {"snapshot": now.id, "changed": changed},
        [f"The kernel {text}: {pluralize(now.rules, 'rule')}, snapshot {now.id}."],
    )

"""Whether a text is a policy, and what its author may have overlooked. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rota.model.policy.decision import PolicyEffect
from rota.policy.loader import parse, snapshot_id
from rota.policy.rules import PolicyRule, PolicyRules


class PolicyLintReport(msgspec.Struct, frozen=True, kw_only=True):
    snapshot: str
    rules: int
    default: PolicyEffect
    velocity_limits: int
    notes: list[str]
    """What is allowed and looks like a slip."""


def lint_policy(text: str, source: str = "policy") -> PolicyLintReport:
    """Raises InvalidInput with the line of the first thing that is wrong."""
    rules = parse(text, source).rules
    return PolicyLintReport(
        snapshot=snapshot_id(text),
        rules=len(rules.ordered),
        default=rules.default,
        velocity_limits=sum(rule.velocity is not None for rule in rules.ordered),
        notes=list(_lint_warnings(rules)),
    )


def _lint_warnings(rules: PolicyRules) -> Iterator[str]:
    every = next((rule for rule in rules.ordered if _matches_every_job(rule)), None)
    if every is None:
        return
    if every.says is PolicyEffect.DENY:
        yield f"Rule {every.id} (line {every.line}) denies every job: no other rule decides anything."
        return
    for rule in rules.ordered[rules.ordered.index(every) + 1 :]:
        if rule.says is not PolicyEffect.DENY:
            yield f"Rule {rule.id} (line {rule.line}) is never reached: rule {every.id} (line {every.line}) is for all."


def _matches_every_job(rule: PolicyRule) -> bool:
    return not rule.match.parts and rule.when is None and rule.velocity is None

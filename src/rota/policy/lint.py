"""Checks a policy text and warns of likely mistakes. No I/O."""

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
    """Warnings: valid, but probably a mistake."""


def lint_policy(text: str, source: str = "policy") -> PolicyLintReport:
    """Raises InvalidInput with the line of the first error."""
    rules = parse(text, source).rules
    return PolicyLintReport(
        snapshot=snapshot_id(text),
        rules=len(rules.ordered),
        default=rules.default,
        velocity_limits=sum(rule.velocity is not None for rule in rules.ordered),
        notes=list(_lint_warnings(rules)),
    )


def _lint_warnings(rules: PolicyRules) -> Iterator[str]:
    broad = next((rule for rule in rules.ordered if _matches_every_job(rule)), None)
    if broad is None:
        return
    if broad.says is PolicyEffect.DENY:
        yield f"Rule {broad.id} (line {broad.line}) denies every job: no other rule has any effect."
        return
    for rule in rules.ordered[rules.ordered.index(broad) + 1 :]:
        if rule.says is not PolicyEffect.DENY:
            first = f"rule {broad.id} (line {broad.line})"
            yield f"Rule {rule.id} (line {rule.line}) is never reached: {first} matches every job."


def _matches_every_job(rule: PolicyRule) -> bool:
    return not rule.match.parts and rule.when is None and rule.velocity is None

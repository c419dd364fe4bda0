"""Whether a text is a policy, and what its author may have overlooked. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rota.model.policy import Says
from rota.policy.load import parse, snapshot_of
from rota.policy.rules import Rule, Rules


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    snapshot: str
    rules: int
    default: Says
    velocity_limits: int
    notes: list[str]
    """What is allowed and looks like a slip."""


def checked(text: str, source: str = "policy") -> Checked:
    """Raises InvalidInput with the line of the first thing that is wrong."""
    rules = parse(text, source).rules
    return Checked(
        snapshot=snapshot_of(text),
        rules=len(rules.ordered),
        default=rules.default,
        velocity_limits=sum(rule.velocity is not None for rule in rules.ordered),
        notes=list(_notes(rules)),
    )


def _notes(rules: Rules) -> Iterator[str]:
    every = next((rule for rule in rules.ordered if _is_for_all(rule)), None)
    if every is None:
        return
    if every.says is Says.DENY:
        yield f"Rule {every.id} (line {every.line}) denies every job: no other rule decides anything."
        return
    for rule in rules.ordered[rules.ordered.index(every) + 1 :]:
        if rule.says is not Says.DENY:
            yield f"Rule {rule.id} (line {rule.line}) is never reached: rule {every.id} (line {every.line}) is for all."


def _is_for_all(rule: Rule) -> bool:
    return not rule.match.parts and rule.when is None and rule.velocity is None

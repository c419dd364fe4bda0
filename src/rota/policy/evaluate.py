"""What a policy says of a job. Pure: the same file and the same job give the same ruling, at any time and place.

How it is decided:

1. Every rule that denies is looked at, wherever it stands. One that is for the job denies; of several, the first.
2. Otherwise the first rule that is for the job decides.
3. Otherwise `default_decision` does.

A condition that gives no answer denies, as the rule it belongs to would if it denied: of a rule that denies always, of
any other when it is reached in 2. So a rule that denies can only take away: adding one never lets a job run, and where
it stands changes at most which rule is named.

A rule with `velocity` is for a job only while more jobs have come than it lets through, and that is counted elsewhere:
the ruling names the limits, and what is said of a job for which one has no place (`rota.policy.rate_limits`).

A policy of thousands of rules looks at few of them: each is kept under one thing that it asks for, such as a topic, how
a topic begins, a show or a risk tag. A ruling is remembered for as long as the policy lives, up to `REMEMBERED`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from enum import StrEnum
from typing import Final

import msgspec

from rota.model.policy.decision import PolicyDecision, PolicyEffect, PolicyRequest
from rota.policy.expressions import ConditionContext, ConditionError
from rota.policy.loader import parse, snapshot_id
from rota.policy.rules import SINGLE_FIELDS, PolicyDocument, PolicyRule, Velocity

CACHE_MAX: Final = 20_000
NO_RULE_REASON: Final = "no rule is for this job"

_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")


class VelocityLimit(msgspec.Struct, frozen=True):
    """A velocity limit a job is counted under, and what is said when it has no place for it."""

    rule: str
    velocity: Velocity
    value: str
    over: PolicyDecision


class PolicyEvaluation(msgspec.Struct, frozen=True):
    """What is said of a job for which every limit has a place. Without limits: what is said."""

    word: PolicyDecision
    limits: tuple[VelocityLimit, ...] = ()


class RuleStatus(StrEnum):
    """What became of a rule when a job was asked about."""

    DECIDED = "decided"
    MATCHED = "matched"
    """It is for the job; another one decided."""
    COUNTS = "counts"
    """It is for the job once its velocity limit is reached."""
    FAILED = "failed"
    """Its condition gave no answer."""
    UNMET = "unmet"


class RuleResult(msgspec.Struct, frozen=True):
    """Of one rule: what became of it, and why."""

    rule: str
    line: int
    says: PolicyEffect
    fate: RuleStatus
    why: str = ""


class CompiledPolicy:
    """A policy that can be asked; never changes."""

    def __init__(self, written: PolicyDocument, snapshot: str) -> None:
        self.written = written
        self.snapshot = snapshot
        self._rules = written.rules.ordered
        self._words = [rule.to_decision(snapshot) for rule in self._rules]
        self._index = _RuleIndex(self._rules)
        self._default = PolicyDecision(says=written.rules.default, reason=NO_RULE_REASON, snapshot=snapshot)
        self._known: dict[bytes, PolicyEvaluation] = {}
        self.size = len(self._rules)
        self.counts = any(rule.velocity for rule in self._rules)
        """Whether it has velocity limits."""

    @classmethod
    def of(cls, text: str, source: str = "policy") -> CompiledPolicy:
        """Raises InvalidInput. A large file takes seconds: whoever has others to serve does this in a thread."""
        return cls(parse(text, source), snapshot_id(text))

    def evaluate(self, asked: PolicyRequest) -> PolicyEvaluation:
        form = _ENCODER.encode(asked)
        known = self._known.get(form)
        if known is None:
            if len(self._known) >= CACHE_MAX:
                self._known.clear()
            known = self._known[form] = self._evaluate_rules(asked)
        return known

    def explain(self, asked: PolicyRequest) -> list[RuleResult]:
        """Every rule with its fate, in the order of the file."""
        decided = self.evaluate(asked).word
        facts = ConditionContext(asked)
        found = []
        is_decided = False
        for rule in self._rules:
            fate, why = _rule_status(rule, asked, facts)
            if fate is RuleStatus.MATCHED and rule.id == decided.rule:
                fate, is_decided = RuleStatus.DECIDED, True
            elif fate is RuleStatus.COUNTS and is_decided and rule.says is not PolicyEffect.DENY:
                fate, why = RuleStatus.MATCHED, ""
            found.append(RuleResult(rule.id, rule.line, rule.says, fate, why))
        return found

    def _evaluate_rules(self, asked: PolicyRequest) -> PolicyEvaluation:
        """One way through the rules in their order; a denial that is no limit ends it wherever it stands."""
        facts = ConditionContext(asked)
        chosen: PolicyDecision | None = None
        limits: list[tuple[bool, VelocityLimit]] = []
        for at in self._index.candidates(asked):
            rule = self._rules[at]
            denies = rule.says is PolicyEffect.DENY
            if chosen is not None and not denies:
                continue
            try:
                if rule.match.first_mismatch(asked) or (rule.when is not None and not rule.when.holds(facts)):
                    continue
            except ConditionError as error:
                return PolicyEvaluation(self._deny_failed_condition(rule, error))
            if rule.velocity is not None:
                value = rule.velocity.value(asked)
                limits.append((denies, VelocityLimit(rule.id, rule.velocity, value, self._words[at])))
            elif denies:
                return PolicyEvaluation(self._words[at])
            elif chosen is None:
                chosen = self._words[at]
        word = chosen or self._default
        if word.says is PolicyEffect.DENY:
            return PolicyEvaluation(word)
        # Denials first: of the limits that have no place, the first of these speaks.
        return PolicyEvaluation(word, tuple(limit for _, limit in sorted(limits, key=lambda each: not each[0])))

    def _deny_failed_condition(self, rule: PolicyRule, error: ConditionError) -> PolicyDecision:
        reason = f"the condition of rule {rule.id} gave no answer: {error}"
        return PolicyDecision(says=PolicyEffect.DENY, reason=reason, rule=rule.id, snapshot=self.snapshot)


def _rule_status(rule: PolicyRule, asked: PolicyRequest, facts: ConditionContext) -> tuple[RuleStatus, str]:
    """Of a rule by itself, and why."""
    if unmet := rule.match.first_mismatch(asked):
        return RuleStatus.UNMET, unmet
    try:
        if rule.when is not None and not rule.when.holds(facts):
            return RuleStatus.UNMET, "when"
    except ConditionError as error:
        return RuleStatus.FAILED, str(error)
    return (
        (RuleStatus.COUNTS, _describe_velocity(rule.velocity))
        if rule.velocity is not None
        else (RuleStatus.MATCHED, "")
    )


def _describe_velocity(velocity: Velocity) -> str:
    return f"more than {velocity.most} in {velocity.window_s:g} s by {':'.join(velocity.key)}"


class _RuleIndex:
    """Which rules can be for a job, without looking at all of them: each is kept under one thing that it asks for."""

    def __init__(self, rules: tuple[PolicyRule, ...]) -> None:
        self._by: dict[str, dict[str, list[int]]] = {}
        self._by_tag: dict[str, list[int]] = defaultdict(list)
        self._by_label: dict[str, list[int]] = defaultdict(list)
        self._by_beginning: dict[str, list[int]] = defaultdict(list)
        self._others: list[int] = []
        for at, rule in enumerate(rules):
            kept = False
            for places, name in self._index_entries(rule):
                places.setdefault(name, []).append(at)
                kept = True
            if not kept:
                self._others.append(at)
        self._lengths = sorted({len(beginning) for beginning in self._by_beginning})

    def _index_entries(self, rule: PolicyRule) -> Iterator[tuple[dict[str, list[int]], str]]:
        """Under what it is kept; nothing: it must be looked at for every job."""
        names = rule.match.names
        for part in SINGLE_FIELDS:
            if part in names and names[part].is_literal:
                yield from ((self._by.setdefault(part, {}), literal) for literal in names[part].literals)
                return
        if "topics" in names and (beginnings := names["topics"].prefixes):
            yield from ((self._by_beginning, beginning) for beginning in beginnings)
        elif "risk_tags" in names and names["risk_tags"].is_literal:
            yield from ((self._by_tag, literal) for literal in names["risk_tags"].literals)
        elif rule.match.labels:
            yield self._by_label, rule.match.labels[0]

    def candidates(self, asked: PolicyRequest) -> list[int]:
        found = [*self._others]
        for part, places in self._by.items():
            found += places.get(SINGLE_FIELDS[part](asked), ())
        for tag in asked.risk_tags:
            found += self._by_tag.get(tag, ())
        for label in asked.labels:
            found += self._by_label.get(label, ())
        topic = asked.topic
        for length in self._lengths:
            found += self._by_beginning.get(topic[:length], ())
        return sorted(set(found))

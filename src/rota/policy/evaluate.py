"""Evaluates a policy for a job. Pure: the same file and job give the same result at any time and place.

Order of evaluation:

1. All deny rules, wherever they stand. The first that matches the job denies.
2. Otherwise the first matching rule decides.
3. Otherwise `default_decision` decides.

A condition that fails to evaluate denies: in a deny rule always, in any other rule when step 2 reaches it. So a deny
rule can only restrict: adding one never lets a job run, and its position changes at most which rule is named.

A rule with `velocity` matches a job only once its limit is exceeded, which is counted elsewhere: the evaluation lists
the limits, each with the decision for a job that exceeds it (`rota.policy.rate_limits`).

An index keeps a policy with thousands of rules fast: each rule is indexed by one thing that it requires, such as a
topic, a topic prefix, a show or a risk tag. Evaluations are cached for the life of the policy, up to `CACHE_MAX`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from enum import StrEnum
from typing import Final

import msgspec

from rota.model.cel_guard import ExpressionError
from rota.model.policy.decision import PolicyDecision, PolicyEffect, PolicyRequest
from rota.policy.expressions import ConditionContext
from rota.policy.loader import parse, snapshot_id
from rota.policy.rules import SINGLE_FIELDS, PolicyDocument, PolicyRule, Velocity

CACHE_MAX: Final = 20_000
NO_RULE_REASON: Final = "no rule matches this job"

_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")


class VelocityLimit(msgspec.Struct, frozen=True):
    """A velocity limit that counts a job, and the decision for a job that exceeds it."""

    rule: str
    velocity: Velocity
    value: str
    over: PolicyDecision


class PolicyEvaluation(msgspec.Struct, frozen=True):
    """The decision for a job that exceeds none of `limits`; final if there are none."""

    word: PolicyDecision
    limits: tuple[VelocityLimit, ...] = ()


class RuleStatus(StrEnum):
    """The outcome of a rule for a job."""

    DECIDED = "decided"
    MATCHED = "matched"
    """It matches; another rule decided."""
    COUNTS = "counts"
    """It matches once its velocity limit is exceeded."""
    FAILED = "failed"
    """Its condition failed to evaluate."""
    UNMET = "unmet"


class RuleResult(msgspec.Struct, frozen=True):
    """The status of one rule, and why."""

    rule: str
    line: int
    says: PolicyEffect
    fate: RuleStatus
    why: str = ""


class CompiledPolicy:
    """A policy ready for evaluation; immutable."""

    def __init__(self, written: PolicyDocument, snapshot: str) -> None:
        self.written = written
        self.snapshot = snapshot
        self._rules = written.rules.ordered
        self._decisions = [rule.to_decision(snapshot) for rule in self._rules]
        self._index = _RuleIndex(self._rules)
        self._default = PolicyDecision(says=written.rules.default, reason=NO_RULE_REASON, snapshot=snapshot)
        self._cache: dict[bytes, PolicyEvaluation] = {}
        self.size = len(self._rules)
        self.counts = any(rule.velocity for rule in self._rules)
        """Whether any rule has a velocity limit."""

    @classmethod
    def of(cls, text: str, source: str = "policy") -> CompiledPolicy:
        """Raises InvalidInput. A large file takes seconds: call it in a thread."""
        return cls(parse(text, source), snapshot_id(text))

    def evaluate(self, request: PolicyRequest) -> PolicyEvaluation:
        cache_key = _ENCODER.encode(request)
        cached = self._cache.get(cache_key)
        if cached is None:
            if len(self._cache) >= CACHE_MAX:
                self._cache.clear()
            cached = self._cache[cache_key] = self._evaluate_rules(request)
        return cached

    def explain(self, request: PolicyRequest) -> list[RuleResult]:
        """The status of every rule, in file order."""
        decided = self.evaluate(request).word
        context = ConditionContext(request)
        found = []
        after_decision = False
        for rule in self._rules:
            fate, why = _rule_status(rule, request, context)
            if fate is RuleStatus.MATCHED and rule.id == decided.rule:
                fate, after_decision = RuleStatus.DECIDED, True
            elif fate is RuleStatus.COUNTS and after_decision and rule.says is not PolicyEffect.DENY:
                fate, why = RuleStatus.MATCHED, ""
            found.append(RuleResult(rule.id, rule.line, rule.says, fate, why))
        return found

    def _evaluate_rules(self, request: PolicyRequest) -> PolicyEvaluation:
        """One pass over the rules in order; a denial without a velocity limit ends it anywhere."""
        context = ConditionContext(request)
        decision: PolicyDecision | None = None
        limits: list[tuple[bool, VelocityLimit]] = []
        for index in self._index.candidates(request):
            rule = self._rules[index]
            denies = rule.says is PolicyEffect.DENY
            if decision is not None and not denies:
                continue
            try:
                if rule.match.first_mismatch(request) or (rule.when is not None and not rule.when.holds(context)):
                    continue
            except ExpressionError as error:
                return PolicyEvaluation(self._deny_failed_condition(rule, error))
            if rule.velocity is not None:
                value = rule.velocity.value(request)
                limits.append((denies, VelocityLimit(rule.id, rule.velocity, value, self._decisions[index])))
            elif denies:
                return PolicyEvaluation(self._decisions[index])
            elif decision is None:
                decision = self._decisions[index]
        final = decision or self._default
        if final.says is PolicyEffect.DENY:
            return PolicyEvaluation(final)
        # Denials first: of several exceeded limits the first decides.
        return PolicyEvaluation(final, tuple(limit for _, limit in sorted(limits, key=lambda each: not each[0])))

    def _deny_failed_condition(self, rule: PolicyRule, error: ExpressionError) -> PolicyDecision:
        reason = f"the condition of rule {rule.id} failed: {error}"
        return PolicyDecision(says=PolicyEffect.DENY, reason=reason, rule=rule.id, snapshot=self.snapshot)


def _rule_status(rule: PolicyRule, request: PolicyRequest, context: ConditionContext) -> tuple[RuleStatus, str]:
    """The status of a rule considered alone, and why."""
    if unmet := rule.match.first_mismatch(request):
        return RuleStatus.UNMET, unmet
    try:
        if rule.when is not None and not rule.when.holds(context):
            return RuleStatus.UNMET, "when"
    except ExpressionError as error:
        return RuleStatus.FAILED, str(error)
    return (
        (RuleStatus.COUNTS, _describe_velocity(rule.velocity))
        if rule.velocity is not None
        else (RuleStatus.MATCHED, "")
    )


def _describe_velocity(velocity: Velocity) -> str:
    return f"more than {velocity.most} in {velocity.window_s:g} s by {':'.join(velocity.key)}"


class _RuleIndex:
    """Finds the rules that can match a job: each is indexed by one thing that it requires."""

    def __init__(self, rules: tuple[PolicyRule, ...]) -> None:
        self._by: dict[str, dict[str, list[int]]] = {}
        self._by_tag: dict[str, list[int]] = defaultdict(list)
        self._by_label: dict[str, list[int]] = defaultdict(list)
        self._by_prefix: dict[str, list[int]] = defaultdict(list)
        self._others: list[int] = []
        for index, rule in enumerate(rules):
            is_indexed = False
            for entries, name in self._index_entries(rule):
                entries.setdefault(name, []).append(index)
                is_indexed = True
            if not is_indexed:
                self._others.append(index)
        self._lengths = sorted({len(prefix) for prefix in self._by_prefix})

    def _index_entries(self, rule: PolicyRule) -> Iterator[tuple[dict[str, list[int]], str]]:
        """Index entries of a rule; none: it is a candidate for every job."""
        names = rule.match.names
        for part in SINGLE_FIELDS:
            if part in names and names[part].is_literal:
                yield from ((self._by.setdefault(part, {}), literal) for literal in names[part].literals)
                return
        if "topics" in names and (prefixes := names["topics"].prefixes):
            yield from ((self._by_prefix, prefix) for prefix in prefixes)
        elif "risk_tags" in names and names["risk_tags"].is_literal:
            yield from ((self._by_tag, literal) for literal in names["risk_tags"].literals)
        elif rule.match.labels:
            yield self._by_label, rule.match.labels[0]

    def candidates(self, request: PolicyRequest) -> list[int]:
        found = [*self._others]
        for part, entries in self._by.items():
            found += entries.get(SINGLE_FIELDS[part](request), ())
        for tag in request.risk_tags:
            found += self._by_tag.get(tag, ())
        for label in request.labels:
            found += self._by_label.get(label, ())
        topic = request.topic
        for length in self._lengths:
            found += self._by_prefix.get(topic[:length], ())
        return sorted(set(found))

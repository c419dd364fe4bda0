"""What a policy says of a job. Pure: the same file and the same job give the same ruling, at any time and place.

How it is decided:

1. Every rule that denies is looked at, wherever it stands. One that is for the job denies; of several, the first.
2. Otherwise the first rule that is for the job decides.
3. Otherwise `default_decision` does.

A condition that gives no answer denies, as the rule it belongs to would if it denied: of a rule that denies always, of
any other when it is reached in 2. So a rule that denies can only take away: adding one never lets a job run, and where
it stands changes at most which rule is named.

A rule with `velocity` is for a job only while more jobs have come than it lets through, and that is counted elsewhere:
the ruling names the limits, and what is said of a job for which one has no place (`rota.policy.velocity`).

A policy of thousands of rules looks at few of them: each is kept under one thing that it asks for, such as a topic, how
a topic begins, a show or a risk tag. A ruling is remembered for as long as the policy lives, up to `REMEMBERED`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from enum import StrEnum
from typing import Final

import msgspec

from rota.model.policy import Asked, Says, Word
from rota.policy.expressions import Facts, Unanswered
from rota.policy.load import parse, snapshot_of
from rota.policy.rules import ONE, Rule, Velocity, Written

REMEMBERED: Final = 20_000
NO_RULE: Final = "no rule is for this job"

_FORM: Final = msgspec.msgpack.Encoder(order="deterministic")


class Limit(msgspec.Struct, frozen=True):
    """A velocity limit a job is counted under, and what is said when it has no place for it."""

    rule: str
    velocity: Velocity
    value: str
    over: Word


class Ruling(msgspec.Struct, frozen=True):
    """What is said of a job for which every limit has a place. Without limits: what is said."""

    word: Word
    limits: tuple[Limit, ...] = ()


class Fate(StrEnum):
    """What became of a rule when a job was asked about."""

    DECIDED = "decided"
    MATCHED = "matched"
    """It is for the job; another one decided."""
    COUNTS = "counts"
    """It is for the job once its velocity limit is reached."""
    FAILED = "failed"
    """Its condition gave no answer."""
    UNMET = "unmet"


class Finding(msgspec.Struct, frozen=True):
    """Of one rule: what became of it, and why."""

    rule: str
    line: int
    says: Says
    fate: Fate
    why: str = ""


class Policy:
    """A policy that can be asked; never changes."""

    def __init__(self, written: Written, snapshot: str) -> None:
        self.written = written
        self.snapshot = snapshot
        self._rules = written.rules.ordered
        self._words = [rule.word(snapshot) for rule in self._rules]
        self._index = _Index(self._rules)
        self._default = Word(says=written.rules.default, reason=NO_RULE, snapshot=snapshot)
        self._known: dict[bytes, Ruling] = {}
        self.size = len(self._rules)
        self.counts = any(rule.velocity for rule in self._rules)
        """Whether it has velocity limits."""

    @classmethod
    def of(cls, text: str, source: str = "policy") -> Policy:
        """Raises InvalidInput. A large file takes seconds: whoever has others to serve does this in a thread."""
        return cls(parse(text, source), snapshot_of(text))

    def rule_on(self, asked: Asked) -> Ruling:
        form = _FORM.encode(asked)
        known = self._known.get(form)
        if known is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            known = self._known[form] = self._ruled(asked)
        return known

    def explain(self, asked: Asked) -> list[Finding]:
        """Every rule with its fate, in the order of the file."""
        decided = self.rule_on(asked).word
        facts = Facts(asked)
        found = []
        is_decided = False
        for rule in self._rules:
            fate, why = _fate(rule, asked, facts)
            if fate is Fate.MATCHED and rule.id == decided.rule:
                fate, is_decided = Fate.DECIDED, True
            elif fate is Fate.COUNTS and is_decided and rule.says is not Says.DENY:
                fate, why = Fate.MATCHED, ""
            found.append(Finding(rule.id, rule.line, rule.says, fate, why))
        return found

    def _ruled(self, asked: Asked) -> Ruling:
        """One way through the rules in their order; a denial that is no limit ends it wherever it stands."""
        facts = Facts(asked)
        chosen: Word | None = None
        limits: list[tuple[bool, Limit]] = []
        for at in self._index.candidates(asked):
            rule = self._rules[at]
            denies = rule.says is Says.DENY
            if chosen is not None and not denies:
                continue
            try:
                if rule.match.unmet(asked) or (rule.when is not None and not rule.when.holds(facts)):
                    continue
            except Unanswered as error:
                return Ruling(self._unanswered(rule, error))
            if rule.velocity is not None:
                value = rule.velocity.value(asked)
                limits.append((denies, Limit(rule.id, rule.velocity, value, self._words[at])))
            elif denies:
                return Ruling(self._words[at])
            elif chosen is None:
                chosen = self._words[at]
        word = chosen or self._default
        if word.says is Says.DENY:
            return Ruling(word)
        # Denials first: of the limits that have no place, the first of these speaks.
        return Ruling(word, tuple(limit for _, limit in sorted(limits, key=lambda each: not each[0])))

    def _unanswered(self, rule: Rule, error: Unanswered) -> Word:
        reason = f"the condition of rule {rule.id} gave no answer: {error}"
        return Word(says=Says.DENY, reason=reason, rule=rule.id, snapshot=self.snapshot)


def _fate(rule: Rule, asked: Asked, facts: Facts) -> tuple[Fate, str]:
    """Of a rule by itself, and why."""
    if unmet := rule.match.unmet(asked):
        return Fate.UNMET, unmet
    try:
        if rule.when is not None and not rule.when.holds(facts):
            return Fate.UNMET, "when"
    except Unanswered as error:
        return Fate.FAILED, str(error)
    return (Fate.COUNTS, _told(rule.velocity)) if rule.velocity is not None else (Fate.MATCHED, "")


def _told(velocity: Velocity) -> str:
    return f"more than {velocity.most} in {velocity.window_s:g} s by {':'.join(velocity.key)}"


class _Index:
    """Which rules can be for a job, without looking at all of them: each is kept under one thing that it asks for."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._by: dict[str, dict[str, list[int]]] = {}
        self._by_tag: dict[str, list[int]] = defaultdict(list)
        self._by_label: dict[str, list[int]] = defaultdict(list)
        self._by_beginning: dict[str, list[int]] = defaultdict(list)
        self._others: list[int] = []
        for at, rule in enumerate(rules):
            kept = False
            for places, name in self._places(rule):
                places.setdefault(name, []).append(at)
                kept = True
            if not kept:
                self._others.append(at)
        self._lengths = sorted({len(beginning) for beginning in self._by_beginning})

    def _places(self, rule: Rule) -> Iterator[tuple[dict[str, list[int]], str]]:
        """Under what it is kept; nothing: it must be looked at for every job."""
        names = rule.match.names
        for part in ONE:
            if part in names and names[part].is_literal:
                yield from ((self._by.setdefault(part, {}), literal) for literal in names[part].literals)
                return
        if "topics" in names and (beginnings := names["topics"].prefixes):
            yield from ((self._by_beginning, beginning) for beginning in beginnings)
        elif "risk_tags" in names and names["risk_tags"].is_literal:
            yield from ((self._by_tag, literal) for literal in names["risk_tags"].literals)
        elif rule.match.labels:
            yield self._by_label, rule.match.labels[0]

    def candidates(self, asked: Asked) -> list[int]:
        found = [*self._others]
        for part, places in self._by.items():
            found += places.get(ONE[part](asked), ())
        for tag in asked.risk_tags:
            found += self._by_tag.get(tag, ())
        for label in asked.labels:
            found += self._by_label.get(label, ())
        topic = asked.topic
        for length in self._lengths:
            found += self._by_beginning.get(topic[:length], ())
        return sorted(set(found))

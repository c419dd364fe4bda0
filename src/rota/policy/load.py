"""A policy file becomes rules: every key known, every value checked, and what is wrong told with its line.

    version: 1
    default_decision: deny
    rules:
      - id: renders
        match: {topics: ["job.render.*"], shows: [alpha]}
        when: frames <= 1000
        decision: allow

A file is read whole or not at all, so nobody sees half a policy. Sections of other rooms (`output_policy`,
`output_rules`) are read by what stands in `SECTIONS` under their names, with the same reader and the same promises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from rota.model.errors import InvalidInput
from rota.model.policy import ApprovalTerms, Budgets, Constraints, Remediation, Says
from rota.policy.expressions import Condition
from rota.policy.names import Names, checked_glob
from rota.policy.output.loading import read_rules, read_section
from rota.policy.reading import Listing, Node, Reader, checked_size, text_of, tree
from rota.policy.rules import ONE, SOME, Match, Rule, Rules, Velocity, Written

VERSIONS: Final = ("1", "v1")
RULES_MAX: Final = 5000
NAMES_MAX: Final = 1000
"""Of one list in a match."""
KEYS: Final = ("show", "tenant", "topic", "capability", "actor_id", "principal", "pack_id", "folder", "dept")
"""What a velocity limit can count by, besides labels."""
DECISIONS: Final = {
    "allow": Says.ALLOW,
    "permit": Says.ALLOW,
    "allow_with_constraints": Says.ALLOW_WITH_CONSTRAINTS,
    "require_approval": Says.REQUIRE_APPROVAL,
    "require_human": Says.REQUIRE_APPROVAL,
    "throttle": Says.THROTTLE,
    "deny": Says.DENY,
    "block": Says.DENY,
}
DEFAULTS: Final = {word: says for word, says in DECISIONS.items() if says in (Says.ALLOW, Says.DENY)}
FAIL_MODES: Final = {"closed": "closed", "open": "open"}

T = TypeVar("T")

SECTIONS: Final[dict[str, Callable[[Reader, Node], Any]]] = {
    "output_policy": read_section,
    "output_rules": read_rules,
}
"""Sections of the file that other modules read, by name."""


def load(path: Path) -> Written:
    """Raises InvalidInput with file and line of the first thing that is wrong."""
    return parse(text_of(path), str(path))


def snapshot_of(text: str) -> str:
    """A policy is known by the hash of what stands in its file."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def parse(text: str, source: str = "policy.yaml") -> Written:
    return _Loader(source).document(tree(checked_size(text, source), source))


class _Loader(Reader):
    def document(self, node: Node | None) -> Written:
        if node is None:
            raise InvalidInput(f"{self.source}:1: the policy is empty; write at least default_decision.")
        others = {name: _reading(self, read) for name, read in SECTIONS.items()}
        found = self.fields(
            node,
            "a policy",
            {
                "version": self._version,
                "default_decision": lambda value: self.one_of(value, "default_decision", DEFAULTS),
                "rules": self._rules,
                "input_policy": self._input_policy,
                **others,
            },
        )
        return Written(
            source=self.source,
            rules=Rules(found.get("rules", ()), found.get("default_decision", Says.DENY)),
            fail_mode=found.get("input_policy", {}).get("fail_mode"),
            sections={name: found[name] for name in others if name in found},
        )

    def _version(self, node: Node) -> str:
        version = self.word(node)
        if version not in VERSIONS:
            raise self.wrong(node, f"version {version[:20]!r} is not known; write 1")
        return version

    def _input_policy(self, node: Node) -> dict[str, Any]:
        return self.fields(
            node, "input_policy", {"fail_mode": lambda value: self.one_of(value, "fail_mode", FAIL_MODES)}
        )

    def _rules(self, node: Node) -> tuple[Rule, ...]:
        rules = tuple(self._rule(each) for each in self.items(node, "rules", RULES_MAX))
        seen: dict[str, Rule] = {}
        for rule, each in zip(rules, self.items(node, "rules"), strict=True):
            if rule.id in seen:
                raise self.wrong(each, f"the rule {rule.id!r} stands in line {seen[rule.id].line} already")
            seen[rule.id] = rule
        return rules

    def _rule(self, node: Node) -> Rule:
        found = self.fields(
            node,
            "a rule",
            {
                "id": self._id,
                "match": self._match,
                "when": self._when,
                "velocity": self._velocity,
                "decision": lambda value: self.one_of(value, "decision", DECISIONS),
                "reason": self.word,
                "constraints": self._constraints,
                "remediations": self._remediations,
                "approval": self._approval,
                "delay": lambda value: self.span_s(value, "delay", 0.001, 86400.0),
            },
        )
        for needed in ("id", "decision"):
            if needed not in found:
                raise self.wrong(node, f"a rule needs {needed}")
        self._check_fits(node, found)
        constrained = found["decision"] is Says.ALLOW and "constraints" in found
        return Rule(
            id=found["id"],
            line=node.line,
            says=Says.ALLOW_WITH_CONSTRAINTS if constrained else found["decision"],
            match=found.get("match") or Match({}, {}, ()),
            when=found.get("when"),
            velocity=found.get("velocity"),
            reason=found.get("reason", ""),
            constraints=found.get("constraints"),
            remediations=found.get("remediations", ()),
            approval=found.get("approval", ApprovalTerms()),
            delay_s=found.get("delay", 0.0),
        )

    def _check_fits(self, node: Node, found: dict[str, Any]) -> None:
        """What makes sense with one decision only is refused with another: it would promise what nobody does."""
        says = found["decision"]
        allows = says in (Says.ALLOW, Says.ALLOW_WITH_CONSTRAINTS)
        for key, fits in (
            ("constraints", allows or says is Says.REQUIRE_APPROVAL),
            ("approval", says is Says.REQUIRE_APPROVAL),
            ("delay", says is Says.THROTTLE),
            ("velocity", not allows),
            ("remediations", not allows),
        ):
            if key in found and not fits:
                raise self.wrong(self.key(node, key), f"{key} has no meaning with the decision {says.lower()}")
        if says is Says.ALLOW_WITH_CONSTRAINTS and "constraints" not in found:
            raise self.wrong(node, f"the rule {found['id']!r} allows with constraints and names none")

    def _id(self, node: Node) -> str:
        found = self.word(node, 100)
        if "\n" in found:
            raise self.wrong(node, "an id stands in one line")
        return found

    def _match(self, node: Node) -> Match:
        lists = dict.fromkeys((*ONE, *SOME), self._names)
        found = self.fields(node, "match", {**lists, "requires": self.words, "labels": self._labels})
        names = {part: found[part] for part in lists if part in found}
        return Match(names, found.get("labels", {}), found.get("requires", ()))

    def _names(self, node: Node) -> Names:
        entries = self.items(node, "a list of names", NAMES_MAX) if isinstance(node, Listing) else (node,)
        return Names([self._glob(each) for each in entries])

    def _glob(self, node: Node) -> str:
        return self._complete(node, checked_glob, self.word(node))

    def _labels(self, node: Node) -> dict[str, Names]:
        return {name: self._names(value) for name, value in self.pairs(node, "labels")}

    def _when(self, node: Node) -> Condition:
        return self._complete(node, Condition, self.word(node, 1_000_000))

    def _complete(self, node: Node, read: Callable[[str], T], text: str) -> T:
        """With the line that whoever reads a part of it does not know."""
        try:
            return read(text)
        except InvalidInput as wrong:
            raise self.wrong(node, wrong.sentence) from None

    def _velocity(self, node: Node) -> Velocity:
        def seconds(value: Node) -> float:
            return float(self.whole(value, "window_seconds", 1, 7 * 86400))

        found = self.fields(
            node,
            "velocity",
            {
                "max_requests": lambda value: self.whole(value, "max_requests", 0, 100_000),
                "window": lambda value: self.span_s(value, "window", 0.001, 7 * 86400.0),
                "window_seconds": seconds,
                "key": self._velocity_key,
            },
        )
        if "max_requests" not in found or ("window" in found) == ("window_seconds" in found):
            raise self.wrong(node, "velocity needs max_requests, and window or window_seconds")
        window_s = found.get("window") or found["window_seconds"]
        return Velocity(found["max_requests"], window_s, found.get("key", ("tenant",)))

    def _velocity_key(self, node: Node) -> tuple[str, ...]:
        parts = tuple(self.word(node).split(":"))
        for part in parts:
            if part not in KEYS and not (part.startswith("labels.") and len(part) > len("labels.")):
                raise self.wrong(node, f"key counts by {', '.join(KEYS)} or labels.NAME, joined by `:`, not {part!r}")
        return parts

    def _constraints(self, node: Node) -> Constraints:
        found = self.fields(
            node,
            "constraints",
            {
                "budgets": self._budgets,
                "sandbox": self._table,
                "toolchain": self._table,
                "diff": self._table,
                "redaction_level": self.word,
            },
        )
        return Constraints(**found)

    def _budgets(self, node: Node) -> Budgets:
        names = ("max_runtime_ms", "max_retries", "max_artifact_bytes", "max_concurrent_jobs")
        least = {"max_retries": 0}
        return Budgets(**self.fields(node, "budgets", {name: _whole(self, name, least.get(name, 1)) for name in names}))

    def _table(self, node: Node) -> dict[str, object]:
        return {key: self.plain(value) for key, value in self.pairs(node, "what stands here")}

    def _remediations(self, node: Node) -> tuple[Remediation, ...]:
        return tuple(self._remediation(each) for each in self.items(node, "remediations", 20))

    def _remediation(self, node: Node) -> Remediation:
        texts = ("id", "title", "summary", "replacement_topic", "replacement_capability")
        found = self.fields(
            node,
            "a remediation",
            {
                **dict.fromkeys(texts, self.word),
                "add_labels": lambda value: {key: self.word(each) for key, each in self.pairs(value, "add_labels")},
                "remove_labels": self.words,
            },
        )
        if "id" not in found:
            raise self.wrong(node, "a remediation needs id")
        return Remediation(**found)

    def _approval(self, node: Node) -> ApprovalTerms:
        found = self.fields(
            node,
            "approval",
            {
                "quorum": lambda value: self.whole(value, "quorum", 1, 100),
                "expires": lambda value: self.span_s(value, "expires", 1.0),
                "approvers": self.words,
            },
        )
        terms = ApprovalTerms(
            quorum=found.get("quorum", 1),
            expires_s=found.get("expires", 0.0),
            approvers=tuple(dict.fromkeys(found.get("approvers", ()))),
        )
        if terms.approvers and len(terms.approvers) < terms.quorum:
            raise self.wrong(node, f"a quorum of {terms.quorum} cannot be met by {len(terms.approvers)} approvers")
        return terms


def _reading(reader: Reader, read: Callable[[Reader, Node], Any]) -> Callable[[Node], Any]:
    return lambda node: read(reader, node)


def _whole(reader: Reader, name: str, least: int) -> Callable[[Node], int]:
    return lambda node: reader.whole(node, name, least)

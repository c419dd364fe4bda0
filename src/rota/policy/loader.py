"""Parses a policy file into rules: rejects unknown keys, checks every value, and reports errors with their line.

    version: 1
    default_decision: deny
    rules:
      - id: renders
        match: {topics: ["job.render.*"], shows: [alpha]}
        when: frames <= 1000
        decision: allow

A file is loaded whole or not at all. The readers in `SECTIONS` parse the sections of other modules (`output_policy`,
`output_rules`) with the same YAML reader and the same guarantees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from rota.infra.yaml_reader import ListNode, YamlNode, YamlReader, check_text_size, parse_yaml, read_text
from rota.model.errors import InvalidInput
from rota.model.policy.decision import ApprovalTerms, Constraints, PolicyBudgets, PolicyEffect, Remediation
from rota.policy.expressions import Condition
from rota.policy.globs import GlobSet, validate_glob
from rota.policy.output.loader import read_rules, read_section
from rota.policy.rules import LIST_FIELDS, SINGLE_FIELDS, JobMatch, PolicyDocument, PolicyRule, PolicyRules, Velocity

VERSIONS: Final = ("1", "v1")
RULES_MAX: Final = 5000
NAMES_MAX: Final = 1000
"""Per list in a match."""
VELOCITY_KEYS: Final = ("show", "tenant", "topic", "capability", "actor_id", "principal", "pack_id", "folder", "dept")
"""What a velocity limit can count by, besides labels."""
DECISIONS: Final = {
    "allow": PolicyEffect.ALLOW,
    "permit": PolicyEffect.ALLOW,
    "allow_with_constraints": PolicyEffect.ALLOW_WITH_CONSTRAINTS,
    "require_approval": PolicyEffect.REQUIRE_APPROVAL,
    "require_human": PolicyEffect.REQUIRE_APPROVAL,
    "throttle": PolicyEffect.THROTTLE,
    "deny": PolicyEffect.DENY,
    "block": PolicyEffect.DENY,
}
DEFAULT_DECISIONS: Final = {
    name: effect for name, effect in DECISIONS.items() if effect in (PolicyEffect.ALLOW, PolicyEffect.DENY)
}
FAIL_MODES: Final = {"closed": "closed", "open": "open"}

T = TypeVar("T")

SECTIONS: Final[dict[str, Callable[[YamlReader, YamlNode], Any]]] = {
    "output_policy": read_section,
    "output_rules": read_rules,
}
"""Readers of the sections that belong to other modules, by section name."""


def load(path: Path) -> PolicyDocument:
    """Raises InvalidInput with file and line of the first error."""
    return parse(read_text(path), str(path))


def snapshot_id(text: str) -> str:
    """The id of a policy: the hash of its text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def parse(text: str, source: str = "policy.yaml") -> PolicyDocument:
    return _PolicyLoader(source).document(parse_yaml(check_text_size(text, source), source))


class _PolicyLoader(YamlReader):
    def document(self, node: YamlNode | None) -> PolicyDocument:
        if node is None:
            raise InvalidInput(f"{self.source}:1: the policy is empty: write at least default_decision.")
        section_readers = {name: _section_reader(self, read) for name, read in SECTIONS.items()}
        found = self.fields(
            node,
            "a policy",
            {
                "version": self._version,
                "default_decision": lambda value: self.one_of(value, "default_decision", DEFAULT_DECISIONS),
                "rules": self._rules,
                "input_policy": self._input_policy,
                **section_readers,
            },
        )
        return PolicyDocument(
            source=self.source,
            rules=PolicyRules(found.get("rules", ()), found.get("default_decision", PolicyEffect.DENY)),
            fail_mode=found.get("input_policy", {}).get("fail_mode"),
            sections={name: found[name] for name in section_readers if name in found},
        )

    def _version(self, node: YamlNode) -> str:
        version = self.string(node)
        if version not in VERSIONS:
            raise self.error(node, f"version {version[:20]!r} is not supported: write 1")
        return version

    def _input_policy(self, node: YamlNode) -> dict[str, Any]:
        return self.fields(
            node, "input_policy", {"fail_mode": lambda value: self.one_of(value, "fail_mode", FAIL_MODES)}
        )

    def _rules(self, node: YamlNode) -> tuple[PolicyRule, ...]:
        rules = tuple(self._rule(each) for each in self.items(node, "rules", RULES_MAX))
        by_id: dict[str, PolicyRule] = {}
        for rule, each in zip(rules, self.items(node, "rules"), strict=True):
            if rule.id in by_id:
                raise self.error(
                    each, f"the rule {rule.id!r} is already defined in line {by_id[rule.id].line}: rename one"
                )
            by_id[rule.id] = rule
        return rules

    def _rule(self, node: YamlNode) -> PolicyRule:
        found = self.fields(
            node,
            "a rule",
            {
                "id": self._id,
                "match": self._match,
                "when": self._when,
                "velocity": self._velocity,
                "decision": lambda value: self.one_of(value, "decision", DECISIONS),
                "reason": self.string,
                "constraints": self._constraints,
                "remediations": self._remediations,
                "approval": self._approval,
                "delay": lambda value: self.duration_s(value, "delay", 0.001, 86400.0),
            },
        )
        for key in ("id", "decision"):
            if key not in found:
                raise self.error(node, f"a rule needs {key}")
        self._check_fits(node, found)
        constrained = found["decision"] is PolicyEffect.ALLOW and "constraints" in found
        return PolicyRule(
            id=found["id"],
            line=node.line,
            says=PolicyEffect.ALLOW_WITH_CONSTRAINTS if constrained else found["decision"],
            match=found.get("match") or JobMatch({}, {}, ()),
            when=found.get("when"),
            velocity=found.get("velocity"),
            reason=found.get("reason", ""),
            constraints=found.get("constraints"),
            remediations=found.get("remediations", ()),
            approval=found.get("approval", ApprovalTerms()),
            delay_s=found.get("delay", 0.0),
        )

    def _check_fits(self, node: YamlNode, found: dict[str, Any]) -> None:
        """Refuse keys that have no effect with the rule's decision."""
        effect = found["decision"]
        allows = effect in (PolicyEffect.ALLOW, PolicyEffect.ALLOW_WITH_CONSTRAINTS)
        for key, fits in (
            ("constraints", allows or effect is PolicyEffect.REQUIRE_APPROVAL),
            ("approval", effect is PolicyEffect.REQUIRE_APPROVAL),
            ("delay", effect is PolicyEffect.THROTTLE),
            ("velocity", not allows),
            ("remediations", not allows),
        ):
            if key in found and not fits:
                raise self.error(
                    self.key_node(node, key), f"{key} has no effect with the decision {effect.lower()}: remove it"
                )
        if effect is PolicyEffect.ALLOW_WITH_CONSTRAINTS and "constraints" not in found:
            raise self.error(node, f"the rule {found['id']!r} allows with constraints and has none: add constraints")

    def _id(self, node: YamlNode) -> str:
        found = self.string(node, 100)
        if "\n" in found:
            raise self.error(node, "an id must be one line")
        return found

    def _match(self, node: YamlNode) -> JobMatch:
        lists = dict.fromkeys((*SINGLE_FIELDS, *LIST_FIELDS), self._names)
        found = self.fields(node, "match", {**lists, "requires": self.strings, "labels": self._labels})
        names = {part: found[part] for part in lists if part in found}
        return JobMatch(names, found.get("labels", {}), found.get("requires", ()))

    def _names(self, node: YamlNode) -> GlobSet:
        entries = self.items(node, "a list of names", NAMES_MAX) if isinstance(node, ListNode) else (node,)
        return GlobSet([self._glob(each) for each in entries])

    def _glob(self, node: YamlNode) -> str:
        return self._parse_at(node, validate_glob, self.string(node))

    def _labels(self, node: YamlNode) -> dict[str, GlobSet]:
        return {name: self._names(value) for name, value in self.pairs(node, "labels")}

    def _when(self, node: YamlNode) -> Condition:
        return self._parse_at(node, Condition, self.string(node, 1_000_000))

    def _parse_at(self, node: YamlNode, read: Callable[[str], T], text: str) -> T:
        """Call `read` and add the line to its error."""
        try:
            return read(text)
        except InvalidInput as error:
            raise self.error(node, error.sentence) from None

    def _velocity(self, node: YamlNode) -> Velocity:
        def seconds(value: YamlNode) -> float:
            return float(self.integer(value, "window_seconds", 1, 7 * 86400))

        found = self.fields(
            node,
            "velocity",
            {
                "max_requests": lambda value: self.integer(value, "max_requests", 0, 100_000),
                "window": lambda value: self.duration_s(value, "window", 0.001, 7 * 86400.0),
                "window_seconds": seconds,
                "key": self._velocity_key,
            },
        )
        if "max_requests" not in found or ("window" in found) == ("window_seconds" in found):
            raise self.error(node, "velocity needs max_requests, and window or window_seconds")
        window_s = found.get("window") or found["window_seconds"]
        return Velocity(found["max_requests"], window_s, found.get("key", ("tenant",)))

    def _velocity_key(self, node: YamlNode) -> tuple[str, ...]:
        parts = tuple(self.string(node).split(":"))
        for part in parts:
            if part not in VELOCITY_KEYS and not (part.startswith("labels.") and len(part) > len("labels.")):
                raise self.error(
                    node, f"key cannot count by {part!r}: use {', '.join(VELOCITY_KEYS)} or labels.NAME, joined by `:`"
                )
        return parts

    def _constraints(self, node: YamlNode) -> Constraints:
        found = self.fields(
            node,
            "constraints",
            {
                "budgets": self._budgets,
                "sandbox": self._table,
                "toolchain": self._table,
                "diff": self._table,
                "redaction_level": self.string,
            },
        )
        return Constraints(**found)

    def _budgets(self, node: YamlNode) -> PolicyBudgets:
        names = ("max_runtime_ms", "max_retries", "max_artifact_bytes", "max_concurrent_jobs")
        minimums = {"max_retries": 0}
        return PolicyBudgets(
            **self.fields(node, "budgets", {name: _integer_reader(self, name, minimums.get(name, 1)) for name in names})
        )

    def _table(self, node: YamlNode) -> dict[str, object]:
        return {key: self.to_builtins(value) for key, value in self.pairs(node, "this value")}

    def _remediations(self, node: YamlNode) -> tuple[Remediation, ...]:
        return tuple(self._remediation(each) for each in self.items(node, "remediations", 20))

    def _remediation(self, node: YamlNode) -> Remediation:
        texts = ("id", "title", "summary", "replacement_topic", "replacement_capability")
        found = self.fields(
            node,
            "a remediation",
            {
                **dict.fromkeys(texts, self.string),
                "add_labels": lambda value: {key: self.string(each) for key, each in self.pairs(value, "add_labels")},
                "remove_labels": self.strings,
            },
        )
        if "id" not in found:
            raise self.error(node, "a remediation needs id")
        return Remediation(**found)

    def _approval(self, node: YamlNode) -> ApprovalTerms:
        found = self.fields(
            node,
            "approval",
            {
                "quorum": lambda value: self.integer(value, "quorum", 1, 100),
                "expires": lambda value: self.duration_s(value, "expires", 1.0),
                "approvers": self.strings,
            },
        )
        terms = ApprovalTerms(
            quorum=found.get("quorum", 1),
            expires_s=found.get("expires", 0.0),
            approvers=tuple(dict.fromkeys(found.get("approvers", ()))),
        )
        if terms.approvers and len(terms.approvers) < terms.quorum:
            raise self.error(node, f"a quorum of {terms.quorum} cannot be met by {len(terms.approvers)} approvers")
        return terms


def _section_reader(reader: YamlReader, read: Callable[[YamlReader, YamlNode], Any]) -> Callable[[YamlNode], Any]:
    return lambda node: read(reader, node)


def _integer_reader(reader: YamlReader, name: str, minimum: int) -> Callable[[YamlNode], int]:
    return lambda node: reader.integer(node, name, minimum)

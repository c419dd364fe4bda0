"""Reads the sections `output_policy` and `output_rules` of a policy file; errors name the line."""

from __future__ import annotations

from typing import Any, Final, get_args

from rota.infra.yaml_reader import YamlNode, YamlReader
from rota.model.errors import InvalidInput
from rota.model.policy.outputs import OutputEffect, OutputScanMode, Severity
from rota.policy.output import rules as checks
from rota.policy.output.rules import Detector, OutputMatch, OutputRule, OutputSection, ScannerName

DECISIONS: Final = {effect.value.lower(): effect for effect in OutputEffect}
MODES: Final = {
    **{mode.value: mode for mode in OutputScanMode},
    "open": OutputScanMode.PASS,
    "closed": OutputScanMode.HOLD,
}
SEVERITIES: Final[dict[str, Severity]] = {name: name for name in get_args(Severity)}
SCANNERS: Final[dict[str, ScannerName]] = {name: name for name in get_args(ScannerName)}
DETECTORS: Final[dict[str, Detector]] = {name: name for name in get_args(Detector)}
GLOBS: Final = ("shows", "tenants", "topics", "capabilities", "content_types")
BYTES_MAX: Final = 2**53 - 1


def read_section(reader: YamlReader, node: YamlNode) -> OutputSection:
    found = reader.fields(
        node,
        "output_policy",
        {
            "enabled": lambda value: reader.boolean(value, "enabled"),
            "fail_mode": lambda value: reader.one_of(value, "fail_mode", MODES),
            "topics": lambda value: _topics(reader, value),
        },
    )
    return OutputSection(**found)


def read_rules(reader: YamlReader, node: YamlNode) -> tuple[OutputRule, ...]:
    by_id: dict[str, OutputRule] = {}
    for each in reader.items(node, "output_rules", checks.RULES_MAX):
        rule = _rule(reader, each)
        if rule.id in by_id:
            raise reader.error(each, f"two output rules are called {rule.id!r}: rename one")
        by_id[rule.id] = rule
    return tuple(by_id.values())


def _topics(reader: YamlReader, node: YamlNode) -> dict[str, OutputScanMode]:
    topics = {}
    for glob, value in reader.pairs(node, "topics"):
        _check_at(reader, value, checks.check_glob, glob)
        topics[glob] = reader.one_of(value, f"the mode of {glob[:60]}", MODES)
    return topics


def _rule(reader: YamlReader, node: YamlNode) -> OutputRule:
    found = reader.fields(
        node,
        "an output rule",
        {
            "id": lambda value: reader.string(value, checks.GLOB_MAX),
            "decision": lambda value: reader.one_of(value, "decision", DECISIONS),
            "match": lambda value: _match(reader, value),
            "severity": lambda value: reader.one_of(value, "severity", SEVERITIES),
            "reason": reader.string,
            "description": reader.string,
            "enabled": lambda value: reader.boolean(value, "enabled"),
        },
    )
    for name in ("id", "decision"):
        if name not in found:
            raise reader.error(node, f"an output rule needs {name}")
    return OutputRule(**found)


def _match(reader: YamlReader, node: YamlNode) -> OutputMatch:
    def size(name: str) -> Any:
        return lambda value: reader.integer(value, name, 0, BYTES_MAX)

    found = reader.fields(
        node,
        "match",
        {
            **{name: lambda value: _checked_strings(reader, value, checks.check_glob) for name in GLOBS},
            "risk_tags": reader.strings,
            "keywords": reader.strings,
            "content_patterns": lambda value: _checked_strings(reader, value, checks.check_pattern),
            "scanners": lambda value: _choices(reader, value, "a scanner", SCANNERS),
            "detectors": lambda value: _choices(reader, value, "a detector", DETECTORS),
            "labels": lambda value: {key: reader.string(label) for key, label in reader.pairs(value, "labels")},
            "output_size_gt": size("output_size_gt"),
            "max_output_bytes": size("max_output_bytes"),
            "has_error": lambda value: reader.boolean(value, "has_error"),
        },
    )
    for name, values in found.items():
        if isinstance(values, tuple) and len(values) > checks.LIST_ENTRIES_MAX:
            raise reader.error(node, f"{name} has more than {checks.LIST_ENTRIES_MAX} entries: use two rules")
    return OutputMatch(**found)


def _checked_strings(reader: YamlReader, node: YamlNode, check: Any) -> tuple[str, ...]:
    values = reader.strings(node)
    nodes = getattr(node, "items", (node,))
    for each, text in zip(nodes, values, strict=True):
        _check_at(reader, each, check, text)
    return values


def _choices(reader: YamlReader, node: YamlNode, what: str, known: dict[str, Any]) -> tuple[Any, ...]:
    nodes = getattr(node, "items", (node,))
    return tuple(reader.one_of(each, what, known) for each in nodes)


def _check_at(reader: YamlReader, node: YamlNode, check: Any, text: str) -> None:
    try:
        check(text)
    except InvalidInput as error:
        raise reader.error(node, error.sentence) from None

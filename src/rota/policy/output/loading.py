"""Sections of a policy file about outputs, read with their lines: `output_policy` and `output_rules`."""

from __future__ import annotations

from typing import Any, Final, get_args

from rota.model.errors import InvalidInput
from rota.model.output import Mode, OutputSays, Severity
from rota.policy.output import rules as checks
from rota.policy.output.rules import Detector, OutputMatch, OutputRule, OutputSection, ScannerName
from rota.policy.reading import Node, Reader

SAYS: Final = {says.value.lower(): says for says in OutputSays}
MODES: Final = {
    **{mode.value: mode for mode in Mode},
    "open": Mode.PASS,
    "closed": Mode.HOLD,
}
SEVERITIES: Final[dict[str, Severity]] = {name: name for name in get_args(Severity)}
SCANNERS: Final[dict[str, ScannerName]] = {name: name for name in get_args(ScannerName)}
DETECTORS: Final[dict[str, Detector]] = {name: name for name in get_args(Detector)}
GLOBS: Final = ("shows", "tenants", "topics", "capabilities", "content_types")
BYTES_MAX: Final = 2**53 - 1


def read_section(reader: Reader, node: Node) -> OutputSection:
    found = reader.fields(
        node,
        "output_policy",
        {
            "enabled": lambda value: reader.flag(value, "enabled"),
            "fail_mode": lambda value: reader.one_of(value, "fail_mode", MODES),
            "topics": lambda value: _topics(reader, value),
        },
    )
    return OutputSection(**found)


def read_rules(reader: Reader, node: Node) -> tuple[OutputRule, ...]:
    read: dict[str, OutputRule] = {}
    for each in reader.items(node, "output_rules", checks.RULES_MAX):
        rule = _rule(reader, each)
        if rule.id in read:
            raise reader.wrong(each, f"two rules about outputs are called {rule.id!r}; rename one")
        read[rule.id] = rule
    return tuple(read.values())


def _topics(reader: Reader, node: Node) -> dict[str, Mode]:
    topics = {}
    for glob, value in reader.pairs(node, "topics"):
        _checked(reader, value, checks.check_glob, glob)
        topics[glob] = reader.one_of(value, f"the mode of {glob[:60]}", MODES)
    return topics


def _rule(reader: Reader, node: Node) -> OutputRule:
    found = reader.fields(
        node,
        "a rule about outputs",
        {
            "id": lambda value: reader.word(value, checks.GLOB_MAX),
            "decision": lambda value: reader.one_of(value, "decision", SAYS),
            "match": lambda value: _match(reader, value),
            "severity": lambda value: reader.one_of(value, "severity", SEVERITIES),
            "reason": reader.word,
            "description": reader.word,
            "enabled": lambda value: reader.flag(value, "enabled"),
        },
    )
    for name in ("id", "decision"):
        if name not in found:
            raise reader.wrong(node, f"a rule about outputs needs {name}")
    return OutputRule(**found)


def _match(reader: Reader, node: Node) -> OutputMatch:
    def size(name: str) -> Any:
        return lambda value: reader.whole(value, name, 0, BYTES_MAX)

    found = reader.fields(
        node,
        "match",
        {
            **{name: lambda value: _list(reader, value, checks.check_glob) for name in GLOBS},
            "risk_tags": reader.words,
            "keywords": reader.words,
            "content_patterns": lambda value: _list(reader, value, checks.check_pattern),
            "scanners": lambda value: _chosen(reader, value, "a scanner", SCANNERS),
            "detectors": lambda value: _chosen(reader, value, "a detector", DETECTORS),
            "labels": lambda value: {key: reader.word(held) for key, held in reader.pairs(value, "labels")},
            "output_size_gt": size("output_size_gt"),
            "max_output_bytes": size("max_output_bytes"),
            "has_error": lambda value: reader.flag(value, "has_error"),
        },
    )
    for name, words in found.items():
        if isinstance(words, tuple) and len(words) > checks.WORDS_MAX:
            raise reader.wrong(node, f"{name} has more than {checks.WORDS_MAX} entries; use two rules")
    return OutputMatch(**found)


def _list(reader: Reader, node: Node, check: Any) -> tuple[str, ...]:
    words = reader.words(node)
    nodes = getattr(node, "items", (node,))
    for each, word in zip(nodes, words, strict=True):
        _checked(reader, each, check, word)
    return words


def _chosen(reader: Reader, node: Node, what: str, known: dict[str, Any]) -> tuple[Any, ...]:
    nodes = getattr(node, "items", (node,))
    return tuple(reader.one_of(each, what, known) for each in nodes)


def _checked(reader: Reader, node: Node, check: Any, word: str) -> None:
    try:
        check(word)
    except InvalidInput as wrong:
        raise reader.wrong(node, wrong.sentence) from None

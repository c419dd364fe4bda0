"""Rules for outputs as a policy file defines them, and the built-in ones. No I/O.

    output_policy:
      fail_mode: pass
      topics: {job.pay.*: hold}
    output_rules:
      - id: no-secrets
        match: {scanners: [secret]}
        decision: QUARANTINE
        severity: critical
        reason: A secret was found in the output.

All parts of a `match` must hold; one entry of a list suffices. The first matching rule decides. Errors carry
`facts["path"]`, the path in the file, so that the reader of the file can name the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from typing import Final, Literal, Protocol

import msgspec

from rota.model.errors import InvalidInput
from rota.model.policy.outputs import OutputEffect, OutputScanMode, Severity

RULES_MAX: Final = 1000
LIST_ENTRIES_MAX: Final = 200
"""Per list in a match."""
PATTERN_MAX: Final = 1000
GLOB_MAX: Final = 200
LARGE_BYTES: Final = 10 * 1024 * 1024

_INVALID_GLOB: Final = re.compile(r"[\[\]{}\\]|\*\*")

ScannerName = Literal["secret", "pii", "injection"]
Detector = Literal["secret_leak", "pii", "code_injection"]


class OutputMatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Shows, tenants, topics, capabilities and content types are globs; `keywords` are case-insensitive."""

    shows: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    risk_tags: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    content_types: tuple[str, ...] = ()
    output_size_gt: int = -1
    """Bytes; -1: any size."""
    max_output_bytes: int = -1
    """The same: matches larger outputs."""
    has_error: bool | None = None
    """True: error texts of failed frames. None: both error texts and outputs."""
    scanners: tuple[ScannerName, ...] = ()
    detectors: tuple[Detector, ...] = ()
    content_patterns: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()

    @property
    def needs_content(self) -> bool:
        return bool(self.scanners or self.detectors or self.content_patterns or self.keywords)


class OutputRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    id: str
    decision: OutputEffect
    match: OutputMatch = OutputMatch()
    severity: Severity = "medium"
    reason: str = ""
    description: str = ""
    enabled: bool = True


class OutputSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The section `output_policy`. Its modes override the setting `output_policy.fail_mode`."""

    enabled: bool = True
    fail_mode: OutputScanMode | None = None
    topics: dict[str, OutputScanMode] = {}
    """By glob; the first match applies."""


class OutputRules(msgspec.Struct, frozen=True, kw_only=True):
    section: OutputSection = OutputSection()
    rules: tuple[OutputRule, ...] = ()


ERROR_SECRETS: Final = OutputRule(
    id="error-secrets",
    match=OutputMatch(has_error=True, scanners=("secret",)),
    decision=OutputEffect.REDACT,
    severity="high",
    reason="A secret was found in the text of an error.",
)
DEFAULT_RULES: Final = (
    ERROR_SECRETS,
    OutputRule(
        id="secrets",
        match=OutputMatch(has_error=False, scanners=("secret",)),
        decision=OutputEffect.QUARANTINE,
        severity="critical",
        reason="A secret was found in the output.",
    ),
    OutputRule(
        id="pii",
        match=OutputMatch(has_error=False, scanners=("pii",)),
        decision=OutputEffect.REDACT,
        severity="high",
        reason="Personal data was found in the output.",
        enabled=False,
    ),
    OutputRule(
        id="injection",
        match=OutputMatch(has_error=False, scanners=("injection",)),
        decision=OutputEffect.QUARANTINE,
        severity="high",
        reason="The output holds what looks like an injection.",
    ),
    OutputRule(
        id="size",
        match=OutputMatch(has_error=False, max_output_bytes=LARGE_BYTES),
        decision=OutputEffect.QUARANTINE,
        severity="medium",
        reason="The output is larger than 10 MiB.",
    ),
)
"""The rules if a file has no `output_rules`."""


def snapshot_id(rules: OutputRules) -> str:
    """The id of rules that come from no file: a hash of their content."""
    return f"outputs:{sha256(msgspec.json.encode(rules, order='deterministic')).hexdigest()[:16]}"


def check_rules(rules: OutputRules) -> OutputRules:
    """Validate the rules and return them."""
    if len(rules.rules) > RULES_MAX:
        raise _invalid(f"{len(rules.rules)} output rules are too many: use at most {RULES_MAX}.", "output_rules")
    for glob in rules.section.topics:
        check_glob(glob, "output_policy", "topics", glob)
    ids: set[str] = set()
    for at, rule in enumerate(rules.rules):
        if not rule.id or len(rule.id) > GLOB_MAX or not rule.id.isprintable():
            raise _invalid("An output rule needs an id of 1 to 200 printable characters.", "output_rules", at, "id")
        if rule.id in ids:
            raise _invalid(f"Two output rules are called {rule.id!r}: rename one.", "output_rules", at, "id")
        ids.add(rule.id)
        _check_match(rule.match, ("output_rules", at, "match"))
    return rules


def _check_match(match: OutputMatch, path: tuple[str | int, ...]) -> None:
    for name in ("shows", "tenants", "topics", "capabilities", "content_types", "risk_tags", "keywords"):
        entries: tuple[str, ...] = getattr(match, name)
        _check_count(entries, *path, name)
        for at, entry in enumerate(entries):
            if name in ("keywords", "risk_tags"):
                _check_keyword(entry, *path, name, at)
            else:
                check_glob(entry, *path, name, at)
    _check_count(match.content_patterns, *path, "content_patterns")
    for at, pattern in enumerate(match.content_patterns):
        check_pattern(pattern, *path, "content_patterns", at)
    for name in ("output_size_gt", "max_output_bytes"):
        if not -1 <= getattr(match, name) < 2**53:
            raise _invalid(f"{name} of an output rule must be a number of bytes.", *path, name)


def _check_count(entries: Iterable[str], *path: str | int) -> None:
    if len(list(entries)) > LIST_ENTRIES_MAX:
        raise _invalid(f"{path[-1]} of an output rule has more than {LIST_ENTRIES_MAX} entries: use two rules.", *path)


def _check_keyword(keyword: str, *path: str | int) -> None:
    if not 0 < len(keyword) <= GLOB_MAX:
        raise _invalid(f"{keyword[:40]!r} is not a valid entry: use 1 to {GLOB_MAX} characters.", *path)


def check_glob(glob: str, *path: str | int) -> None:
    if not 0 < len(glob) <= GLOB_MAX or not glob.isprintable() or _INVALID_GLOB.search(glob):
        raise _invalid(
            f"{glob[:40]!r} is not a valid glob: use up to {GLOB_MAX} characters, * for any text and ? for one.", *path
        )


def check_pattern(pattern: str, *path: str | int) -> None:
    """RE2 is linear in the text for any pattern; unsupported patterns are refused here."""
    if len(pattern) > PATTERN_MAX or r"\C" in pattern:
        raise _invalid(
            f"A pattern of {len(pattern)} characters cannot be used: use at most {PATTERN_MAX} and no \\C.", *path
        )
    try:
        matches_empty = compile_pattern(pattern).search(b"") is not None
    except ValueError as error:
        raise _invalid(f"{pattern[:40]!r} is not a valid RE2 pattern: {error}.", *path) from None
    if matches_empty:
        raise _invalid(f"{pattern[:40]!r} matches the empty text, so it would match everywhere.", *path)


class RegexMatch(Protocol):
    def span(self, group: int = 0, /) -> tuple[int, int]: ...


class Regex(Protocol):
    """An RE2 pattern over bytes."""

    def search(self, text: bytes, pos: int = 0, /) -> RegexMatch | None: ...


def compile_pattern(pattern: str, *, word: bool = False) -> Regex:
    """Compile a pattern, or with `word` a case-insensitive literal. ValueError explains an invalid pattern."""
    import re2  # type: ignore[import-untyped]  # ships no types; loaded only where outputs are scanned

    options = re2.Options()
    options.log_errors = False
    options.case_sensitive = not word
    options.literal = word
    try:
        found: Regex = re2.compile(pattern.encode(), options)
    except re2.error as error:
        message = error.args[0] if error.args else "it cannot be compiled"
        raise ValueError(
            (message.decode(errors="replace") if isinstance(message, bytes) else str(message))[:100]
        ) from None
    return found


def _invalid(sentence: str, *path: str | int) -> InvalidInput:
    return InvalidInput(sentence, path=list(path))

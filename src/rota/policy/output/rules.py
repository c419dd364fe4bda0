"""Rules about outputs, as a policy file has them, and what they are without one. No I/O.

    output_policy:
      fail_mode: pass
      topics: {job.pay.*: hold}
    output_rules:
      - id: no-secrets
        match: {scanners: [secret]}
        decision: QUARANTINE
        severity: critical
        reason: A secret was found in the output.

All that a `match` names must hold; of a list any one will do. The first rule that matches decides. What is wrong is
told with `facts["path"]`, the way to it in the file, so that whoever read the file can name the line.
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
"""Of one list in a match."""
PATTERN_MAX: Final = 1000
GLOB_MAX: Final = 200
LARGE_BYTES: Final = 10 * 1024 * 1024

_INVALID_GLOB: Final = re.compile(r"[\[\]{}\\]|\*\*")

ScannerName = Literal["secret", "pii", "injection"]
Detector = Literal["secret_leak", "pii", "code_injection"]


class OutputMatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Shows, tenants, topics, capabilities and content types are globs; `keywords` are words, in any case."""

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
    """The same: it matches what is larger."""
    has_error: bool | None = None
    """True: the error text of frames that failed. Left out: those and outputs alike."""
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
    """`output_policy` of a file. Its modes go before the setting `output_policy.fail_mode`."""

    enabled: bool = True
    fail_mode: OutputScanMode | None = None
    topics: dict[str, OutputScanMode] = {}
    """By glob, the first that fits."""


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
"""Where a file has no `output_rules`."""


def snapshot_id(given: OutputRules) -> str:
    """What these rules go by where no file names them all: a hash of what they say."""
    return f"outputs:{sha256(msgspec.json.encode(given, order='deterministic')).hexdigest()[:16]}"


def check_rules(given: OutputRules) -> OutputRules:
    """The rules, if they can be used."""
    if len(given.rules) > RULES_MAX:
        raise _invalid(f"{len(given.rules)} rules about outputs are too many: use at most {RULES_MAX}.", "output_rules")
    for glob in given.section.topics:
        check_glob(glob, "output_policy", "topics", glob)
    seen: set[str] = set()
    for at, rule in enumerate(given.rules):
        if not rule.id or len(rule.id) > GLOB_MAX or not rule.id.isprintable():
            raise _invalid(
                "A rule about outputs needs an id of 1 to 200 printable characters.", "output_rules", at, "id"
            )
        if rule.id in seen:
            raise _invalid(f"Two rules about outputs are called {rule.id!r}: rename one.", "output_rules", at, "id")
        seen.add(rule.id)
        _check_match(rule.match, ("output_rules", at, "match"))
    return given


def _check_match(match: OutputMatch, path: tuple[str | int, ...]) -> None:
    for name in ("shows", "tenants", "topics", "capabilities", "content_types", "risk_tags", "keywords"):
        words: tuple[str, ...] = getattr(match, name)
        _check_count(words, *path, name)
        for at, word in enumerate(words):
            if name in ("keywords", "risk_tags"):
                _check_keyword(word, *path, name, at)
            else:
                check_glob(word, *path, name, at)
    _check_count(match.content_patterns, *path, "content_patterns")
    for at, pattern in enumerate(match.content_patterns):
        check_pattern(pattern, *path, "content_patterns", at)
    for name in ("output_size_gt", "max_output_bytes"):
        if not -1 <= getattr(match, name) < 2**53:
            raise _invalid(f"{name} of a rule about outputs must be a number of bytes.", *path, name)


def _check_count(words: Iterable[str], *path: str | int) -> None:
    if len(list(words)) > LIST_ENTRIES_MAX:
        raise _invalid(
            f"{path[-1]} of a rule about outputs has more than {LIST_ENTRIES_MAX} entries: use two rules.", *path
        )


def _check_keyword(word: str, *path: str | int) -> None:
    if not 0 < len(word) <= GLOB_MAX:
        raise _invalid(f"{word[:40]!r} is no word to look for: use 1 to {GLOB_MAX} characters.", *path)


def check_glob(glob: str, *path: str | int) -> None:
    if not 0 < len(glob) <= GLOB_MAX or not glob.isprintable() or _INVALID_GLOB.search(glob):
        raise _invalid(
            f"{glob[:40]!r} is no glob: use up to {GLOB_MAX} characters, * for any text and ? for one.", *path
        )


def check_pattern(pattern: str, *path: str | int) -> None:
    """RE2 takes time in proportion to the text, whatever the pattern; what it cannot do is refused here."""
    if len(pattern) > PATTERN_MAX or r"\C" in pattern:
        raise _invalid(
            f"A pattern of {len(pattern)} characters cannot be used: at most {PATTERN_MAX}, and none of \\C.", *path
        )
    try:
        empty = compile_pattern(pattern).search(b"") is not None
    except ValueError as error:
        raise _invalid(f"{pattern[:40]!r} is no pattern that RE2 knows: {error}.", *path) from None
    if empty:
        raise _invalid(f"{pattern[:40]!r} matches a text without any character, so it would match everywhere.", *path)


class RegexMatch(Protocol):
    def span(self, group: int = 0, /) -> tuple[int, int]: ...


class Regex(Protocol):
    """Of RE2, over bytes."""

    def search(self, text: bytes, pos: int = 0, /) -> RegexMatch | None: ...


def compile_pattern(pattern: str, *, word: bool = False) -> Regex:
    """A pattern, or a word as it stands, in any case; ValueError says what is wrong with it."""
    import re2  # type: ignore[import-untyped]  # ships no types; loaded where outputs are looked into

    options = re2.Options()
    options.log_errors = False
    options.case_sensitive = not word
    options.literal = word
    try:
        found: Regex = re2.compile(pattern.encode(), options)
    except re2.error as error:
        told = error.args[0] if error.args else "it cannot be compiled"
        raise ValueError((told.decode(errors="replace") if isinstance(told, bytes) else str(told))[:100]) from None
    return found


def _invalid(sentence: str, *path: str | int) -> InvalidInput:
    return InvalidInput(sentence, path=list(path))

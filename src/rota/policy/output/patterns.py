"""The patterns that scanners search for: secrets, personal data and injections. No I/O.

A pattern finds candidates; `confirm` checks them further where the shape alone is not enough (check digits, entropy).
The first group is the text to redact. It has no maximum length: anything beyond one would stay readable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from math import log2
from typing import Final, NamedTuple

from rota.model.policy.outputs import Severity
from rota.policy.output.rules import Regex, compile_pattern

ENTROPY_MIN: Final = 3.5
"""Bits per character; English has about 2.5 to 3 at such lengths, random base64 more than 4."""
ENTROPY_BYTES: Final = 500
"""Only the start of a text counts: a long tail of one letter must not lower its entropy."""


class ScanPattern(NamedTuple):
    scanner: str
    type: str
    name: str
    severity: Severity
    regex: Regex
    confirm: Callable[[bytes], bool] | None = None
    group: int = 0
    """The group to redact; 0: the whole match."""


_CARDS: Final = (
    (("4",), (13, 16, 19)),
    (("51", "52", "53", "54", "55", "22", "23", "24", "25", "26", "27", "35"), (16,)),
    (("34", "37"), (15,)),
    (("30", "36", "38"), (14,)),
    (("60", "62", "64", "65"), (16, 17, 18, 19)),
)
"""Prefixes of card numbers, and their lengths in digits."""


def is_card(text: bytes) -> bool:
    """One number in ten has a valid check digit by chance, so prefix and length must match too."""
    number = bytes(text).translate(None, b" -").decode()
    if not any(number.startswith(prefixes) and len(number) in lengths for prefixes, lengths in _CARDS):
        return False
    digits = [int(each) for each in number]
    doubled = [
        each if at % 2 == 0 else (each * 2 - 9 if each > 4 else each * 2) for at, each in enumerate(digits[::-1])
    ]
    return sum(doubled) % 10 == 0 and len(set(digits)) > 1


def is_iban(text: bytes) -> bool:
    packed = bytes(text).replace(b" ", b"").upper()
    if not 15 <= len(packed) <= 34:
        return False
    rearranged = (packed[4:] + packed[:4]).decode(errors="replace")
    return (
        rearranged.isalnum()
        and rearranged.isascii()
        and int("".join(str(int(each, 36)) for each in rearranged)) % 97 == 1
    )


def is_social_security(text: bytes) -> bool:
    area, group, number = bytes(text).split(b"-")
    return area not in (b"000", b"666") and area < b"900" and group != b"00" and number != b"0000"


def is_random(text: bytes) -> bool:
    start = bytes(text[:ENTROPY_BYTES])
    counts = Counter(start).values()
    return -sum(n / len(start) * log2(n / len(start)) for n in counts) >= ENTROPY_MIN


def is_not_placeholder(text: bytes) -> bool:
    """False for a placeholder password, as in examples."""
    return bytes(text).strip(b"*x.<>[]${}") != b"" and b"REDACTED" not in text


_NAMES_OF_SECRETS: Final = (
    r"(?:secret|token|passw(?:or)?d|passphrase|api[_-]?key|private[_-]?key|access[_-]?key|credential)[a-z0-9_-]{0,20}"
)
_ASSIGNED: Final = r"[\"']?\s{0,4}[:=]\s{0,4}[\"']?"
_BEGIN_KEY: Final = r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
_END_KEY: Final = r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
_EARLIER: Final = r"(?:(?:all|any|of|the|your)\s{1,8}){0,3}(?:previous|prior|above|earlier)"

PatternRows = tuple[tuple[str, Severity, str, Callable[[bytes], bool] | None], ...]
_SECRETS: Final[PatternRows] = (
    ("aws_access_key", "critical", r"\b((?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16})\b", None),
    (
        "aws_secret_key",
        "critical",
        rf"(?i)aws[\w .-]{{0,20}}secret[\w .-]{{0,20}}{_ASSIGNED}([A-Za-z0-9/+=]{{40}})",
        None,
    ),
    ("github_token", "critical", r"\b(gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})", None),
    ("slack_token", "critical", r"\b(xox[abeoprs]-[A-Za-z0-9-]{10,})", None),
    ("slack_webhook", "high", r"(https://hooks\.slack\.com/services/[A-Za-z0-9/+]{20,})", None),
    ("openai_key", "critical", r"\b(sk-(?:proj-|svcacct-|ant-)?[A-Za-z0-9_-]{20,})", None),
    ("rota_key", "critical", r"\b(rota_[0-9a-z]{10}_[0-9A-Za-z]{12,})", None),
    ("jwt", "high", r"\b(eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,})", None),
    ("private_key", "critical", rf"(?s)({_BEGIN_KEY}.*?(?:{_END_KEY}|\z))", None),
    (
        "url_password",
        "high",
        r"\b[A-Za-z][A-Za-z0-9+.-]{1,30}://[^\s:@/\x00]{0,200}:([^\s@/\x00]+)@",
        is_not_placeholder,
    ),
    ("high_entropy", "high", rf"(?i){_NAMES_OF_SECRETS}{_ASSIGNED}([A-Za-z0-9+/=_.~-]{{20,}})", is_random),
)
_PERSONAL: Final[PatternRows] = (
    ("email", "medium", r"\b([A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24})\b", None),
    ("social_security", "high", r"\b(\d{3}-\d{2}-\d{4})\b", is_social_security),
    ("card", "critical", r"\b((?:2[2-7]|3[045678]|4\d|5[1-5]|6[0245])\d{2}(?:[ -]?\d){9,15})\b", is_card),
    ("iban", "high", r"\b([A-Z]{2}\d{2}(?: ?[A-Z0-9]){11,30})\b", is_iban),
)
_INJECTIONS: Final[PatternRows] = (
    ("shell_remove", "high", r"(?i)((?:;|&&|\|)\s{0,8}rm\s{1,8}-(?:rf|fr)\b)", None),
    ("shell_fetch", "high", r"(?i)(\b(?:curl|wget)\b[^|\n]{1,300}\|\s{0,8}(?:ba|z)?sh\b|\$\((?:curl|wget|nc)\b)", None),
    ("sql_drop", "high", r"(?i)(;\s{0,8}drop\s{1,8}(?:table|database)\b)", None),
    ("sql_union", "high", r"(?i)(\bunion\s{1,8}(?:all\s{1,8})?select\b)", None),
    ("sql_always", "high", r"(?i)(['\"]\s{0,8}or\s{1,8}['\"]?1['\"]?\s{0,8}=\s{0,8}['\"]?1)", None),
    (
        "prompt_ignore",
        "high",
        rf"(?i)(\b(?:ignore|disregard|forget)\s{{1,8}}{_EARLIER}\s{{1,8}}(?:instructions|prompts|rules)\b)",
        None,
    ),
    ("prompt_reveal", "high", r"(?i)(\breveal\s{1,8}(?:your|the)\s{1,8}system\s{1,8}prompt\b)", None),
)


@cache
def built_in_patterns() -> tuple[ScanPattern, ...]:
    """Compiled once, with the first policy."""
    tables = (
        ("secret", "secret_leak", _SECRETS),
        ("pii", "pii", _PERSONAL),
        ("injection", "code_injection", _INJECTIONS),
    )
    return tuple(
        ScanPattern(scanner, kind, name, severity, compile_pattern(regex), confirm, 1)
        for scanner, kind, rows in tables
        for name, severity, regex, confirm in rows
    )


def scanner_patterns(names: Sequence[str]) -> tuple[ScanPattern, ...]:
    return tuple(pattern for pattern in built_in_patterns() if pattern.scanner in names)


def detector_patterns(types: Sequence[str]) -> tuple[ScanPattern, ...]:
    return tuple(pattern for pattern in built_in_patterns() if pattern.type in types)


def rule_patterns(patterns: Sequence[str], severity: Severity) -> tuple[ScanPattern, ...]:
    return tuple(
        ScanPattern("patterns", "pattern", f"pattern {at}", severity, compile_pattern(each))
        for at, each in enumerate(patterns, 1)
    )


def keyword_patterns(keywords: Sequence[str], severity: Severity) -> tuple[ScanPattern, ...]:
    return tuple(
        ScanPattern("keywords", "keyword", f"keyword {at}", severity, compile_pattern(each, word=True))
        for at, each in enumerate(keywords, 1)
    )

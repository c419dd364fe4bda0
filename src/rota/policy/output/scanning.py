"""Searches outputs for patterns. No I/O; linear in the text, with a deadline.

RE2 does not backtrack, so no pattern can be slow; this module bounds the number of hits and the total time. After a
timeout nothing is known about the output, and the caller decides what that means.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from rota.model.policy.outputs import ScanFinding
from rota.policy.output.patterns import ScanPattern, scanner_patterns
from rota.policy.output.text_extraction import ScanTarget, format_path

HITS_MAX: Final = 1000
"""Per body. A body with more is redacted or quarantined as a whole."""
FINDINGS_MAX: Final = 50
"""Per stored record."""
KEY_CHARS_MAX: Final = 40
REJECTED_BYTES_MAX: Final = 64
"""Bytes: a rejected candidate up to this length may hide a real one that starts within it, such as a card number after
a digit; the search resumes at its second byte."""


class Hit(NamedTuple):
    pattern: ScanPattern
    begin: int
    end: int


class Hits(NamedTuple):
    """The hits in one body."""

    body: ScanTarget
    hits: list[Hit]

    @property
    def too_many(self) -> bool:
        return len(self.hits) >= HITS_MAX

    def spans(self) -> list[tuple[int, int, int]]:
        return [span for hit in self.hits for span in self.body.spans(hit.begin, hit.end)]

    def findings(self) -> list[ScanFinding]:
        regexes = {hit.pattern.regex for hit in self.hits}

        def is_reportable(name: str) -> bool:
            return is_safe_name(name) and not any(regex.search(name.encode()) for regex in regexes)

        return [self._finding(hit, is_reportable) for hit in self.hits[:FINDINGS_MAX]]

    def _finding(self, hit: Hit, is_reportable: Callable[[str], bool]) -> ScanFinding:
        pattern = hit.pattern
        spans = self.body.spans(hit.begin, hit.end)
        at, begin, end = spans[0] if spans else (0, 0, 0)
        fragment = self.body.fragments[at]
        offset, length = fragment.reported_span(*fragment.align_span(begin, end))
        return ScanFinding(
            type=pattern.type,
            scanner=pattern.scanner,
            name=pattern.name,
            where=self.body.name + format_path(fragment.path, is_reportable),
            offset=offset,
            length=length,
            severity=pattern.severity,
        )


def find_hits(body: ScanTarget, patterns: Sequence[ScanPattern], until_s: float) -> Hits:
    """All hits of the patterns; TimeoutError once the monotonic clock passes `until_s`."""
    hits: list[Hit] = []
    for pattern in patterns:
        for hit in _search(body.text, pattern, until_s):
            hits.append(hit)
            if len(hits) >= HITS_MAX:
                return Hits(body, hits)
    return Hits(body, hits)


def _search(text: bytes, pattern: ScanPattern, until_s: float) -> Iterator[Hit]:
    _check_deadline(until_s)
    at = 0
    while (match := pattern.regex.search(text, at)) is not None:
        _check_deadline(until_s)
        first, at = match.span()
        begin, end = match.span(pattern.group)
        if begin < end and (pattern.confirm is None or pattern.confirm(text[begin:end])):
            yield Hit(pattern, begin, end)
        elif at - first <= REJECTED_BYTES_MAX:
            at = first + 1


def _check_deadline(until_s: float) -> None:
    if time.monotonic() > until_s:
        raise TimeoutError


def is_safe_name(name: str) -> bool:
    """Whether a mapping key may be shown to people who must not see its value."""
    if len(name) > KEY_CHARS_MAX or not name.replace("_", "").replace("-", "").isalnum():
        return False
    data = name.encode()
    return not any(pattern.regex.search(data) for pattern in scanner_patterns(("secret", "pii")))

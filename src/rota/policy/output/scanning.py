"""Looking for patterns in an output. No I/O; takes time in proportion to the text, and no more of it than it may.

RE2 never goes back in a text, so no pattern can take long; what is bounded here is how much is found and how long all
of it together may take. Who is out of time knows nothing of the output, and what that means is for the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from rota.model.policy.outputs import ScanFinding
from rota.policy.output.patterns import ScanPattern, scanner_patterns
from rota.policy.output.text_extraction import ScanTarget, format_path

HITS_MAX: Final = 1000
"""In one body. What has more is redacted or kept back as a whole."""
FINDINGS_MAX: Final = 50
"""In a record; there is no use in more."""
KEY_CHARS_MAX: Final = 40
REJECTED_BYTES_MAX: Final = 64
"""Bytes: a shorter candidate that is none may hide one that begins within it, as a number right before a card does."""


class Hit(NamedTuple):
    pattern: ScanPattern
    begin: int
    end: int


class Hits(NamedTuple):
    """What was found in one body."""

    body: ScanTarget
    hits: list[Hit]

    @property
    def too_many(self) -> bool:
        return len(self.hits) >= HITS_MAX

    def spans(self) -> list[tuple[int, int, int]]:
        return [span for hit in self.hits for span in self.body.spans(hit.begin, hit.end)]

    def findings(self) -> list[ScanFinding]:
        known = {hit.pattern.regex for hit in self.hits}

        def is_told(name: str) -> bool:
            return is_safe_name(name) and not any(regex.search(name.encode()) for regex in known)

        return [self._finding(hit, is_told) for hit in self.hits[:FINDINGS_MAX]]

    def _finding(self, hit: Hit, is_told: Callable[[str], bool]) -> ScanFinding:
        pattern = hit.pattern
        spans = self.body.spans(hit.begin, hit.end)
        at, begin, end = spans[0] if spans else (0, 0, 0)
        piece = self.body.pieces[at]
        offset, length = piece.reported_span(*piece.align_span(begin, end))
        return ScanFinding(
            type=pattern.type,
            scanner=pattern.scanner,
            name=pattern.name,
            where=self.body.name + format_path(piece.path, is_told),
            offset=offset,
            length=length,
            severity=pattern.severity,
        )


def find_hits(body: ScanTarget, patterns: Sequence[ScanPattern], until_s: float) -> Hits:
    """All that these patterns find; TimeoutError once the monotonic clock is past `until_s`."""
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
    """Whether a key of a mapping may be told to those who must not see what it names."""
    if len(name) > KEY_CHARS_MAX or not name.replace("_", "").replace("-", "").isalnum():
        return False
    data = name.encode()
    return not any(pattern.regex.search(data) for pattern in scanner_patterns(("secret", "pii")))

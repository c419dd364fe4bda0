"""Looking for patterns in an output. No I/O; takes time in proportion to the text, and no more of it than it may.

RE2 never goes back in a text, so no pattern can take long; what is bounded here is how much is found and how long all
of it together may take. Who is out of time knows nothing of the output, and what that means is for the caller.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from rota.model.output import Finding
from rota.policy.output.content import Body, told_path
from rota.policy.output.patterns import Pattern, of_scanners

HITS_MAX: Final = 1000
"""In one body. What has more is redacted or kept back as a whole."""
FINDINGS_TOLD: Final = 50
"""In a record; there is no use in more."""
KEY_MAX: Final = 40


class Hit(NamedTuple):
    pattern: Pattern
    begin: int
    end: int


class Hits(NamedTuple):
    """What was found in one body."""

    body: Body
    hits: list[Hit]

    @property
    def too_many(self) -> bool:
        return len(self.hits) >= HITS_MAX

    def spans(self) -> list[tuple[int, int, int]]:
        return [span for hit in self.hits for span in self.body.spans(hit.begin, hit.end)]

    def findings(self) -> list[Finding]:
        return [self._finding(hit) for hit in self.hits[:FINDINGS_TOLD]]

    def _finding(self, hit: Hit) -> Finding:
        pattern = hit.pattern
        spans = self.body.spans(hit.begin, hit.end)
        at, begin, end = spans[0] if spans else (0, 0, 0)
        piece = self.body.pieces[at]
        offset, length = piece.place(*piece.cut(begin, end))
        return Finding(
            type=pattern.type,
            scanner=pattern.scanner,
            name=pattern.name,
            where=self.body.name + told_path(piece.path, is_clean),
            offset=offset,
            length=length,
            severity=pattern.severity,
        )


def find(body: Body, patterns: Sequence[Pattern], until_s: float) -> Hits:
    """All that these patterns find; TimeoutError once the monotonic clock is past `until_s`."""
    hits: list[Hit] = []
    for pattern in patterns:
        for hit in _found(body.text, pattern, until_s):
            hits.append(hit)
            if len(hits) >= HITS_MAX:
                return Hits(body, hits)
    return Hits(body, hits)


def _found(text: bytes, pattern: Pattern, until_s: float) -> Iterator[Hit]:
    _check_time(until_s)
    for match in pattern.regex.finditer(text):
        _check_time(until_s)
        begin, end = match.span(pattern.group)
        if begin < end and (pattern.confirm is None or pattern.confirm(text[begin:end])):
            yield Hit(pattern, begin, end)


def _check_time(until_s: float) -> None:
    if time.monotonic() > until_s:
        raise TimeoutError


def is_clean(name: str) -> bool:
    """Whether a key of a mapping may be told to those who must not see what it names."""
    if len(name) > KEY_MAX or not name.replace("_", "").replace("-", "").isalnum():
        return False
    data = name.encode()
    return not any(pattern.regex.search(data) for pattern in of_scanners(("secret", "pii")))

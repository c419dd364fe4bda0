"""Searches outputs for patterns. No I/O; linear in the text, with a deadline.

RE2 does not backtrack, so no pattern can be slow; this module bounds the number of hits and the total time. After a
timeout nothing is known about the output, and the caller decides what that means.

A text is searched in windows, so memory is bounded for files of any size, and so is the time for which one search keeps
other threads from running. Windows overlap by `OVERLAP_BYTES`: a match of up to that length is found wherever it lies.
A longer one may be missed at the border of two windows, or is cut there; a text with a cut match is redacted whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from rota.model.policy.outputs import ScanFinding
from rota.policy.output.parts import OutputFile, bytes_file, windows
from rota.policy.output.patterns import ScanPattern, scanner_patterns
from rota.policy.output.text_extraction import OutputStream, ScanTarget, format_path

WINDOW_BYTES: Final = 1024 * 1024
OVERLAP_BYTES: Final = 64 * 1024
CONTEXT_BYTES: Final = 64
"""Kept before the place where the search resumes: a pattern may look at the character before its match."""
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

    body: ScanTarget | OutputStream
    hits: list[Hit]
    is_cut: bool = False
    """A match was longer than what is searched at a time."""

    @property
    def too_many(self) -> bool:
        """Whether redacting them one by one is not enough."""
        return len(self.hits) >= HITS_MAX or self.is_cut

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


class PatternSearch:
    """Searches a text that arrives in windows for several kinds of patterns."""

    def __init__(self, kinds: Sequence[Sequence[ScanPattern]], until_s: float) -> None:
        self.hits: list[list[Hit]] = [[] for _ in kinds]
        self.is_cut = [False for _ in kinds]
        self._patterns = [(number, pattern) for number, kind in enumerate(kinds) for pattern in kind]
        self._resume_at = [0 for _ in self._patterns]
        self._until_s = until_s
        self._text = b""
        self._base = 0
        """Offset of `_text` in the whole text."""

    def feed(self, window: bytes, *, is_last: bool) -> None:
        """TimeoutError once the monotonic clock passes the deadline."""
        self._text = self._text + window if self._text else window
        for number, (kind, pattern) in enumerate(self._patterns):
            _check_deadline(self._until_s)
            at = max(0, self._resume_at[number] - self._base)
            self._resume_at[number] = self._base + self._search(kind, pattern, at, is_last=is_last)
        end = self._base + len(self._text)
        keep_from = max(self._base, min(self._resume_at, default=end) - CONTEXT_BYTES)
        self._text, self._base = self._text[keep_from - self._base :], keep_from

    def _search(self, kind: int, pattern: ScanPattern, at: int, *, is_last: bool) -> int:
        """Add the hits from `at` on; returns where to resume."""
        text, hits = self._text, self.hits[kind]
        while at <= len(text) and len(hits) < HITS_MAX:
            match = pattern.regex.search(text, at)
            if match is None:
                break
            _check_deadline(self._until_s)
            first, after = match.span()
            if after == len(text) and not is_last:
                if after - first < OVERLAP_BYTES:
                    return first  # it may go on in the next window
                self.is_cut[kind] = True
            begin, end = match.span(pattern.group)
            at = after
            if begin < end and (pattern.confirm is None or pattern.confirm(text[begin:end])):
                hits.append(Hit(pattern, self._base + begin, self._base + end))
            elif after - first <= REJECTED_BYTES_MAX:
                at = first + 1
        if is_last or len(hits) >= HITS_MAX:
            return len(text)
        return max(at, len(text) - OVERLAP_BYTES)


def find_hits(body: ScanTarget, patterns: Sequence[ScanPattern], until_s: float) -> Hits:
    """All hits of the patterns; TimeoutError once the monotonic clock passes `until_s`."""
    [hits] = find_hits_by_kind(body, [patterns], until_s)
    return hits


def find_hits_by_kind(
    body: ScanTarget | OutputFile, kinds: Sequence[Sequence[ScanPattern]], until_s: float
) -> list[Hits]:
    """The same for each kind of patterns; a file is read once."""
    is_file = isinstance(body, OutputFile)
    chunks = body.chunks() if isinstance(body, OutputFile) else bytes_file("", body.text).chunks()
    search = PatternSearch(kinds, until_s)
    for window, is_last in windows(chunks, WINDOW_BYTES):
        search.feed(window, is_last=is_last)
    target = OutputStream(f"artifact:{body.name}") if is_file else body
    assert not isinstance(target, OutputFile)
    return [Hits(target, hits, is_cut) for hits, is_cut in zip(search.hits, search.is_cut, strict=True)]


def _check_deadline(until_s: float) -> None:
    if time.monotonic() > until_s:
        raise TimeoutError


def is_safe_name(name: str) -> bool:
    """Whether a mapping key may be shown to people who must not see its value."""
    if len(name) > KEY_CHARS_MAX or not name.replace("_", "").replace("-", "").isalnum():
        return False
    data = name.encode()
    return not any(pattern.regex.search(data) for pattern in scanner_patterns(("secret", "pii")))

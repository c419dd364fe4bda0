"""Evaluates rules for outputs: first by metadata, then by content. No I/O.

The metadata check applies the rules in order. A rule that needs the content cannot decide yet, so the output must be
scanned (`scan`), but a later rule that quarantines by metadata does so immediately. A rule that allows an output
saves the scan if no earlier rule needs the content.

The content check applies every rule. After a rule redacts, all rules are applied to the result again: so redaction
cannot let pass what a later rule quarantines, and it ends with a text without findings, or with the marker alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from fnmatch import translate
from functools import partial
from typing import Final, NamedTuple

import msgspec

from rota.model.policy.outputs import (
    REDACTION_MARKER,
    OutputEffect,
    OutputMeta,
    OutputPolicyDecision,
    OutputScanMode,
    ScanFinding,
    Severity,
)
from rota.policy.output import patterns
from rota.policy.output.parts import OutputContent, OutputFile, OutputParts, redacted_chunks
from rota.policy.output.patterns import ScanPattern
from rota.policy.output.rules import OutputMatch, OutputRule, OutputRules, check_rules
from rota.policy.output.scanning import FINDINGS_MAX, Hits, find_hits, find_hits_by_kind
from rota.policy.output.text_extraction import OutputBlob, OutputValue

REDACTION_ROUNDS_MAX: Final = 8
CACHE_MAX: Final = 4096
"""Cached sets of applicable rules."""


class MetadataResult(NamedTuple):
    """The result of the metadata check."""

    word: OutputPolicyDecision
    scan: bool
    """Whether the content must be scanned."""
    must: bool = False
    """A rule redacts it by metadata and no earlier rule can allow it: it is unreadable until the redaction is done."""


class ContentResult(NamedTuple):
    """The result of the content check; `redacted` is what may be read instead."""

    word: OutputPolicyDecision
    redacted: OutputContent | None = None


class PartsResult(NamedTuple):
    """The same for an output in parts. A file that stays as it is, is the same object."""

    word: OutputPolicyDecision
    redacted: OutputParts | None = None


class PartsHits(NamedTuple):
    """The hits in an output."""

    value: OutputValue | None
    by_kind: list[list[Hits]]
    """For each kind of patterns: the hits in the value, if there is one, and in each file."""


class CompiledOutputRule:
    """A rule ready for evaluation."""

    def __init__(self, rule: OutputRule) -> None:
        self.rule = rule
        match = rule.match
        self.needs_content = match.needs_content
        self.kinds: list[tuple[ScanPattern, ...]] = [
            kind
            for kind in (
                patterns.scanner_patterns(match.scanners),
                patterns.detector_patterns(match.detectors),
                patterns.rule_patterns(match.content_patterns, rule.severity),
                patterns.keyword_patterns(match.keywords, rule.severity),
            )
            if kind
        ]
        self._size = max(match.output_size_gt, match.max_output_bytes)
        self._types = _compile_globs(match.content_types)
        self._applies = _compile_match(match)

    def applies(self, meta: OutputMeta) -> bool:
        """Whether the part of the match that is the same for all frames of a layer holds."""
        return self._applies(meta)

    def fits(self, meta: OutputMeta) -> bool:
        match = self.rule.match
        if match.has_error is not None and match.has_error != meta.has_error:
            return False
        if self._size >= 0 and meta.bytes <= self._size:
            return False
        return self._types is None or any(self._types(each) for each in meta.content_types)

    def match_hits(self, by_kind: Sequence[Sequence[Hits]]) -> list[Hits] | None:
        """The hits of each kind of pattern that it requires, one after the other; None if one kind has none."""
        if not all(any(each.hits for each in hits) for hits in by_kind):
            return None
        return [each for hits in by_kind for each in hits]

    def to_decision(
        self, snapshot: str, findings: Sequence[ScanFinding] = (), effect: OutputEffect | None = None
    ) -> OutputPolicyDecision:
        rule = self.rule
        return OutputPolicyDecision(
            says=effect or rule.decision,
            rule=rule.id,
            reason=rule.reason or f"The rule {rule.id} matches.",
            severity=_highest_severity([rule.severity, *(each.severity for each in findings)]),
            snapshot=snapshot,
            findings=tuple(findings[:FINDINGS_MAX]),
        )


class CompiledOutputPolicy:
    """The compiled rules of one snapshot. Thread-safe."""

    def __init__(
        self, rules: OutputRules, *, snapshot: str = "", otherwise: OutputScanMode = OutputScanMode.PASS
    ) -> None:
        checked = check_rules(rules)
        self.snapshot = snapshot
        self._rules = [CompiledOutputRule(rule) for rule in checked.rules if rule.enabled]
        self._modes = [(_compile_glob(glob), mode) for glob, mode in checked.section.topics.items()]
        self._otherwise = checked.section.fail_mode or otherwise
        self._allowed = OutputPolicyDecision(says=OutputEffect.ALLOW, snapshot=snapshot)
        self._cache: dict[tuple[object, ...], list[CompiledOutputRule]] = {}

    def mode(self, topic: str) -> OutputScanMode:
        return next((mode for fits, mode in self._modes if fits(topic)), self._otherwise)

    def check_metadata(self, meta: OutputMeta) -> MetadataResult:
        """Decide by metadata."""
        scan = may_pass = False
        for rule in self._applicable_rules(meta):
            if not rule.fits(meta):
                continue
            if rule.needs_content:
                scan = True
                may_pass |= rule.rule.decision is OutputEffect.ALLOW
            elif rule.rule.decision.quarantines:
                return MetadataResult(rule.to_decision(self.snapshot), scan=False)
            elif rule.rule.decision is OutputEffect.REDACT:
                return MetadataResult(self._allowed, scan=True, must=not may_pass)
            else:
                break
        return MetadataResult(self._allowed, scan)

    def check_content(self, meta: OutputMeta, content: OutputContent, until_s: float) -> ContentResult:
        """As `check_parts`, for an output in memory."""
        word, redacted = self.check_parts(meta, content.parts(), until_s)
        return ContentResult(word, None if redacted is None else redacted.content())

    def check_parts(self, meta: OutputMeta, parts: OutputParts, until_s: float) -> PartsResult:
        """Decide by content; TimeoutError past `until_s` on the monotonic clock. Blocks while files are read."""
        found: list[ScanFinding] = []
        decision = self._allowed
        current = parts
        for _ in range(REDACTION_ROUNDS_MAX):
            result, redacted = self._evaluate_parts(meta, current, until_s, again=bool(found))
            found += result.findings
            if result.says is OutputEffect.ALLOW:
                break
            decision = result
            if redacted is None:
                return PartsResult(_with_findings(decision, found))
            current = redacted
        else:
            current = parts.replaced_by_marker()
        return (
            PartsResult(self._allowed)
            if decision.says is OutputEffect.ALLOW
            else PartsResult(_with_findings(decision, found), current)
        )

    def check_error(self, meta: OutputMeta, text: str, until_s: float) -> tuple[OutputPolicyDecision, str]:
        """The decision about an error text, and the text that may be stored."""
        decision, current = self._allowed, text
        for _ in range(REDACTION_ROUNDS_MAX):
            result, remaining = self._evaluate_error(meta, current, until_s)
            if result.says is OutputEffect.ALLOW:
                return decision, current
            decision, current = result, remaining
            if current == REDACTION_MARKER:
                break
        else:
            current = REDACTION_MARKER
        return decision, current

    def _evaluate_error(self, meta: OutputMeta, text: str, until_s: float) -> tuple[OutputPolicyDecision, str]:
        body = OutputBlob("error", text.encode(errors="replace"), is_text=True)
        for rule in self._applicable_rules(meta):
            if not rule.fits(meta):
                continue
            hits = rule.match_hits([[find_hits(body, kind, until_s)] for kind in rule.kinds])
            if hits is None:
                continue
            decision = rule.to_decision(self.snapshot, [finding for each in hits for finding in each.findings()])
            if decision.says is not OutputEffect.REDACT or any(each.too_many for each in hits):
                return decision, REDACTION_MARKER
            return decision, body.redact([span for each in hits for span in each.spans()]).decode(errors="replace")
        return self._allowed, text

    def _evaluate_parts(
        self, meta: OutputMeta, parts: OutputParts, until_s: float, *, again: bool
    ) -> tuple[OutputPolicyDecision, OutputParts | None]:
        rules = [
            rule
            for rule in self._applicable_rules(meta)
            if rule.fits(meta) and not (again and not rule.needs_content and rule.rule.decision is OutputEffect.REDACT)
        ]
        found = _find_in_parts(parts, [kind for rule in rules for kind in rule.kinds], until_s)
        kinds = iter(found.by_kind)
        for rule in rules:
            hits = rule.match_hits([next(kinds) for _ in rule.kinds])
            if hits is None:
                continue
            decision = rule.to_decision(self.snapshot, [finding for each in hits for finding in each.findings()])
            if rule.rule.decision is not OutputEffect.REDACT:
                return decision, None
            return decision, _redact(parts, found.value, hits)
        return self._allowed, None

    def _applicable_rules(self, meta: OutputMeta) -> list[CompiledOutputRule]:
        key = (meta.show, meta.topic, meta.tenant, meta.capability, meta.risk_tags, tuple(meta.labels.items()))
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= CACHE_MAX:
                self._cache.clear()
            found = self._cache[key] = [rule for rule in self._rules if rule.applies(meta)]
        return found


def redact_all(parts: OutputParts, until_s: float, *, whole: bool = False) -> tuple[OutputParts, list[ScanFinding]]:
    """Remove the findings of all scanners; content without findings is replaced whole."""
    if whole:
        return parts.replaced_by_marker(), []
    found = _find_in_parts(parts, [patterns.built_in_patterns()], until_s)
    hits = found.by_kind[0]
    return _redact(parts, found.value, hits), [finding for each in hits for finding in each.findings()]


def _find_in_parts(parts: OutputParts, kinds: Sequence[Sequence[ScanPattern]], until_s: float) -> PartsHits:
    """Each file is read once."""
    value = None if parts.value is None else OutputValue(parts.value)
    bodies: list[OutputValue | OutputFile] = [*([] if value is None else [value]), *parts.files]
    by_body = [find_hits_by_kind(body, kinds, until_s) for body in bodies] if kinds else []
    return PartsHits(value, [[hits[number] for hits in by_body] for number in range(len(kinds))])


def _redact(parts: OutputParts, body: OutputValue | None, hits: Sequence[Hits]) -> OutputParts:
    """Parts without hits stay unchanged; without any hit everything is replaced."""
    if not any(each.hits for each in hits) or any(each.too_many for each in hits):
        return parts.replaced_by_marker()
    value = parts.value
    if body is not None and (spans := [span for each in hits if each.body is body for span in each.spans()]):
        value = body.redact(spans)
    return OutputParts(value, tuple(_redact_file(file, number, parts, hits) for number, file in enumerate(parts.files)))


def _redact_file(file: OutputFile, number: int, parts: OutputParts, hits: Sequence[Hits]) -> OutputFile:
    """The hits of each kind are in the order of the parts."""
    bodies = len(parts.files) + (parts.value is not None)
    place = number + (parts.value is not None)
    spans = [(hit.begin, hit.end) for each in hits[place::bodies] for hit in each.hits]
    return OutputFile(file.name, partial(redacted_chunks, file.chunks, spans)) if spans else file


def _with_findings(decision: OutputPolicyDecision, findings: Sequence[ScanFinding]) -> OutputPolicyDecision:
    return msgspec.structs.replace(decision, findings=tuple(findings[:FINDINGS_MAX]))


def _highest_severity(severities: Sequence[Severity]) -> Severity:
    order: tuple[Severity, ...] = ("low", "medium", "high", "critical")
    return max(severities, key=order.index)


def _compile_match(match: OutputMatch) -> Callable[[OutputMeta], bool]:
    shows, tenants = _compile_globs(match.shows), _compile_globs(match.tenants)
    topics, capabilities = _compile_globs(match.topics), _compile_globs(match.capabilities)
    tags = frozenset(match.risk_tags)

    def applies(meta: OutputMeta) -> bool:
        return (
            (shows is None or shows(meta.show))
            and (tenants is None or tenants(meta.tenant))
            and (topics is None or topics(meta.topic))
            and (capabilities is None or capabilities(meta.capability))
            and (not tags or not tags.isdisjoint(meta.risk_tags))
            and all(meta.labels.get(key) == value for key, value in match.labels.items())
        )

    return applies


def _compile_globs(globs: Sequence[str]) -> Callable[[str], bool] | None:
    if not globs:
        return None
    fits = [_compile_glob(glob) for glob in globs]
    return lambda text: any(fit(text) for fit in fits)


def _compile_glob(glob: str) -> Callable[[str], bool]:
    found = re.compile(translate(glob))
    return lambda text: found.match(text) is not None


def deadline_after(seconds: float) -> float:
    """The time on the monotonic clock `seconds` from now."""
    return time.monotonic() + seconds

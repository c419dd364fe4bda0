"""What rules say of outputs: at first of what they are, then of what is in them. No I/O.

The first look sees metadata. Rules are asked in their order; one that needs the content cannot say anything yet, so the
output must be looked into (`scan`), but a later rule that keeps it back for what it is does so at once. A rule that
allows an output, with none before it that needs the content, spares it the second look.

The second look sees the content and asks every rule. When a rule redacts, what is left is judged anew, by all rules:
so a rule that redacts cannot let pass what a later one keeps back, and redaction ends with a text in which it finds
nothing more, or with the marker alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from fnmatch import translate
from typing import Final, NamedTuple

import msgspec

from rota.model.output import (
    MARKER,
    Finding,
    Mode,
    OutputMeta,
    OutputSays,
    OutputWord,
    Severity,
)
from rota.policy.output import patterns
from rota.policy.output.content import Blob, Body, Value
from rota.policy.output.patterns import Pattern
from rota.policy.output.rules import OutputMatch, OutputRule, OutputRules, checked
from rota.policy.output.scanning import FINDINGS_TOLD, Hits, find

ROUNDS_MAX: Final = 8
KNOWN_MAX: Final = 4096
"""Kinds of outputs of which it is remembered which rules apply."""
UNKNOWN_SAID: Final = "The policy said something that nobody knows."


class First(NamedTuple):
    """What the first look says."""

    word: OutputWord
    scan: bool
    """Whether somebody must look inside."""
    must: bool = False
    """A rule redacts it for what it is, and none before may let it pass: nobody reads it before that is done."""


class Content(msgspec.Struct, frozen=True):
    """All of an output: what the frame returned, and its files by name."""

    value: bytes | None = None
    artifacts: tuple[tuple[str, bytes], ...] = ()

    def bodies(self) -> list[Value | Blob]:
        value = [] if self.value is None else [Value(self.value)]
        return [*value, *(Blob(f"artifact:{name}", data) for name, data in self.artifacts)]


class Second(NamedTuple):
    """What the look inside says; `redacted` is what may be read instead."""

    word: OutputWord
    redacted: Content | None = None


class Rule:
    """A rule, made ready."""

    def __init__(self, rule: OutputRule) -> None:
        self.rule = rule
        match = rule.match
        self.needs_content = match.needs_content
        self.kinds: list[tuple[Pattern, ...]] = [
            kind
            for kind in (
                patterns.of_scanners(match.scanners),
                patterns.of_detectors(match.detectors),
                patterns.of_rule(match.content_patterns, rule.severity),
                patterns.of_keywords(match.keywords, rule.severity),
            )
            if kind
        ]
        self._size = max(match.output_size_gt, match.max_output_bytes)
        self._types = _globs(match.content_types)
        self._named = _named(match)

    def applies(self, meta: OutputMeta) -> bool:
        """As far as that is the same for all frames of a layer."""
        return self._named(meta)

    def fits(self, meta: OutputMeta) -> bool:
        match = self.rule.match
        if match.has_error is not None and match.has_error != meta.has_error:
            return False
        if self._size >= 0 and meta.bytes <= self._size:
            return False
        return self._types is None or any(self._types(each) for each in meta.content_types)

    def look(self, bodies: Sequence[Body], until_s: float) -> list[Hits] | None:
        """What was found of each kind that it asks for; None unless there is something of every one."""
        found: list[Hits] = []
        for kind in self.kinds:
            hits = [find(body, kind, until_s) for body in bodies]
            if not any(each.hits for each in hits):
                return None
            found += hits
        return found

    def word(self, snapshot: str, findings: Sequence[Finding] = (), says: OutputSays | None = None) -> OutputWord:
        rule = self.rule
        return OutputWord(
            says=says or rule.decision,
            rule=rule.id,
            reason=rule.reason or f"The rule {rule.id} matches.",
            severity=_worst([rule.severity, *(each.severity for each in findings)]),
            snapshot=snapshot,
            findings=tuple(findings[:FINDINGS_TOLD]),
        )


class OutputPolicy:
    """Rules of one snapshot, for this process. May be asked from any thread."""

    def __init__(self, rules: OutputRules, *, snapshot: str = "", otherwise: Mode = Mode.PASS) -> None:
        given = checked(rules)
        self.snapshot = snapshot
        self._rules = [Rule(rule) for rule in given.rules if rule.enabled]
        self._modes = [(_glob(glob), mode) for glob, mode in given.section.topics.items()]
        self._otherwise = given.section.fail_mode or otherwise
        self._allowed = OutputWord(says=OutputSays.ALLOW, snapshot=snapshot)
        self._known: dict[tuple[object, ...], list[Rule]] = {}

    def mode(self, topic: str) -> Mode:
        return next((mode for fits, mode in self._modes if fits(topic)), self._otherwise)

    def first(self, meta: OutputMeta) -> First:
        """By what it is."""
        scan = may_pass = False
        for rule in self._applying(meta):
            if not rule.fits(meta):
                continue
            if rule.needs_content:
                scan = True
                may_pass |= rule.rule.decision is OutputSays.ALLOW
            elif rule.rule.decision.keeps_back:
                return First(rule.word(self.snapshot), scan=False)
            elif rule.rule.decision is OutputSays.REDACT:
                return First(self._allowed, scan=True, must=not may_pass)
            else:
                break
        return First(self._allowed, scan)

    def second(self, meta: OutputMeta, content: Content, until_s: float) -> Second:
        """By what is in it; TimeoutError when that takes longer than until then, by the monotonic clock."""
        found: list[Finding] = []
        word = self._allowed
        now = content
        for _ in range(ROUNDS_MAX):
            said, redacted = self._judge(meta, now, until_s, again=bool(found))
            found += said.findings
            if said.says is OutputSays.ALLOW:
                break
            word = said
            if redacted is None:
                return Second(_with(word, found))
            now = redacted
        else:
            now = _marked(content)
        return Second(self._allowed) if word.says is OutputSays.ALLOW else Second(_with(word, found), now)

    def error(self, meta: OutputMeta, text: str, until_s: float) -> tuple[OutputWord, str]:
        """Of the text of an error, and what may be written down of it."""
        word, now = self._allowed, text
        for _ in range(ROUNDS_MAX):
            said, left = self._judge_error(meta, now, until_s)
            if said.says is OutputSays.ALLOW:
                return word, now
            word, now = said, left
            if now == MARKER:
                break
        else:
            now = MARKER
        return word, now

    def _judge_error(self, meta: OutputMeta, text: str, until_s: float) -> tuple[OutputWord, str]:
        body = Blob("error", text.encode(errors="replace"), is_text=True)
        for rule in self._applying(meta):
            hits = rule.look([body], until_s) if rule.fits(meta) else None
            if hits is None:
                continue
            word = rule.word(self.snapshot, [finding for each in hits for finding in each.findings()])
            if word.says is not OutputSays.REDACT or any(each.too_many for each in hits):
                return word, MARKER
            return word, body.redacted([span for each in hits for span in each.spans()]).decode(errors="replace")
        return self._allowed, text

    def _judge(
        self, meta: OutputMeta, content: Content, until_s: float, *, again: bool
    ) -> tuple[OutputWord, Content | None]:
        bodies = content.bodies()
        cut = any(body.truncated for body in bodies)
        for rule in self._applying(meta):
            if not rule.fits(meta) or (again and not rule.needs_content and rule.rule.decision is OutputSays.REDACT):
                continue
            hits = rule.look(bodies, until_s) if rule.needs_content else []
            if hits is None:
                continue
            findings = [finding for each in hits for finding in each.findings()]
            if rule.rule.decision is not OutputSays.REDACT:
                return rule.word(self.snapshot, findings), None
            if cut:
                return rule.word(self.snapshot, findings, OutputSays.QUARANTINE), None
            return rule.word(self.snapshot, findings), _redacted(content, bodies, hits)
        return self._allowed, None

    def _applying(self, meta: OutputMeta) -> list[Rule]:
        alike = (meta.show, meta.topic, meta.tenant, meta.capability, meta.risk_tags, tuple(meta.labels.items()))
        found = self._known.get(alike)
        if found is None:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            found = self._known[alike] = [rule for rule in self._rules if rule.applies(meta)]
        return found


def redact_all(content: Content, until_s: float, *, whole: bool = False) -> tuple[Content, list[Finding]]:
    """Without all that any scanner knows; what cannot be looked at whole, or holds nothing they know, goes whole."""
    if whole:
        return _marked(content), []
    bodies = content.bodies()
    hits = [find(body, patterns.built_in(), until_s) for body in bodies]
    findings = [finding for each in hits for finding in each.findings()]
    if any(body.truncated for body in bodies) or not findings:
        return _marked(content), findings
    return _redacted(content, bodies, hits), findings


def _redacted(content: Content, bodies: Sequence[Value | Blob], hits: Sequence[Hits]) -> Content:
    """Bodies in which nothing was found stay as they are; with no hit at all everything goes."""
    if not any(each.hits for each in hits) or any(each.too_many for each in hits):
        return _marked(content)
    left: list[bytes] = []
    for body, original in zip(bodies, _parts(content), strict=True):
        spans = [span for each in hits if each.body is body for span in each.spans()]
        left.append(body.redacted(spans) if spans else original)
    value = None if content.value is None else left.pop(0)
    return Content(value, tuple((name, data) for (name, _), data in zip(content.artifacts, left, strict=True)))


def _parts(content: Content) -> list[bytes]:
    return [*([] if content.value is None else [content.value]), *(data for _, data in content.artifacts)]


def _marked(content: Content) -> Content:
    value = None if content.value is None else msgspec.msgpack.encode(MARKER)
    return Content(value, tuple((name, MARKER.encode()) for name, _ in content.artifacts))


def _with(word: OutputWord, findings: Sequence[Finding]) -> OutputWord:
    return msgspec.structs.replace(word, findings=tuple(findings[:FINDINGS_TOLD]))


def _worst(severities: Sequence[Severity]) -> Severity:
    order: tuple[Severity, ...] = ("low", "medium", "high", "critical")
    return max(severities, key=order.index)


def _named(match: OutputMatch) -> Callable[[OutputMeta], bool]:
    shows, tenants = _globs(match.shows), _globs(match.tenants)
    topics, capabilities = _globs(match.topics), _globs(match.capabilities)
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


def _globs(globs: Sequence[str]) -> Callable[[str], bool] | None:
    if not globs:
        return None
    fits = [_glob(glob) for glob in globs]
    return lambda text: any(fit(text) for fit in fits)


def _glob(glob: str) -> Callable[[str], bool]:
    found = re.compile(translate(glob))
    return lambda text: found.match(text) is not None


def within(seconds: float) -> float:
    """The moment, by the monotonic clock, that is so far ahead."""
    return time.monotonic() + seconds

"""Checks the content of outputs: by the rules of this process, or at a remote kernel over gRPC.

Both scan the whole output and return a decision and, if it redacts, the redacted content. Files are read in chunks. A
remote kernel gets an output in one call, or, if a part of it is longer than `SCANNED_BYTES_MAX`, in windows, a call
each; it cannot redact what it sees in windows, so such an output is quarantined instead. An unknown decision of a
remote kernel quarantines the output. A malformed reply counts as no answer, and the mode of the topic decides then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final, Protocol

import msgspec

from rota.infra.telemetry import metrics
from rota.model.errors import InvalidInput, Unavailable
from rota.model.policy.outputs import (
    SCANNED_BYTES_MAX,
    OutputEffect,
    OutputMeta,
    OutputPolicyDecision,
    OutputScanMode,
    ScanFinding,
    Severity,
)
from rota.model.settings.lifecycle import OutputPolicySettings
from rota.policy.output.evaluate import CompiledOutputPolicy, ContentResult, PartsResult, deadline_after
from rota.policy.output.parts import OutputContent, OutputParts, bytes_file, windows
from rota.policy.output.rules import DEFAULT_RULES, ERROR_SECRETS, OutputMatch, OutputRule, OutputRules, snapshot_id
from rota.policy.output.scanning import OVERLAP_BYTES, WINDOW_BYTES
from rota.policy.snapshots import PolicySnapshots

EVALUATION_SECONDS = metrics.histogram(
    "rota_output_eval_duration_seconds",
    "Time to evaluate the rules on the content of one output.",
    buckets=(0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0),
)
SERVED_TIMEOUT_S: Final = OutputPolicySettings().content_timeout
INVALID_REPLY: Final = (
    "The kernel returned an invalid decision about an output: check that its version is that of this server."
)

OutputPolicySource = Callable[[], CompiledOutputPolicy | None]
"""Returns the current rules; None: outputs are not checked."""
_META = msgspec.json.Decoder(OutputMeta)
_CONTENT = msgspec.msgpack.Decoder(OutputContent)


class ContentChecker(Protocol):
    """Checks the content of an output."""

    async def check(self, meta: OutputMeta, parts: OutputParts, within_s: float) -> PartsResult:
        """Raises TimeoutError or Unavailable when it cannot decide."""
        ...

    async def close(self) -> None: ...


class OutputDecisionReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A reply on the wire; `says` may be a value of another version."""

    says: str
    rule: str = ""
    reason: str = ""
    severity: Severity = "medium"
    snapshot: str = ""
    findings: tuple[ScanFinding, ...] = ()
    redacted: OutputContent | None = None


_REPLY = msgspec.json.Decoder(OutputDecisionReply)


class LocalContentChecker:
    """Applies the rules of this process in a thread: RE2 takes milliseconds for the largest text."""

    def __init__(self, policy: OutputPolicySource, served_timeout_s: float = SERVED_TIMEOUT_S) -> None:
        self._policy = policy
        self._served_timeout_s = served_timeout_s

    async def check(self, meta: OutputMeta, parts: OutputParts, within_s: float) -> PartsResult:
        policy = self._policy()
        if policy is None:
            return PartsResult(OutputPolicyDecision(says=OutputEffect.ALLOW))
        began_s = time.perf_counter()
        result = await asyncio.to_thread(policy.check_parts, meta, parts, deadline_after(within_s))
        EVALUATION_SECONDS.observe(time.perf_counter() - began_s)
        return result

    async def close(self) -> None:
        return None

    async def check_output(self, asked_json: str, content: bytes) -> str:
        """The same for gRPC callers; InvalidInput for a malformed request."""
        try:
            meta, decoded = _META.decode(asked_json), _CONTENT.decode(content)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidInput(
                "The request about an output cannot be decoded: check that client and kernel have the same version."
            ) from error
        decision, redacted = await self.check(meta, decoded.parts(), self._served_timeout_s)
        remaining = None if redacted is None else redacted.content()
        reply = OutputDecisionReply(**msgspec.structs.asdict(decision), redacted=remaining)
        return msgspec.json.encode(reply).decode()


class OutputKernel(Protocol):
    async def check_output(self, asked_json: str, content: bytes, timeout_s: float) -> str: ...

    async def close(self) -> None: ...


class KernelContentChecker:
    """Checks at a remote kernel."""

    def __init__(self, remote: OutputKernel) -> None:
        self._remote = remote

    async def close(self) -> None:
        await self._remote.close()

    async def check(self, meta: OutputMeta, parts: OutputParts, within_s: float) -> PartsResult:
        until_s = deadline_after(within_s)
        content = await asyncio.to_thread(_small_content, parts)
        if content is not None:
            decision, redacted = await self._ask(meta, content, until_s)
            return PartsResult(decision, None if redacted is None else redacted.parts())
        decision = OutputPolicyDecision(says=OutputEffect.ALLOW)
        async for window in _each_in_thread(_content_windows(parts)):
            decision, _ = await self._ask(meta, window, until_s)
            if decision.says is not OutputEffect.ALLOW:
                break
        if decision.says is OutputEffect.REDACT:
            decision = msgspec.structs.replace(decision, says=OutputEffect.QUARANTINE)
        return PartsResult(decision)

    async def _ask(self, meta: OutputMeta, content: OutputContent, until_s: float) -> ContentResult:
        meta_json, within_s = msgspec.json.encode(meta).decode(), until_s - time.monotonic()
        if within_s <= 0:
            raise TimeoutError
        reply_json = await self._remote.check_output(meta_json, msgspec.msgpack.encode(content), within_s)
        try:
            reply = _REPLY.decode(reply_json)
        except (msgspec.MsgspecError, ValueError) as error:
            raise Unavailable(INVALID_REPLY) from error
        if any("\0" in text for text in _texts(reply)):
            raise Unavailable(INVALID_REPLY)  # PostgreSQL cannot store NUL, and the failed write would lose the batch
        return _to_content_result(reply, content)


async def _each_in_thread(contents: Iterator[OutputContent]) -> AsyncIterator[OutputContent]:
    while (content := await asyncio.to_thread(next, contents, None)) is not None:
        yield content


def _small_content(parts: OutputParts) -> OutputContent | None:
    """The whole output, if each of its parts fits into a call; else None."""
    if parts.value is not None and len(parts.value) > SCANNED_BYTES_MAX:
        return None
    files = []
    for file in parts.files:
        data, is_whole = next(windows(file.chunks(), SCANNED_BYTES_MAX))
        if not is_whole or len(data) > SCANNED_BYTES_MAX:
            return None
        files.append((file.name, data))
    return OutputContent(parts.value, tuple(files))


def _content_windows(parts: OutputParts) -> Iterator[OutputContent]:
    """The parts in overlapping windows; a value as its bytes, in which texts are as they are."""
    value = [] if parts.value is None else [bytes_file("value", parts.value)]
    for file in (*value, *parts.files):
        tail = b""
        for window, _ in windows(file.chunks(), WINDOW_BYTES):
            data = tail + window
            yield OutputContent(None, ((file.name, data),))
            tail = data[-OVERLAP_BYTES:]


def _texts(reply: OutputDecisionReply) -> list[str]:
    found = [text for each in reply.findings for text in (each.type, each.scanner, each.name, each.where)]
    return [reply.rule, reply.reason, reply.snapshot, *found]


def _to_content_result(reply: OutputDecisionReply, content: OutputContent) -> ContentResult:
    is_known = reply.says in OutputEffect.__members__
    says = OutputEffect(reply.says) if is_known else OutputEffect.QUARANTINE
    redacted = reply.redacted if says is OutputEffect.REDACT else None
    if redacted is not None and not _has_same_parts(redacted, content):
        says, redacted = OutputEffect.QUARANTINE, None
    decision = OutputPolicyDecision(
        says=says,
        rule=reply.rule,
        reason=reply.reason,
        severity=reply.severity,
        snapshot=reply.snapshot,
        findings=reply.findings,
    )
    return ContentResult(decision, redacted)


def _has_same_parts(redacted: OutputContent, content: OutputContent) -> bool:
    """Whether it can replace the other: the same parts with the same names."""
    names = [[name for name, _ in each.artifacts] for each in (redacted, content)]
    return names[0] == names[1] and (redacted.value is None) == (content.value is None)


class FileOutputPolicySource:
    """The rules of the policy file in force, compiled once per snapshot."""

    def __init__(self, snapshots: PolicySnapshots, otherwise: OutputScanMode = OutputScanMode.PASS) -> None:
        self._snapshots = snapshots
        self._otherwise = otherwise
        self._compiled: tuple[str, CompiledOutputPolicy | None] = ("", None)

    def __call__(self) -> CompiledOutputPolicy | None:
        current = self._snapshots.current
        if current.snapshot != self._compiled[0]:
            self._compiled = (current.snapshot, self._compile(current.written.sections, current.snapshot))
        return self._compiled[1]

    def _compile(self, sections: dict[str, object], snapshot: str) -> CompiledOutputPolicy | None:
        section = sections.get("output_policy")
        rules = OutputRules(rules=sections.get("output_rules", DEFAULT_RULES))  # type: ignore[arg-type]  # checked by the loader
        if section is not None:
            rules = msgspec.structs.replace(rules, section=section)
        return (
            CompiledOutputPolicy(rules, snapshot=snapshot, otherwise=self._otherwise) if rules.section.enabled else None
        )


def remote_output_policy(otherwise: OutputScanMode) -> CompiledOutputPolicy:
    """For a server with a remote kernel: it scans all content there and error texts here."""
    unknown = OutputRule(
        id="kernel",
        decision=OutputEffect.QUARANTINE,
        match=OutputMatch(has_error=False, scanners=("secret", "pii", "injection")),
    )
    rules = OutputRules(rules=(ERROR_SECRETS, unknown))
    return CompiledOutputPolicy(rules, snapshot=snapshot_id(rules), otherwise=otherwise)


def default_output_policy(otherwise: OutputScanMode) -> CompiledOutputPolicy:
    """The policy if no file has rules for outputs."""
    rules = OutputRules(rules=DEFAULT_RULES)
    return CompiledOutputPolicy(rules, snapshot=snapshot_id(rules), otherwise=otherwise)

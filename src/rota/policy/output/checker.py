"""Who looks into outputs: the rules of this process, or a kernel elsewhere, asked over gRPC.

Both are asked with all of an output and answer with a word and, when it redacts, with what is left. What a kernel says
that nobody knows keeps the output back; what cannot be read at all is no answer, and silence means what the topic says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
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
from rota.policy.output.evaluate import CompiledOutputPolicy, ContentResult, OutputContent, deadline_after
from rota.policy.output.rules import DEFAULT_RULES, ERROR_SECRETS, OutputMatch, OutputRule, OutputRules, snapshot_id
from rota.policy.snapshots import PolicySnapshots

EVALUATION_SECONDS = metrics.histogram(
    "rota_output_eval_duration_seconds",
    "How long rules took over the content of one output.",
    buckets=(0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0),
)
SERVED_TIMEOUT_S: Final = 30.0
INVALID_REPLY: Final = "The kernel says of an output what makes no sense: is it of this version?"

OutputPolicySource = Callable[[], CompiledOutputPolicy | None]
"""The rules of now; None: outputs are not looked at."""
_META = msgspec.json.Decoder(OutputMeta)
_CONTENT = msgspec.msgpack.Decoder(OutputContent)


class ContentChecker(Protocol):
    """Who looks inside."""

    async def check(self, meta: OutputMeta, content: OutputContent, within_s: float) -> ContentResult:
        """Raises `TimeoutError`, or `Unavailable`, when it cannot say."""
        ...

    async def close(self) -> None: ...


class OutputDecisionReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An answer as it travels; `says` may be a word of another version."""

    says: str
    rule: str = ""
    reason: str = ""
    severity: Severity = "medium"
    snapshot: str = ""
    findings: tuple[ScanFinding, ...] = ()
    redacted: OutputContent | None = None


_REPLY = msgspec.json.Decoder(OutputDecisionReply)


class LocalContentChecker:
    """Rules of this process, in a thread: RE2 takes milliseconds for the largest text."""

    def __init__(self, policy: OutputPolicySource) -> None:
        self._policy = policy

    async def check(self, meta: OutputMeta, content: OutputContent, within_s: float) -> ContentResult:
        policy = self._policy()
        if policy is None:
            return ContentResult(OutputPolicyDecision(says=OutputEffect.ALLOW))
        began_s = time.perf_counter()
        said = await asyncio.to_thread(policy.check_content, meta, content, deadline_after(within_s))
        EVALUATION_SECONDS.observe(time.perf_counter() - began_s)
        return said

    async def close(self) -> None:
        return None

    async def check_output(self, asked_json: str, content: bytes) -> str:
        """The same for those who ask over gRPC; InvalidInput for what makes no sense."""
        try:
            meta, given = _META.decode(asked_json), _CONTENT.decode(content)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidInput("What was asked about an output cannot be read: is it of this version?") from error
        word, left = await self.check(meta, given, SERVED_TIMEOUT_S)
        said = OutputDecisionReply(**msgspec.structs.asdict(word), redacted=left)
        return msgspec.json.encode(said).decode()


class OutputKernel(Protocol):
    async def check_output(self, asked_json: str, content: bytes, timeout_s: float) -> str: ...

    async def close(self) -> None: ...


class KernelContentChecker:
    """A kernel elsewhere."""

    def __init__(self, remote: OutputKernel) -> None:
        self._remote = remote

    async def close(self) -> None:
        await self._remote.close()

    async def check(self, meta: OutputMeta, content: OutputContent, within_s: float) -> ContentResult:
        asked = msgspec.json.encode(meta).decode()
        told = await self._remote.check_output(asked, msgspec.msgpack.encode(_truncate(content)), within_s)
        try:
            said = _REPLY.decode(told)
        except (msgspec.MsgspecError, ValueError) as error:
            raise Unavailable(INVALID_REPLY) from error
        if any("\0" in text for text in _texts(said)):
            raise Unavailable(INVALID_REPLY)  # it cannot be written down, nor what was said of others with it
        return _to_content_result(said, content)


def _texts(said: OutputDecisionReply) -> list[str]:
    found = [text for each in said.findings for text in (each.type, each.scanner, each.name, each.where)]
    return [said.rule, said.reason, said.snapshot, *found]


def _to_content_result(said: OutputDecisionReply, content: OutputContent) -> ContentResult:
    known = said.says in OutputEffect.__members__
    says = OutputEffect(said.says) if known else OutputEffect.QUARANTINE
    redacted = said.redacted if says is OutputEffect.REDACT else None
    if redacted is not None and not _has_same_parts(redacted, content):
        says, redacted = OutputEffect.QUARANTINE, None
    word = OutputPolicyDecision(
        says=says,
        rule=said.rule,
        reason=said.reason,
        severity=said.severity,
        snapshot=said.snapshot,
        findings=said.findings,
    )
    return ContentResult(word, redacted)


def _has_same_parts(redacted: OutputContent, content: OutputContent) -> bool:
    """Whether it can stand in the place of the other: the same parts under the same names."""
    names = [[name for name, _ in each.artifacts] for each in (redacted, content)]
    return names[0] == names[1] and (redacted.value is None) == (content.value is None)


def _truncate(content: OutputContent) -> OutputContent:
    """What lies behind that is not looked at; one byte more says that there is more."""
    most = SCANNED_BYTES_MAX + 1
    value = None if content.value is None else content.value[:most]
    return OutputContent(value, tuple((name, data[:most]) for name, data in content.artifacts))


class FileOutputPolicySource:
    """The rules of the policy file that is in force, made ready once for each snapshot."""

    def __init__(self, snapshots: PolicySnapshots, otherwise: OutputScanMode = OutputScanMode.PASS) -> None:
        self._snapshots = snapshots
        self._otherwise = otherwise
        self._known: tuple[str, CompiledOutputPolicy | None] = ("", None)

    def __call__(self) -> CompiledOutputPolicy | None:
        current = self._snapshots.current
        if current.snapshot != self._known[0]:
            self._known = (current.snapshot, self._compile(current.written.sections, current.snapshot))
        return self._known[1]

    def _compile(self, sections: dict[str, object], snapshot: str) -> CompiledOutputPolicy | None:
        section = sections.get("output_policy")
        given = OutputRules(rules=sections.get("output_rules", DEFAULT_RULES))  # type: ignore[arg-type]  # read by loading
        if section is not None:
            given = msgspec.structs.replace(given, section=section)
        return (
            CompiledOutputPolicy(given, snapshot=snapshot, otherwise=self._otherwise) if given.section.enabled else None
        )


def remote_output_policy(otherwise: OutputScanMode) -> CompiledOutputPolicy:
    """For a server that asks a kernel elsewhere: everything is looked into, there; errors are looked at here."""
    unknown = OutputRule(
        id="kernel",
        decision=OutputEffect.QUARANTINE,
        match=OutputMatch(has_error=False, scanners=("secret", "pii", "injection")),
    )
    rules = OutputRules(rules=(ERROR_SECRETS, unknown))
    return CompiledOutputPolicy(rules, snapshot=snapshot_id(rules), otherwise=otherwise)


def default_output_policy(otherwise: OutputScanMode) -> CompiledOutputPolicy:
    """Where no file says anything about outputs."""
    rules = OutputRules(rules=DEFAULT_RULES)
    return CompiledOutputPolicy(rules, snapshot=snapshot_id(rules), otherwise=otherwise)

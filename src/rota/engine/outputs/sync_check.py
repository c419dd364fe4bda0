"""Synchronous output check: metadata and error texts, in the transaction that ends a frame.

It sees the metadata of an output (size, type, topic, labels), in this process and without I/O of its own. The result is
written with the frame's end:

| the policy decides | the frame ends | its output |
|---|---|---|
| no objection | SUCCEEDED | is readable |
| scan the content | SUCCEEDED | is readable, or held where the topic says so; a row of `rota.scan` is due |
| redact | SUCCEEDED | is held, and quarantined unless it is redacted within `REDACT_BUDGET_S` |
| quarantine, deny | OUTPUT_QUARANTINED | is quarantined, with a dead letter and an audit entry |
| (the check fails) | SUCCEEDED | is readable and counted as skipped; held where the topic says so; or quarantined |

Error texts of failed frames are checked here completely, since they are copied to several places: text that a rule
matches, or that there was no time to check, is never stored. Frames without outputs are not checked.
"""

from __future__ import annotations

import asyncio
import mimetypes
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import structlog

from rota.api.admin import DeadLetter
from rota.infra import audit
from rota.infra.audit import AuditEntry
from rota.infra.blob_store import BlobPointer
from rota.infra.postgres import Record, Transaction, query
from rota.infra.telemetry import metrics
from rota.model.errors import InvalidInput
from rota.model.ids import JobId, LayerId, ShowId
from rota.model.jobs.submission import decode_details
from rota.model.policy.outputs import (
    REDACTION_MARKER,
    OutputCheck,
    OutputCheckPhase,
    OutputEffect,
    OutputMeta,
    OutputPolicyDecision,
    OutputRestriction,
    OutputScanMode,
)
from rota.model.protocol import AttemptResult
from rota.model.reasons import Reason
from rota.policy.output.evaluate import CompiledOutputPolicy, deadline_after

if TYPE_CHECKING:
    from rota.engine.completion.finisher import EndedAttempt
    from rota.engine.completion.retry_decision import AttemptOutcome

LAYER_META = query(__package__, "outputs_layers")
ADD_SCANS = query(__package__, "outputs_scan")
UPSERT_OUTPUTS = query(__package__, "outputs_keep")

log = structlog.get_logger(__name__)
REDACT_BUDGET_S: Final = 5.0
ERROR_TEXT_BUDGET_S: Final = 1.0
"""Budget for the error texts of one report: a thousand long texts take a third of it."""
POLICY_ACTOR: Final = "policy:output"
VALUE_TYPE: Final = "application/msgpack"

CHECKED = metrics.counter("rota_output_policy_checked", "Outputs checked by the policy.", labels=("topic", "phase"))
QUARANTINED = metrics.counter(
    "rota_output_policy_quarantined", "Outputs quarantined by the policy.", labels=("topic", "phase")
)
SKIPPED = metrics.counter(
    "rota_output_policy_skipped", "Outputs passed because they could not be checked.", labels=("topic", "phase")
)
EVALUATIONS = metrics.counter("rota_output_evaluations", "Evaluations of output rules.", labels=("phase",))
DENIALS = metrics.counter("rota_output_denials", "Outputs denied by a rule.", labels=("topic",))
LATENCY = metrics.histogram(
    "rota_output_check_latency_seconds",
    "Duration of output checks: of all outputs of a report (sync), or of one with its content (async).",
    labels=("topic", "phase"),
    buckets=(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0),
)


class SyncCheckResult(NamedTuple):
    """The result of the synchronous check of one output."""

    meta: OutputMeta
    word: OutputPolicyDecision
    check: OutputCheck
    output: OutputRestriction | None = None
    scan: OutputScanMode | None = None
    """The mode of the content scan when it gives no verdict; None: no scan."""
    budget_s: float = 0.0


class OutputStateChange(NamedTuple):
    """An output that enters a restricted state, or leaves it."""

    token: int
    layer: LayerId
    frame: int
    job: JobId
    show: ShowId
    state: str
    word: OutputPolicyDecision
    meta: OutputMeta
    original: str = ""


class CheckedFrames(NamedTuple):
    """Frames and outcomes after the check, and the result for each output."""

    frames: dict[int, EndedAttempt]
    endings: dict[int, AttemptOutcome]
    seen: dict[int, SyncCheckResult]


class SyncOutputChecker:
    def __init__(self, policy: Callable[[], CompiledOutputPolicy | None], by: str, *, content_s: float = 30.0) -> None:
        self.policy = policy
        """The current policy; None: outputs are not checked."""
        self.by = by
        """Name of this server in check records."""
        self.content_s = content_s
        self.due = asyncio.Event()
        """Set when this process has written a scan."""

    async def check(self, tx: Transaction, unchecked: CheckedFrames) -> CheckedFrames:
        checked = CheckedFrames(dict(unchecked.frames), dict(unchecked.endings), {})
        policy = self.policy()
        to_check = {
            token: frame
            for token, frame in unchecked.frames.items()
            if _needs_check(frame.end, unchecked.endings[token])
        }
        if policy is None or not to_check:
            return unchecked
        rows = await tx.rows(LAYER_META, list({frame.layer for frame in to_check.values()}))
        layers = {row["pk_layer"]: _layer_output_meta(row) for row in rows}
        began_s = time.perf_counter()
        deadline_s = deadline_after(ERROR_TEXT_BUDGET_S)
        for token, frame in to_check.items():
            layer_meta = layers.get(frame.layer)
            if layer_meta is not None:
                self._check_frame(policy, checked, token, _output_meta(layer_meta, frame), deadline_s)
        took_s = time.perf_counter() - began_s
        topics = Counter(seen.meta.topic for seen in checked.seen.values())
        EVALUATIONS.labels("sync").inc(len(checked.seen))
        for topic, outputs in topics.items():
            CHECKED.labels(topic, "sync").inc(outputs)
            LATENCY.labels(topic, "sync").observe(took_s)
        return checked

    def _check_frame(
        self, policy: CompiledOutputPolicy, checked: CheckedFrames, token: int, meta: OutputMeta, deadline_s: float
    ) -> None:
        frame, ending = checked.frames[token], checked.endings[token]
        if frame.end.error:
            failed = msgspec.structs.replace(meta, has_error=True)
            error = self._checked_error_text(policy, failed, frame.end.error, deadline_s)
            checked.frames[token] = _with_error_text(frame, error)
        if ending.state != "SUCCEEDED":
            return
        seen = self._check_output(policy, meta)
        checked.seen[token] = seen
        if seen.output is OutputRestriction.QUARANTINED:
            reason = Reason.OUTPUT_QUARANTINED.value
            checked.endings[token] = ending._replace(state="OUTPUT_QUARANTINED", reason=reason)
            checked.frames[token] = _with_error_text(frame, seen.word.reason)

    def _check_output(self, policy: CompiledOutputPolicy, meta: OutputMeta) -> SyncCheckResult:
        mode = OutputScanMode.PASS
        try:
            mode = policy.mode(meta.topic)
            result = policy.check_metadata(meta)
        except Exception:
            log.exception("output_check_failed", topic=meta.topic, mode=mode)
            return self._result_on_failure(meta, mode)
        check = self.check_record("sync", result.word)
        if result.word.says.quarantines:
            return SyncCheckResult(meta, result.word, check, OutputRestriction.QUARANTINED)
        if not result.scan:
            return SyncCheckResult(meta, result.word, check)
        if result.must:
            return SyncCheckResult(
                meta, result.word, check, OutputRestriction.HELD, OutputScanMode.FAIL_CLOSED, REDACT_BUDGET_S
            )
        return SyncCheckResult(
            meta, result.word, check, OutputRestriction.HELD if mode.holds else None, mode, self.content_s
        )

    def _result_on_failure(self, meta: OutputMeta, mode: OutputScanMode) -> SyncCheckResult:
        word = OutputPolicyDecision(
            says=OutputEffect.QUARANTINE, reason="The output could not be checked.", severity="high"
        )
        check = msgspec.structs.replace(self.check_record("sync", word), says="SKIPPED")
        match mode:
            case OutputScanMode.PASS:
                SKIPPED.labels(meta.topic, "sync").inc()
                return SyncCheckResult(meta, word, check)
            case OutputScanMode.HOLD:
                return SyncCheckResult(meta, word, check, OutputRestriction.HELD, mode, self.content_s)
            case OutputScanMode.FAIL_CLOSED:
                return SyncCheckResult(meta, word, check, OutputRestriction.QUARANTINED)

    def _checked_error_text(self, policy: CompiledOutputPolicy, meta: OutputMeta, text: str, deadline_s: float) -> str:
        try:
            # As it will be stored: NUL characters must not hide a secret.
            return policy.check_error(meta, text.replace("\0", ""), deadline_s)[1]
        except TimeoutError:
            log.warning("error_text_check_failed", topic=meta.topic, because="timeout")
            return REDACTION_MARKER
        except Exception as wrong:  # noqa: BLE001 - its text may contain a part of the output
            log.warning("error_text_check_failed", topic=meta.topic, because=type(wrong).__name__)
            return REDACTION_MARKER if policy.mode(meta.topic).holds else text

    def check_record(self, phase: OutputCheckPhase, word: OutputPolicyDecision, by: str = "") -> OutputCheck:
        return OutputCheck(
            phase=phase,
            at_ms=time.time_ns() // 1_000_000,
            by=by or self.by,
            says=word.says.value,
            rule=word.rule,
            reason=word.reason,
            severity=word.severity,
            snapshot=word.snapshot,
            findings=word.findings,
        )

    async def add_scans(self, tx: Transaction, frames: Mapping[int, EndedAttempt], checked: CheckedFrames) -> bool:
        """Called before the jobs end: their dependents wait until the outputs are readable."""
        rows = [(frame, seen) for token, frame in frames.items() if (seen := checked.seen.get(token)) and seen.scan]
        if not rows:
            return False
        await tx.run(
            ADD_SCANS,
            [frame.end.token for frame, _ in rows],
            [frame.layer for frame, _ in rows],
            [frame.frame for frame, _ in rows],
            [frame.job for frame, _ in rows],
            [frame.show for frame, _ in rows],
            [str(seen.scan) for _, seen in rows],
            [seen.budget_s for _, seen in rows],
            [msgspec.msgpack.encode(seen.meta) for _, seen in rows],
        )
        return True

    async def quarantine(
        self, tx: Transaction, frames: Mapping[int, EndedAttempt], checked: CheckedFrames
    ) -> list[OutputStateChange]:
        """Records the outputs quarantined by this check, for review."""
        changes = [
            OutputStateChange(
                token,
                frame.layer,
                frame.frame,
                frame.job,
                frame.show,
                OutputRestriction.QUARANTINED,
                seen.word,
                seen.meta,
            )
            for token, frame in frames.items()
            if (seen := checked.seen.get(token)) is not None and seen.output is OutputRestriction.QUARANTINED
        ]
        if changes:
            await write_state_changes(tx, changes)
        return changes


async def write_state_changes(
    tx: Transaction, changes: Sequence[OutputStateChange], ended: Sequence[object] | None = None
) -> None:
    await tx.run(
        UPSERT_OUTPUTS,
        [one.token for one in changes],
        [one.layer for one in changes],
        [one.frame for one in changes],
        [one.job for one in changes],
        [one.show for one in changes],
        [str(one.state) for one in changes],
        [one.word.severity for one in changes],
        [one.word.rule for one in changes],
        [one.word.reason for one in changes],
        [msgspec.msgpack.encode(one.meta) for one in changes],
        [one.original for one in changes],
        list(ended) if ended is not None else [None] * len(changes),
    )


def output_dead_letters(changes: Sequence[OutputStateChange], reason: Reason) -> list[DeadLetter]:
    return [
        DeadLetter(
            kind="output",
            reason=reason.value,
            cause=dead_letter_cause(one.token),
            job=one.job,
            error=f"Frame {one.meta.number} of layer {one.meta.layer}: {one.word.reason}",
        )
        for one in changes
    ]


def dead_letter_cause(token: int) -> str:
    """The cause by which the dead letter of an output is found."""
    return f"output:{token}"


async def audit_state_changes(tx: Transaction, changes: Sequence[OutputStateChange], phase: OutputCheckPhase) -> None:
    """Called last: appending locks the audit trail until the commit."""
    if changes:
        await audit.append(tx, [_audit_entry(one, phase) for one in changes])


def _audit_entry(change: OutputStateChange, phase: OutputCheckPhase) -> AuditEntry:
    word = change.word
    detail = {
        "show": str(change.show),
        "output": change.token,
        "frame": change.meta.number,
        "layer": change.meta.layer,
        "phase": phase,
        "rule": word.rule,
        "snapshot": word.snapshot,
        "severity": word.severity,
        "findings": sorted({finding.name for finding in word.findings}),
    }
    act = "redact" if change.state == OutputRestriction.REDACTED else "quarantine"
    return AuditEntry(POLICY_ACTOR, f"output.{act}", f"job:{change.job}", detail)


def count_quarantined(changes: Sequence[OutputStateChange], phase: OutputCheckPhase) -> None:
    for one in changes:
        QUARANTINED.labels(one.meta.topic, phase).inc()
        if one.word.says is OutputEffect.DENY:
            DENIALS.labels(one.meta.topic).inc()


def frame_end_columns(checked: CheckedFrames, tokens: Sequence[int]) -> tuple[list[str | None], list[str | None]]:
    """The columns `output` and `checks` of these frame ends."""
    seen = [checked.seen.get(token) for token in tokens]
    return (
        [one.output if one is not None else None for one in seen],
        [msgspec.json.encode([one.check]).decode() if one is not None else None for one in seen],
    )


def _needs_check(end: AttemptResult, ending: AttemptOutcome) -> bool:
    if ending.state == "SUCCEEDED" and (end.value is not None or end.pointer is not None or end.artifacts):
        return True
    return bool(end.error) and ending.state not in ("RETURNED", "HANDED_BACK", "RERUN")


class _LayerOutputMeta(NamedTuple):
    """Metadata that all outputs of a layer share, and its frame numbering."""

    meta: OutputMeta
    first: int
    step: int


def _layer_output_meta(row: Record) -> _LayerOutputMeta:
    details = decode_details(row["request"])
    labels: dict[str, str] = msgspec.json.decode(row["labels"]) if row["labels"] else {}
    meta = OutputMeta(
        show=row["show"],
        topic=row["topic"],
        tenant=details.tenant,
        capability=details.capability,
        risk_tags=details.risk_tags,
        labels=labels,
        pack_id=details.pack_id,
        principal=details.principal,
        actor_id=details.actor_id,
        layer=row["layer"],
    )
    return _LayerOutputMeta(meta, row["first_frame"], row["frame_step"])


def _output_meta(layer_meta: _LayerOutputMeta, frame: EndedAttempt) -> OutputMeta:
    end = frame.end
    files = tuple((each.name, len(each.data) or _pointer_size(each.pointer)) for each in end.artifacts)
    value = len(end.value or b"") + _pointer_size(end.pointer)
    types = [VALUE_TYPE] if value else []
    types += [mimetypes.guess_type(name)[0] or "application/octet-stream" for name, _ in files]
    return msgspec.structs.replace(
        layer_meta.meta,
        number=layer_meta.first + (frame.frame - layer_meta.first) * layer_meta.step,
        attempt=frame.attempt,
        worker=str(frame.worker),
        took_ms=end.took_ms,
        bytes=value + sum(size for _, size in files),
        content_types=tuple(dict.fromkeys(types)),
        artifacts=files,
    )


def _with_error_text(frame: EndedAttempt, error: str) -> EndedAttempt:
    return frame._replace(end=msgspec.structs.replace(frame.end, error=error))


def _pointer_size(pointer: str | None) -> int:
    try:
        return BlobPointer.parse(pointer).size if pointer else 0
    except InvalidInput:
        return 0

"""Outputs on their way out: the first look, in the transaction that ends a frame.

It sees what an output is (size, kind, topic, labels), in this process and without I/O of its own. What comes of it is
written with the end of the frame:

| the policy says | the frame ends | its output |
|---|---|---|
| nothing against it | SUCCEEDED | is readable |
| it must be looked into | SUCCEEDED | is readable, or held where the topic says so; a row of `rota.scan` is due |
| redact it for what it is | SUCCEEDED | is held, and quarantined unless it is redacted within `MUST_S` |
| quarantine, deny | OUTPUT_QUARANTINED | is quarantined, with a dead letter and an entry in the audit trail |
| (it fails) | SUCCEEDED | is readable and counted as skipped; is held where the topic says so; or is quarantined |

What a failed frame says of itself is looked at here as a whole, since it goes to several places at once: what a rule
finds in it is never written down, nor is what there was no time to look at. Frames that
returned nothing do not come by here.
"""

from __future__ import annotations

import asyncio
import mimetypes
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

import msgspec
import structlog

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
from rota.queue.dead_letters import DeadLetter

if TYPE_CHECKING:
    from rota.engine.completion.finisher import EndedAttempt
    from rota.engine.completion.retry_decision import AttemptOutcome

LAYER_META = query(__package__, "outputs_layers")
ADD_SCANS = query(__package__, "outputs_scan")
UPSERT_OUTPUTS = query(__package__, "outputs_keep")

log = structlog.get_logger(__name__)
REDACT_BUDGET_S: Final = 5.0
ERROR_TEXT_BUDGET_S: Final = 1.0
"""Longest look at what failed frames of one report say: a thousand long texts take a third of it."""
POLICY_ACTOR: Final = "policy:output"
VALUE_TYPE: Final = "application/msgpack"

CHECKED = metrics.counter("rota_output_policy_checked", "Outputs that the policy looked at.", labels=("topic", "phase"))
QUARANTINED = metrics.counter(
    "rota_output_policy_quarantined", "Outputs that the policy keeps back.", labels=("topic", "phase")
)
SKIPPED = metrics.counter(
    "rota_output_policy_skipped", "Outputs that passed because nobody could look at them.", labels=("topic", "phase")
)
EVALUATIONS = metrics.counter("rota_output_evaluations", "Evaluations of rules about outputs.", labels=("phase",))
DENIALS = metrics.counter("rota_output_denials", "Outputs that a rule denies.", labels=("topic",))
LATENCY = metrics.histogram(
    "rota_output_check_latency_seconds",
    "How long looking at outputs took: all of a report at once (sync), or one with its content (async).",
    labels=("topic", "phase"),
    buckets=(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0),
)


class SyncCheckResult(NamedTuple):
    """What the first look says of one output."""

    meta: OutputMeta
    word: OutputPolicyDecision
    check: OutputCheck
    output: OutputRestriction | None = None
    scan: OutputScanMode | None = None
    """What silence means for the look inside; None: nobody looks."""
    budget_s: float = 0.0


class OutputStateChange(NamedTuple):
    """An output that comes into a state of its own."""

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
    """Frames and endings as they are after the first look, and what it said of each output."""

    frames: dict[int, EndedAttempt]
    endings: dict[int, AttemptOutcome]
    seen: dict[int, SyncCheckResult]


class SyncOutputChecker:
    def __init__(self, policy: Callable[[], CompiledOutputPolicy | None], by: str, *, content_s: float = 30.0) -> None:
        self.policy = policy
        """That of now; None: outputs are not looked at."""
        self.by = by
        """As records of checks name this server."""
        self.content_s = content_s
        self.due = asyncio.Event()
        """Somebody here has written a scan."""

    async def check(self, tx: Transaction, worker: UUID | None, given: CheckedFrames) -> CheckedFrames:
        looked = CheckedFrames(dict(given.frames), dict(given.endings), {})
        policy = self.policy()
        wanted = {
            token: frame for token, frame in given.frames.items() if _needs_check(frame.end, given.endings[token])
        }
        if policy is None or not wanted:
            return given
        rows = await tx.rows(LAYER_META, list({frame.layer for frame in wanted.values()}))
        layers = {row["pk_layer"]: _layer_output_meta(row) for row in rows}
        began_s = time.perf_counter()
        until_s = deadline_after(ERROR_TEXT_BUDGET_S)
        for token, frame in wanted.items():
            alike = layers.get(frame.layer)
            if alike is not None:
                self._check_frame(policy, looked, token, _output_meta(alike, frame, worker), until_s)
        took_s = time.perf_counter() - began_s
        topics = Counter(seen.meta.topic for seen in looked.seen.values())
        EVALUATIONS.labels("sync").inc(len(looked.seen))
        for topic, outputs in topics.items():
            CHECKED.labels(topic, "sync").inc(outputs)
            LATENCY.labels(topic, "sync").observe(took_s)
        return looked

    def _check_frame(
        self, policy: CompiledOutputPolicy, looked: CheckedFrames, token: int, meta: OutputMeta, until_s: float
    ) -> None:
        frame, ending = looked.frames[token], looked.endings[token]
        if frame.end.error:
            failed = msgspec.structs.replace(meta, has_error=True)
            error = self._checked_error_text(policy, failed, frame.end.error, until_s)
            looked.frames[token] = _with_error_text(frame, error)
        if ending.state != "SUCCEEDED":
            return
        seen = self._check_output(policy, meta)
        looked.seen[token] = seen
        if seen.output is OutputRestriction.QUARANTINED:
            reason = Reason.OUTPUT_QUARANTINED.value
            looked.endings[token] = ending._replace(state="OUTPUT_QUARANTINED", reason=reason)
            looked.frames[token] = _with_error_text(frame, seen.word.reason)

    def _check_output(self, policy: CompiledOutputPolicy, meta: OutputMeta) -> SyncCheckResult:
        mode = OutputScanMode.PASS
        try:
            mode = policy.mode(meta.topic)
            said = policy.check_metadata(meta)
        except Exception:
            log.exception("output_check_failed", topic=meta.topic, mode=mode)
            return self._result_on_failure(meta, mode)
        check = self.check_record("sync", said.word)
        if said.word.says.quarantines:
            return SyncCheckResult(meta, said.word, check, OutputRestriction.QUARANTINED)
        if not said.scan:
            return SyncCheckResult(meta, said.word, check)
        if said.must:
            return SyncCheckResult(
                meta, said.word, check, OutputRestriction.HELD, OutputScanMode.FAIL_CLOSED, REDACT_BUDGET_S
            )
        return SyncCheckResult(
            meta, said.word, check, OutputRestriction.HELD if mode.holds else None, mode, self.content_s
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

    def _checked_error_text(self, policy: CompiledOutputPolicy, meta: OutputMeta, text: str, until_s: float) -> str:
        try:
            # As it will be written: a NUL within a secret is no disguise.
            return policy.check_error(meta, text.replace("\0", ""), until_s)[1]
        except TimeoutError:
            log.warning("error_text_not_checked", topic=meta.topic, because="out of time")
            return REDACTION_MARKER
        except Exception as wrong:  # noqa: BLE001 - its text may hold what must not be read
            log.warning("error_text_not_checked", topic=meta.topic, because=type(wrong).__name__)
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

    async def add_scans(self, tx: Transaction, frames: Mapping[int, EndedAttempt], looked: CheckedFrames) -> bool:
        """Before the jobs end: what waits for them waits until their outputs may be read."""
        rows = [(frame, seen) for token, frame in frames.items() if (seen := looked.seen.get(token)) and seen.scan]
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
        self, tx: Transaction, frames: Mapping[int, EndedAttempt], looked: CheckedFrames
    ) -> list[OutputStateChange]:
        """Those of the frames whose outputs are quarantined at once, as rows for whoever decides about them."""
        kept = [
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
            if (seen := looked.seen.get(token)) is not None and seen.output is OutputRestriction.QUARANTINED
        ]
        if kept:
            await write_state_changes(tx, kept)
        return kept


async def write_state_changes(
    tx: Transaction, kept: Sequence[OutputStateChange], ended: Sequence[object] | None = None
) -> None:
    await tx.run(
        UPSERT_OUTPUTS,
        [one.token for one in kept],
        [one.layer for one in kept],
        [one.frame for one in kept],
        [one.job for one in kept],
        [one.show for one in kept],
        [str(one.state) for one in kept],
        [one.word.severity for one in kept],
        [one.word.rule for one in kept],
        [one.word.reason for one in kept],
        [msgspec.msgpack.encode(one.meta) for one in kept],
        [one.original for one in kept],
        list(ended) if ended is not None else [None] * len(kept),
    )


def output_dead_letters(kept: Sequence[OutputStateChange], reason: Reason) -> list[DeadLetter]:
    return [
        DeadLetter(
            kind="output",
            reason=reason.value,
            cause=dead_letter_cause(one.token),
            job=one.job,
            error=f"Frame {one.meta.number} of layer {one.meta.layer}: {one.word.reason}",
        )
        for one in kept
    ]


def dead_letter_cause(token: int) -> str:
    """What the dead letter of an output goes by."""
    return f"output:{token}"


async def audit_state_changes(tx: Transaction, kept: Sequence[OutputStateChange], phase: OutputCheckPhase) -> None:
    """At the very end: from here to the commit nobody else writes to the trail."""
    if kept:
        await audit.append(tx, [_audit_entry(one, phase) for one in kept])


def _audit_entry(kept: OutputStateChange, phase: OutputCheckPhase) -> AuditEntry:
    word = kept.word
    detail = {
        "show": str(kept.show),
        "output": kept.token,
        "frame": kept.meta.number,
        "layer": kept.meta.layer,
        "phase": phase,
        "rule": word.rule,
        "snapshot": word.snapshot,
        "severity": word.severity,
        "findings": sorted({finding.name for finding in word.findings}),
    }
    act = "redact" if kept.state == OutputRestriction.REDACTED else "quarantine"
    return AuditEntry(POLICY_ACTOR, f"output.{act}", f"job:{kept.job}", detail)


def count_quarantined(kept: Sequence[OutputStateChange], phase: OutputCheckPhase) -> None:
    for one in kept:
        QUARANTINED.labels(one.meta.topic, phase).inc()
        if one.word.says is OutputEffect.DENY:
            DENIALS.labels(one.meta.topic).inc()


def frame_end_columns(looked: CheckedFrames, tokens: Sequence[int]) -> tuple[list[str | None], list[str | None]]:
    """How the ends of these frames say what may be read of them, and what was said of it."""
    seen = [looked.seen.get(token) for token in tokens]
    return (
        [one.output if one is not None else None for one in seen],
        [msgspec.json.encode([one.check]).decode() if one is not None else None for one in seen],
    )


def _needs_check(end: AttemptResult, ending: AttemptOutcome) -> bool:
    if ending.state == "SUCCEEDED" and (end.value is not None or end.pointer is not None or end.artifacts):
        return True
    return bool(end.error) and ending.state != "RETURNED"


class _LayerOutputMeta(NamedTuple):
    """What outputs of one layer have in common, and how its frames are numbered."""

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


def _output_meta(alike: _LayerOutputMeta, frame: EndedAttempt, worker: UUID | None) -> OutputMeta:
    end = frame.end
    files = tuple((each.name, len(each.data) or _pointer_size(each.pointer)) for each in end.artifacts)
    value = len(end.value or b"") + _pointer_size(end.pointer)
    types = [VALUE_TYPE] if value else []
    types += [mimetypes.guess_type(name)[0] or "application/octet-stream" for name, _ in files]
    return msgspec.structs.replace(
        alike.meta,
        number=alike.first + (frame.frame - alike.first) * alike.step,
        attempt=frame.attempt,
        worker=str(worker or ""),
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

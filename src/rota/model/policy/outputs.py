"""Output policy: what is checked about results and artifacts, decisions, and who may read an output. No I/O.

The synchronous check sees `OutputMeta` only, not the content. A `ScanFinding` records location and type of a match,
never its text, because more people read the records of checks than the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final, Literal
from uuid import UUID

import msgspec

from rota.model.errors import OutputHeld, OutputQuarantined, Refused
from rota.model.ids import JobId

SCANNED_BYTES_MAX: Final = 2 * 1024 * 1024
"""Longest part of an output that a remote kernel gets in one call; it scans longer ones in windows."""
REDACTION_MARKER: Final = "[REDACTED]"

Severity = Literal["low", "medium", "high", "critical"]
OutputCheckPhase = Literal["sync", "async", "person"]


class OutputEffect(StrEnum):
    """Effect of a decision on an output; an unknown value means QUARANTINE."""

    ALLOW = "ALLOW"
    QUARANTINE = "QUARANTINE"
    DENY = "DENY"
    """Same as QUARANTINE."""
    REDACT = "REDACT"

    @property
    def quarantines(self) -> bool:
        return self in (OutputEffect.QUARANTINE, OutputEffect.DENY)


class OutputScanMode(StrEnum):
    """What happens to an output whose content could not be scanned in time."""

    PASS = "pass"  # noqa: S105 - no password
    """Readable before, during and after."""
    HOLD = "hold"
    """Not readable until scanned, however long that takes."""
    FAIL_CLOSED = "fail_closed"
    """Not readable until scanned; quarantined if that takes too long."""

    @property
    def holds(self) -> bool:
        return self is not OutputScanMode.PASS


class OutputRestriction(StrEnum):
    """Restriction of an output, as stored in the completion record of its frame."""

    HELD = "held"
    QUARANTINED = "quarantined"
    REDACTED = "redacted"


class OutputMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything the synchronous check may depend on."""

    show: str
    topic: str
    tenant: str = ""
    capability: str = ""
    risk_tags: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    pack_id: str = ""
    principal: str = ""
    """The submitter; neither they nor the actor may release the output."""
    actor_id: str = ""
    layer: str = ""
    number: int = 0
    """Frame number as submitted."""
    attempt: int = 1
    worker: str = ""
    took_ms: int = 0
    bytes: int = 0
    """Value and all files together."""
    content_types: tuple[str, ...] = ()
    artifacts: tuple[tuple[str, int], ...] = ()
    """Name and size of each file."""
    has_error: bool = False


class ScanFinding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A match of a scanner, without the matched text."""

    type: str
    scanner: str
    name: str
    """Which of the scanner's patterns."""
    where: str = ""
    """Such as `value.user.email`, `artifact:out.txt` or `error`."""
    offset: int = 0
    """In characters of a text, in bytes of a file."""
    length: int = 0
    severity: Severity = "medium"


class OutputPolicyDecision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The decision about one output, and its origin."""

    says: OutputEffect
    rule: str = ""
    """Empty: no rule matched."""
    reason: str = ""
    severity: Severity = "medium"
    snapshot: str = ""
    findings: tuple[ScanFinding, ...] = ()


class OutputCheck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Record of one check of an output, stored with the completion of its frame."""

    phase: OutputCheckPhase
    at_ms: int
    by: str
    """The server or the user."""
    says: str
    """An OutputEffect, SKIPPED or RELEASED."""
    rule: str = ""
    reason: str = ""
    severity: Severity = "medium"
    snapshot: str = ""
    findings: tuple[ScanFinding, ...] = ()


class OutputSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A restricted or redacted output in a list."""

    id: int
    job: JobId
    show: str
    topic: str
    layer: str
    frame: int
    attempt: int
    state: str
    """held, quarantined, redacted or released."""
    severity: Severity | None = None
    rule: str = ""
    reason: str = ""
    bytes: int = 0
    at: datetime


class OutputView(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one output; its content is a separate request."""

    line: OutputSummary
    checks: list[OutputCheck]
    artifacts: list[str] = []
    """File names."""


class OutputReviewRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user's decision about an output."""

    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=500, pattern=r"^[^\x00]*$")]
    whole: bool = False
    """For a redaction: remove the whole content."""


class OutputReviewResult(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    job: JobId
    state: str
    changed: bool
    """False: it already had this state."""


def check_readable(restriction: OutputRestriction | str | None, job: UUID, frame: int) -> None:
    """Raises OutputHeld or OutputQuarantined unless users who may see the job may read this output. The only check."""
    refusal = read_refusal(restriction, job, frame)
    if refusal is not None:
        raise refusal


def read_refusal(restriction: OutputRestriction | str | None, job: UUID, frame: int) -> Refused | None:
    """Why the output of a frame cannot be read; None if it can."""
    facts = {"job": str(job), "frame": frame}
    match restriction:
        case None | OutputRestriction.REDACTED:
            return None
        case OutputRestriction.HELD:
            return OutputHeld(
                f"The output of frame {frame} of job {job} is held until it has been scanned: try again in a moment, or"
                " see `rota outputs list`.",
                **facts,
            )
        case _:
            return OutputQuarantined(
                f"The output of frame {frame} of job {job} is quarantined by the output policy: an operator may release"
                " or redact it, see `rota outputs list`.",
                **facts,
            )


def merge_spans(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted (begin, end) pairs, with touching or overlapping ones merged."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged

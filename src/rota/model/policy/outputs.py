"""What frames return and leave behind, as a policy looks at it, and what it says. No I/O.

The first look sees `OutputMeta` alone: what an output is, not what is in it. What is found inside is told by where it
is and what kind of thing it is (`Finding`), never by its text: records of checks are read by more people than outputs.
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
"""What lies behind that in a value or a file is not looked at."""
REDACTION_MARKER: Final = "[REDACTED]"

Severity = Literal["low", "medium", "high", "critical"]
OutputCheckPhase = Literal["sync", "async", "person"]


class OutputEffect(StrEnum):
    """What a policy says of an output; anything else that is heard means QUARANTINE."""

    ALLOW = "ALLOW"
    QUARANTINE = "QUARANTINE"
    DENY = "DENY"
    """The same as QUARANTINE."""
    REDACT = "REDACT"

    @property
    def quarantines(self) -> bool:
        return self in (OutputEffect.QUARANTINE, OutputEffect.DENY)


class OutputScanMode(StrEnum):
    """What becomes of an output whose content nobody could look at in time."""

    PASS = "pass"  # noqa: S105 - no password
    """It is readable all the time, and stays so."""
    HOLD = "hold"
    """Nobody reads it before it was looked at, however long that takes."""
    FAIL_CLOSED = "fail_closed"
    """Nobody reads it before it was looked at, and it is quarantined when that takes too long."""

    @property
    def holds(self) -> bool:
        return self is not OutputScanMode.PASS


class OutputRestriction(StrEnum):
    """How the end of a frame says that its output is not, or not as it was, for everybody."""

    HELD = "held"
    QUARANTINED = "quarantined"
    REDACTED = "redacted"


class OutputMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that the first look may see of an output."""

    show: str
    topic: str
    tenant: str = ""
    capability: str = ""
    risk_tags: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    pack_id: str = ""
    principal: str = ""
    """Who submitted it; they may not release it, nor may its actor."""
    actor_id: str = ""
    layer: str = ""
    number: int = 0
    """Of the frame, as it was submitted."""
    attempt: int = 1
    worker: str = ""
    took_ms: int = 0
    bytes: int = 0
    """Of the value and all files together."""
    content_types: tuple[str, ...] = ()
    artifacts: tuple[tuple[str, int], ...] = ()
    """Name and size of each file."""
    has_error: bool = False


class ScanFinding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something a scanner knows, without the thing itself."""

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
    """What the policy says of one output, and by what."""

    says: OutputEffect
    rule: str = ""
    """Empty: no rule matched."""
    reason: str = ""
    severity: Severity = "medium"
    snapshot: str = ""
    findings: tuple[ScanFinding, ...] = ()


class OutputCheck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of one look at an output, as the end of its frame keeps it."""

    phase: OutputCheckPhase
    at_ms: int
    by: str
    """The server, or the person."""
    says: str
    """As OutputSays, or SKIPPED, RELEASED."""
    rule: str = ""
    reason: str = ""
    severity: Severity = "medium"
    snapshot: str = ""
    findings: tuple[ScanFinding, ...] = ()


class OutputSummary(msgspec.Struct, frozen=True, kw_only=True):
    """An output that is kept back or was redacted, in a list."""

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
    """All that is recorded of one; what it holds is asked for by itself."""

    line: OutputSummary
    checks: list[OutputCheck]
    artifacts: list[str] = []
    """Names of its files."""


class OutputReviewRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What somebody decides about an output."""

    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=500, pattern=r"^[^\x00]*$")]
    whole: bool = False
    """Of a redaction: nothing of it is left."""


class OutputReviewResult(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    job: JobId
    state: str
    changed: bool
    """False: it was so before."""


def check_readable(kept: OutputRestriction | str | None, job: UUID, frame: int) -> None:
    """Raises unless everybody who may see the job may read this output: the one place that decides it."""
    refused = read_refusal(kept, job, frame)
    if refused is not None:
        raise refused


def read_refusal(kept: OutputRestriction | str | None, job: UUID, frame: int) -> Refused | None:
    """Why the output of a frame cannot be read; None when it can."""
    facts = {"job": str(job), "frame": frame}
    match kept:
        case None | OutputRestriction.REDACTED:
            return None
        case OutputRestriction.HELD:
            return OutputHeld(
                f"The output of frame {frame} of job {job} is held until it was scanned: ask again in a moment, or see"
                " `rota outputs list`.",
                **facts,
            )
        case _:
            return OutputQuarantined(
                f"The output of frame {frame} of job {job} is quarantined by the output policy: an operator may release"
                " or redact it, see `rota outputs list`.",
                **facts,
            )


def merge_spans(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Begin and end of each, in order, those that touch or overlap as one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found

"""What the frames of a job returned, wrote and stored. No I/O."""

from __future__ import annotations

from typing import Any

import msgspec

from rota.api.jobs import JobView
from rota.api.logs import Stream
from rota.model.job_states import FrameState


class FrameResult(msgspec.Struct, frozen=True, kw_only=True):
    layer: str
    number: int
    """Number of its layer in the job."""
    place: int
    """Index of the frame in its layer, from 0."""
    frame: int
    """Frame number, as submitted."""
    attempt: int
    state: FrameState
    value: Any = None
    raw: bytes | None = None
    """The return value as msgpack, where it cannot be encoded as JSON."""
    code: str | None = None
    error: str | None = None
    problem: str | None = None
    """Why the value is missing."""
    output: str | None = None
    """held, quarantined: the policy withholds it; redacted: it was changed."""
    took_ms: int = 0


class FrameResultPage(msgspec.Struct, frozen=True):
    items: list[FrameResult]
    next: str | None = None


class JobOutcome(msgspec.Struct, frozen=True):
    """A job, and the first page of its results once it has ended."""

    job: JobView
    results: FrameResultPage | None = None


class ArtifactView(msgspec.Struct, frozen=True, kw_only=True):
    """Download it with `at`: `/jobs/{job}/artifacts/file?at=...`."""

    layer: str
    frame: int
    attempt: int
    name: str
    bytes: int
    sha256: str
    at: str


class LogChunkView(msgspec.Struct, frozen=True, kw_only=True):
    """The output of one stream of a frame from byte `at`."""

    attempt: int
    stream: Stream
    at: int
    text: str
    dropped: int = 0
    """Bytes right before `at` that were dropped because the log was too large."""
    lost: int = 0
    """Bytes right before `at` that are missing for another reason."""
    last: bool = False
    """The stream ends here."""

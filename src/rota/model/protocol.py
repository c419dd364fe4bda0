"""What servers and workers say to each other on the bus, as msgpack. No I/O.

Frames travel as runs of consecutive tokens, since thousands of them come and go together; only what has something to
say of its own (a value, an error) is told one by one. A message that cannot be read is refused with a sentence.

| subject | what | who hears it | kept |
|---|---|---|---|
| `worker.<id>.jobs` | `Assignment` | that worker | stream ROTA_JOBS |
| `sys.job.result` | `Report` | one server | stream ROTA_SYS |
| `sys.job.submit` | a submission | one server | stream ROTA_SYS |
| `sys.job.cancel` | `Cancel` | every worker | no: told again while a worker lists a frame that has ended |
| `sys.job.progress` | `Progress` | every server | no |
| `sys.job.log` | `LogChunk` | one server | no |
| `sys.handshake` | `Hello`, answered by `Welcome` | one server | no: asked again |
| `sys.heartbeat` | `Heartbeat` | every server | no |
| `sys.worker.told` | `Told` | every worker and server | no |
| `sys.worker.freed` | `Freed` | every server | no: looked at again after a moment |
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final, Literal, TypeVar
from uuid import UUID

import msgspec

from rota.model.errors import InvalidInput
from rota.model.jobs.work import Work

JOBS_SUBJECT: Final = "worker.{}.jobs"
RESULT_SUBJECT: Final = "sys.job.result"
SUBMIT_SUBJECT: Final = "sys.job.submit"
CANCEL_SUBJECT: Final = "sys.job.cancel"
PROGRESS_SUBJECT: Final = "sys.job.progress"
LOG_SUBJECT: Final = "sys.job.log"
HANDSHAKE_SUBJECT: Final = "sys.handshake"
HEARTBEAT_SUBJECT: Final = "sys.heartbeat"
LIVENESS_SUBJECT: Final = "sys.worker.told"
RELEASED_SUBJECT: Final = "sys.worker.freed"
FATAL_CODE: Final = "fatal"
FATAL_CODES: Final = frozenset({FATAL_CODE, "bad_input"})
"""Codes of attempts that said themselves that trying again is useless: FAILED_FATAL, as it is kept."""

TokenRange = tuple[int, int]
"""First token, and how many follow it, itself included."""


class AttemptStatus(StrEnum):
    """How a worker says that an attempt ended."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    """By an error; whether it is tried again is up to the layer's retries. As FAILED_RETRYABLE."""
    FAILED_RETRYABLE = "FAILED_RETRYABLE"
    FAILED_FATAL = "FAILED_FATAL"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    REFUSED = "REFUSED"
    """Never began: no room, no such task, or the worker is ending."""


class AssignedRange(msgspec.Struct, frozen=True, array_like=True):
    """Frames of one layer that follow each other: token `token + i` is frame number `frame + i * step`, for i < n."""

    token: int
    n: int
    job: UUID
    layer: UUID
    frame: int
    attempt: int
    work: int
    """Its place in `Assignment.works`."""
    input: bytes | None = None
    """What the task is called with, msgpack; the same for all of these frames."""
    pointer: str | None = None
    """Where the input is, when it is too large to travel."""
    step: int = 1
    """Between the numbers of two frames that follow each other."""
    trace: str = ""
    """The traceparent of its hand-over, when somebody traces its job."""


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """Frames that were booked on this worker. One that is known already changes nothing."""

    works: list[Work]
    portions: list[AssignedRange]


class Artifact(msgspec.Struct, frozen=True, array_like=True):
    """A file that a frame left: where it is, or the file itself when it is small."""

    name: str
    pointer: str = ""
    data: bytes = b""


class AttemptResult(msgspec.Struct, frozen=True, array_like=True):
    """An attempt that has something to say."""

    token: int
    status: AttemptStatus
    value: bytes | None = None
    """What the task returned, msgpack; None also means that it returned nothing."""
    pointer: str | None = None
    """Where the value is, when it is too large to travel."""
    code: str = ""
    """A stable word for what went wrong, such as `exit_status`."""
    error: str = ""
    took_ms: int = 0
    artifacts: tuple[Artifact, ...] = ()
    after_s: float = 0.0
    """How long the task itself asks to wait before it is tried again; 0: as its layer says."""


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What ended on a worker since its last report. `done` succeeded and returned nothing."""

    worker: UUID
    done: list[TokenRange] = []
    ends: list[AttemptResult] = []
    took_ms: int = 0
    """Of all of `done` together."""


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """Not kept: what began, and how far what runs has come."""

    worker: UUID
    started: list[TokenRange] = []
    percent: dict[int, tuple[float, str]] = {}
    """By token: how far, and a word about it."""


class LogChunk(msgspec.Struct, frozen=True, array_like=True):
    """Not kept by the bus: what a frame wrote, in order per stream; a gap in `at` is what got lost on the way."""

    worker: UUID
    token: int
    stream: Literal["stdout", "stderr", "log"]
    at: int
    """Place of the first byte among all that the stream ever wrote."""
    data: bytes
    dropped: int = 0
    """Bytes right before this chunk that were too many to be kept."""
    last: bool = False


class Register(msgspec.Struct, frozen=True):
    """A worker that has started asks to be known."""

    name: str
    pool: str
    slots: int
    """Frames at a time, whatever they ask for."""
    cores: int
    """Hundredths of a core that frames may use together."""
    gpus: int = 0
    memory_mb: int = 0
    labels: dict[str, str] = {}
    capabilities: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    version: str = ""


class Registered(msgspec.Struct, frozen=True):
    """Who the worker is from now on, or why not."""

    worker: UUID | None = None
    heartbeat_s: float = 2.0
    lease_s: float = 60.0
    """A worker that has heard of no server for this long stops what it runs."""
    refusal: str = ""


class Heartbeat(msgspec.Struct, frozen=True):
    """A worker lives, and has these frames."""

    worker: UUID
    name: str
    pool: str
    number: int
    """Counts up; an older one that comes late is passed over."""
    slots: int
    cores: int
    gpus: int = 0
    memory_mb: int = 0
    cpu_load: float = 0.0
    gpu_utilization: float = 0.0
    memory_load: float = 0.0
    labels: dict[str, str] = {}
    capabilities: tuple[str, ...] = ()
    draining: bool = False
    held: list[TokenRange] = []
    """Tokens that it has: waiting, running, or ended and not yet stored by the bus."""
    reported: int = 0
    """Place of its last report in the stream; what is not held and was reported there is not lost."""


class CancelFrames(msgspec.Struct, frozen=True, array_like=True):
    """Stop these, whoever has them."""

    tokens: list[TokenRange]
    reason: str = "cancelled"


class FramesReleased(msgspec.Struct, frozen=True, array_like=True):
    """Frames of a show have ended on a worker, and given back what they held."""

    worker: UUID
    tokens: list[TokenRange]
    show: UUID
    frames: int


class WorkerLiveness(msgspec.Struct, frozen=True):
    """A server leads, and hears these workers; one that is `lost` has nothing any more and must start anew."""

    heard: list[UUID] = []
    lost: list[UUID] = []


T = TypeVar("T")
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def encode(message: msgspec.Struct) -> bytes:
    return _ENCODER.encode(message)


def decode(kind: type[T], data: bytes) -> T:
    """The message, or InvalidInput: who sent it must mend it."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
    try:
        message: T = decoder.decode(data)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"A message of {len(data)} bytes is no {kind.__name__}: {error}.") from error
    return message


def to_ranges(tokens: Sequence[int]) -> list[TokenRange]:
    """Consecutive tokens as runs, in order."""
    runs: list[TokenRange] = []
    for token in sorted(set(tokens)):
        if runs and runs[-1][0] + runs[-1][1] == token:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((token, 1))
    return runs

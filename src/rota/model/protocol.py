"""Messages between servers and workers on the bus, encoded as msgpack. No I/O.

Frames are sent as ranges of consecutive tokens, because thousands are assigned and completed together; only a frame
with a value or an error has its own entry. Undecodable messages are refused with InvalidInput.

| subject | message | received by | durable |
|---|---|---|---|
| `worker.<id>.jobs` | `Assignment` | that worker | stream ROTA_JOBS |
| `sys.job.result` | `Report` | one server | stream ROTA_SYS |
| `sys.job.submit` | a submission | one server | stream ROTA_SYS |
| `worker.<id>.recall` | `RecallFrames` | that worker | no: it hands back by itself a little later |
| `sys.job.cancel` | `CancelFrames` | every worker | no: resent while a worker lists a frame that has ended |
| `sys.job.progress` | `Progress` | every server | no |
| `sys.job.log` | `LogChunk` | one server | no |
| `sys.handshake` | `Register`, answered by `Registered` | one server | no: the worker retries |
| `sys.heartbeat` | `Heartbeat`, in parts if it is large | every server | no |
| `sys.worker.told` | `WorkerLiveness` | every worker and server | no |
| `sys.worker.freed` | `FramesReleased` | every server | no: servers poll as well |
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final, Literal, TypeVar
from uuid import UUID

import msgspec

from rota.model.attempt_codes import AttemptCode
from rota.model.errors import InvalidInput
from rota.model.heartbeats import HEARTBEAT_INTERVAL_S
from rota.model.jobs.work import Work
from rota.model.token_ranges import TokenRange

JOBS_SUBJECT: Final = "worker.{}.jobs"
RECALL_SUBJECT: Final = "worker.{}.recall"
RESULT_SUBJECT: Final = "sys.job.result"
SUBMIT_SUBJECT: Final = "sys.job.submit"
CANCEL_SUBJECT: Final = "sys.job.cancel"
PROGRESS_SUBJECT: Final = "sys.job.progress"
LOG_SUBJECT: Final = "sys.job.log"
HANDSHAKE_SUBJECT: Final = "sys.handshake"
HEARTBEAT_SUBJECT: Final = "sys.heartbeat"
LIVENESS_SUBJECT: Final = "sys.worker.told"
RELEASED_SUBJECT: Final = "sys.worker.freed"
FATAL_CODES: Final = frozenset({AttemptCode.FATAL, AttemptCode.BAD_INPUT})
"""Codes of attempts that declared a retry useless; stored as FAILED_FATAL."""


class AttemptStatus(StrEnum):
    """How an attempt ended, as reported by the worker."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    """Ended by an error; the layer's retries decide about another attempt. Same as FAILED_RETRYABLE."""
    FAILED_RETRYABLE = "FAILED_RETRYABLE"
    FAILED_FATAL = "FAILED_FATAL"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    REFUSED = "REFUSED"
    """Never started: no capacity, unknown task, or the worker is shutting down."""


class AssignedRange(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive frames of one layer: token `token + i` is frame number `frame + i * step`, for i < n."""

    token: int
    n: int
    job: UUID
    layer: UUID
    frame: int
    attempt: int
    work: int
    """Index into `Assignment.works`."""
    input: bytes | None = None
    """Input of the task, msgpack; the same for all frames of the range."""
    pointer: str | None = None
    """Pointer to the input if it is too large to be inlined."""
    step: int = 1
    """Difference between the numbers of consecutive frames."""
    trace: str = ""
    """The traceparent of the assignment if the job is traced."""
    series: int = 0
    """Frames of all ranges with the same number, other than 0, run one after the other, in the order of the ranges, on
    the capacity of one frame. It is the token of the last of them."""


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """Frames booked on this worker. Idempotent: frames the worker already has are ignored."""

    works: list[Work]
    portions: list[AssignedRange]
    timing_keys: list[int] = []
    """One for each of `works`: the worker reports under it how long frames take."""


class Artifact(msgspec.Struct, frozen=True, array_like=True):
    """A file produced by a frame: a pointer to it, or its content if it is small."""

    name: str
    pointer: str = ""
    data: bytes = b""


class AttemptResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of an attempt that has more to report than plain success."""

    token: int
    status: AttemptStatus
    value: bytes | None = None
    """The task's return value, msgpack; None if it returned nothing."""
    pointer: str | None = None
    """Pointer to the value if it is too large to be inlined."""
    code: str = ""
    """An `AttemptCode`, or a `Reason` where the control plane ended the attempt."""
    error: str = ""
    took_ms: int = 0
    artifacts: tuple[Artifact, ...] = ()
    after_s: float = 0.0
    """Retry delay requested by the task itself; 0: as configured by its layer."""


class Report(msgspec.Struct, frozen=True, array_like=True):
    """Attempts that ended on a worker since its last report. `done` succeeded and returned nothing."""

    worker: UUID
    done: list[TokenRange] = []
    ends: list[AttemptResult] = []
    took_ms: int = 0
    """Sum over all of `done`."""
    timings: list[tuple[int, int, int, int]] = []
    """Timing key, frames that ended, how long they ran and how long they kept their slots in total, in microseconds."""


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """Not durable: frames that started, and the progress of running ones."""

    worker: UUID
    started: list[TokenRange] = []
    percent: dict[int, tuple[float, str]] = {}
    """By token: percentage and message."""


class LogChunk(msgspec.Struct, frozen=True, array_like=True):
    """Not durable on the bus: output of a frame, in order per stream; a gap in `at` means that chunks were lost."""

    worker: UUID
    token: int
    stream: Literal["stdout", "stderr", "log"]
    at: int
    """Offset of the first byte within the stream."""
    data: bytes
    dropped: int = 0
    """Bytes directly before this chunk that exceeded the limit and were discarded."""
    last: bool = False


class Register(msgspec.Struct, frozen=True):
    """A starting worker registers."""

    name: str
    pool: str
    slots: int
    """Concurrent frames, whatever their resources."""
    cores: int
    """Hundredths of a core that frames may use in total."""
    gpus: int = 0
    memory_mb: int = 0
    labels: dict[str, str] = {}
    capabilities: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    version: str = ""


class Registered(msgspec.Struct, frozen=True):
    """The worker's session id, or the reason for refusing it."""

    worker: UUID | None = None
    heartbeat_s: float = HEARTBEAT_INTERVAL_S
    lease_s: float = 60.0
    """A worker without contact to any server for this long stops its frames."""
    refusal: str = ""


class Heartbeat(msgspec.Struct, frozen=True):
    """A worker is alive and has these frames."""

    worker: UUID
    name: str
    pool: str
    number: int
    """Increasing; an older heartbeat that arrives late is ignored."""
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
    interval_s: float = HEARTBEAT_INTERVAL_S
    """Until the next heartbeat: the interval of its registration, whatever the setting is by now."""
    held: list[TokenRange] = []
    """Tokens of its frames: waiting, running, or ended and not yet stored by the bus."""
    reported: int = 0
    """Stream sequence of its last report; a token that is not held but was reported up to there is not lost."""
    part: int = 0
    series: bool = False
    """It runs frames in series; workers of older versions would run them all at once."""
    parts: int = 1
    """More than one: `held` is a share of the frames, and the other parts have the same number."""


class RecallFrames(msgspec.Struct, frozen=True, array_like=True):
    """Frames in series that the worker hands back, unless they have started: they can run elsewhere."""

    tokens: list[TokenRange]


class CancelFrames(msgspec.Struct, frozen=True, array_like=True):
    """Stop these frames on whichever worker has them."""

    tokens: list[TokenRange]
    reason: str = "cancelled"


class FramesReleased(msgspec.Struct, frozen=True, array_like=True):
    """Frames of a show ended and released their resources; and workers whose capacity they, or others, released."""

    worker: UUID
    tokens: list[TokenRange]
    show: UUID
    frames: int
    """0: they share the charge of other frames, which has not ended."""
    by_pool: Sequence[tuple[UUID, int, int]] = ()
    """Cores, in hundredths, and GPUs that they released in each pool."""
    server: str = ""
    """The sender, which receives its own message as well."""
    others: Sequence[tuple[UUID, list[TokenRange]]] = ()
    """Further workers, and tokens of each."""


class WorkerLiveness(msgspec.Struct, frozen=True):
    """Workers whose heartbeats the leading server receives; a `lost` one has no frames left and must register again."""

    heard: list[UUID] = []
    lost: list[UUID] = []
    overdue: list[UUID] = []
    """Their heartbeat has not come, which may be the loss of one message: they send another one at once."""


T = TypeVar("T")
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def encode(message: msgspec.Struct) -> bytes:
    return _ENCODER.encode(message)


def decode(kind: type[T], data: bytes) -> T:
    """Decode a message of type `kind`; raises InvalidInput if it is malformed."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
    try:
        message: T = decoder.decode(data)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"A message of {len(data)} bytes is not a valid {kind.__name__}: {error}.") from error
    return message

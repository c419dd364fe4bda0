"""Messages between a worker and its task processes. No I/O."""

from __future__ import annotations

from typing import Final, Generic, TypeVar
from uuid import UUID

import msgspec

from rota.model.protocol import AttemptStatus
from rota.worker.processes.ipc import ProcessReady

TASK_MESSAGE_BYTES_MAX: Final = 512 * 1024 * 1024


Id = TypeVar("Id", UUID, str)
"""UUIDs travel as text, and a task rarely asks for them: the process keeps the text."""


class TaskProcessRequest(msgspec.Struct, Generic[Id], frozen=True, array_like=True):
    """Runs one frame."""

    token: int
    task: str
    job: Id
    layer: Id
    frame: int
    attempt: int
    input: bytes | None
    env: dict[str, str]
    gpus: tuple[int, ...]
    trace: str = ""
    folder: str = ""
    """Path of the frame's directory, created on request."""
    in_series: bool = False
    """The request of the next frame may be sent before this one has ended."""


class TaskProcessProgress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    token: int
    percent: float
    word: str


class TaskProcessLogLine(msgspec.Struct, frozen=True, array_like=True, tag="log"):
    token: int
    line: str


class TaskProcessArtifact(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """Registers an artifact; without a name: announces the frame's directory."""

    token: int
    path: str = ""
    name: str = ""


class TaskProcessResult(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    token: int
    status: AttemptStatus
    value: bytes | None = None
    code: str = ""
    error: str = ""
    after_s: float = 0.0
    began_at: float = 0.0
    """When the process took the frame. By the monotonic clock, which all processes of a machine share."""
    ended_at: float = 0.0
    waits: bool = False
    """The process waits for `GO_ON` before it takes another frame, because this one left output or files."""


TaskProcessMessage = ProcessReady | TaskProcessProgress | TaskProcessLogLine | TaskProcessArtifact | TaskProcessResult
TASK_REQUEST_DECODER: Final = msgspec.msgpack.Decoder(TaskProcessRequest[str])
TASK_MESSAGE_DECODER: Final[msgspec.msgpack.Decoder[TaskProcessMessage]] = msgspec.msgpack.Decoder(TaskProcessMessage)

"""Messages between a worker and its task processes: msgpack with a length prefix. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from uuid import UUID

import msgspec

from rota.model.protocol import AttemptStatus

LENGTH_BYTES: Final = 4
MESSAGE_BYTES_MAX: Final = 512 * 1024 * 1024


class TaskProcessRequest(msgspec.Struct, frozen=True, array_like=True):
    """Runs one frame."""

    token: int
    task: str
    job: UUID
    layer: UUID
    frame: int
    attempt: int
    input: bytes | None
    env: dict[str, str]
    gpus: tuple[int, ...]
    trace: str = ""
    folder: str = ""
    """Path of the frame's directory, created on request."""


class TaskProcessReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The app was loaded, or `problem` says why not."""

    problem: str = ""


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


TaskProcessMessage = (
    TaskProcessReady | TaskProcessProgress | TaskProcessLogLine | TaskProcessArtifact | TaskProcessResult
)
TASK_REQUEST_DECODER = msgspec.msgpack.Decoder(TaskProcessRequest)
_TASK_MESSAGE_DECODER: msgspec.msgpack.Decoder[TaskProcessMessage] = msgspec.msgpack.Decoder(TaskProcessMessage)
_ENCODER = msgspec.msgpack.Encoder()


def pack_task_message(message: msgspec.Struct) -> bytes:
    data = _ENCODER.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


class TaskProcessMessageReader:
    """Incremental decoder. After `msgspec.DecodeError` the stream is unusable."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[TaskProcessMessage]:
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES:
            size = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
            if size > MESSAGE_BYTES_MAX:
                raise msgspec.DecodeError(f"a message of {size} bytes")
            if len(self._buffer) < LENGTH_BYTES + size:
                return
            message = _TASK_MESSAGE_DECODER.decode(memoryview(self._buffer)[LENGTH_BYTES : LENGTH_BYTES + size])
            del self._buffer[: LENGTH_BYTES + size]
            yield message

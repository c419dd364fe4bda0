"""What a worker and a process of its own say to each other: msgpack, each message after its length. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from uuid import UUID

import msgspec

from rota.model.messages import Status

LENGTH: Final = 4
MESSAGE_MAX: Final = 512 * 1024 * 1024


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Run this."""

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
    """Where its directory is to be, should it ask for one."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Its app is loaded, or could not be."""

    problem: str = ""


class Progressed(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    token: int
    percent: float
    word: str


class Logged(msgspec.Struct, frozen=True, array_like=True, tag="log"):
    token: int
    line: str


class Left(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """A file that it leaves; without a name: it asks for its directory."""

    token: int
    path: str = ""
    name: str = ""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    token: int
    status: Status
    value: bytes | None = None
    code: str = ""
    error: str = ""
    after_s: float = 0.0


Said = Ready | Progressed | Logged | Left | Ended
CALL = msgspec.msgpack.Decoder(Call)
_SAID: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)
_ENCODER = msgspec.msgpack.Encoder()


def packed(message: msgspec.Struct) -> bytes:
    data = _ENCODER.encode(message)
    return len(data).to_bytes(LENGTH, "big") + data


class Unpacker:
    """Bytes in, messages out. `msgspec.DecodeError` when they make no sense: then nothing after them does."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Said]:
        self._buffer += data
        while len(self._buffer) >= LENGTH:
            size = int.from_bytes(self._buffer[:LENGTH], "big")
            if size > MESSAGE_MAX:
                raise msgspec.DecodeError(f"a message of {size} bytes")
            if len(self._buffer) < LENGTH + size:
                return
            message = _SAID.decode(memoryview(self._buffer)[LENGTH : LENGTH + size])
            del self._buffer[: LENGTH + size]
            yield message

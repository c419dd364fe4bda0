"""Messages between a worker and its child processes: msgpack with a length prefix. No I/O."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec

LENGTH_BYTES: Final = 4
LENGTH_MAX: Final = 2 ** (8 * LENGTH_BYTES) - 1
GO_ON: Final = b"\0"
"""To a child that waits until its worker has read what it sent (`WorkerChannel.wait_for_worker`)."""

_ENCODER = msgspec.msgpack.Encoder()
M = TypeVar("M")


class ProcessReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Start handshake, the first message of a child: the app was loaded, or `problem` says why not."""

    problem: str = ""


def encode_message(message: msgspec.Struct) -> bytes:
    return _ENCODER.encode(message)


def add_length(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def pack_message(message: msgspec.Struct) -> bytes:
    return add_length(_ENCODER.encode(message))


class MessageReader(Generic[M]):
    """Incremental decoder. After `msgspec.DecodeError` the stream is unusable."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M], size_max: int) -> None:
        self._decoder = decoder
        self._size_max = size_max
        self._buffer = bytearray()
        self._start = 0
        """Of the next message in the buffer: those before it are removed together."""

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def pop(self) -> M | None:
        """Removes the next message; None: it is incomplete."""
        first = self._start + LENGTH_BYTES
        size = int.from_bytes(self._buffer[self._start : first], "big")
        end = first + size
        if len(self._buffer) < first or (len(self._buffer) < end and size <= self._size_max):
            del self._buffer[: self._start]
            self._start = 0
            return None
        if size > self._size_max:
            raise msgspec.DecodeError(f"a message of {size} bytes")
        message = self._decoder.decode(memoryview(self._buffer)[first:end])
        self._start = end
        return message

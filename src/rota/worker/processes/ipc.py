"""Messages between a worker and its child processes: msgpack with a length prefix. No I/O."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec

LENGTH_BYTES: Final = 4
LENGTH_MAX: Final = 2 ** (8 * LENGTH_BYTES) - 1

_ENCODER = msgspec.msgpack.Encoder()
M = TypeVar("M")


class ProcessReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Start handshake, the first message of a child: the app was loaded, or `problem` says why not."""

    problem: str = ""


def pack_message(message: msgspec.Struct) -> bytes:
    data = _ENCODER.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


class MessageReader(Generic[M]):
    """Incremental decoder. After `msgspec.DecodeError` the stream is unusable."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M], size_max: int) -> None:
        self._decoder = decoder
        self._size_max = size_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def pop(self) -> M | None:
        """Removes the next message; None: it is incomplete."""
        if len(self._buffer) < LENGTH_BYTES:
            return None
        size = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        if size > self._size_max:
            raise msgspec.DecodeError(f"a message of {size} bytes")
        end = LENGTH_BYTES + size
        if len(self._buffer) < end:
            return None
        message = self._decoder.decode(memoryview(self._buffer)[LENGTH_BYTES:end])
        del self._buffer[:end]
        return message

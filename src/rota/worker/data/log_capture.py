"""Bounded capture of one output stream of a frame: the head as it arrives, the tail when the frame ends. No I/O.

Half of the limit is for the head and half for the tail; bytes in between are counted and dropped, so an endless writer
uses a bounded amount of memory, disk and bandwidth.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Literal

Stream = Literal["stdout", "stderr", "log"]
Chunk = tuple[int, bytes, int, bool]
"""Offset in the stream, bytes, number of bytes dropped right before it, whether it is the last chunk."""

CHUNK_BYTES_MAX: Final = 64 * 1024


class LogCapture:
    def __init__(self, size_max: int) -> None:
        self.written = 0
        self._head_left = size_max - size_max // 2
        self._tail_max = size_max // 2
        self._head = bytearray()
        self._sent = 0
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._closed = False

    def write(self, data: bytes) -> None:
        self.written += len(data)
        if self._head_left:
            self._head += data[: self._head_left]
            n = min(len(data), self._head_left)
            self._head_left -= n
            data = data[n:]
        if data:
            self._append_tail(data)

    def close(self) -> None:
        """Ends the stream: the next `take_chunks` includes the tail."""
        self._closed = True

    def take_chunks(self) -> list[Chunk]:
        """Removes and returns the chunks to publish now, in order."""
        chunks = [(at, data, 0, False) for at, data in _split_chunks(self._sent, bytes(self._head))]
        self._sent += len(self._head)
        self._head.clear()
        if self._closed:
            chunks += self._final_chunks()
        return chunks

    def _final_chunks(self) -> list[Chunk]:
        end = b"".join(self._tail)
        end = end[max(0, len(end) - self._tail_max) :]
        at = self.written - len(end)
        dropped, self._tail_size = at - self._sent, 0
        self._tail.clear()
        chunks = _split_chunks(at, end) or [(at, b"")]
        return [
            (offset, data, dropped if number == 0 else 0, number == len(chunks) - 1)
            for number, (offset, data) in enumerate(chunks)
        ]

    def _append_tail(self, data: bytes) -> None:
        self._tail.append(data[-self._tail_max :] if self._tail_max else b"")
        self._tail_size += len(self._tail[-1])
        while self._tail and self._tail_size - len(self._tail[0]) >= self._tail_max:
            self._tail_size -= len(self._tail.popleft())


def _split_chunks(at: int, data: bytes) -> list[tuple[int, bytes]]:
    return [(at + start, data[start : start + CHUNK_BYTES_MAX]) for start in range(0, len(data), CHUNK_BYTES_MAX)]

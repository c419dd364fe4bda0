"""What one frame writes to one stream, cut to size: its beginning as it comes, its end when it is over. No I/O.

Half of the size is for the beginning and half for the end; what lay between is counted and dropped, so a frame that
writes without end costs a bounded amount of memory, disk and bus.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Literal

Stream = Literal["stdout", "stderr", "log"]
Chunk = tuple[int, bytes, int, bool]
"""Its place in the stream, its bytes, how many were dropped right before it, and whether it is the last one."""

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
            kept = min(len(data), self._head_left)
            self._head_left -= kept
            data = data[kept:]
        if data:
            self._append_tail(data)

    def close(self) -> None:
        """Nothing more comes: the end may be taken, too."""
        self._closed = True

    def take_chunks(self) -> list[Chunk]:
        """What is to be told now, in order."""
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
        pieces = _split_chunks(at, end) or [(at, b"")]
        return [
            (place, data, dropped if number == 0 else 0, number == len(pieces) - 1)
            for number, (place, data) in enumerate(pieces)
        ]

    def _append_tail(self, data: bytes) -> None:
        self._tail.append(data[-self._tail_max :] if self._tail_max else b"")
        self._tail_size += len(self._tail[-1])
        while self._tail and self._tail_size - len(self._tail[0]) >= self._tail_max:
            self._tail_size -= len(self._tail.popleft())


def _split_chunks(at: int, data: bytes) -> list[tuple[int, bytes]]:
    return [(at + start, data[start : start + CHUNK_BYTES_MAX]) for start in range(0, len(data), CHUNK_BYTES_MAX)]

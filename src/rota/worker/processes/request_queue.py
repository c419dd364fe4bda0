"""Requests that a child process has not taken yet: it takes one at a time, and its worker can take back all others.

The queue is a pipe in packet mode: one packet is one request, and a read takes exactly one. To take requests back, the
worker, which has a copy of the child's end, moves all of them to a pipe of its own by one `splice`, during which the
child cannot read. So the requests that come back are the last ones, in order, and were never seen by the child; all
others were taken. This needs nothing of the child, which may be busy, stopped or dead, and no thread in it, which would
be missing in the forks of user code.

Other systems than Linux have no such pipes: there, requests go by the stream, one at a time.
"""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress
from typing import Final

HAS_PACKETS: Final = sys.platform.startswith("linux")
REQUEST_BYTES_MAX: Final = 4096 if HAS_PACKETS else 0
"""Of a request in the queue. A larger one follows on the stream: `LARGE_REQUEST` is queued for it."""
LARGE_REQUEST: Final = b"\0"
RAN_DRY: Final = b"\0"
"""From the child: it has handled several requests, and there is no other one."""
PACKET_BYTES_MAX: Final = 4096
REQUESTS_MAX: Final = 128
"""Each packet takes a page. Without the permission for so many, a pipe has the pages that the system grants."""


class RequestQueue:
    """The worker's side."""

    def __init__(self) -> None:
        self.child_end, self._requests = _packet_pipe()
        """Descriptor from which the child reads."""
        os.set_blocking(self._requests, False)
        self.dry, self.child_dry = os.pipe()
        """Readable when the child `RAN_DRY`; what the child writes it to."""
        os.set_blocking(self.dry, False)

    def put(self, request: bytes) -> bool:
        """Whether there was room for it."""
        assert len(request) <= max(REQUEST_BYTES_MAX, len(LARGE_REQUEST)), "a larger request goes by the stream"
        try:
            os.write(self._requests, request)
        except OSError:
            return False
        return True

    def take_back(self) -> int:
        """Removes what the child has not taken: the last requests, and how many they were."""
        if not HAS_PACKETS:
            return 0
        source, target = _packet_pipe()
        os.set_blocking(source, False)
        n = 0
        try:
            with suppress(BlockingIOError):  # there was nothing, or nothing is left
                os.splice(self.child_end, target, REQUESTS_MAX * PACKET_BYTES_MAX, flags=os.SPLICE_F_NONBLOCK)
                while os.read(source, PACKET_BYTES_MAX):
                    n += 1
        finally:
            os.close(source)
            os.close(target)
        return n

    def clear_dry(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self.dry, PACKET_BYTES_MAX):
                pass

    def close(self) -> None:
        for descriptor in (self.child_end, self._requests, self.dry, self.child_dry):
            os.close(descriptor)


def _packet_pipe() -> tuple[int, int]:
    """The ends for reading and writing."""
    if not HAS_PACKETS:
        return os.pipe()
    reading, writing = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
    with suppress(OSError):
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, REQUESTS_MAX * PACKET_BYTES_MAX)
    return reading, writing

"""What ends a sync agent when its worker cannot: a process beside the one that has the body, which only listens.

The worker says how long the lease lasts, again and again; when that time is over and nothing more was said, because
the worker is stopped or gone, the body is killed with all it has started. It is a process, not a thread: a body may
keep the interpreter's lock for as long as it likes. Whoever kills it makes the worker kill the body.

The number of the body's process cannot come to mean another one: it is that of the group in which this one lives.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from contextlib import suppress
from typing import Final, NoReturn

KILL_GRACE_S: Final = 1.0
"""How long after the lease the body is killed, at the latest: less than whoever takes over waits."""
NO_DEADLINE: Final = 0.0
"""Said in place of a time when there is no body: silence does no harm then."""
_DEADLINE_FORMAT: Final = struct.Struct("!d")
READ_BYTES: Final = 4096


def encode_deadline(until: float) -> bytes:
    """What the worker says: go on until then, by the monotonic clock of this machine."""
    return _DEADLINE_FORMAT.pack(until)


def fork_watchdog(line: socket.socket, *ours: socket.socket) -> None:
    """Put this process on the leash whose other end of `line` the worker has; `ours` are not for the other one."""
    body = os.getpid()
    if os.fork() == 0:
        try:
            for each in ours:
                each.close()
            _detach_streams()
            watch_lease(line, body)
        finally:
            os._exit(1)
    line.close()


def watch_lease(line: socket.socket, body: int) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    until, buffer = NO_DEADLINE, bytearray()
    while True:
        patience_s = None if until == NO_DEADLINE else max(0.0, until + KILL_GRACE_S - time.monotonic())
        heard, _, _ = select.select([line], [], [], patience_s)
        data = _read(line) if heard else b""
        if not data:
            kill_agent_process(body)
        buffer += data
        while len(buffer) >= _DEADLINE_FORMAT.size:
            [until] = _DEADLINE_FORMAT.unpack_from(buffer)
            del buffer[: _DEADLINE_FORMAT.size]


def kill_agent_process(body: int) -> NoReturn:
    """The body, though it may have left the group, and then the group, which is also ours."""
    with suppress(ProcessLookupError):
        os.kill(body, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(body, signal.SIGKILL)
    os._exit(1)


def _read(line: socket.socket) -> bytes:
    try:
        return line.recv(READ_BYTES)
    except OSError:
        return b""


def _detach_streams() -> None:
    """Whoever reads what the body writes must see its end."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)

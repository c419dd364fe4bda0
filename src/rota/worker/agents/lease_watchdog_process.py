"""Watchdog process that kills a sync agent body when its worker stops renewing the lease.

The worker repeatedly sends the lease deadline. When the deadline passes without a new one, because the worker is paused
or dead, the watchdog kills the body and its descendants. It is a process, not a thread: a body may hold the GIL for any
time. If the watchdog is killed, the worker kills the body.

The body's pid cannot be reused while the watchdog runs: it is the id of the process group the watchdog belongs to.
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
"""The body is killed at most this long after the deadline: less than a successor waits before it starts the agent."""
NO_DEADLINE: Final = 0.0
"""Sent instead of a deadline while no body runs."""
_DEADLINE_FORMAT: Final = struct.Struct("!d")
READ_BYTES: Final = 4096


def encode_deadline(until: float) -> bytes:
    """`until`: monotonic seconds of this host."""
    return _DEADLINE_FORMAT.pack(until)


def fork_watchdog(lease_socket: socket.socket, *others: socket.socket) -> None:
    """Forks the watchdog of this process; it reads deadlines from `lease_socket` and closes its copies of `others`."""
    body = os.getpid()
    if os.fork() == 0:
        try:
            for each in others:
                each.close()
            _detach_streams()
            watch_lease(lease_socket, body)
        finally:
            os._exit(1)
    lease_socket.close()


def watch_lease(lease_socket: socket.socket, body: int) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    until, buffer = NO_DEADLINE, bytearray()
    while True:
        timeout_s = None if until == NO_DEADLINE else max(0.0, until + KILL_GRACE_S - time.monotonic())
        readable, _, _ = select.select([lease_socket], [], [], timeout_s)
        data = _read(lease_socket) if readable else b""
        if not data:
            kill_agent_process(body)
        buffer += data
        while len(buffer) >= _DEADLINE_FORMAT.size:
            [until] = _DEADLINE_FORMAT.unpack_from(buffer)
            del buffer[: _DEADLINE_FORMAT.size]


def kill_agent_process(body: int) -> NoReturn:
    """Kills the body first, in case it left the group, then the group, which includes this process."""
    with suppress(ProcessLookupError):
        os.kill(body, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(body, signal.SIGKILL)
    os._exit(1)


def _read(lease_socket: socket.socket) -> bytes:
    try:
        return lease_socket.recv(READ_BYTES)
    except OSError:
        return b""


def _detach_streams() -> None:
    """Otherwise readers of the body's output would never see end-of-file."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(devnull, stream)

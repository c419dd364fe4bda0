"""The identity of this process."""

from __future__ import annotations

import os
import secrets
import socket

_SUFFIXES: dict[int, str] = {}


def process_name() -> str:
    """Host and process id, for people."""
    return f"{socket.gethostname()}:{os.getpid()}"


def replica_name() -> str:
    """Unique among all processes, as shown in logs, leases and server lists.

    Host and process id are not enough: two containers may have one host name and are both process 1.
    """
    pid = os.getpid()  # after a fork the child has its own
    return f"{process_name()}:{_SUFFIXES.setdefault(pid, secrets.token_hex(2))}"

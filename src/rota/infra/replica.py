"""The identity of this process."""

from __future__ import annotations

import os
import socket


def replica_name() -> str:
    """Host and process id, as shown in logs, leases and server lists."""
    return f"{socket.gethostname()}:{os.getpid()}"

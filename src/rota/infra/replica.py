"""Who this process is."""

from __future__ import annotations

import os
import socket


def replica_name() -> str:
    """Host and process, as logs, leases and the servers' own lists show us."""
    return f"{socket.gethostname()}:{os.getpid()}"

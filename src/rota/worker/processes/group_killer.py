"""Kills the process groups that a killed worker left. Run as a file, without site packages; `group_guard` starts it.

    group_killer.py PARENT

Reads numbers from standard input, one in each line: a process group to kill, or, negative, one that has ended. Standard
input ends with the worker. The parent is checked too, because a process forked from the worker may keep the pipe open.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

POLL_INTERVAL_S = 1.0
READ_BYTES = 65_536


def main(parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    rest = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], POLL_INTERVAL_S)[0]:
            continue
        data = os.read(0, READ_BYTES)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for group in map(int, lines):
            (groups.add if group > 0 else groups.discard)(abs(group))
    for group in groups:
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))

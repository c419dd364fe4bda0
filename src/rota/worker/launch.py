"""Runs before a command in the command's own process, then becomes it. Started as a file, with no site packages.

    launch.py PARENT MEMORY PROGRAM ARGV...

What must happen between fork and exec happens here instead of in a `preexec_fn`, which is unsafe beside threads: no
core dumps, at most MEMORY bytes of data (0: no limit), and death with the worker. The parent is looked at last, because
it may have died before the signal was armed.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
CANNOT_RUN = 126


def die_with(parent: int) -> None:
    """Where the kernel can do that; elsewhere a command outlives a worker that was killed."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def main(parent: int, memory: int, program: str, argv: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    die_with(parent)
    try:
        os.execv(program, argv)  # noqa: S606 - an argv list, no shell
    except OSError as error:
        sys.stderr.write(f"{program} cannot be run: {error.strerror}\n")
        sys.exit(CANNOT_RUN)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])

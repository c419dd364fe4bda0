"""Runs before a command in the command's own process, then becomes it. Started as a file, with no site packages.

    command_launcher.py PARENT CPU,DATA,ADDRESS,FILES,FILE PROGRAM ARGV...

What must happen between fork and exec happens here instead of in a `preexec_fn`, which is unsafe beside threads: no
core dumps, limits (seconds, bytes, bytes, a number, bytes; 0: none), signals as programs expect to find them, and death
with the worker. The parent is looked at last, because it may have died before the signal was armed.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
CPU_GRACE_S = 1
"""Between the signal that says so and the end of one that goes on."""
SIGNALS_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
CANNOT_RUN_STATUS = 126


def die_with_parent(parent: int) -> None:
    """Where the kernel can do that; elsewhere a command outlives a worker that was killed."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def apply_limits(limits: list[int]) -> None:
    cpu, data, address, files, file = limits
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if cpu:
        _lower_limit(resource.RLIMIT_CPU, cpu, cpu + CPU_GRACE_S)
    kinds = (resource.RLIMIT_DATA, resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)
    for kind, most in zip(kinds, (data, address, files, file), strict=True):
        if most:
            _lower_limit(kind, most, most)


def _lower_limit(kind: int, soft: int, hard: int) -> None:
    """Never past a limit that holds already; only root might raise that."""
    before = resource.getrlimit(kind)[1]
    if before != resource.RLIM_INFINITY:
        soft, hard = min(soft, before), min(hard, before)
    resource.setrlimit(kind, (soft, hard))


def main(parent: int, limits: list[int], program: str, argv: list[str]) -> None:
    for number in SIGNALS_IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    apply_limits(limits)
    die_with_parent(parent)
    try:
        os.execv(program, argv)  # noqa: S606 - an argv list, no shell
    except OSError as error:
        sys.stderr.write(f"{program} cannot be run: {error.strerror}\n")
        sys.exit(CANNOT_RUN_STATUS)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(word) for word in sys.argv[2].split(",")], sys.argv[3], sys.argv[4:])

"""Sets up the process of a command, then execs the command. Run as a file, without site packages; `main` imports it.

    launcher.py PARENT CPU,DATA,ADDRESS,FILES,FILE PROGRAM ARGV...

It does the work between fork and exec, because `preexec_fn` is unsafe with threads: disables core dumps, sets limits
(seconds, bytes, bytes, a count, bytes; 0: none), restores default signal handlers and arranges death with the worker.
The parent is checked last, because it may have died before the death signal was armed.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
CPU_GRACE_S = 1
"""Seconds between SIGXCPU and SIGKILL."""
SIGNALS_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
CANNOT_RUN_STATUS = 126


def die_with_parent(parent: int) -> None:
    """Linux only; on other systems a command outlives a killed worker."""
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
    for kind, limit in zip(kinds, (data, address, files, file), strict=True):
        if limit:
            _lower_limit(kind, limit, limit)


def _lower_limit(kind: int, soft: int, hard: int) -> None:
    """Never raises an existing hard limit: only root could."""
    current = resource.getrlimit(kind)[1]
    if current != resource.RLIM_INFINITY:
        soft, hard = min(soft, current), min(hard, current)
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
    main(int(sys.argv[1]), [int(limit) for limit in sys.argv[2].split(",")], sys.argv[3], sys.argv[4:])

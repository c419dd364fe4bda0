"""Exit statuses of every command, in one place; scripts rely on them. No I/O."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    JOB_CANCELLED = 3
    JOB_TIMED_OUT = 4
    JOB_DENIED = 5
    JOB_QUARANTINED = 6
    NOT_ENDED = 7
    INTERRUPTED = 130


MEANINGS: Final = {
    Exit.OK: "It is done; what was asked about is well; a job that was waited for succeeded.",
    Exit.FAILED: "It was understood and could not be done, a server does not answer, what was checked is not well, or a"
    " job that was waited for failed.",
    Exit.BAD_INPUT: "What was typed, or a setting, is wrong. Nothing was changed.",
    Exit.JOB_CANCELLED: "A job that was waited for was cancelled.",
    Exit.JOB_TIMED_OUT: "A job that was waited for, or a frame of it, ran out of time.",
    Exit.JOB_DENIED: "A job that was waited for was not let run by the policy.",
    Exit.JOB_QUARANTINED: "A job that was waited for succeeded, and the policy keeps its output back.",
    Exit.NOT_ENDED: "A job had not ended within `--timeout`; it goes on.",
    Exit.INTERRUPTED: "Ctrl-C. What was submitted goes on.",
}

_OF_JOBS: Final = {
    "SUCCEEDED": Exit.OK,
    "CANCELLED": Exit.JOB_CANCELLED,
    "TIMEOUT": Exit.JOB_TIMED_OUT,
    "DENIED": Exit.JOB_DENIED,
    "OUTPUT_QUARANTINED": Exit.JOB_QUARANTINED,
}


def of_job(state: str) -> Exit:
    """Of a job that has ended so."""
    return _OF_JOBS.get(state, Exit.FAILED)

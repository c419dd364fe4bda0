"""Exit statuses of every command. Scripts rely on them. No I/O."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    JOB_CANCELLED = 3
    JOB_TIMED_OUT = 4
    JOB_DENIED = 5
    JOB_QUARANTINED = 6
    NOT_ENDED = 7
    INTERRUPTED = 130


EXIT_CODE_MEANINGS: Final = {
    ExitCode.OK: "It is done; what was asked about is well; a job that was waited for succeeded.",
    ExitCode.FAILED: "It was understood and could not be done, a server does not answer, what was checked is not well, or a"
    " job that was waited for failed.",
    ExitCode.BAD_INPUT: "What was typed, or a setting, is wrong. Nothing was changed.",
    ExitCode.JOB_CANCELLED: "A job that was waited for was cancelled.",
    ExitCode.JOB_TIMED_OUT: "A job that was waited for, or a frame of it, ran out of time.",
    ExitCode.JOB_DENIED: "A job that was waited for was not let run by the policy.",
    ExitCode.JOB_QUARANTINED: "A job that was waited for succeeded, and the policy keeps its output back.",
    ExitCode.NOT_ENDED: "A job had not ended within `--timeout`; it goes on.",
    ExitCode.INTERRUPTED: "Ctrl-C. What was submitted goes on.",
}

_BY_JOB_STATE: Final = {
    "SUCCEEDED": ExitCode.OK,
    "CANCELLED": ExitCode.JOB_CANCELLED,
    "TIMEOUT": ExitCode.JOB_TIMED_OUT,
    "DENIED": ExitCode.JOB_DENIED,
    "OUTPUT_QUARANTINED": ExitCode.JOB_QUARANTINED,
}


def exit_code_of_job(state: str) -> ExitCode:
    """Exit status for a job that ended in `state`."""
    return _BY_JOB_STATE.get(state, ExitCode.FAILED)

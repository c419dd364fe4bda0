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
    ExitCode.OK: "Success: the command is done, the check passed, or the awaited job succeeded.",
    ExitCode.FAILED: "The command failed, a server does not answer, a check failed, or the awaited job failed.",
    ExitCode.BAD_INPUT: "The command line or a setting is invalid. Nothing was changed.",
    ExitCode.JOB_CANCELLED: "The awaited job was cancelled.",
    ExitCode.JOB_TIMED_OUT: "The awaited job, or one of its frames, timed out.",
    ExitCode.JOB_DENIED: "The policy denied the awaited job.",
    ExitCode.JOB_QUARANTINED: "The awaited job succeeded, and the policy withholds its output.",
    ExitCode.NOT_ENDED: "The job did not end within `--timeout`; it continues.",
    ExitCode.INTERRUPTED: "Ctrl-C. Submitted jobs continue.",
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

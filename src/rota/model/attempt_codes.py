"""Codes of failed attempts: why one run of a frame did not succeed. No I/O.

A code describes one attempt; a `Reason` describes a job. The code of an attempt is stored with it, labels the metrics
of retries, and becomes the reason of the dead letter when the frame fails for good. Attempts that the control plane
ended have the code of their `Reason` instead (`worker_lost`, `running_timeout`, `dispatch_timeout`, `cancelled`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class AttemptCode(StrEnum):
    EXCEPTION = "exception"
    FATAL = "fatal"
    RETRY = "retry"
    TIMEOUT = "timeout"
    EXIT_STATUS = "exit_status"
    SIGNAL = "signal"
    CPU_LIMIT = "cpu_limit"
    FILE_LIMIT = "file_limit"
    NO_COMMAND = "no_command"
    NO_PROCESS = "no_process"
    BAD_INPUT = "bad_input"
    INPUT_MISSING = "input_missing"
    UNENCODABLE_RESULT = "unencodable_result"
    RESULT_TOO_LARGE = "result_too_large"
    ARTIFACT_MISSING = "artifact_missing"
    ARTIFACT_TOO_LARGE = "artifact_too_large"
    ARTIFACT_LIMIT = "artifact_limit"
    ARTIFACT_NOT_STORED = "artifact_not_stored"
    JOB_ENDED = "job_ended"
    PUBLISH_FAILED = "publish_failed"
    NO_ROOM = "no_room"
    TASK_MISSING = "unknown_task"
    DRAINING = "draining"
    WORKER_STOPPED = "worker_stopped"
    HANDED_BACK = "handed_back"
    SERIES_LOST = "series_lost"

    @property
    def meaning(self) -> str:
        return MEANINGS[self]

    @property
    def returned(self) -> bool:
        """Whether the frame never started, so that the same attempt is dispatched again."""
        return self in RETURNED_CODES


MEANINGS: Final[dict[AttemptCode, str]] = {
    AttemptCode.EXCEPTION: "The task raised an exception.",
    AttemptCode.FATAL: "The task raised `Fatal`: it is not retried.",
    AttemptCode.RETRY: "The task raised `Retry`: it is run again as often as its retries allow.",
    AttemptCode.TIMEOUT: "The worker stopped it at its time limit.",
    AttemptCode.EXIT_STATUS: "The command ended with an exit status other than 0.",
    AttemptCode.SIGNAL: "A signal ended its process.",
    AttemptCode.CPU_LIMIT: "The command used more CPU time than it may.",
    AttemptCode.FILE_LIMIT: "The command wrote a larger file than it may.",
    AttemptCode.NO_COMMAND: "The worker could not start the command.",
    AttemptCode.NO_PROCESS: "The worker could not start a process for the task.",
    AttemptCode.BAD_INPUT: "The task cannot be called with its arguments: it is not retried.",
    AttemptCode.INPUT_MISSING: "Its input could not be read from the store.",
    AttemptCode.UNENCODABLE_RESULT: "Its result cannot be encoded as msgpack.",
    AttemptCode.RESULT_TOO_LARGE: "Its result is too large to be stored.",
    AttemptCode.ARTIFACT_MISSING: "A file that it should have written is missing or cannot be read.",
    AttemptCode.ARTIFACT_TOO_LARGE: "It wrote too many artifacts, or one that is too large.",
    AttemptCode.ARTIFACT_LIMIT: "Its artifacts exceed the limit of its policy.",
    AttemptCode.ARTIFACT_NOT_STORED: "An artifact could not be written to the store.",
    AttemptCode.JOB_ENDED: "Its job had ended before it could be dispatched.",
    AttemptCode.PUBLISH_FAILED: "The assignment could not be sent to its worker.",
    AttemptCode.NO_ROOM: "It did not fit the free capacity of its worker.",
    AttemptCode.TASK_MISSING: "Its worker does not have the task.",
    AttemptCode.DRAINING: "Its worker was draining.",
    AttemptCode.WORKER_STOPPED: "Its worker was stopping.",
    AttemptCode.HANDED_BACK: "It waited in a series on its worker, and could run elsewhere.",
    AttemptCode.SERIES_LOST: "Its worker was lost, which had a frame of the same series before it.",
}

RETURNED_CODES: Final = frozenset(
    {
        AttemptCode.PUBLISH_FAILED,
        AttemptCode.NO_ROOM,
        AttemptCode.TASK_MISSING,
        AttemptCode.DRAINING,
        AttemptCode.WORKER_STOPPED,
        AttemptCode.HANDED_BACK,
        AttemptCode.SERIES_LOST,
    }
)

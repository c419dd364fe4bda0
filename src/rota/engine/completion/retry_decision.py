"""What becomes of a failed attempt: retried after a delay, or failed for good. Decides without I/O."""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple

from rota.model.attempt_codes import AttemptCode
from rota.model.backoff import Backoff
from rota.model.jobs.work import Retries
from rota.model.protocol import FATAL_CODES, AttemptResult, AttemptStatus
from rota.model.reasons import Reason

WORKER_LOST: Final = Reason.WORKER_LOST.value
WORKER_LOST_BACKOFF: Final = Backoff(1.0, 60.0)
WORKER_LOST_JITTER_STEPS: Final = 8
RETRY_DELAY_MAX_S: Final = 86_400.0


KNOWN_CODES: Final = frozenset({*map(str, AttemptCode), *map(str, Reason)})
CODES_OF_STATUS: Final[dict[AttemptStatus, str]] = {
    AttemptStatus.FAILED_RETRYABLE: AttemptCode.RETRY,
    AttemptStatus.FAILED_FATAL: AttemptCode.FATAL,
    AttemptStatus.CANCELLED: Reason.CANCELLED.value,
    AttemptStatus.TIMEOUT: AttemptCode.TIMEOUT,
    AttemptStatus.REFUSED: Reason.DISPATCH_FAILED.value,
}


class AttemptOutcome(NamedTuple):
    """What becomes of one attempt."""

    state: str
    """A terminal FrameState; RETRIED: another attempt; RETURNED: the same attempt again, after a delay; HANDED_BACK:
    at once; RERUN: another attempt, which is no retry, because this one may not have started."""
    reason: str
    delay_s: float = 0.0
    ends_job: bool = False
    """Whether the other frames of its job are terminated (fail-fast)."""


def decide_retry_after_loss(token: int, before: int, most: int) -> AttemptOutcome:
    """Retry of a frame whose worker was lost, as it was `before` times already.

    The frame may be the cause (a handler that kills its process) or a bystander. So the first retry is immediate, and
    later ones have delays that differ among neighbours: the culprit returns apart from them.
    """
    if before >= most:
        return AttemptOutcome("FAILED", WORKER_LOST)
    pause_s = (
        WORKER_LOST_BACKOFF.pause_s(before, token % WORKER_LOST_JITTER_STEPS / WORKER_LOST_JITTER_STEPS)
        if before
        else 0.0
    )
    return AttemptOutcome("RETRIED", WORKER_LOST, round(pause_s, 2))


def known_code(end: AttemptResult) -> str:
    """The code of an attempt that did not succeed; one that this version does not know, such as that of a newer worker,
    is replaced by that of its status."""
    return end.code if end.code in KNOWN_CODES else CODES_OF_STATUS.get(end.status, AttemptCode.EXCEPTION)


def decide_retry(end: AttemptResult, retries: Retries, failed: int) -> AttemptOutcome:
    """Whether a failed attempt is retried; `failed` attempts failed before it."""
    code = known_code(end)
    if end.status is AttemptStatus.FAILED_FATAL and code not in FATAL_CODES:
        code = AttemptCode.FATAL
    timed_out = end.status is AttemptStatus.TIMEOUT
    kind = "timeout" if timed_out else "error"
    requested = end.status is AttemptStatus.FAILED_RETRYABLE
    if end.status is not AttemptStatus.FAILED_FATAL and failed < retries.most and (requested or kind in retries.on):
        pause_s = end.after_s or _backoff_s(Backoff(retries.first_s, retries.longest_s), failed + 1)
        return AttemptOutcome("RETRIED", code, min(pause_s, RETRY_DELAY_MAX_S))
    return AttemptOutcome("TIMEOUT" if timed_out else "FAILED", code)


def _backoff_s(pauses: Backoff, streak: int) -> float:
    return round(pauses.pause_s(streak, jitter()), 2)


def jitter() -> float:
    return secrets.randbelow(1000) / 1000

"""States of jobs and frames, and the allowed transitions. Every other transition is refused.

A job's state follows from its frames: DISPATCHED when the first was assigned to a worker, RUNNING when a worker
reported its start, terminal when the last frame has ended, with the worst of the frames' terminal states. A frame has
at most one queue entry at a time; a retry is a new attempt of the same frame.

Transitions beyond the basic graph (reasons in docs/adr/0015-the-lifecycle.md): back to SCHEDULED when all remaining
frames wait (a worker was lost, an attempt is retried, a limit was lowered), SUCCEEDED to OUTPUT_QUARANTINED after a
late scan and back on release, and cancellation from every live state.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from rota.model.errors import IllegalTransition


class JobState(StrEnum):
    PENDING = "PENDING"
    APPROVAL_REQUIRED = "APPROVAL_REQUIRED"
    SCHEDULED = "SCHEDULED"
    DISPATCHED = "DISPATCHED"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    OUTPUT_QUARANTINED = "OUTPUT_QUARANTINED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"
    DENIED = "DENIED"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL_STATES


class FrameState(StrEnum):
    WAITING = "WAITING"
    """Queued: ready, deferred or parked."""
    DISPATCHED = "DISPATCHED"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    OUTPUT_QUARANTINED = "OUTPUT_QUARANTINED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"
    DENIED = "DENIED"

    @property
    def terminal(self) -> bool:
        return self.value in TERMINAL_STATES


TERMINAL_STATES: Final = (
    JobState.SUCCEEDED,
    JobState.OUTPUT_QUARANTINED,
    JobState.FAILED,
    JobState.TIMEOUT,
    JobState.CANCELLED,
    JobState.DENIED,
)
"""Terminal states from best to worst: a job takes the worst state among its frames."""

RESCHEDULE_AFTER_S: Final = 1.0
"""A job without a booked frame for about this long is SCHEDULED again."""

_J = JobState
JOB_TRANSITIONS: Final[dict[JobState, frozenset[JobState]]] = {
    _J.PENDING: frozenset({_J.SCHEDULED, _J.APPROVAL_REQUIRED, _J.DENIED, _J.FAILED, _J.TIMEOUT, _J.CANCELLED}),
    _J.APPROVAL_REQUIRED: frozenset({_J.PENDING, _J.DENIED, _J.FAILED, _J.TIMEOUT, _J.CANCELLED}),
    _J.SCHEDULED: frozenset({_J.DISPATCHED, *TERMINAL_STATES} - {_J.SUCCEEDED, _J.OUTPUT_QUARANTINED}),
    _J.DISPATCHED: frozenset({_J.RUNNING, _J.SCHEDULED, *TERMINAL_STATES}),
    _J.RUNNING: frozenset({_J.SCHEDULED, *TERMINAL_STATES}),
    _J.SUCCEEDED: frozenset({_J.OUTPUT_QUARANTINED}),
    _J.OUTPUT_QUARANTINED: frozenset({_J.SUCCEEDED}),
    _J.FAILED: frozenset(),
    _J.TIMEOUT: frozenset(),
    _J.CANCELLED: frozenset(),
    _J.DENIED: frozenset(),
}

_F = FrameState
_FRAME_TERMINAL_STATES: Final = frozenset(FrameState(end.value) for end in TERMINAL_STATES)
FRAME_TRANSITIONS: Final[dict[FrameState, frozenset[FrameState]]] = {
    _F.WAITING: frozenset({_F.DISPATCHED, _F.CANCELLED, _F.DENIED, _F.FAILED, _F.TIMEOUT}),
    _F.DISPATCHED: frozenset({_F.RUNNING, _F.WAITING, *_FRAME_TERMINAL_STATES}),
    _F.RUNNING: frozenset({_F.WAITING, *_FRAME_TERMINAL_STATES}),
    _F.SUCCEEDED: frozenset({_F.OUTPUT_QUARANTINED}),
    _F.OUTPUT_QUARANTINED: frozenset({_F.SUCCEEDED}),
    _F.FAILED: frozenset(),
    _F.TIMEOUT: frozenset(),
    _F.CANCELLED: frozenset(),
    _F.DENIED: frozenset(),
}


def can_transition(state: JobState, then: JobState) -> bool:
    return then in JOB_TRANSITIONS[state]


def check_transition(state: JobState, then: JobState) -> None:
    """Raises IllegalTransition unless a job may go from `state` to `then`."""
    if not can_transition(state, then):
        raise IllegalTransition(f"A job in state {state} cannot change to {then}.", state=state.value, then=then.value)


def worst_state(ends: Iterable[JobState]) -> JobState:
    """The terminal state of a job whose frames (at least one) ended in `ends`."""
    return max(ends, key=TERMINAL_STATES.index)

"""Every transition of jobs and frames, allowed or not: the tables are repeated here on purpose."""

from itertools import combinations_with_replacement, permutations

import pytest

from rota.model.errors import IllegalTransition
from rota.model.job_states import (
    FRAME_TRANSITIONS,
    TERMINAL_STATES,
    FrameState,
    JobState,
    can_transition,
    check_transition,
    worst_state,
)

# docs/adr/0015-the-lifecycle.md gives the reasons.
JOBS = {
    "PENDING": "SCHEDULED APPROVAL_REQUIRED DENIED FAILED TIMEOUT CANCELLED",
    "APPROVAL_REQUIRED": "PENDING DENIED FAILED TIMEOUT CANCELLED",
    "SCHEDULED": "DISPATCHED DENIED FAILED TIMEOUT CANCELLED",
    "DISPATCHED": "RUNNING SCHEDULED SUCCEEDED OUTPUT_QUARANTINED FAILED TIMEOUT CANCELLED DENIED",
    "RUNNING": "SCHEDULED SUCCEEDED OUTPUT_QUARANTINED FAILED TIMEOUT CANCELLED DENIED",
    "SUCCEEDED": "OUTPUT_QUARANTINED",
    "OUTPUT_QUARANTINED": "SUCCEEDED",
    "FAILED": "",
    "TIMEOUT": "",
    "CANCELLED": "",
    "DENIED": "",
}
FRAMES = {
    "WAITING": "DISPATCHED DENIED FAILED TIMEOUT CANCELLED",
    "DISPATCHED": "RUNNING WAITING SUCCEEDED OUTPUT_QUARANTINED FAILED TIMEOUT CANCELLED DENIED",
    "RUNNING": "WAITING SUCCEEDED OUTPUT_QUARANTINED FAILED TIMEOUT CANCELLED DENIED",
    "SUCCEEDED": "OUTPUT_QUARANTINED",
    "OUTPUT_QUARANTINED": "SUCCEEDED",
    "FAILED": "",
    "TIMEOUT": "",
    "CANCELLED": "",
    "DENIED": "",
}


@pytest.mark.parametrize("state", list(JobState))
@pytest.mark.parametrize("then", list(JobState))
def test_job_allows_exactly_the_declared_transitions(state, then):
    allowed = then.value in JOBS[state.value].split()
    assert can_transition(state, then) is allowed
    if allowed:
        check_transition(state, then)
    else:
        with pytest.raises(IllegalTransition, match=f"A job in state {state} cannot change to {then}"):
            check_transition(state, then)


@pytest.mark.parametrize("state", list(FrameState))
def test_frame_allows_exactly_the_declared_transitions(state):
    assert FRAME_TRANSITIONS[state] == {FrameState(then) for then in FRAMES[state.value].split()}


def test_tables_cover_every_state():
    assert set(JOBS) == {state.value for state in JobState}
    assert set(FRAMES) == {state.value for state in FrameState}


def test_exactly_the_live_jobs_can_be_cancelled():
    cancellable = {state for state in JobState if can_transition(state, JobState.CANCELLED)}
    assert cancellable == {state for state in JobState if not state.terminal}


def test_only_quarantine_transitions_leave_a_terminal_state():
    leaving = {(state, then) for state in TERMINAL_STATES for then in JobState if can_transition(state, then)}
    assert leaving == {
        (JobState.SUCCEEDED, JobState.OUTPUT_QUARANTINED),
        (JobState.OUTPUT_QUARANTINED, JobState.SUCCEEDED),
    }


def test_every_state_is_reachable_and_every_live_state_can_end():
    reached, seen = {JobState.PENDING}, set()
    while reached - seen:
        state = (reached - seen).pop()
        seen.add(state)
        reached |= {then for then in JobState if can_transition(state, then)}
    assert reached == set(JobState)
    assert all(any(can_transition(state, end) for end in TERMINAL_STATES) for state in JobState if not state.terminal)


def test_job_takes_the_worst_terminal_state_of_its_frames():
    order = ["SUCCEEDED", "OUTPUT_QUARANTINED", "FAILED", "TIMEOUT", "CANCELLED", "DENIED"]
    for number in range(1, 4):
        for ends in combinations_with_replacement(order, number):
            for given in set(permutations(ends)):
                assert worst_state(map(JobState, given)) == max(ends, key=order.index)


def test_terminal_states_of_jobs_and_frames_are_equal():
    assert {state.value for state in FrameState if state.terminal} == {state.value for state in TERMINAL_STATES}

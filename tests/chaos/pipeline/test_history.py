"""The history checker accepts a valid history and detects each kind of injected fault."""

import copy

import pytest

from tests.chaos.pipeline.history import (
    Booked,
    CapSet,
    Claimed,
    Done,
    End,
    Granted,
    History,
    Layer,
    LedgerSample,
    LedgerSeeded,
    Message,
    OwnerDied,
    Released,
    Run,
    Submit,
    repeated_starts,
    violations,
)

KEYS = (("sub", "pool"), ("job", "j1"))
STATES = ["PENDING", "SCHEDULED", "DISPATCHED", "RUNNING"]


def booked(token, cores=100, fence=1):
    return Booked(token, "film", KEYS, cores, fence)


def valid_history():
    """Three jobs: one with two frames, one of them retried; one that failed; one that was never acknowledged."""
    return History(
        submits=[
            Submit("a", 2, jobs=["j1", "j1"]),
            Submit("b", ends=("FAILED",), jobs=["j2"]),
            Submit("c"),
            Submit("never"),
        ],
        keys={"a": "j1", "b": "j2", "c": "j3"},
        done=[
            Done("j1", "SUCCEEDED", [*STATES, "SUCCEEDED"], [Layer("l1", 2, {"succeeded": 2})]),
            Done("j2", "FAILED", [*STATES[:2], "FAILED"], [Layer("l2", 1, {"failed": 1})]),
            Done("j3", "SUCCEEDED", [*STATES[:3], "SUCCEEDED"], [Layer("l3", 1, {"succeeded": 1})]),
        ],
        ends=[
            End("l1", 1, 1, 11, "RETRIED", "exception"),
            End("l1", 1, 2, 20, "SUCCEEDED"),
            End("l2", 0, 1, 30, "FAILED", "exception"),
        ],
        runs=[
            Run("j1", "l1", 0, 1, 10, "w", 1.0, 2.0),
            Run("j1", "l1", 1, 1, 11, "w", 1.0),
            Run("j1", "l1", 1, 2, 20, "w", 3.0, 4.0),
            Run("j2", "l2", 0, 1, 30, "w", 5.0),
            Run("j3", "l3", 0, 1, 40, "w", 5.0, 6.0),
        ],
        commits=[
            [CapSet(KEYS[0], 200), Granted("reconciler", 1)],
            [booked(10), booked(11)],
            [Released(10)],
            [Released(11), booked(20)],
            [CapSet(KEYS[0], 100), Claimed(1)],
            [Released(20), LedgerSeeded("film", 2), Granted("reconciler", 3), OwnerDied(1), Claimed(2)],
            [booked(30, fence=2)],
            [Released(30)],
        ],
        counts=[
            ({"q": {"running": 1}}, {"q": {"running": 1}}),
            ({"q": {"completed": 3, "failed": 1}}, {"q": {"completed": 3, "failed": 1}}),
        ],
        left={"procs": 0, "live jobs": 0},
        ledger_samples=[LedgerSample([], set(), {}), LedgerSample([booked(10), booked(11)], {10, 11}, {KEYS[0]: 300})],
        messages=[
            Message("lost with the stream", 0, poison=True),
            Message("perhaps never stored", -1, poison=True),
            Message("odd", 1, poison=True),
            Message("c", 1),
        ],
        wipes=1,
        dead_letters=["odd"],
    )


def test_valid_history_has_no_violations():
    assert violations(valid_history()) == []
    assert repeated_starts(valid_history()) == 1


def _set_final_counts(history, **counts):
    history.counts[-1] = ({"q": counts}, {"q": counts})


INJECTED_FAULTS = {
    "acknowledged job never ended": ("J1", lambda h: h.done.pop(0)),
    "job ended twice": ("J1", lambda h: h.done.append(h.done[0])),
    "one key acknowledged with two jobs": ("J1", lambda h: h.submits[0].jobs.append("j9")),
    "acknowledged key missing in PostgreSQL": ("J1", lambda h: h.keys.pop("b")),
    "unacknowledged submission was committed and never ended": ("J1", lambda h: h.done.pop(2)),
    "job was never submitted": ("J1", lambda h: h.submits.pop(2)),
    "invalid state transition": ("J2", lambda h: h.done[0].history.insert(4, "PENDING")),
    "transition after a terminal state": ("J2", lambda h: h.done[1].history.append("RUNNING")),
    "job state better than its frames": ("J2", lambda h: h.done[1].layers[0].counts.update(failed=0, cancelled=1)),
    "unexpected final state": ("J2", lambda h: setattr(h.submits[1], "ends", ("SUCCEEDED",))),
    "frame counted twice": ("J3", lambda h: h.done[0].layers[0].counts.update(succeeded=3)),
    "frame never counted": ("J3", lambda h: h.done[0].layers[0].counts.update(succeeded=1)),
    "layer lost a frame": ("J3", lambda h: setattr(h.submits[0], "frames", 3)),
    "attempt ended twice": ("J3", lambda h: h.ends.append(End("l1", 1, 1, 12, "RETRIED", "exception"))),
    "frame with two ends": ("J3", lambda h: h.ends.append(End("l1", 1, 3, 50, "SUCCEEDED"))),
    "old attempt recorded as the end": ("J3", lambda h: setattr(h.ends[0], "attempt", 7)),
    "failure not recorded": ("J3", lambda h: h.ends.pop(2)),
    "success without a run": ("J3", lambda h: h.runs.pop(4)),
    "success whose only run did not finish": ("J3", lambda h: setattr(h.runs[0], "ended", None)),
    "token started twice": ("J3", lambda h: h.runs.append(h.runs[0])),
    "failed attempt never ran": ("J3", lambda h: h.runs.pop(1)),
    "proc left behind": ("J4", lambda h: h.left.update(procs=1)),
    "cap exceeded": ("A1", lambda h: h.commits.insert(2, [booked(12)])),
    "insert above a lowered cap": ("A1", lambda h: h.commits.insert(5, [booked(21)])),
    "release without a booking": ("A1", lambda h: h.commits.append([Released(99)])),
    "ledger audit differs": ("A3", lambda h: h.audit_problems.append("sub pool: redis 100, procs 0")),
    "booking from an unseeded Redis": ("A4", lambda h: h.commits.append([booked(50, 1, fence=1)])),
    "counts differ from the rows": ("C1", lambda h: h.counts.insert(0, ({"q": {"running": 2}}, {}))),
    "queue counts a frame twice": ("C1", lambda h: _set_final_counts(h, completed=4, failed=1)),
    "fence decreased": ("F1", lambda h: h.commits.append([Granted("reconciler", 2)])),
    "dead dispatcher claims": ("F1", lambda h: h.commits.append([Claimed(1)])),
    "token missing in Redis": ("A2", lambda h: h.ledger_samples[1].tokens.remove(11)),
    "Redis counter below the procs": ("A2", lambda h: h.ledger_samples[1].counters.update({KEYS[0]: 199})),
    "Redis counter lost": ("A2", lambda h: h.ledger_samples[1].counters.update({KEYS[1]: 0})),
    "poison message without a dead letter": ("P1", lambda h: h.dead_letters.clear()),
    "poison message with two dead letters": ("P1", lambda h: h.dead_letters.append("odd")),
    "valid message in the dead letters": ("P1", lambda h: h.dead_letters.append("c")),
    "valid message not consumed after poison": ("P1", lambda h: h.keys.pop("c")),
}


@pytest.mark.parametrize("injected", INJECTED_FAULTS)
def test_injected_fault_is_detected(injected):
    invariant, inject = INJECTED_FAULTS[injected]
    history = copy.deepcopy(valid_history())
    inject(history)
    assert invariant in {violation.invariant for violation in violations(history)}

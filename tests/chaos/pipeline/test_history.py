"""The checker of the pipeline's histories: it passes a good one, and sees each kind of fault that is planted in it."""

import copy

import pytest

from tests.chaos.pipeline.history import (
    Booked,
    Capped,
    Claimed,
    Done,
    End,
    Founded,
    Freed,
    Granted,
    History,
    Kept,
    Layer,
    Message,
    OwnerDied,
    Run,
    Submit,
    doubles,
    faults,
)

KEYS = (("sub", "pool"), ("job", "j1"))
WAY = ["PENDING", "SCHEDULED", "DISPATCHED", "RUNNING"]


def booked(token, cores=100, fence=1):
    return Booked(token, "film", KEYS, cores, fence)


def good():
    """Three jobs: one of two frames, of which one was tried twice; one that failed; one that nobody was told of."""
    return History(
        submits=[
            Submit("a", 2, jobs=["j1", "j1"]),
            Submit("b", ends=("FAILED",), jobs=["j2"]),
            Submit("c"),
            Submit("never"),
        ],
        keys={"a": "j1", "b": "j2", "c": "j3"},
        done=[
            Done("j1", "SUCCEEDED", [*WAY, "SUCCEEDED"], [Layer("l1", 2, {"succeeded": 2})]),
            Done("j2", "FAILED", [*WAY[:2], "FAILED"], [Layer("l2", 1, {"failed": 1})]),
            Done("j3", "SUCCEEDED", [*WAY[:3], "SUCCEEDED"], [Layer("l3", 1, {"succeeded": 1})]),
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
            [Capped(KEYS[0], 200), Granted("reconciler", 1)],
            [booked(10), booked(11)],
            [Freed(10)],
            [Freed(11), booked(20)],
            [Capped(KEYS[0], 100), Claimed(1)],
            [Freed(20), Founded("film", 2), Granted("reconciler", 3), OwnerDied(1), Claimed(2)],
            [booked(30, fence=2)],
            [Freed(30)],
        ],
        counts=[
            ({"q": {"running": 1}}, {"q": {"running": 1}}),
            ({"q": {"completed": 3, "failed": 1}}, {"q": {"completed": 3, "failed": 1}}),
        ],
        left={"procs": 0, "live jobs": 0},
        kept=[Kept([], set(), {}), Kept([booked(10), booked(11)], {10, 11}, {KEYS[0]: 300})],
        messages=[
            Message("lost with the stream", 0, poison=True),
            Message("perhaps never stored", -1, poison=True),
            Message("odd", 1, poison=True),
            Message("c", 1),
        ],
        wipes=1,
        letters=["odd"],
    )


def test_a_history_in_which_all_is_well_has_no_fault():
    assert faults(good()) == []
    assert doubles(good()) == 1


def _recount(history, **counts):
    history.counts[-1] = ({"q": counts}, {"q": counts})


PLANTED = {
    "an acknowledged job that never ended": ("J1", lambda h: h.done.pop(0)),
    "a job that ended twice": ("J1", lambda h: h.done.append(h.done[0])),
    "one key answered with two jobs": ("J1", lambda h: h.submits[0].jobs.append("j9")),
    "an answer that PostgreSQL does not know": ("J1", lambda h: h.keys.pop("b")),
    "an unknown submit that was written and never ended": ("J1", lambda h: h.done.pop(2)),
    "a job that nobody submitted": ("J1", lambda h: h.submits.pop(2)),
    "a state that is no edge": ("J2", lambda h: h.done[0].history.insert(4, "PENDING")),
    "a way that goes on behind its end": ("J2", lambda h: h.done[1].history.append("RUNNING")),
    "a job better than its frames": ("J2", lambda h: h.done[1].layers[0].counts.update(failed=0, cancelled=1)),
    "a job that should not have failed": ("J2", lambda h: setattr(h.submits[1], "ends", ("SUCCEEDED",))),
    "a frame that was counted twice": ("J3", lambda h: h.done[0].layers[0].counts.update(succeeded=3)),
    "a frame that was never counted": ("J3", lambda h: h.done[0].layers[0].counts.update(succeeded=1)),
    "a layer that lost a frame": ("J3", lambda h: setattr(h.submits[0], "frames", 3)),
    "an attempt that ended twice": ("J3", lambda h: h.ends.append(End("l1", 1, 1, 12, "RETRIED", "exception"))),
    "a frame with two ends": ("J3", lambda h: h.ends.append(End("l1", 1, 3, 50, "SUCCEEDED"))),
    "an old attempt that was taken for the end": ("J3", lambda h: setattr(h.ends[0], "attempt", 7)),
    "a failure that is not written down": ("J3", lambda h: h.ends.pop(2)),
    "a success that nobody ran": ("J3", lambda h: h.runs.pop(4)),
    "a success whose only run never came to its end": ("J3", lambda h: setattr(h.runs[0], "ended", None)),
    "a token that was begun twice": ("J3", lambda h: h.runs.append(h.runs[0])),
    "a failed attempt that never ran": ("J3", lambda h: h.runs.pop(1)),
    "a proc left behind": ("J4", lambda h: h.left.update(procs=1)),
    "a cap that was passed": ("A1", lambda h: h.commits.insert(2, [booked(12)])),
    "an insert over a lowered cap": ("A1", lambda h: h.commits.insert(5, [booked(21)])),
    "a release of what was never booked": ("A1", lambda h: h.commits.append([Freed(99)])),
    "books that differ": ("A3", lambda h: h.books.append("sub pool: redis 100, procs 0")),
    "a booking from an unseeded Redis": ("A4", lambda h: h.commits.append([booked(50, 1, fence=1)])),
    "counts that differ from the rows": ("C1", lambda h: h.counts.insert(0, ({"q": {"running": 2}}, {}))),
    "a frame the queue counts twice": ("C1", lambda h: _recount(h, completed=4, failed=1)),
    "a fence that goes back": ("F1", lambda h: h.commits.append([Granted("reconciler", 2)])),
    "a dead dispatcher that claims": ("F1", lambda h: h.commits.append([Claimed(1)])),
    "a token that Redis does not hold": ("A2", lambda h: h.kept[1].tokens.remove(11)),
    "a counter below the procs": ("A2", lambda h: h.kept[1].counters.update({KEYS[0]: 199})),
    "a counter that Redis lost": ("A2", lambda h: h.kept[1].counters.update({KEYS[1]: 0})),
    "a poison message that is nowhere": ("P1", lambda h: h.letters.clear()),
    "a poison message that is there twice": ("P1", lambda h: h.letters.append("odd")),
    "a good message among the dead letters": ("P1", lambda h: h.letters.append("c")),
    "a good message that poison held up": ("P1", lambda h: h.keys.pop("c")),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_seen(planted):
    invariant, plant = PLANTED[planted]
    history = copy.deepcopy(good())
    plant(history)
    assert invariant in {fault.invariant for fault in faults(history)}

"""When states of jobs are written down, and when not."""

from uuid import UUID

from rota.engine.marks import SETTLE_S, Marks


class HandClock:
    """Moves when told."""

    def __init__(self):
        self.at_s = 1000.0

    def now_ms(self):
        return int(self.at_s * 1000)

    def monotonic(self):
        return self.at_s


class Written:
    """In place of a database: which jobs were marked, and as what."""

    def __init__(self):
        self.marks = []

    async def rows(self, _query, jobs, state, _moments):
        self.marks += [(job.int, state) for job in jobs]
        return []


def some_marks():
    clock, written = HandClock(), Written()
    return Marks(written, clock), clock, written


async def test_a_job_that_has_only_just_begun_is_not_marked_with_those_before_it():
    marks, clock, written = some_marks()
    marks.dispatched([UUID(int=1)])
    clock.at_s += SETTLE_S
    marks.dispatched([UUID(int=2)])
    await marks.write()
    assert written.marks == [(1, "DISPATCHED")]


async def test_what_is_left_for_later_is_written_then():
    marks, clock, written = some_marks()
    marks.dispatched([UUID(int=1)])
    await marks.write()
    assert written.marks == []
    clock.at_s += SETTLE_S
    await marks.write()
    await marks.write()
    assert written.marks == [(1, "DISPATCHED")]


async def test_a_job_that_ended_in_time_is_never_marked():
    marks, clock, written = some_marks()
    marks.dispatched([UUID(int=1), UUID(int=2)])
    marks.running([UUID(int=1)])
    marks.ended([UUID(int=1)])
    clock.at_s += SETTLE_S
    await marks.write()
    assert written.marks == [(2, "DISPATCHED")]

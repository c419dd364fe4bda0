"""When states of jobs are written down, and when not."""

from uuid import UUID

from rota.engine.dispatch.state_writer import DEBOUNCE_S, JobStateWriter


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
    return JobStateWriter(written, clock), clock, written


async def test_a_job_that_has_only_just_begun_is_not_marked_with_those_before_it():
    marks, clock, written = some_marks()
    marks.record_dispatched([UUID(int=1)])
    clock.at_s += DEBOUNCE_S
    marks.record_dispatched([UUID(int=2)])
    await marks.flush()
    assert written.marks == [(1, "DISPATCHED")]


async def test_what_is_left_for_later_is_written_then():
    marks, clock, written = some_marks()
    marks.record_dispatched([UUID(int=1)])
    await marks.flush()
    assert written.marks == []
    clock.at_s += DEBOUNCE_S
    await marks.flush()
    await marks.flush()
    assert written.marks == [(1, "DISPATCHED")]


async def test_a_job_that_ended_in_time_is_never_marked():
    marks, clock, written = some_marks()
    marks.record_dispatched([UUID(int=1), UUID(int=2)])
    marks.record_running([UUID(int=1)])
    marks.forget([UUID(int=1)])
    clock.at_s += DEBOUNCE_S
    await marks.flush()
    assert written.marks == [(2, "DISPATCHED")]

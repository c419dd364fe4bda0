"""When job states are written to the database."""

from types import SimpleNamespace
from uuid import UUID

from rota.engine.dispatch.state_writer import DEBOUNCE_S, JobStateWriter
from tests.support.jobs import NO_EVENTS


class ManualClock:
    """Advanced by the test."""

    def __init__(self):
        self.at_s = 1000.0

    def now_ms(self):
        return int(self.at_s * 1000)

    def monotonic(self):
        return self.at_s


class FakeDatabase:
    """Records which job states were written."""

    def __init__(self):
        self.states = []

    async def rows(self, _query, jobs, state, _times):
        self.states += [(job.int, state) for job in jobs]
        return []


def make_writer():
    clock, database = ManualClock(), FakeDatabase()
    return JobStateWriter(database, NO_EVENTS, clock), clock, database


async def test_job_dispatched_just_now_is_not_written_with_older_ones():
    writer, clock, database = make_writer()
    writer.record_dispatched([UUID(int=1)])
    clock.at_s += DEBOUNCE_S
    writer.record_dispatched([UUID(int=2)])
    await writer.flush()
    assert database.states == [(1, "DISPATCHED")]


async def test_state_inside_the_debounce_window_is_written_by_a_later_flush():
    writer, clock, database = make_writer()
    writer.record_dispatched([UUID(int=1)])
    await writer.flush()
    assert database.states == []
    clock.at_s += DEBOUNCE_S
    await writer.flush()
    await writer.flush()
    assert database.states == [(1, "DISPATCHED")]


async def test_state_of_a_job_that_ended_within_the_debounce_window_is_never_written():
    writer, clock, database = make_writer()
    writer.record_dispatched([UUID(int=1), UUID(int=2)])
    writer.record_running([UUID(int=1)])
    writer.forget_ended([SimpleNamespace(job=UUID(int=1))])
    clock.at_s += DEBOUNCE_S
    await writer.flush()
    assert database.states == [(2, "DISPATCHED")]

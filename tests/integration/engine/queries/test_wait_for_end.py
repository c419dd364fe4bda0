"""Waiting for the end of jobs: woken by the end itself, and by a poll for ends elsewhere."""

import asyncio
from uuid import uuid4

import pytest

from rota.engine.completion.job_ends import JobEnd
from rota.engine.queries import wait_for_end
from rota.engine.queries.wait_for_end import EndWaiter
from rota.infra.service import Service, Supervisor
from rota.model.ids import JobId
from tests.support.waiting import until


class Ends:
    """Ends that a poll finds; records what was asked."""

    def __init__(self):
        self.ended, self.asked = set(), []

    async def find(self, ids):
        self.asked.append(list(ids))
        return self.ended & set(ids)


class Clock:
    """A clock whose pauses end when the test says so."""

    def __init__(self):
        self.pauses = asyncio.Queue()

    async def sleep(self, _seconds):
        ended = asyncio.Event()
        self.pauses.put_nowait(ended)
        await ended.wait()

    async def tick(self):
        (await self.pauses.get()).set()


@pytest.fixture
def ends():
    return Ends()


@pytest.fixture
async def clock():
    return Clock()


@pytest.fixture
async def waiter(ends, clock):
    waiter = EndWaiter(ends.find, clock)
    supervisor = Supervisor(abandon=lambda status: pytest.fail(f"abandoned with {status}"))
    supervisor.add(Service("watch", waiter.run))
    async with supervisor.running():
        yield waiter


def end_of(job):
    return JobEnd(*[job if field == "job" else None for field in JobEnd.__struct_fields__])


async def test_end_in_this_process_wakes_without_a_statement(waiter, ends):
    job = JobId(uuid4())
    async with asyncio.timeout(10):
        with waiter.watching(job) as watch:
            waiter.jobs_ended([end_of(JobId(uuid4())), end_of(job)])
            await watch.wait(60)
    assert ends.asked == []


async def test_end_between_the_read_of_the_state_and_the_wait_is_noticed(waiter, ends):
    """As when a job ends while the answer to the read is under way."""
    job = JobId(uuid4())
    async with asyncio.timeout(10):
        with waiter.watching(job) as watch:
            await asyncio.to_thread(lambda: None)  # the read
            waiter.jobs_ended([end_of(job)])
            await asyncio.to_thread(lambda: None)
            await watch.wait(60)
    assert waiter._waiting == {}


async def test_end_elsewhere_is_found_by_the_next_poll_for_all_waiters(waiter, ends, clock, monkeypatch):
    monkeypatch.setattr(wait_for_end, "MAX_BATCH", 2)
    jobs = [JobId(uuid4()) for _ in range(3)]

    async def wait(job):
        with waiter.watching(job) as watch:
            await watch.wait(60)

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        for job in jobs:
            tasks.create_task(wait(job))
        await clock.tick()
        await until(lambda: len(ends.asked) == 2, what="a poll")
        ends.ended |= set(jobs)
        await clock.tick()
    polls = [[*ends.asked[at], *ends.asked[at + 1]] for at in (0, 2)]
    assert [sorted(poll) for poll in polls] == [sorted(jobs)] * 2


async def test_wait_ends_at_its_timeout_and_when_the_server_drains(ends, clock):
    waiter = EndWaiter(ends.find, clock)
    supervisor = Supervisor(abandon=lambda status: pytest.fail(f"abandoned with {status}"))
    supervisor.add(Service("watch", waiter.run))
    async with asyncio.timeout(10):
        with waiter.watching(JobId(uuid4())) as watch:
            async with supervisor.running():
                await watch.wait(0.001)
                waiting = asyncio.create_task(watch.wait(60))
            await waiting
        with waiter.watching(JobId(uuid4())) as watch:
            await watch.wait(60)
    assert waiter._waiting == {}

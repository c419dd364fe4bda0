"""Leader loops under real leases: a lost lease, draining, and failures that keep the lease."""

import asyncio
from functools import partial

import pytest

from rota.infra.lease import LeaderLoop, LeaderStep, Leases, leader_loop
from rota.infra.service import Lifecycle, Service, ServiceState
from rota.model.errors import NatsUnavailable, PostgresUnavailable
from tests.integration.infra.lease_support import EXPIRE, QUICK_BACKOFF, forever, take, write
from tests.support.waiting import until

NEVER_S = 3600.0


class Loop(LeaderLoop):
    """One step, which calls `work` with the lease."""

    def __init__(self, leases, work, **options):
        super().__init__(leases, "chair", kind="test", **options)
        self.leadership._pauses = QUICK_BACKOFF
        self.work = work
        self.begun, self.ended = [], 0

    def begin_term(self, lease):
        self.begun.append(lease.fence)
        return [
            LeaderStep("work", NEVER_S, partial(self.work, lease)),
            LeaderStep("other", NEVER_S, partial(asyncio.sleep, 0)),
        ]

    def end_term(self):
        self.ended += 1


@pytest.fixture
def leases(database):
    return Leases(database, owner="me")


async def run_service(loop, until_):
    """Run the loop as a service until the condition holds; then drain it."""
    service = Service("loop", loop.run)
    async with asyncio.timeout(15), asyncio.TaskGroup() as tasks:
        service.start(tasks)
        try:
            await until(until_)
            assert service.state is ServiceState.READY
        finally:
            assert await service.stop(5.0)
    assert (service.state, service.cut, service.error) == (ServiceState.STOPPED, False, None)


@pytest.mark.parametrize("parallel", [False, True])
async def test_lost_lease_cancels_the_running_step_and_the_next_term_runs_it_at_once(leases, database, parallel):
    cancelled = []

    async def work(lease):
        try:
            await forever()
        finally:
            cancelled.append(lease.fence)

    loop = Loop(leases, work, ttl_s=0.6, parallel=parallel)

    async def third_term():
        if len(loop.begun) == len(cancelled) + 1 < 3:
            await database.run(EXPIRE, "chair")
        return len(loop.begun) == 3

    await run_service(loop, third_term)
    assert (loop.begun, cancelled, loop.ended) == ([1, 2, 3], [1, 2, 3], 3)


@pytest.mark.parametrize("parallel", [False, True])
async def test_step_that_fails_when_the_lease_is_lost_does_not_go_on_without_it(leases, database, parallel):
    tried = []

    async def work(lease):
        tried.append(lease.fence)
        try:
            await forever()
        except asyncio.CancelledError:
            raise NatsUnavailable("gone") from None

    loop = Loop(leases, work, ttl_s=0.6, parallel=parallel)

    async def second_term():
        if len(tried) == 1:
            await database.run(EXPIRE, "chair")
        return len(loop.begun) == 2

    await run_service(loop, second_term)
    assert (tried, loop.begun, loop.ended) == ([1, 2], [1, 2], 2)


@pytest.mark.parametrize("error", [NatsUnavailable("gone"), PostgresUnavailable("gone", outcome="unknown")])
async def test_step_of_an_unavailable_server_is_retried_under_the_same_lease(leases, monkeypatch, error):
    monkeypatch.setattr(leader_loop, "RETRY_BACKOFF", QUICK_BACKOFF)
    tried = []

    async def work(lease):
        tried.append(lease.fence)
        if len(tried) < 3:
            raise error

    loop = Loop(leases, work)
    await run_service(loop, lambda: len(tried) == 3)
    assert (tried, loop.ended) == ([1, 1, 1], 1)


async def test_refused_write_ends_the_term(leases, database):
    async def work(lease):
        if lease.fence == 1:
            await database.run(EXPIRE, "chair")
            await write(leases, lease)

    loop = Loop(leases, work)
    await run_service(loop, lambda: len(loop.begun) == 2)
    assert loop.ended == 2


@pytest.mark.parametrize("parallel", [False, True])
async def test_defect_in_a_step_is_raised_to_the_supervisor(leases, parallel):
    async def work(_lease):
        raise LookupError("bug")

    loop = Loop(leases, work, parallel=parallel)
    with pytest.raises(LookupError):
        async with asyncio.timeout(5):
            await loop.run(Lifecycle(asyncio.Event(), lambda: None))
    assert loop.ended == 1
    assert await take(leases, "chair")


@pytest.mark.parametrize("fails", [False, True])
async def test_draining_cancels_the_running_step_and_releases_the_lease(leases, database, fails):
    began = asyncio.Event()

    async def work(_lease):
        began.set()
        try:
            await forever()
        except asyncio.CancelledError:
            if fails:
                raise PostgresUnavailable("gone") from None
            raise

    loop = Loop(leases, work)
    await run_service(loop, began.is_set)
    assert (loop.begun, loop.ended) == ([1], 1)
    assert await take(Leases(database, owner="others"), "chair")

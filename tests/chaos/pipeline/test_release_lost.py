"""A server is killed while it ends frames, and another one runs on: before the commit in PostgreSQL, and between it and
the release in Redis."""

import asyncio

import pytest

from rota.engine.cluster import membership
from rota.infra import failpoints
from tests.chaos.pipeline.deployment import POLL_S, Farm
from tests.support.queue import sql
from tests.support.waiting import until

FREE_WITHIN_S = 5.0
HANDLED_WITHIN_S = 6.0
"""`nats.job_ack_wait`, and a moment to handle the report."""
ENDED = sql("SELECT 1 FROM rota.job_done WHERE pk_job = $1::uuid")


@pytest.fixture
async def farm(private_stack, tmp_path, proxy):
    stack = await private_stack("postgres", "redis", "nats")
    async with Farm(stack, tmp_path, proxy, links=False) as farm:
        await farm.show("film", burst=1)
        await farm.start(servers=0, workers=1, slots=64)
        yield farm


async def counted(farm):
    """What Redis counts of the show, by level and key, without zeros."""
    [show] = await farm.accounting.admin.shows()
    counters = await farm.accounting.live.counters(show.id)
    return {key: usage for key, usage in counters.items() if usage.cores}


async def is_free(farm):
    return not await counted(farm)


async def until_both_are_heard(farm):
    """A server that was never heard is missed only when its lease expires."""
    names = set()
    async with asyncio.timeout(30), farm.bus.subscribe_core(membership.SUBJECT) as heartbeats:
        while len(names) < 2:
            names.add((await heartbeats.get()).data)


async def killed_at(farm, place):
    """Have the leader die at a failpoint that it passes with each report; returns the last job and the other server."""
    doomed = await farm.add_server("doomed", heartbeat_s=0.5, CRASH_AT=place)
    await farm.until_workers(1)
    # It leads: nobody else is up. It dies with the first report that it handles, and not before the other server is up.
    other = await farm.add_server("other", heartbeat_s=0.5)
    await until(lambda: "services_ready" in other.all_logs(), within_s=30, what="the other server", every_s=POLL_S)
    await until_both_are_heard(farm)
    dying = asyncio.create_task(doomed.wait(60.0))
    job = None
    while not dying.done():
        job = await farm.submit("noop")
        while not dying.done() and not await farm.database.value(ENDED, job):
            await asyncio.wait({dying}, timeout=POLL_S)
    assert await dying == failpoints.CRASH_EXIT_STATUS, doomed.all_logs()[-1500:]
    return job, other


@pytest.mark.slow("two servers and a worker are started as processes")
async def test_release_lost_by_a_killed_leader_frees_the_slots_of_its_show_within_5_s(farm):
    """One frame at a time, so that the server leaves nothing else undone, such as a claim or an unread report."""
    _, other = await killed_at(farm, "publisher.before_release")
    assert await counted(farm), "nothing was lost: the test shows nothing"
    await until(lambda: is_free(farm), within_s=FREE_WITHIN_S, what="free slots", every_s=POLL_S)
    assert "lost_releases_repaired" in other.all_logs()
    await farm.quiet()


@pytest.mark.slow("two servers and a worker are started as processes")
async def test_report_in_the_hands_of_a_killed_server_is_handled_by_another_within_seconds(farm):
    job, _ = await killed_at(farm, "finish.before_success")
    assert not await farm.database.value(ENDED, job), "its report was handled: the test shows nothing"

    async def has_ended():
        return await farm.database.value(ENDED, job)

    await until(has_ended, within_s=HANDLED_WITHIN_S, what="the end of the job", every_s=POLL_S)
    await farm.quiet()

"""Concurrent jobs per show: never over the limit across dispatchers, and no job is forgotten."""

import asyncio
from uuid import uuid4

import pytest

from rota.accounting.admin import QuotaAdmin
from rota.engine.dispatch.concurrency_limits import ADMIT_JOBS, ConcurrencyLimiter
from rota.engine.dispatch.pending_reader import PendingReader
from rota.engine.submission.submitter import Submitter
from rota.model.errors import InvalidInput
from rota.model.job_states import JobState
from tests.support.jobs import NO_EVENTS, a_show, task
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, gates, hanging, seen
from tests.support.waiting import until

REASONS = sql("SELECT pk_job, reason FROM rota.job")
WAITS = sql("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
SLOTS = sql("SELECT pk_job FROM rota.job_slot")


@pytest.fixture
async def cluster(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        await cluster.show()
        yield cluster
        for gate in gates.values():
            gate.set()
        await cluster.quiet()


async def limit(accounting, number, show="film"):
    await accounting.change(lambda admin: admin.change_show(show, max_jobs=number, actor="test"))


async def limit_is_known(cluster):
    await until(
        lambda: cluster.replica.engine.dispatcher.concurrency_limiter.limited, what="the dispatcher to read the limit"
    )


async def reasons(database):
    return {row["pk_job"]: row["reason"] for row in await database.rows(REASONS)}


async def test_job_over_the_limit_waits_with_a_reason_and_runs_when_another_ends(cluster):
    await limit(cluster.accounting, 1)
    await limit_is_known(cluster)
    await cluster.worker(slots=20)
    hanging("a"), hanging("b")
    first = await cluster.submit("hang", "a", frames=3)
    await cluster.running("a", 3)
    second = await cluster.submit("hang", "b", frames=3)

    async def has_reason():
        return (await reasons(cluster.database)).get(second) == "tenant_limit"

    await until(has_reason, what="the wait reason")
    assert seen["began"] == ["a"] * 3
    gates["a"].set()
    assert await cluster.ended(first) == "SUCCEEDED"
    await cluster.running("b", 3)
    gates["b"].set()
    assert await cluster.ended(second) == "SUCCEEDED"
    assert (await cluster.done(second))["reason"] is None


async def test_retry_of_a_running_job_is_not_blocked_by_a_waiting_job(cluster):
    await limit(cluster.accounting, 1)
    await limit_is_known(cluster)
    await cluster.worker(slots=2)
    first = await cluster.submit("flaky", 3, layer={"retries": 3})
    others = [await cluster.submit("noop") for _ in range(8)]
    assert await cluster.ended(first) == "SUCCEEDED"
    assert {await cluster.ended(job) for job in others} == {"SUCCEEDED"}


async def test_raising_or_removing_the_limit_admits_jobs_at_once(cluster):
    await limit(cluster.accounting, 0)
    await limit_is_known(cluster)
    await cluster.worker(slots=20)
    hanging("x")
    for _ in range(4):
        await cluster.submit("hang", "x")

    async def all_have_reason():
        return list((await reasons(cluster.database)).values()) == ["tenant_limit"] * 4

    await until(all_have_reason, what="a wait reason for every job")
    await limit(cluster.accounting, 2)
    await cluster.running("x", 2)
    assert len(await cluster.database.rows(SLOTS)) == 2
    await limit(cluster.accounting, -1)
    await cluster.running("x", 4)


async def test_job_below_the_limit_that_waits_for_a_worker_does_not_say_tenant_limit(cluster):
    await limit(cluster.accounting, 0)
    await limit_is_known(cluster)
    await cluster.show("short")
    await cluster.worker(slots=1)
    hanging("x")
    waiting = await cluster.submit("hang", "x")

    async def reason_is(expected):
        return (await reasons(cluster.database)).get(waiting) == expected

    await until(lambda: reason_is("tenant_limit"), what="the wait reason")
    hanging("y")
    await cluster.submit("hang", "y", show="short")
    await cluster.running("y")
    await limit(cluster.accounting, 1)
    await until(lambda: reason_is(None), what="the end of the wait reason")
    assert seen["began"] == ["y"]


async def test_running_jobs_count_against_a_new_limit_of_their_show_only(cluster):
    await cluster.worker(slots=20)
    await cluster.show("short")
    hanging("a"), hanging("b")
    first = await cluster.submit("hang", "a")
    await cluster.running("a")
    await limit(cluster.accounting, 1)
    await limit_is_known(cluster)
    second = await cluster.submit("hang", "b")
    assert await cluster.ended(await cluster.submit("noop", show="short")) == "SUCCEEDED"
    assert seen["began"] == ["a"]
    gates["a"].set()
    assert await cluster.ended(first) == "SUCCEEDED"
    await cluster.running("b")
    gates["b"].set()
    assert await cluster.ended(second) == "SUCCEEDED"


async def test_cancelled_waiting_job_holds_no_slot_and_a_cancelled_running_job_frees_its_slot(cluster):
    await limit(cluster.accounting, 1)
    await limit_is_known(cluster)
    await cluster.worker(slots=20)
    hanging("a"), hanging("b")
    first = await cluster.submit("hang", "a")
    await cluster.running("a")
    second, third = await cluster.submit("noop", frames=3), await cluster.submit("hang", "b")
    canceller = cluster.replica.engine.canceller
    for job in (second, first):
        await canceller.terminate(job, JobState.CANCELLED, "cancelled")
    await cluster.running("b")
    gates["b"].set()
    assert await cluster.ended(third) == "SUCCEEDED"


async def test_two_replicas_together_respect_the_limit(cluster):
    await limit(cluster.accounting, 2)
    other = await cluster.server()
    for replica in (cluster.replica, other):
        await until(
            lambda replica=replica: replica.engine.dispatcher.concurrency_limiter.limited,
            what="the dispatcher to read the limit",
        )
    for number in range(3):
        await cluster.worker(f"w{number}", slots=4)
    names = [f"j{number}" for number in range(8)]
    for name in names:
        hanging(name)
    jobs = [await cluster.submit("hang", name) for name in names]
    opened = set()
    while len(opened) < len(names):
        expected = min(len(opened) + 2, len(names))
        await until(
            lambda expected=expected: len(seen.get("began", [])) >= expected, what="as many jobs as the limit allows"
        )
        assert len(set(seen["began"]) - opened) <= 2
        name = next(name for name in seen["began"] if name not in opened)
        opened.add(name)
        gates[name].set()
    assert {await cluster.ended(job) for job in jobs} == {"SUCCEEDED"}


@pytest.fixture
async def limiter(database):
    await a_show(database)
    return ConcurrencyLimiter(database)


async def show_with(database, number):
    change = await QuotaAdmin(database).change_show("film", max_jobs=number, actor="ann")
    return change.after.id


async def submitted(database, number):
    return [one.job for one in await Submitter(database, NO_EVENTS).submit([task() for _ in range(number)])]


async def test_concurrent_admits_never_exceed_the_limit(limiter, database):
    show = await show_with(database, 3)
    jobs = await submitted(database, 12)
    asked = await asyncio.gather(*(limiter.admit(show, jobs[n : n + 4]) for n in range(9)))
    admitted = set().union(*asked)
    assert len(admitted) == 3
    assert await limiter.admit(show, jobs) == admitted
    assert {job for job, reason in (await reasons(database)).items() if reason == "tenant_limit"} == set(
        jobs
    ) - admitted


async def test_admit_waits_for_a_concurrent_uncommitted_admit(limiter, database):
    show = await show_with(database, 1)
    first, second = await submitted(database, 2)
    async with database.transaction() as tx:
        assert await tx.value(ADMIT_JOBS, show, [first]) == [first]
        asking = asyncio.create_task(limiter.admit(show, [second]))

        async def settled():
            return asking.done() or await database.value(WAITS)

        await until(settled, what="a lock waiter")
    assert await asking == set()


async def test_slots_of_ended_jobs_and_of_jobs_that_never_started_are_freed(limiter, database):
    show = await show_with(database, 2)
    jobs = await submitted(database, 5)
    assert await limiter.admit(show, jobs[:2]) == set(jobs[:2])
    assert await limiter.admit(show, jobs[2:]) == set()
    await database.run(sql("DELETE FROM rota.job WHERE pk_job = $1"), jobs[0])
    assert await limiter.admit(show, jobs[2:]) == {jobs[2]}
    await database.run(sql("UPDATE rota.job_slot SET ts_taken = now() - interval '31 s'"))
    await database.run(sql("UPDATE rota.job SET state = 'RUNNING' WHERE pk_job = $1"), jobs[1])
    assert await limiter.admit(show, jobs[3:]) == {jobs[3]}
    assert await limiter.admit(show, jobs[4:]) == set()


async def test_job_with_a_booking_keeps_its_slot_at_any_age(limiter, database):
    show = await show_with(database, 1)
    first, second = await submitted(database, 2)
    await limiter.admit(show, [first])
    await database.run(sql("UPDATE rota.job_slot SET ts_taken = now() - interval '31 s'"))
    await database.run(sql("INSERT INTO rota.proc VALUES (1, $1, $1, $1, $2, $1, $1, $1, 0, 0, 0)"), uuid4(), first)
    assert await limiter.admit(show, [second]) == set()
    await database.run(sql("DELETE FROM rota.proc"))


async def test_only_shows_with_a_limit_are_checked(limiter, database):
    reader = PendingReader(None, database, None, None)
    await limiter.refresh((await reader.read_limits()).limited)
    assert limiter.limited == frozenset()
    show = await show_with(database, 0)
    await limiter.refresh((await reader.read_limits()).limited)
    assert limiter.limited == {show}
    await show_with(database, -1)
    jobs = await submitted(database, 3)
    assert await limiter.admit(show, jobs) == set(jobs)
    assert await database.rows(SLOTS) == []


async def test_invalid_limit_is_refused_and_a_valid_one_is_audited(limiter, database):
    with pytest.raises(InvalidInput, match="not a valid number of jobs"):
        await show_with(database, -2)
    await show_with(database, 5)
    detail = await database.value(sql("SELECT detail::text FROM rota.audit ORDER BY seq DESC LIMIT 1"))
    assert '"max_jobs": 5' in detail or '"max_jobs":5' in detail

"""How many jobs of a show run at once: never more than it may, whoever dispatches, and none is forgotten."""

import asyncio
from uuid import uuid4

import pytest

from rota.accounting.admin import QuotaAdmin
from rota.engine.dispatch.concurrency_limits import ADMIT_JOBS, ConcurrencyLimiter
from rota.engine.submission.submitter import Submitter
from rota.model.errors import InvalidInput
from rota.model.job_states import JobState
from tests.support.jobs import a_show, task
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, gates, hanging, seen
from tests.support.waiting import until

REASONS = sql("SELECT pk_job, reason FROM rota.job")
WAITS = sql("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
SLOTS = sql("SELECT pk_job FROM rota.job_slot")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        yield farm
        for gate in gates.values():
            gate.set()
        await farm.quiet()


async def limit(books, number, show="film"):
    await books.change(lambda admin: admin.change_show(show, max_jobs=number, actor="test"))


async def known(farm):
    await until(lambda: farm.replica.engine.dispatcher.concurrency_limiter.limited, what="the limit being known")


async def reasons(database):
    return {row["pk_job"]: row["reason"] for row in await database.rows(REASONS)}


async def test_a_job_beyond_the_limit_waits_with_that_reason_and_runs_when_one_has_ended(farm):
    await limit(farm.books, 1)
    await known(farm)
    await farm.worker(slots=20)
    hanging("a"), hanging("b")
    first = await farm.submit("hang", "a", frames=3)
    await farm.running("a", 3)
    second = await farm.submit("hang", "b", frames=3)

    async def told():
        return (await reasons(farm.database)).get(second) == "tenant_limit"

    await until(told, what="the reason")
    assert seen["began"] == ["a"] * 3
    gates["a"].set()
    assert await farm.ended(first) == "SUCCEEDED"
    await farm.running("b", 3)
    gates["b"].set()
    assert await farm.ended(second) == "SUCCEEDED"
    assert (await farm.done(second))["reason"] is None


async def test_a_retry_of_a_running_job_is_not_held_up_by_one_that_waits_for_it(farm):
    await limit(farm.books, 1)
    await known(farm)
    await farm.worker(slots=2)
    first = await farm.submit("flaky", 3, layer={"retries": 3})
    others = [await farm.submit("noop") for _ in range(8)]
    assert await farm.ended(first) == "SUCCEEDED"
    assert {await farm.ended(job) for job in others} == {"SUCCEEDED"}


async def test_a_raised_limit_lets_jobs_in_at_once_and_a_removed_one_all_of_them(farm):
    await limit(farm.books, 0)
    await known(farm)
    await farm.worker(slots=20)
    hanging("x")
    for _ in range(4):
        await farm.submit("hang", "x")

    async def all_told():
        return list((await reasons(farm.database)).values()) == ["tenant_limit"] * 4

    await until(all_told, what="every job saying why it waits")
    await limit(farm.books, 2)
    await farm.running("x", 2)
    assert len(await farm.database.rows(SLOTS)) == 2
    await limit(farm.books, -1)
    await farm.running("x", 4)


async def test_what_runs_when_the_limit_comes_counts_and_another_show_is_not_concerned(farm):
    await farm.worker(slots=20)
    await farm.show("short")
    hanging("a"), hanging("b")
    first = await farm.submit("hang", "a")
    await farm.running("a")
    await limit(farm.books, 1)
    await known(farm)
    second = await farm.submit("hang", "b")
    assert await farm.ended(await farm.submit("noop", show="short")) == "SUCCEEDED"
    assert seen["began"] == ["a"]
    gates["a"].set()
    assert await farm.ended(first) == "SUCCEEDED"
    await farm.running("b")
    gates["b"].set()
    assert await farm.ended(second) == "SUCCEEDED"


async def test_a_job_that_is_cancelled_while_it_waits_leaves_nothing_and_one_that_ran_makes_room(farm):
    await limit(farm.books, 1)
    await known(farm)
    await farm.worker(slots=20)
    hanging("a"), hanging("b")
    first = await farm.submit("hang", "a")
    await farm.running("a")
    second, third = await farm.submit("noop", frames=3), await farm.submit("hang", "b")
    ender = farm.replica.engine.canceller
    for job in (second, first):
        await ender.terminate(job, JobState.CANCELLED, "cancelled")
    await farm.running("b")
    gates["b"].set()
    assert await farm.ended(third) == "SUCCEEDED"


async def test_two_replicas_together_let_no_more_in_than_one(farm):
    await limit(farm.books, 2)
    other = await farm.server()
    for replica in (farm.replica, other):
        await until(
            lambda replica=replica: replica.engine.dispatcher.concurrency_limiter.limited, what="the limit being known"
        )
    for number in range(3):
        await farm.worker(f"w{number}", slots=4)
    names = [f"j{number}" for number in range(8)]
    for name in names:
        hanging(name)
    jobs = [await farm.submit("hang", name) for name in names]
    opened = set()
    while len(opened) < len(names):
        wanted = min(len(opened) + 2, len(names))
        await until(lambda wanted=wanted: len(seen.get("began", [])) >= wanted, what="as many as may run")
        assert len(set(seen["began"]) - opened) <= 2
        name = next(name for name in seen["began"] if name not in opened)
        opened.add(name)
        gates[name].set()
    assert {await farm.ended(job) for job in jobs} == {"SUCCEEDED"}


@pytest.fixture
async def tenants(database):
    await a_show(database)
    return ConcurrencyLimiter(database)


async def show_with(database, number):
    change = await QuotaAdmin(database).change_show("film", max_jobs=number, actor="ann")
    return change.after.id


async def submitted(database, number):
    return [one.job for one in await Submitter(database).submit([task() for _ in range(number)])]


async def test_of_many_who_ask_at_once_no_more_are_let_in_than_may_run(tenants, database):
    show = await show_with(database, 3)
    jobs = await submitted(database, 12)
    asked = await asyncio.gather(*(tenants.admit(show, jobs[n : n + 4]) for n in range(9)))
    let_in = set().union(*asked)
    assert len(let_in) == 3
    assert await tenants.admit(show, jobs) == let_in
    assert {job for job, reason in (await reasons(database)).items() if reason == "tenant_limit"} == set(jobs) - let_in


async def test_who_asks_while_another_is_let_in_waits_for_that(tenants, database):
    show = await show_with(database, 1)
    first, second = await submitted(database, 2)
    async with database.transaction() as tx:
        assert await tx.value(ADMIT_JOBS, show, [first]) == [first]
        asking = asyncio.create_task(tenants.admit(show, [second]))

        async def settled():
            return asking.done() or await database.value(WAITS)

        await until(settled, what="somebody waiting")
    assert await asking == set()


async def test_jobs_that_have_ended_make_room_and_those_that_never_began_do_after_a_while(tenants, database):
    show = await show_with(database, 2)
    jobs = await submitted(database, 5)
    assert await tenants.admit(show, jobs[:2]) == set(jobs[:2])
    assert await tenants.admit(show, jobs[2:]) == set()
    await database.run(sql("DELETE FROM rota.job WHERE pk_job = $1"), jobs[0])
    assert await tenants.admit(show, jobs[2:]) == {jobs[2]}
    await database.run(sql("UPDATE rota.job_slot SET ts_taken = now() - interval '31 s'"))
    await database.run(sql("UPDATE rota.job SET state = 'RUNNING' WHERE pk_job = $1"), jobs[1])
    assert await tenants.admit(show, jobs[3:]) == {jobs[3]}
    assert await tenants.admit(show, jobs[4:]) == set()


async def test_one_that_has_something_booked_keeps_its_place_however_old(tenants, database):
    show = await show_with(database, 1)
    first, second = await submitted(database, 2)
    await tenants.admit(show, [first])
    await database.run(sql("UPDATE rota.job_slot SET ts_taken = now() - interval '31 s'"))
    await database.run(sql("INSERT INTO rota.proc VALUES (1, $1, $1, $1, $2, $1, $1, $1, 0, 0, 0)"), uuid4(), first)
    assert await tenants.admit(show, [second]) == set()
    await database.run(sql("DELETE FROM rota.proc"))


async def test_only_shows_with_a_limit_are_asked_about(tenants, database):
    await tenants.refresh()
    assert tenants.limited == frozenset()
    show = await show_with(database, 0)
    await tenants.refresh()
    assert tenants.limited == {show}
    await show_with(database, -1)
    jobs = await submitted(database, 3)
    assert await tenants.admit(show, jobs) == set(jobs)
    assert await database.rows(SLOTS) == []


async def test_a_limit_that_is_none_is_refused_and_one_that_is_set_is_in_the_audit_trail(tenants, database):
    with pytest.raises(InvalidInput, match="not a valid number of jobs"):
        await show_with(database, -2)
    await show_with(database, 5)
    detail = await database.value(sql("SELECT detail::text FROM rota.audit ORDER BY seq DESC LIMIT 1"))
    assert '"max_jobs": 5' in detail or '"max_jobs":5' in detail

"""The Redis mirror of timers and sagas: built from PostgreSQL, kept in line with it, and never required."""

import json
from datetime import UTC, datetime

import pytest

from rota.infra.redis import RedisTarget, connect
from rota.model.workflows.spec import StepSpec
from rota.testing.clock import MovableClock
from rota.workflow.redis_mirror import publisher as redis_mirror_publisher
from rota.workflow.sagas import ACTIVE_SAGAS
from tests.integration.workflow.test_sagas import THREE, undo
from tests.support.jobs import a_show, task
from tests.support.leader_steps import run_steps
from tests.support.queue import sql
from tests.support.workflow_recovery import POLLING, TIMERS, RecoveryHarness
from tests.support.workflows import end_job

DUE = sql("SELECT (extract(epoch FROM ts_due) * 1000)::bigint FROM rota.workflow_timer")


@pytest.fixture
async def harness(database, redis):
    await a_show(database)
    return RecoveryHarness(database, redis)


def delay(name="wait", seconds=3600):
    return StepSpec(id=name, type="delay", delay_sec=seconds)


async def test_timers_are_mirrored_by_due_time_until_they_fire(harness):
    run = await harness.start(delay("wait"), delay("nap", 7200.125), name="flow", timeout_s=9000)
    assert await harness.mirror.flush()
    assert await harness.shown() == {f"{run}:wait:1", f"{run}:nap:1", f"{run}:-:0"}
    first, *_ = await harness.redis.zrange(TIMERS, 0, -1, withscores=True)
    due_ms = await harness.database.value(sql(f"{DUE.text} ORDER BY ts_due LIMIT 1"))
    assert first == (f"flow:{run}:wait:1".encode(), pytest.approx(due_ms / 1000, abs=0.0011))
    await harness.pass_time(3600)
    await harness.advance()
    assert await harness.mirror.flush()
    assert await harness.shown() == {f"{run}:nap:1", f"{run}:-:0"}
    await harness.commands.cancel(run, "ann")
    assert await harness.mirror.flush()
    assert await harness.shown() == set()


async def test_flushed_redis_is_refilled_in_one_pass_and_no_timer_is_late(harness, monkeypatch):
    monkeypatch.setattr("rota.workflow.redis_mirror.sagas.CHUNK", 1)
    runs = [await harness.start(delay(), *THREE) for _ in range(3)]
    for run in runs:
        await harness.end("flight", run=run, value={"ticket": 1})
    await harness.advance()
    await harness.poller.fill(POLLING)
    await harness.redis.flushdb()
    await harness.redis.script_flush()
    await harness.poller.fill(POLLING)
    assert await harness.shown() == {f"{run}:wait:1" for run in runs}
    assert [await harness.stack(run) for run in runs] == [[("flight", "pending", "undo")]] * 3
    await harness.redis.flushdb()
    await harness.pass_time(3600)
    assert await harness.advance() == 3, "timers fire without Redis"


async def test_complete_mirror_is_checked_in_chunks_and_a_short_one_at_once(harness, monkeypatch):
    monkeypatch.setattr("rota.workflow.redis_mirror.timers.CHUNK", 2)
    await harness.declare(delay())
    started = await harness.commands.start_many("film", "flow", [{}] * 5, actor="ann")
    await harness.poller.fill(POLLING)
    assert await harness.redis.zcard(TIMERS) == 5
    # The count matches, but one entry is foreign: each pass checks two more.
    await harness.redis.zrem(TIMERS, f"flow:{max(each.run for each in started)}:wait:1")
    await harness.redis.zadd(TIMERS, {"flow:strange": 1.0})
    sizes = []
    for _ in range(3):
        await harness.poller.fill(POLLING)
        sizes.append(await harness.redis.zcard(TIMERS))
    assert sizes == [5, 5, 6]


async def test_clean_removes_only_entries_without_a_timer(harness):
    run = await harness.start(delay("a"), delay("b", 1.5))
    await harness.mirror.flush()
    await harness.pass_time(400 * 86_400)
    stale_entries = {f"flow:{run}:a:2": 1.0, "flow:00000000-0000-0000-0000-000000000000:a:1": 4e9, "nonsense": 0.0}
    await harness.redis.zadd(TIMERS, stale_entries)
    await harness.redis.rpush("saga:00000000-0000-0000-0000-000000000000:stack", "{}")
    await harness.redis.rpush("saga:film/none%20such:stack", "{}")
    await harness.poller.clean()
    assert await harness.shown() == {f"{run}:a:1", f"{run}:b:1"}
    assert await harness.redis.keys("saga:*") == []
    assert await harness.advance() == 1
    assert set((await harness.states()).values()) == {"SUCCEEDED"}


async def test_saga_stack_lists_next_compensation_first_and_is_locked_during_rollback(harness):
    run = await harness.start(*THREE)
    for step in ("flight", "hotel", "car"):
        await harness.end(step, value={"ticket": 7})
        await harness.advance()
    await harness.mirror.flush()
    assert await harness.stack() == [
        ("car", "pending", "undo"),
        ("hotel", "pending", "undo"),
        ("flight", "pending", "undo"),
    ]
    assert await harness.redis.get(f"saga:{run}:lock") is None

    await harness.end("pay", "FAILED", code="fatal", error="no money")
    await harness.advance()
    await harness.mirror.flush()
    assert [state for _, state, _ in await harness.stack()] == ["running", "pending", "pending"]
    await harness.redis.delete(f"saga:{run}:lock")
    await harness.poller.fill(POLLING)
    assert ACTIVE_SAGAS._value.get() == 1
    fence = int(await harness.redis.get(f"saga:{run}:lock"))
    assert 0 < await harness.redis.pttl(f"saga:{run}:lock") <= 120_000
    assert json.loads(await harness.redis.lindex(f"saga:{run}:stack", 0))["fence"] == fence

    for left in (2, 1, 0):
        await end_next_compensation(harness)
        await harness.mirror.flush()
        assert len(await harness.stack()) == left
    assert await harness.redis.keys("saga:*") == []
    await harness.poller.fill(POLLING)
    assert ACTIVE_SAGAS._value.get() == 0


async def end_next_compensation(harness):
    [row] = await harness.database.rows(sql("SELECT pk_undo FROM rota.saga_entry WHERE state = 'running'"))
    await end_job(harness.database, row["pk_undo"])
    await harness.advance()


async def test_older_saga_state_does_not_overwrite_a_newer_one(harness):
    run = await harness.start(*THREE)
    await harness.end("flight", value={"ticket": 7})
    await harness.advance()
    await harness.mirror.flush()
    newer = json.dumps({"step": "later", "job": "", "state": "pending", "topic": "t", "fence": 10_000})
    await harness.redis.lpush(f"saga:{run}:stack", newer)
    await harness.stacks.fill(0)
    assert (await harness.stack())[0] == ("later", "pending", "t")


async def test_succeeded_run_leaves_no_saga_stack(harness):
    await harness.start(
        StepSpec(id="a", task="book", compensate=undo()), StepSpec(id="b", task="book", depends_on=("a",))
    )
    await harness.end("a")
    await harness.advance()
    await harness.mirror.flush()
    assert len(await harness.stack()) == 1
    await harness.end("b")
    await harness.advance()
    await harness.mirror.flush()
    assert await harness.redis.keys("saga:*") == []


async def test_same_workflow_id_in_two_shows_is_two_sagas(harness):
    await a_show(harness.database, "other", depts=())
    for show in ("film", "other"):
        [job] = await harness.submitter.submit([task(show=show, workflow_id="order {17}", compensation=undo())])
        await end_job(harness.database, job.job)
    await harness.advance()
    await harness.mirror.flush()
    assert sorted(await harness.redis.keys("saga:*")) == [
        *(b"saga:film/order%20%7B17%7D:stack", b"saga:other/order%20%7B17%7D:stack")
    ]
    await harness.poller.clean()
    assert len(await harness.redis.keys("saga:*")) == 2


async def test_full_mirror_queue_drops_and_counts_without_blocking(harness, monkeypatch):
    monkeypatch.setattr(redis_mirror_publisher, "QUEUE_MAX", 2)
    dropped = redis_mirror_publisher.DROPPED.labels("timers", "full")
    before = dropped._value.get()
    await harness.declare(delay())
    await harness.commands.start_many("film", "flow", [{}] * 5, actor="ann")
    assert dropped._value.get() - before == 3
    await harness.mirror.flush()
    assert await harness.redis.zcard(TIMERS) == 2
    await harness.poller.fill(POLLING)
    assert await harness.redis.zcard(TIMERS) == 5


async def test_redis_outage_drops_mirror_updates_and_runs_continue(database):
    await a_show(database)
    async with connect(RedisTarget(url="redis://127.0.0.1:1/0")) as unreachable:
        harness = RecoveryHarness(database, unreachable)
        await harness.start(delay())
        assert not await harness.mirror.flush()
        assert await run_steps(harness.poller, POLLING, "fill") == {}
        await harness.pass_time(3600)
        assert await harness.advance() == 1


async def test_mirror_keys_of_the_wrong_type_are_harmless(harness):
    await harness.redis.set(TIMERS, "mine")
    run = await harness.start(delay(), *THREE)
    await harness.redis.set(f"saga:{run}:stack", "mine")
    await harness.end("flight", value={"ticket": 7})
    await harness.advance()
    assert not await harness.mirror.flush()
    assert await harness.mirror.flush(), "a failed update is not kept"
    assert await run_steps(harness.poller, POLLING) == {}
    assert await harness.redis.get(TIMERS) == b"mine"


async def test_replicas_with_different_clocks_mirror_and_fire_alike(database, redis):
    await a_show(database)
    fast = RecoveryHarness(database, redis, MovableClock(datetime(2040, 1, 1, tzinfo=UTC)))
    slow = RecoveryHarness(database, redis, MovableClock(datetime(1999, 1, 1, tzinfo=UTC)))
    run = await fast.start(delay())
    await fast.mirror.flush()
    [(_, score)] = await redis.zrange(TIMERS, 0, -1, withscores=True)
    due_ms = await database.value(DUE)
    assert score == pytest.approx(due_ms / 1000, abs=0.0011)
    assert [await fast.advance(), await slow.advance()] == [0, 0]
    await fast.pass_time(3600)
    assert [await slow.advance(), await fast.advance()] == [1, 0]
    for each in (fast, slow):
        await each.mirror.flush()
    assert await redis.zcard(TIMERS) == 0
    assert (await fast.timeline(run)).count(("wait", "succeeded")) == 1

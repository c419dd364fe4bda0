"""T1, W1, F1 with Redis and the reconciler: kill -9, pauses, lost replies, a flushed Redis and no Redis at all."""

from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis import Redis

from rota.infra import failpoints
from rota.infra.failpoints import LostReply
from rota.infra.redis import RedisTarget, connect
from rota.model.workflows.spec import StepSpec
from tests.integration.workflow.test_sagas import THREE, undo
from tests.support.jobs import a_show
from tests.support.queue import sessions_over, sql
from tests.support.waiting import until
from tests.support.workflow_recovery import TIMERS, UNSAY, Netted
from tests.support.workflows import end_job

FLOW = (
    StepSpec(id="lost", task="noop"),
    StepSpec(id="a", task="noop", compensate=undo()),
    StepSpec(id="wait", type="delay", delay_sec=3600, depends_on=("a",)),
    StepSpec(id="b", task="noop", depends_on=("a",)),
    StepSpec(id="c", task="noop", depends_on=("lost", "wait", "b")),
)
MIRROR_FAILPOINTS = {"saga.before_tell", "saga.tell", "saga.before_clean", "saga.clean", "saga.mend"}
OWN_FAILPOINTS = MIRROR_FAILPOINTS | {"workflow.before_pruned", "workflow.prune"}
FAILPOINTS = [
    (kind, name)
    for kind, name in failpoints.declared_failpoints()
    if name.split(".")[0] in ("timer", "lock") or name in OWN_FAILPOINTS
]
ADVANCE_FAILPOINTS = {"workflow.after_take", "workflow.before_commit", "workflow.advance"}
ALL_FAILPOINTS = [name for _, name in FAILPOINTS] + sorted(ADVANCE_FAILPOINTS)
MISSING_RUN = "00000000-0000-0000-0000-000000000000"
RUNNING_COMPENSATION = sql("SELECT pk_undo FROM rota.saga_entry WHERE state = 'running'")
EVENTS = sql("SELECT count(*) FROM rota.workflow_event")


async def start_run(room):
    """A run with unprocessed inbox entries, and a Redis mirror with stale entries."""
    await room.redis.zadd(TIMERS, {f"flow:{MISSING_RUN}:wait:7": 1.0})
    await room.redis.rpush(f"saga:{MISSING_RUN}:stack", "{}")
    run = await room.start(*FLOW)
    job = await room.job("lost")
    await room.end("lost")
    await room.database.run(UNSAY, job)
    await room.end("a")
    return run


async def assert_finishes(room):
    """The run ends as it should whatever the fault: nothing was lost or repeated."""
    run = room.run
    await until(lambda: is_settled(room), what="the processing of both job ends")
    await room.desk.resume(run, "ann")
    await run_services(room)
    assert await room.jobs() == ["a", "b", "lost"]
    assert await room.shown() == {f"{run}:wait:1"}
    assert await room.stack() == [("a", "pending", "undo")]
    assert await room.timers() == [(2, 1)]
    await room.end("b")
    await room.pass_time(3600)
    await run_services(room)
    await room.end("c")
    await run_services(room)
    assert set((await room.states()).values()) == {"SUCCEEDED"}
    assert await room.jobs() == ["a", "b", "c", "lost"]
    events = [each for each in await room.told() if each[1] not in ("paused", "resumed")]
    assert len(events) == len(set(events)) == 12
    assert (await room.shown(), await room.redis.keys("saga:*")) == (set(), [])


async def run_services(room):
    async for step in room.keep():
        await step()


async def is_settled(room):
    # The session of a killed process may hold its locks a moment longer.
    if await room.lead() is not None:
        await room.mend()
    states = await room.states()
    return states["lost"] == states["a"] == "SUCCEEDED"


@pytest.fixture
async def room(database, redis):
    await a_show(database)
    return Netted(database, redis)


@pytest.mark.parametrize("place", [name for kind, name in FAILPOINTS if kind == "hit"])
async def test_crash_at_failpoint_loses_and_repeats_nothing(spawn, database_url, redis_url, room, place):
    run = await start_run(room)
    env = {"URL": database_url, "REDIS_URL": redis_url, "RUN": str(run), "CRASH_AT": place}
    client = await spawn("tests.integration.workflow.recovery_client", env=env)
    assert await client.wait() == failpoints.CRASH_EXIT_STATUS, await client.errors()
    await sessions_over(room.database)
    await assert_finishes(room)


class Fault:
    """A fault injected once at a failpoint."""

    def __init__(self, monkeypatch, place, happen):
        self.place, self.happen, self.has_happened = place, happen, False
        monkeypatch.setattr(failpoints, "hit", self)
        monkeypatch.setattr(failpoints, "after_send", self)

    def __call__(self, name):
        if name == self.place and not self.has_happened:
            self.has_happened = True
            self.happen()


async def run_with_fault(room, fault):
    """Run all services of a replica with the fault; failed steps are left to the next round."""
    run = await start_run(room)
    async for step in room.keep():
        with suppress(LostReply):
            await step()
    with suppress(LostReply):
        await room.desk.pause(run, "ann")
    assert fault.has_happened, "the failpoint is reached"


@pytest.mark.parametrize("place", [name for kind, name in FAILPOINTS if kind == "after_send"])
async def test_lost_reply_at_failpoint_repeats_nothing(room, monkeypatch, place):
    def lose():
        raise LostReply(place)

    await run_with_fault(room, Fault(monkeypatch, place, lose))
    await assert_finishes(room)


@pytest.mark.parametrize("place", ALL_FAILPOINTS)
async def test_redis_flush_at_failpoint_is_harmless(room, redis_url, monkeypatch, place):
    with Redis.from_url(redis_url) as other:

        def empty():
            other.flushdb()
            other.script_flush()

        await run_with_fault(room, Fault(monkeypatch, place, empty))
    await assert_finishes(room)


@pytest.mark.parametrize("place", ALL_FAILPOINTS)
async def test_redis_outage_at_failpoint_is_harmless(database, redis, redis_url, proxy, monkeypatch, place):
    await a_show(database)
    server = urlsplit(redis_url)
    redis_proxy = await proxy(server.hostname, server.port)
    async with connect(RedisTarget(url=redis_proxy.url(redis_url))) as client:
        room = Netted(database, client)
        await run_with_fault(room, Fault(monkeypatch, place, redis_proxy.cut))
        assert (await room.states())["b"] == "RUNNING", "runs continue without Redis"
        redis_proxy.heal()
        await client.connection_pool.disconnect()
        await assert_finishes(room)


@pytest.mark.parametrize(
    ("only", "place", "cut_off"),
    [("pause", "lock.after_run", {"LOCK_S": "1"}), ("mend", "lock.before_mend", {"LEASE_S": "1", "HOLDER": "other"})],
)
async def test_process_paused_with_locked_run_is_fenced_and_writes_nothing(
    spawn, database_url, redis_url, room, only, place, cut_off
):
    run = await start_run(room)
    env = {"URL": database_url, "REDIS_URL": redis_url, "RUN": str(run), "ONLY": only, "PAUSE_AT": place, **cut_off}
    client = await spawn("tests.integration.workflow.recovery_client", env=env)
    await until(lambda: is_stopped(client.pid), what="the pause of the client in its transaction")
    assert await room.advance() == 0, "its run is skipped without waiting"
    assert await until(room.advance, what="the end of the paused session") == 1
    await until(lambda: is_settled(room), what="a new leader")
    events = await room.database.value(EVENTS)
    client.resume()
    assert await client.wait() == 0, await client.errors()
    assert await room.database.value(EVENTS) == events, "it has written nothing"
    await assert_finishes(room)


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


COMPENSATION_FAILPOINTS = sorted(
    name
    for _, name in failpoints.declared_failpoints()
    if (name.startswith("saga.") and name not in MIRROR_FAILPOINTS) or name == "workflow.before_commit"
)


@pytest.mark.parametrize("away", [False, True], ids=["emptied", "away"])
@pytest.mark.parametrize("place", COMPENSATION_FAILPOINTS)
async def test_compensation_continues_without_redis(database, redis, redis_url, proxy, monkeypatch, place, away):
    await a_show(database)
    server = urlsplit(redis_url)
    redis_proxy = await proxy(server.hostname, server.port)
    async with connect(RedisTarget(url=redis_proxy.url(redis_url))) as client:
        room = Netted(database, client)
        run = await room.start(*THREE)
        for step in ("flight", "hotel", "car"):
            await room.end(step, value={"ticket": 7})
            await run_services(room)
        with Redis.from_url(redis_url) as other:
            fault = Fault(monkeypatch, place, redis_proxy.cut if away else other.flushdb)
            await room.end("pay", "FAILED", code="fatal")
            for _ in range(3):
                await run_services(room)
                await end_job(database, await database.value(RUNNING_COMPENSATION))
            await run_services(room)
        assert fault.has_happened
        found = await room.looking.saga((await room.looking.get(run)).show_id, str(run))
        assert (found.state, [entry.step for entry in found.entries]) == ("rolled_back", ["car", "hotel", "flight"])
        assert (await room.states(run))[""] == "FAILED"
    await Netted(database, redis).poller.clean(None)
    assert await redis.keys("saga:*") == []


async def test_two_replicas_fire_a_timer_once_and_clear_its_mirror_entry(database, redis, room):
    run = await start_run(room)
    await run_services(room)
    other = Netted(database, redis)
    await room.pass_time(3600)
    fired = [await each.advance() for each in (other, room)]
    assert fired == [1, 0]
    await other.mirror.flush()
    assert await room.shown() == set()
    assert (await room.told(run)).count(("wait", "succeeded")) == 1


async def test_long_outage_with_flushed_redis_fires_each_timer_once(room):
    runs = [await room.start(StepSpec(id="wait", type="delay", delay_sec=60 + n)) for n in range(3)]
    await run_services(room)
    await room.redis.flushdb()
    await room.pass_time(40 * 86_400)
    await room.poller.fill(await room.lead())
    assert await room.shown() == {f"{run}:wait:1" for run in runs}, "an overdue timer is mirrored until it has fired"
    await room.poller.clean(await room.lead())
    assert len(await room.shown()) == 3
    await run_services(room)
    assert await room.shown() == set()
    for run in runs:
        assert (await room.told(run)).count(("wait", "succeeded")) == 1

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
from tests.support.workflow_recovery import DELETE_INBOX_EVENT, TIMERS, RecoveryHarness
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


async def start_run(harness):
    """A run with unprocessed inbox entries, and a Redis mirror with stale entries."""
    await harness.redis.zadd(TIMERS, {f"flow:{MISSING_RUN}:wait:7": 1.0})
    await harness.redis.rpush(f"saga:{MISSING_RUN}:stack", "{}")
    run = await harness.start(*FLOW)
    job = await harness.job("lost")
    await harness.end("lost")
    await harness.database.run(DELETE_INBOX_EVENT, job)
    await harness.end("a")
    return run


async def assert_finishes(harness):
    """The run ends as it should whatever the fault: nothing was lost or repeated."""
    run = harness.run
    await until(lambda: is_settled(harness), what="the processing of both job ends")
    await harness.commands.resume(run, "ann")
    await run_services(harness)
    assert await harness.jobs() == ["a", "b", "lost"]
    assert await harness.shown() == {f"{run}:wait:1"}
    assert await harness.stack() == [("a", "pending", "undo")]
    assert await harness.timers() == [(2, 1)]
    await harness.end("b")
    await harness.pass_time(3600)
    await run_services(harness)
    await harness.end("c")
    await run_services(harness)
    assert set((await harness.states()).values()) == {"SUCCEEDED"}
    assert await harness.jobs() == ["a", "b", "c", "lost"]
    events = [each for each in await harness.timeline() if each[1] not in ("paused", "resumed")]
    assert len(events) == len(set(events)) == 12
    assert (await harness.shown(), await harness.redis.keys("saga:*")) == (set(), [])


async def run_services(harness):
    async for step in harness.keep():
        await step()


async def is_settled(harness):
    # The session of a killed process may hold its locks a moment longer.
    if await harness.lead() is not None:
        await harness.repair()
    states = await harness.states()
    return states["lost"] == states["a"] == "SUCCEEDED"


@pytest.fixture
async def harness(database, redis):
    await a_show(database)
    return RecoveryHarness(database, redis)


@pytest.mark.parametrize("place", [name for kind, name in FAILPOINTS if kind == "hit"])
async def test_crash_at_failpoint_loses_and_repeats_nothing(spawn, database_url, redis_url, harness, place):
    run = await start_run(harness)
    env = {"URL": database_url, "REDIS_URL": redis_url, "RUN": str(run), "CRASH_AT": place}
    client = await spawn("tests.integration.workflow.recovery_client", env=env)
    assert await client.wait() == failpoints.CRASH_EXIT_STATUS, await client.errors()
    await sessions_over(harness.database)
    await assert_finishes(harness)


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


async def run_with_fault(harness, fault):
    """Run all services of a replica with the fault; failed steps are left to the next round."""
    run = await start_run(harness)
    async for step in harness.keep():
        with suppress(LostReply):
            await step()
    with suppress(LostReply):
        await harness.commands.pause(run, "ann")
    assert fault.has_happened, "the failpoint is reached"


@pytest.mark.parametrize("place", [name for kind, name in FAILPOINTS if kind == "after_send"])
async def test_lost_reply_at_failpoint_repeats_nothing(harness, monkeypatch, place):
    def lose():
        raise LostReply(place)

    await run_with_fault(harness, Fault(monkeypatch, place, lose))
    await assert_finishes(harness)


@pytest.mark.parametrize("place", ALL_FAILPOINTS)
async def test_redis_flush_at_failpoint_is_harmless(harness, redis_url, monkeypatch, place):
    with Redis.from_url(redis_url) as other:

        def empty():
            other.flushdb()
            other.script_flush()

        await run_with_fault(harness, Fault(monkeypatch, place, empty))
    await assert_finishes(harness)


@pytest.mark.parametrize("place", ALL_FAILPOINTS)
async def test_redis_outage_at_failpoint_is_harmless(database, redis, redis_url, proxy, monkeypatch, place):
    await a_show(database)
    server = urlsplit(redis_url)
    redis_proxy = await proxy(server.hostname, server.port)
    async with connect(RedisTarget(url=redis_proxy.url(redis_url))) as client:
        harness = RecoveryHarness(database, client)
        await run_with_fault(harness, Fault(monkeypatch, place, redis_proxy.cut))
        assert (await harness.states())["b"] == "RUNNING", "runs continue without Redis"
        redis_proxy.heal()
        await client.connection_pool.disconnect()
        await assert_finishes(harness)


@pytest.mark.parametrize(
    ("only", "place", "cut_off"),
    [("pause", "lock.after_run", {"LOCK_S": "1"}), ("mend", "lock.before_mend", {"LEASE_S": "1", "HOLDER": "other"})],
)
async def test_process_paused_with_locked_run_is_fenced_and_writes_nothing(
    spawn, database_url, redis_url, harness, only, place, cut_off
):
    run = await start_run(harness)
    env = {"URL": database_url, "REDIS_URL": redis_url, "RUN": str(run), "ONLY": only, "PAUSE_AT": place, **cut_off}
    client = await spawn("tests.integration.workflow.recovery_client", env=env)
    await until(lambda: is_stopped(client.pid), what="the pause of the client in its transaction")
    assert await harness.advance() == 0, "its run is skipped without waiting"
    assert await until(harness.advance, what="the end of the paused session") == 1
    await until(lambda: is_settled(harness), what="a new leader")
    events = await harness.database.value(EVENTS)
    client.resume()
    assert await client.wait() == 0, await client.errors()
    assert await harness.database.value(EVENTS) == events, "it has written nothing"
    await assert_finishes(harness)


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
        harness = RecoveryHarness(database, client)
        run = await harness.start(*THREE)
        for step in ("flight", "hotel", "car"):
            await harness.end(step, value={"ticket": 7})
            await run_services(harness)
        with Redis.from_url(redis_url) as other:
            fault = Fault(monkeypatch, place, redis_proxy.cut if away else other.flushdb)
            await harness.end("pay", "FAILED", code="fatal")
            for _ in range(3):
                await run_services(harness)
                await end_job(database, await database.value(RUNNING_COMPENSATION))
            await run_services(harness)
        assert fault.has_happened
        found = await harness.queries.saga((await harness.queries.get(run)).show_id, str(run))
        assert (found.state, [entry.step for entry in found.entries]) == ("rolled_back", ["car", "hotel", "flight"])
        assert (await harness.states(run))[""] == "FAILED"
    await RecoveryHarness(database, redis).poller.clean()
    assert await redis.keys("saga:*") == []


async def test_two_replicas_fire_a_timer_once_and_clear_its_mirror_entry(database, redis, harness):
    run = await start_run(harness)
    await run_services(harness)
    other = RecoveryHarness(database, redis)
    await harness.pass_time(3600)
    fired = [await each.advance() for each in (other, harness)]
    assert fired == [1, 0]
    await other.mirror.flush()
    assert await harness.shown() == set()
    assert (await harness.timeline(run)).count(("wait", "succeeded")) == 1


async def test_long_outage_with_flushed_redis_fires_each_timer_once(harness):
    runs = [await harness.start(StepSpec(id="wait", type="delay", delay_sec=60 + n)) for n in range(3)]
    await run_services(harness)
    await harness.redis.flushdb()
    await harness.pass_time(40 * 86_400)
    await harness.poller.fill(await harness.lead())
    assert await harness.shown() == {f"{run}:wait:1" for run in runs}, "an overdue timer is mirrored until it has fired"
    await harness.poller.clean()
    assert len(await harness.shown()) == 3
    await run_services(harness)
    assert await harness.shown() == set()
    for run in runs:
        assert (await harness.timeline(run)).count(("wait", "succeeded")) == 1

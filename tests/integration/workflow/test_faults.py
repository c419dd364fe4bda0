"""T1, W1, F1 where Redis and the net come in: kill -9, pauses, lost replies, an emptied Redis and none at all."""

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
VIEWS = {"saga.before_tell", "saga.tell", "saga.before_clean", "saga.clean", "saga.mend"}
OWN = VIEWS | {"workflow.before_pruned", "workflow.prune"}
HERE = [
    (kind, name)
    for kind, name in failpoints.declared_failpoints()
    if name.split(".")[0] in ("timer", "lock") or name in OWN
]
ADVANCING = {"workflow.after_take", "workflow.before_commit", "workflow.advance"}
EVERYWHERE = [name for _, name in HERE] + sorted(ADVANCING)
NOBODY = "00000000-0000-0000-0000-000000000000"
UNDONE_BY = sql("SELECT pk_undo FROM rota.saga_entry WHERE state = 'running'")
EVENTS = sql("SELECT count(*) FROM rota.workflow_event")


async def begun(room):
    """A run of which much is to be heard and told, and a Redis that shows what is not there."""
    await room.redis.zadd(TIMERS, {f"flow:{NOBODY}:wait:7": 1.0})
    await room.redis.rpush(f"saga:{NOBODY}:stack", "{}")
    run = await room.start(*FLOW)
    job = await room.job("lost")
    await room.end("lost")
    await room.database.run(UNSAY, job)
    await room.end("a")
    return run


async def finished(room):
    """Whatever happened before, the run ends as it should: nothing was lost, and nothing happened twice."""
    run = room.run
    await until(lambda: settled(room), what="the run to have heard of both jobs")
    await room.desk.resume(run, "ann")
    await kept(room)
    assert await room.jobs() == ["a", "b", "lost"]
    assert await room.shown() == {f"{run}:wait:1"}
    assert await room.stack() == [("a", "pending", "undo")]
    assert await room.timers() == [(2, 1)]
    await room.end("b")
    await room.pass_time(3600)
    await kept(room)
    await room.end("c")
    await kept(room)
    assert set((await room.states()).values()) == {"SUCCEEDED"}
    assert await room.jobs() == ["a", "b", "c", "lost"]
    told = [each for each in await room.told() if each[1] not in ("paused", "resumed")]
    assert len(told) == len(set(told)) == 12
    assert (await room.shown(), await room.redis.keys("saga:*")) == (set(), [])


async def kept(room):
    async for step in room.keep():
        await step()


async def settled(room):
    # A session whose process was killed may hold its locks for a moment more.
    if await room.lead() is not None:
        await room.mend()
    states = await room.states()
    return states["lost"] == states["a"] == "SUCCEEDED"


@pytest.fixture
async def room(database, redis):
    await a_show(database)
    return Netted(database, redis)


@pytest.mark.parametrize("place", [name for kind, name in HERE if kind == "hit"])
async def test_dying_there_loses_and_repeats_nothing(spawn, database_url, redis_url, room, place):
    run = await begun(room)
    env = {"URL": database_url, "REDIS_URL": redis_url, "RUN": str(run), "CRASH_AT": place}
    client = await spawn("tests.integration.workflow.recovery_client", env=env)
    assert await client.wait() == failpoints.CRASH_EXIT_STATUS, await client.errors()
    await sessions_over(room.database)
    await finished(room)


class Trouble:
    """Something that happens at a place, once."""

    def __init__(self, monkeypatch, place, happen):
        self.place, self.happen, self.has_happened = place, happen, False
        monkeypatch.setattr(failpoints, "hit", self)
        monkeypatch.setattr(failpoints, "after_send", self)

    def __call__(self, name):
        if name == self.place and not self.has_happened:
            self.has_happened = True
            self.happen()


async def with_trouble(room, trouble):
    """All that a replica does, with trouble in it; steps that fail are left to the next round."""
    run = await begun(room)
    async for step in room.keep():
        with suppress(LostReply):
            await step()
    with suppress(LostReply):
        await room.desk.pause(run, "ann")
    assert trouble.has_happened, "the place is visited"


@pytest.mark.parametrize("place", [name for kind, name in HERE if kind == "after_send"])
async def test_a_reply_that_is_lost_there_repeats_nothing(room, monkeypatch, place):
    def lose():
        raise LostReply(place)

    await with_trouble(room, Trouble(monkeypatch, place, lose))
    await finished(room)


@pytest.mark.parametrize("place", EVERYWHERE)
async def test_a_redis_that_is_emptied_there_costs_nothing(room, redis_url, monkeypatch, place):
    with Redis.from_url(redis_url) as other:

        def empty():
            other.flushdb()
            other.script_flush()

        await with_trouble(room, Trouble(monkeypatch, place, empty))
    await finished(room)


@pytest.mark.parametrize("place", EVERYWHERE)
async def test_a_redis_that_goes_away_there_costs_nothing(database, redis, redis_url, proxy, monkeypatch, place):
    await a_show(database)
    server = urlsplit(redis_url)
    between = await proxy(server.hostname, server.port)
    async with connect(RedisTarget(url=between.url(redis_url))) as client:
        room = Netted(database, client)
        await with_trouble(room, Trouble(monkeypatch, place, between.cut))
        assert (await room.states())["b"] == "RUNNING", "runs go on without it"
        between.heal()
        await client.connection_pool.disconnect()
        await finished(room)


@pytest.mark.parametrize(
    ("only", "place", "cut_off"),
    [("pause", "lock.after_run", {"LOCK_S": "1"}), ("mend", "lock.before_mend", {"LEASE_S": "1", "HOLDER": "other"})],
)
async def test_who_is_paused_past_its_time_with_a_run_locked_is_cut_off_and_writes_nothing(
    spawn, database_url, redis_url, room, only, place, cut_off
):
    run = await begun(room)
    env = {"URL": database_url, "REDIS_URL": redis_url, "RUN": str(run), "ONLY": only, "PAUSE_AT": place, **cut_off}
    client = await spawn("tests.integration.workflow.recovery_client", env=env)
    await until(lambda: is_stopped(client.pid), what="the client to be paused in its transaction")
    assert await room.advance() == 0, "its run is left for later, and nothing waits"
    assert await until(room.advance, what="PostgreSQL to end the session of who is paused") == 1
    await until(lambda: settled(room), what="somebody else to lead")
    told = await room.database.value(EVENTS)
    client.resume()
    assert await client.wait() == 0, await client.errors()
    assert await room.database.value(EVENTS) == told, "it has written nothing"
    await finished(room)


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


UNDOING = sorted(
    name
    for _, name in failpoints.declared_failpoints()
    if (name.startswith("saga.") and name not in VIEWS) or name == "workflow.before_commit"
)


@pytest.mark.parametrize("away", [False, True], ids=["emptied", "away"])
@pytest.mark.parametrize("place", UNDOING)
async def test_undoing_goes_on_without_redis(database, redis, redis_url, proxy, monkeypatch, place, away):
    await a_show(database)
    server = urlsplit(redis_url)
    between = await proxy(server.hostname, server.port)
    async with connect(RedisTarget(url=between.url(redis_url))) as client:
        room = Netted(database, client)
        run = await room.start(*THREE)
        for step in ("flight", "hotel", "car"):
            await room.end(step, value={"ticket": 7})
            await kept(room)
        with Redis.from_url(redis_url) as other:
            trouble = Trouble(monkeypatch, place, between.cut if away else other.flushdb)
            await room.end("pay", "FAILED", code="fatal")
            for _ in range(3):
                await kept(room)
                await end_job(database, await database.value(UNDONE_BY))
            await kept(room)
        assert trouble.has_happened
        found = await room.looking.saga((await room.looking.get(run)).show_id, str(run))
        assert (found.state, [entry.step for entry in found.entries]) == ("rolled_back", ["car", "hotel", "flight"])
        assert (await room.states(run))[""] == "FAILED"
    await Netted(database, redis).poller.clean(None)
    assert await redis.keys("saga:*") == []


async def test_two_replicas_fire_a_timer_once_and_show_it_no_more(database, redis, room):
    run = await begun(room)
    await kept(room)
    other = Netted(database, redis)
    await room.pass_time(3600)
    fired = [await each.advance() for each in (other, room)]
    assert fired == [1, 0]
    await other.mirror.flush()
    assert await room.shown() == set()
    assert (await room.told(run)).count(("wait", "succeeded")) == 1


async def test_an_outage_of_days_with_an_emptied_redis_fires_each_timer_once(room):
    runs = [await room.start(StepSpec(id="wait", type="delay", delay_sec=60 + n)) for n in range(3)]
    await kept(room)
    await room.redis.flushdb()
    await room.pass_time(40 * 86_400)
    await room.poller.fill(await room.lead())
    assert await room.shown() == {f"{run}:wait:1" for run in runs}, "overdue is shown until it has fired"
    await room.poller.clean(await room.lead())
    assert len(await room.shown()) == 3
    await kept(room)
    assert await room.shown() == set()
    for run in runs:
        assert (await room.told(run)).count(("wait", "succeeded")) == 1

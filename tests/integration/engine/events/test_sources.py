"""What a farm tells while it works: jobs, workers, dead letters and changes; and the moments of one job."""

import asyncio
import time

import pytest

from rota.engine.cluster.membership import ClusterMembership
from rota.engine.events.audit_source import LAST_ENTRY
from rota.engine.events.server_presence import ServerPresence, subject_of
from rota.infra.clock import SystemClock
from rota.model.errors import NotFound
from rota.model.events import EventFilter
from rota.model.ids import JobId, uuid7
from rota.model.job_states import JobState
from tests.integration.engine.events.events_support import Reading
from tests.support.replica_and_worker import Farm, hanging
from tests.support.waiting import until


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        yield farm


def told(events):
    return [(event.kind, event.show, event.facts.get("topic")) for event in events]


async def test_the_ways_of_jobs_are_told_in_order_with_their_show(farm):
    await farm.show()
    await farm.worker()
    engine = farm.replica.engine
    async with engine.event_stream.subscribe(EventFilter()):
        before = engine.event_stream.place
    gate = hanging("slow")
    farm.submitter = engine.submitter
    job = await farm.submit("hang", "slow")
    reading = Reading(engine.event_stream, EventFilter(job=job), before)
    await reading.until(3)
    gate.set()
    assert await farm.ended(job) == "SUCCEEDED"
    await reading.until(4)
    assert told(reading.events) == [
        (f"job.{state}", "film", "default") for state in ("scheduled", "dispatched", "running", "succeeded")
    ]
    failed = await farm.submit("boom")
    ended = await Reading(engine.event_stream, EventFilter(job=failed, kinds=("job.failed",)), before).until(1)
    assert ended[0].job == failed
    assert ended[0].facts.keys() == {"topic"}  # never what went wrong in words


async def test_a_cancelled_job_and_a_retry_are_told(farm):
    await farm.show()
    engine = farm.replica.engine
    async with engine.event_stream.subscribe(EventFilter()):
        before = engine.event_stream.place
    job = await farm.submit("noop")
    await engine.canceller.terminate(job, JobState.CANCELLED, "cancelled")
    engine.event_publisher.emit_job_retried(job, "film", JobId(uuid7(1, bytes(10))))
    events = await Reading(engine.event_stream, EventFilter(job=job), before).until(2)
    assert [event.kind for event in events] == ["job.cancelled", "job.retried"]
    assert events[1].facts == {"as": str(uuid7(1, bytes(10)))}


async def test_workers_that_come_and_go_are_told(farm):
    await farm.show()
    engine = farm.replica.engine
    async with engine.event_stream.subscribe(EventFilter()):
        before = engine.event_stream.place
    end = await farm.worker("w1")
    reading = Reading(engine.event_stream, EventFilter(kinds=("worker",)), before)
    [came] = await reading.until(1)
    assert (came.kind, came.show, came.facts["name"], came.facts["pool"]) == ("worker.came", None, "w1", "local")
    await end()
    await until(lambda: reading.until(2, within_s=15), within_s=20)
    assert reading.events[-1].kind in ("worker.draining", "worker.gone")


async def test_a_frame_that_nobody_can_run_is_told_as_a_dead_letter(farm):
    await farm.show()
    engine = farm.replica.engine
    async with engine.event_stream.subscribe(EventFilter()):
        before = engine.event_stream.place
    job = await farm.submit("noop", labels={"preferred_pool": "mars"})
    assert await farm.ended(job) == "FAILED"
    [letter] = await Reading(engine.event_stream, EventFilter(kinds=("dlq",)), before).until(1)
    assert (letter.kind, letter.show, letter.job) == ("dlq.added", "film", job)
    assert letter.facts == {"what": "frame", "reason": "no_pool_mapping"}


async def test_what_people_change_is_told_from_the_audit_trail_to_those_who_see_the_show(farm):
    engine = farm.replica.engine
    await farm.show("film")
    await farm.show("other")
    async with engine.event_stream.subscribe(EventFilter()):
        before = engine.event_stream.place
    await farm.books.change(lambda admin: admin.change_subscription("film", "local", burst=7, actor="ann"))
    await farm.books.change(lambda admin: admin.change_subscription("other", "local", burst=8, actor="ann"))
    await farm.books.change(lambda admin: admin.create_pool("gpu", actor="ann"))
    [film] = [show.id for show in await farm.books.admin.shows() if show.name == "film"]
    wanted = ("subscription.change", "pool.create")
    events = [
        event
        for event in await Reading(engine.event_stream, EventFilter(kinds=wanted), before).until(3)
        if event.facts["what"] != "pool:local"
    ]
    assert [(event.kind, event.show, event.facts["what"]) for event in events[-3:]] == [
        ("subscription.change", "film", "subscription:film/local"),
        ("subscription.change", "other", "subscription:other/local"),
        ("pool.create", None, "pool:gpu"),
    ]
    assert all("ann" not in str(event) for event in events)
    only = await Reading(engine.event_stream, EventFilter(shows=frozenset({film}), kinds=wanted), before).until(1)
    assert [event.facts["what"] for event in only] == ["subscription:film/local"]


async def test_changes_are_told_once_whoever_leads(farm):
    await farm.show()
    bus, audit = farm.replica.bus, farm.replica.engine._audit
    before = await until(lambda: _told_all(farm, audit), what="the trail to be told")
    await farm.books.change(lambda admin: admin.create_pool("new", actor="ann"))
    await until(lambda: _told_all(farm, audit, after=before), what="the change to be told")
    state = await bus.stream_state("EVENTS")
    # A leader that was paused between reading the trail and telling it.
    assert await audit.publish_after(before) == before + 1
    assert await bus.stream_state("EVENTS") == state


async def _told_all(farm, audit, after=0):
    """Up to where, when that is all of it."""
    head, stored = await farm.database.value(LAST_ENTRY), await farm.replica.bus.last_message("EVENTS", "event.audited")
    return head if stored and head > after and await audit.last_published_seq() == head else 0


async def test_the_moments_of_a_job_are_told_exactly_and_end_with_it(farm):
    await farm.show()
    await farm.worker()
    histories = farm.replica.engine.histories
    gate = hanging("slow")
    job = await farm.submit("hang", "slow")
    async with histories.watch(job) as watch:
        told, began = [], time.monotonic()
        while not watch.ended:
            told += await watch.next_entries(5)
            if any(moment.state is JobState.RUNNING for _, moment in told):
                gate.set()
        assert time.monotonic() - began < 5
    kept = (await farm.jobs.get(job)).history
    assert told == list(enumerate(kept, 1))
    for after in range(len(kept) + 1):
        async with histories.watch(job, after) as watch:
            assert await watch.next_entries(5) == told[after:]
            assert watch.ended
    assert not histories._watches


async def test_moments_are_told_without_any_event(farm, monkeypatch):
    await farm.show()
    await farm.worker()
    histories = farm.replica.engine.histories
    monkeypatch.setattr(histories._has_changes, "set", lambda: None)  # no event wakes it
    gate = hanging("slow")
    job = await farm.submit("hang", "slow")
    await farm.running("slow")
    async with histories.watch(job) as watch:
        gate.set()
        async with asyncio.timeout(10):
            while not watch.ended:
                await watch.next_entries(5)


async def test_a_job_that_nobody_knows_cannot_be_watched(farm):
    with pytest.raises(NotFound):
        async with farm.replica.engine.histories.watch(JobId(uuid7(1, bytes(10)))):
            pass
    assert not farm.replica.engine.histories._watches


class Later(SystemClock):
    """A minute from now."""

    def now_ms(self):
        return super().now_ms() + 60_000


async def test_a_server_that_went_without_a_word_is_told_with_a_gap_and_one_that_said_so_is_not(farm):
    engine = farm.replica.engine
    async with engine.event_stream.subscribe(EventFilter()):
        before = engine.event_stream.place
    servers = ServerPresence(farm.replica.bus, engine.members, Later())
    assert await servers.report_lost_servers() == []
    clean, dead = (
        ServerPresence(servers.bus, ClusterMembership(servers.bus, "clean/1")),
        ServerPresence(servers.bus, ClusterMembership(servers.bus, "dead/2")),
    )
    for one in (clean, dead):
        await one._publish([one._event_group("server.came", one.members.name)])
    await dead._publish([])  # as it does from time to time
    await clean._publish([clean._event_group("server.gone", "clean/1")])
    members = engine.members
    await until(lambda: members.hears_itself_since is not None)
    members.hears_itself_since -= 60
    assert await servers.report_lost_servers() == [subject_of("dead/2")]
    reading = Reading(engine.event_stream, EventFilter(kinds=("server",)), before)
    events = await reading.until(5)
    assert [(event.kind, event.facts.get("name", "")) for event in events] == [
        ("server.came", "clean/1"),
        ("server.came", "dead/2"),
        ("server.gone", "clean/1"),
        ("server.lost", "dead/2"),
        ("reset", ""),
    ]
    assert events[-1].facts == {"because": "server_lost"}
    state = await farm.replica.bus.stream_state("EVENTS")
    assert await servers.report_lost_servers() == []
    assert await farm.replica.bus.stream_state("EVENTS") == state


async def test_a_server_says_when_it_comes_and_after_its_last_event_that_it_goes(farm):
    engine = farm.replica.engine
    async with engine.event_stream.subscribe(EventFilter()):
        before = engine.event_stream.place
    other = await farm.server()
    name = other.engine.members.name
    reading = Reading(engine.event_stream, EventFilter(), before)
    other.engine.event_publisher.emit("worker.came", name="last")
    other.supervisor.request_stop()
    for service in reversed(other.supervisor.services):
        await service.stop(5)
    told = [(event.kind, event.facts.get("name")) for event in await reading.until(3)]
    assert told[-3:] == [("server.came", name), ("worker.came", "last"), ("server.gone", name)]

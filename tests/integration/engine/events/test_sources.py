"""Events of jobs, workers, servers, dead letters and the audit log; and the history of one job."""

import asyncio
import time

import pytest

from rota.engine.cluster.membership import ClusterMembership
from rota.engine.events.audit_source import LAST_ENTRY
from rota.engine.events.server_presence import ServerPresence, subject_of
from rota.infra import failpoints
from rota.infra.clock import SystemClock
from rota.model.errors import NotFound
from rota.model.events import EventFilter
from rota.model.ids import JobId, uuid7
from rota.model.job_states import JobState
from tests.integration.engine.events.events_support import Reading
from tests.support.replica_and_worker import Farm, hanging
from tests.support.waiting import until


@pytest.fixture
async def cluster(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        yield cluster


def summaries(events):
    return [(event.kind, event.show, event.facts.get("topic")) for event in events]


async def test_job_state_events_are_published_in_order_with_their_show(cluster):
    await cluster.show()
    await cluster.worker()
    engine = cluster.replica.engine
    async with engine.event_stream.subscribe(EventFilter()):
        before = engine.event_stream.place
    gate = hanging("slow")
    cluster.submitter = engine.submitter
    job = await cluster.submit("hang", "slow")
    reading = Reading(engine.event_stream, EventFilter(job=job), before)
    await reading.until(3)
    gate.set()
    assert await cluster.ended(job) == "SUCCEEDED"
    await reading.until(4)
    assert summaries(reading.events) == [
        (f"job.{state}", "film", "default") for state in ("scheduled", "dispatched", "running", "succeeded")
    ]
    failed = await cluster.submit("boom")
    ended = await Reading(engine.event_stream, EventFilter(job=failed, kinds=("job.failed",)), before).until(1)
    assert ended[0].job == failed
    assert ended[0].facts.keys() == {"topic"}  # never the error text


async def test_job_whose_end_lost_its_commit_reply_is_announced_by_a_reset(cluster, monkeypatch):
    await cluster.show()
    engine = cluster.replica.engine
    async with engine.event_stream.subscribe(EventFilter()):
        before = engine.event_stream.place
    job = await cluster.submit("leave", "a.txt")
    finish, armed = engine.finisher.finish_attempts, set()

    async def finish_without_a_reply(*args):
        armed.add(asyncio.current_task())
        return await finish(*args)

    def lose_the_reply(place):
        if place == "postgres.commit" and asyncio.current_task() in armed:
            monkeypatch.undo()
            raise failpoints.LostReply

    monkeypatch.setattr(engine.finisher, "finish_attempts", finish_without_a_reply)
    monkeypatch.setattr(failpoints, "after_send", lose_the_reply)
    await cluster.worker()
    [reset] = await Reading(engine.event_stream, EventFilter(kinds=("reset",)), before).until(1, within_s=5)
    assert reset.facts == {"because": "unconfirmed"}
    assert await cluster.ended(job) == "SUCCEEDED"


async def test_cancelled_and_retried_jobs_publish_events(cluster):
    await cluster.show()
    engine = cluster.replica.engine
    async with engine.event_stream.subscribe(EventFilter()):
        before = engine.event_stream.place
    job = await cluster.submit("noop")
    await engine.canceller.terminate(job, JobState.CANCELLED, "cancelled")
    engine.event_publisher.emit_job_retried(job, "film", JobId(uuid7(1, bytes(10))))
    events = await Reading(engine.event_stream, EventFilter(job=job), before).until(2)
    assert [event.kind for event in events] == ["job.cancelled", "job.retried"]
    assert events[1].facts == {"as": str(uuid7(1, bytes(10)))}


async def test_worker_arrival_and_departure_publish_events(cluster):
    await cluster.show()
    engine = cluster.replica.engine
    async with engine.event_stream.subscribe(EventFilter()):
        before = engine.event_stream.place
    end = await cluster.worker("w1")
    reading = Reading(engine.event_stream, EventFilter(kinds=("worker",)), before)
    [came] = await reading.until(1)
    assert (came.kind, came.show, came.facts["name"], came.facts["pool"]) == ("worker.came", None, "w1", "local")
    await end()
    await until(lambda: reading.until(2, within_s=15), within_s=20)
    assert reading.events[-1].kind in ("worker.draining", "worker.gone")


async def test_frame_without_a_pool_publishes_a_dead_letter_event(cluster):
    await cluster.show()
    engine = cluster.replica.engine
    async with engine.event_stream.subscribe(EventFilter()):
        before = engine.event_stream.place
    job = await cluster.submit("noop", labels={"preferred_pool": "mars"})
    assert await cluster.ended(job) == "FAILED"
    [dead_letter] = await Reading(engine.event_stream, EventFilter(kinds=("dlq",)), before).until(1)
    assert (dead_letter.kind, dead_letter.show, dead_letter.job) == ("dlq.added", "film", job)
    assert dead_letter.facts == {"what": "frame", "reason": "no_pool_mapping"}


async def test_audit_entries_are_published_to_readers_who_may_see_the_show(cluster):
    engine = cluster.replica.engine
    await cluster.show("film")
    await cluster.show("other")
    async with engine.event_stream.subscribe(EventFilter()):
        before = engine.event_stream.place
    await cluster.accounting.change(lambda admin: admin.change_subscription("film", "local", burst=7, actor="ann"))
    await cluster.accounting.change(lambda admin: admin.change_subscription("other", "local", burst=8, actor="ann"))
    await cluster.accounting.change(lambda admin: admin.create_pool("gpu", actor="ann"))
    [film] = [show.id for show in await cluster.accounting.admin.shows() if show.name == "film"]
    kinds = ("subscription.change", "pool.create")
    reading = Reading(engine.event_stream, EventFilter(kinds=kinds), before)
    while "pool:gpu" not in [event.facts["what"] for event in reading.events]:  # entries from before may come, too
        await reading.until(len(reading.events) + 1)
    assert [(event.kind, event.show, event.facts["what"]) for event in reading.events[-3:]] == [
        ("subscription.change", "film", "subscription:film/local"),
        ("subscription.change", "other", "subscription:other/local"),
        ("pool.create", None, "pool:gpu"),
    ]
    assert all("ann" not in str(event) for event in reading.events)
    only = await Reading(engine.event_stream, EventFilter(shows=frozenset({film}), kinds=kinds), before).until(1)
    assert [event.facts["what"] for event in only] == ["subscription:film/local"]


async def test_audit_entries_are_published_once_across_leaders(cluster):
    await cluster.show()
    bus, audit = cluster.replica.bus, cluster.replica.engine._audit
    before = await until(lambda: _last_published(cluster, audit), what="the audit log to be published")
    await cluster.accounting.change(lambda admin: admin.create_pool("new", actor="ann"))
    await until(lambda: _last_published(cluster, audit, after=before), what="the change to be published")
    state = await bus.stream_state("EVENTS")
    # As a leader that was paused between reading the audit log and publishing it.
    assert await audit.publish_after(before) == before + 1
    assert await bus.stream_state("EVENTS") == state


async def _last_published(cluster, audit, after=0):
    """The last audit sequence number if all entries are published, otherwise 0."""
    head, stored = (
        await cluster.database.value(LAST_ENTRY),
        await cluster.replica.bus.last_message("EVENTS", "event.audited"),
    )
    return head if stored and head > after and await audit.last_published_seq() == head else 0


async def test_history_watch_returns_every_entry_and_ends_with_the_job(cluster):
    await cluster.show()
    await cluster.worker()
    histories = cluster.replica.engine.histories
    gate = hanging("slow")
    job = await cluster.submit("hang", "slow")
    async with histories.watch(job) as watch:
        entries, began = [], time.monotonic()
        while not watch.ended:
            entries += await watch.next_entries(5)
            if any(entry.state is JobState.RUNNING for _, entry in entries):
                gate.set()
        assert time.monotonic() - began < 5
    history = (await cluster.jobs.get(job)).history
    assert entries == list(enumerate(history, 1))
    for after in range(len(history) + 1):
        async with histories.watch(job, after) as watch:
            assert await watch.next_entries(5) == entries[after:]
            assert watch.ended
    assert not histories._watches


async def test_history_watch_works_without_events(cluster, monkeypatch):
    await cluster.show()
    await cluster.worker()
    histories = cluster.replica.engine.histories
    monkeypatch.setattr(histories._has_changes, "set", lambda: None)  # no event wakes the watch
    gate = hanging("slow")
    job = await cluster.submit("hang", "slow")
    await cluster.running("slow")
    async with histories.watch(job) as watch:
        gate.set()
        async with asyncio.timeout(10):
            while not watch.ended:
                await watch.next_entries(5)


async def test_history_watch_of_an_unknown_job_is_refused(cluster):
    with pytest.raises(NotFound):
        async with cluster.replica.engine.histories.watch(JobId(uuid7(1, bytes(10)))):
            pass
    assert not cluster.replica.engine.histories._watches


class ClockAhead(SystemClock):
    """A minute ahead."""

    def now_ms(self):
        return super().now_ms() + 60_000


def a_member(bus, name):
    return ClusterMembership(bus, lambda _owns: None, lambda: None, name)


async def test_lost_server_publishes_a_reset_and_a_stopped_one_does_not(cluster):
    engine = cluster.replica.engine
    async with engine.event_stream.subscribe(EventFilter()):
        before = engine.event_stream.place
    servers = ServerPresence(cluster.replica.bus, engine.members, ClockAhead())
    assert await servers.report_lost_servers() == []
    clean, dead = (
        ServerPresence(servers.bus, a_member(servers.bus, "clean/1")),
        ServerPresence(servers.bus, a_member(servers.bus, "dead/2")),
    )
    for one in (clean, dead):
        await one._publish([one._event_group("server.came", one.members.name)])
    await dead._publish([])  # its periodic message
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
    state = await cluster.replica.bus.stream_state("EVENTS")
    assert await servers.report_lost_servers() == []
    assert await cluster.replica.bus.stream_state("EVENTS") == state


async def test_server_publishes_its_start_and_after_its_last_event_its_stop(cluster):
    engine = cluster.replica.engine
    async with engine.event_stream.subscribe(EventFilter()):
        before = engine.event_stream.place
    other = await cluster.server()
    name = other.engine.members.name
    reading = Reading(engine.event_stream, EventFilter(), before)
    other.engine.event_publisher.emit("worker.came", name="last")
    other.supervisor.request_stop()
    for service in reversed(other.supervisor.services):
        await service.stop(5)
    events = [(event.kind, event.facts.get("name")) for event in await reading.until(3)]
    assert events[-3:] == [("server.came", name), ("worker.came", "last"), ("server.gone", name)]

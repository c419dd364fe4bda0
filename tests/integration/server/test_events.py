"""Event streams over HTTP: resuming, visibility, filters, misbehaving clients and shutdown."""

import asyncio
import gc
import time
from pathlib import Path

import httpx
import pytest

from rota.model.identity.api_key_format import parse_key
from rota.model.ids import JobId, uuid7
from rota.server.access import ApiKeyStore
from rota.server.http import open_streams, sse
from rota.server.http.middleware import rate_limit
from tests.integration.engine.events.events_support import job
from tests.integration.server.sse_support import ApiFarm, raw, streaming, streams_of
from tests.support.harness.effort import effort
from tests.support.replica_and_worker import hanging
from tests.support.waiting import until

RECONNECTS = effort(2_000, 10_000)


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with ApiFarm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        yield farm


@pytest.fixture
def publisher(farm):
    return farm.replica.engine.event_publisher


def emit_jobs(publisher, first, count, show="film", kind="job.succeeded"):
    publisher.emit(kind, show=show, jobs=[job(n) for n in range(first, first + count)], topic="t")


def numbers(events):
    return [int(event["data"]["job"].replace("-", ""), 16) for event in events]


async def test_job_events_are_streamed_from_submission_to_end(farm):
    await farm.worker()
    key = await farm.key()
    farm.submitter = farm.replica.engine.submitter
    gate = hanging("slow")
    async with streaming(farm.replica, key, kind="job") as client:
        assert client.response.headers["content-type"].startswith("text/event-stream")
        await client.opened()
        submitted = await farm.submit("hang", "slow")
        events = await client.some(3)
        gate.set()
        events += await client.some(1)
    assert [event["event"] for event in events] == ["job.scheduled", "job.dispatched", "job.running", "job.succeeded"]
    assert {event["data"]["job"] for event in events} == {str(submitted)}
    assert {event["data"]["show"] for event in events} == {"film"}
    assert all(event["id"] == event["data"]["id"] for event in events)


async def test_head_of_a_stream_or_a_wait_answers_at_once_and_holds_no_slot(farm):
    farm.submitter = farm.replica.engine.submitter
    key, job = await farm.key(), await farm.submit("noop")
    headers = {"authorization": f"Bearer {key}"}
    waits = (f"/jobs/{job}?wait=60", f"/jobs/{job}/logs/stdout?follow=true", f"/jobs/{job}/logs/log/chunks?follow=true")
    async with httpx.AsyncClient(base_url=farm.replica.listen_url + "/api/v1", timeout=10, verify=False) as client:
        for path in ("/events", f"/jobs/{job}/events", "/events", *waits):
            answer = await client.head(path, headers=headers)
            assert (answer.status_code, answer.content) == (200, b""), path
            assert not streams_of(farm.replica)._open, path
            assert rate_limit.REQUESTS_WAITING._value.get() == 0, path
        assert (await client.head("/events?after=nonsense", headers=headers)).status_code == 400


async def test_stream_resumes_after_any_event_without_loss_or_duplicates(farm, publisher):
    key = await farm.key()
    other = await farm.server()
    async with streaming(farm.replica, key, kind="job") as client:
        await client.opened()
        start = client.last
        for first in range(0, 30, 3):
            emit_jobs(publisher, first, 3)
            await publisher.publish()
        await until(lambda: other.engine.event_stream.place == farm.replica.engine.event_stream.place)
        whole = await client.some(30)
        assert numbers(whole) == list(range(30))
    for cut, last in enumerate([start, *(event["id"] for event in whole)]):
        server = (farm.replica, other)[cut % 2]
        named = {"last": last} if cut % 3 else {"after": last}
        async with streaming(server, key, kind="job", **named) as client:
            rest = await client.some(30 - cut)
            assert [event["id"] for event in rest] == [event["id"] for event in whole[cut:]], f"cut after {cut}"


async def test_stream_resumes_on_a_restarted_server(farm, publisher):
    key = await farm.key()
    async with streaming(farm.replica, key, kind="job") as client:
        await client.opened()
        start = client.last
        emit_jobs(publisher, 0, 5)
        seen = await client.some(2)
    later = await farm.server()  # as after a restart: nothing in memory
    async with streaming(later, key, last=seen[-1]["id"], kind="job") as client:
        assert numbers(await client.some(3)) == [2, 3, 4]
    async with streaming(later, key, last=start, kind="job") as client:
        assert numbers(await client.some(5)) == [0, 1, 2, 3, 4]


async def test_unknown_event_id_gets_reset_and_invalid_parameters_are_refused(farm):
    key = await farm.key()
    async with streaming(farm.replica, key, last="abc-12-0") as client:
        event = await client.next()
        assert (event["event"], event["data"]["facts"]) == ("reset", {"because": "unknown"})
    for wrong in ({"last": "nonsense"}, {"kind": "job.exploded"}, {"job": "x"}):
        async with streaming(farm.replica, key, **wrong) as client:
            await client.response.aread()
            assert client.response.status_code == 400
            assert client.response.json()["code"] == "invalid_input"


async def test_single_show_key_sees_no_events_of_other_shows(farm, publisher):
    await farm.show("secret")
    all_shows, film_only = await farm.key("all"), await farm.key("film", show="film")
    async with streaming(farm.replica, all_shows) as all_events, streaming(farm.replica, film_only) as film:
        await all_events.opened()
        await film.opened()
        emit_jobs(publisher, 0, 2, "secret")
        publisher.emit("worker.came", worker="w", name="w", pool="p")
        emit_jobs(publisher, 2, 1, "gone-show")
        await farm.accounting.change(lambda admin: admin.create_folder("secret", "x", actor="ann"))
        emit_jobs(publisher, 3, 1, "film")
        await until(lambda: _next_kind_in(all_events, {"folder.create"}), within_s=10)
        emit_jobs(publisher, 4, 1, "film")
        seen = [await film.next()]
        while str(job(4)) != seen[-1]["data"]["job"]:
            seen.append(await film.next())
        assert {event["data"]["show"] for event in seen} == {"film"}
        assert numbers(event for event in seen if event["data"]["job"]) == [3, 4]
        assert all("secret" not in str(event) for event in seen)
    hidden = await farm.submit("noop", show="secret")
    async with streaming(farm.replica, film_only, f"/api/v1/jobs/{hidden}/events") as client:
        await client.response.aread()
        unknown = client.response.json()
        assert client.response.status_code == 404
    missing = JobId(uuid7(1, bytes(10)))
    async with streaming(farm.replica, film_only, f"/api/v1/jobs/{missing}/events") as client:
        await client.response.aread()
        assert client.response.json()["detail"].replace(str(missing), str(hidden)) == unknown["detail"]


async def _next_kind_in(client, kinds):
    event = await client.next()
    return event["event"] in kinds


async def test_stream_with_unknown_key_is_refused(farm):
    for path in ("/api/v1/events", f"/api/v1/jobs/{uuid7(1, bytes(10))}/events"):
        async with streaming(farm.replica, "rota_0000000000_" + "0" * 39, path) as client:
            assert client.response.status_code == 401


async def test_stream_filters_by_show_job_and_kind(farm, publisher):
    await farm.show("other")
    key = await farm.key()
    async with (
        streaming(farm.replica, key, show="other", kind="job") as show,
        streaming(farm.replica, key, job=str(job(7))) as one,
        streaming(farm.replica, key, kind="worker,job.failed") as kind,
    ):
        for client in (show, one, kind):
            await client.opened()
        emit_jobs(publisher, 5, 5)
        emit_jobs(publisher, 20, 1, kind="job.failed")
        emit_jobs(publisher, 30, 1, "other")
        publisher.emit("worker.lost", worker="w", name="w", pool="p")
        emit_jobs(publisher, 7, 1, "other", kind="job.cancelled")
        assert numbers(await show.some(2)) == [30, 7]
        assert numbers(await one.some(2)) == [7, 7]
        assert [event["event"] for event in await kind.some(2)] == ["job.failed", "worker.lost"]


async def test_job_history_stream_is_complete_and_resumes_after_any_entry(farm):
    await farm.worker()
    key = await farm.key()
    gate = hanging("slow")
    submitted = await farm.submit("hang", "slow")
    path = f"/api/v1/jobs/{submitted}/events"
    async with streaming(farm.replica, key, path) as client:
        received = []
        while (event := await client.next()) is not None:
            received.append(event)
            if event["event"] == "job.running":
                gate.set()
    history = (await farm.jobs.get(submitted)).history
    assert [event["event"] for event in received] == [f"job.{moment.state.lower()}" for moment in history]
    assert [event["id"] for event in received] == [str(number) for number in range(1, len(history) + 1)]
    for cut in range(len(history)):
        async with streaming(farm.replica, key, path, last=str(cut)) as client:
            assert await client.some(len(history) - cut) == received[cut:]
            assert await client.next() is None
    async with streaming(farm.replica, key, path, last=str(len(history))) as client:
        assert client.response.status_code == 204  # browsers do not reconnect after this


async def test_revoked_or_expired_key_loses_its_streams_within_seconds(farm):
    revoked, lasting = await farm.key("revoked"), await farm.key("lasting")
    expiring = await farm.key("expiring", expires_s=1.5)
    async with (
        streaming(farm.replica, revoked) as first,
        streaming(farm.replica, expiring) as second,
        streaming(farm.replica, lasting) as third,
    ):
        for client in (first, second, third):
            await client.opened()
        await ApiKeyStore(farm.database).revoke(parse_key(revoked).id, actor="test")
        assert await first.ended(within_s=open_streams.KEY_CHECK_INTERVAL_S + 3)
        assert await second.ended(within_s=open_streams.KEY_CHECK_INTERVAL_S + 5)
        with pytest.raises(TimeoutError):
            await third.ended(within_s=0.1)


async def test_key_that_loses_its_show_loses_its_streams(farm):
    key = await farm.key("film", show="film")
    async with streaming(farm.replica, key) as client:
        await client.opened()
        await farm.accounting.change(lambda admin: admin.rename_show("film", "movie", actor="ann"))
        assert await client.ended(within_s=open_streams.KEY_CHECK_INTERVAL_S + 5)


async def test_streams_end_promptly_on_server_shutdown(farm):
    key = await farm.key()
    other = await farm.server()
    waiting = await farm.submit("noop")
    async with (
        streaming(other, key) as events,
        streaming(other, key, f"/api/v1/jobs/{waiting}/events") as moments,
    ):
        await events.opened()
        await moments.next()
        began = time.monotonic()
        other.supervisor.request_stop()
        other.supervisor.services[-1].drain()  # the next step of `running`
        assert await events.ended()
        assert await moments.ended()
        assert time.monotonic() - began < 1.0


async def test_slow_consumer_is_disconnected_while_others_continue(farm, publisher, monkeypatch):
    monkeypatch.setattr(sse, "SEND_TIMEOUT_S", 0.3)
    key = await farm.key()
    reader, writer = await raw(farm.replica, key)
    writer.transport.pause_reading()
    async with streaming(farm.replica, key, kind="job") as client:
        await client.opened()
        for first in range(0, 80_000, 4_000):
            emit_jobs(publisher, first, 4_000)
            await publisher.publish()
            assert numbers(await client.some(4_000)) == list(range(first, first + 4_000))
        await until(lambda: _open(farm.replica) == 1, what="disconnecting the slow consumer")
        emit_jobs(publisher, 100_000, 1)
        assert numbers(await client.some(1)) == [100_000]
    writer.transport.resume_reading()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await _drain(reader)
    writer.close()


async def _drain(reader):
    while await reader.read(1 << 20):
        pass
    raise asyncio.IncompleteReadError(b"", None)


def _open(replica):
    return sum(len(each) for each in streams_of(replica)._open.values())


async def test_stream_of_a_client_that_is_gone_ends_though_another_request_was_in_line(farm):
    key = await farm.key()
    for follow_up in (b"", b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"):
        _, writer = await raw(farm.replica, key, follow_up=follow_up)
        await until(lambda: _open(farm.replica) == 1, what="the stream")
        writer.transport.abort()
        await until(lambda: _open(farm.replica) == 0, what="the end of the stream")


async def test_streams_over_the_per_key_limit_are_refused_with_retry_after(farm, monkeypatch):
    monkeypatch.setattr(rate_limit, "WAITING_PER_KEY_MAX", 2)
    key, other = await farm.key("one"), await farm.key("two")
    async with streaming(farm.replica, key) as first, streaming(farm.replica, key) as second:
        await first.opened()
        await second.opened()
        async with streaming(farm.replica, key) as third:
            await third.response.aread()
            assert (third.response.status_code, third.response.json()["code"]) == (429, "rate_limited")
            assert int(third.response.headers["retry-after"]) > 0
        async with streaming(farm.replica, other) as fourth:
            await fourth.opened()
    await until(lambda: not _open(farm.replica))
    async with streaming(farm.replica, key) as again:
        await again.opened()


async def test_heartbeat_carries_position_when_filter_passes_nothing(farm, publisher, monkeypatch):
    monkeypatch.setattr(sse, "HEARTBEAT_INTERVAL_S", 0.05)
    key = await farm.key()
    async with streaming(farm.replica, key, kind="worker.lost") as client:
        await client.opened()
        start = client.last
        emit_jobs(publisher, 0, 3)
        waiting = asyncio.create_task(client.next())
        await until(lambda: client.last != start and client.last == str(farm.replica.engine.event_stream.place))
        waiting.cancel()
        await asyncio.wait([waiting])
        assert client.heartbeats


@pytest.mark.slow("thousands of connections")
@pytest.mark.timeout(180)
async def test_thousands_of_reconnects_leak_nothing(farm):
    key, concurrency = await farm.key(), 50

    async def reconnect(times):
        for _ in range(times):
            reader, writer = await raw(farm.replica, key)
            await reader.readuntil(b"id:")
            writer.transport.abort()

    async def reconnect_all(total):
        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(reconnect(total // concurrency))
        await until(lambda: not _open(farm.replica))
        await until(lambda: not _connections(farm.replica))

    await reconnect_all(500)
    tasks, files = len(asyncio.all_tasks()), _files()
    growths = []
    for _ in range(3):  # a pool or a cache grows once, a leak grows in every round
        before = _objects()
        await reconnect_all(RECONNECTS // 2)
        growths.append(_objects() - before)
        if growths[-1] < RECONNECTS // 4:
            break
    # Background loops start tasks of their own for a moment; a leak would stay.
    await until(lambda: len(asyncio.all_tasks()) <= tasks + 2, what="the tasks of connections to end")
    # The PostgreSQL pool may have grown to its maximum meanwhile.
    assert _files() <= files + farm.settings.postgres.pool_max
    assert growths[-1] < RECONNECTS // 4, f"each reconnect leaks objects: {growths}"


def _objects():
    gc.collect()
    return len(gc.get_objects())


def _files():
    return len(list(Path("/proc/self/fd").iterdir()))


def _connections(replica):
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("stream.")]

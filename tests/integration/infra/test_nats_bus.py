"""The bus on a real NATS: topology, publishing, consuming, lost servers and lost data."""

import asyncio
import os
import shutil
import time
from urllib.parse import urlsplit

import msgspec
import nats
import pytest
import structlog

from rota.infra.clock import SystemClock
from rota.infra.nats import Bus, NatsTarget, PublishOutcome, StreamSpec, connection, consumer, keep_in_progress
from rota.model.backoff import Backoff
from rota.model.errors import InvalidInput, LoginRefused, NatsUnavailable, SetupFailed
from tests.integration.infra.nats_support import (
    JOBS,
    READER,
    SHORT_ACK_WAIT,
    WAIT_S,
    RunningConsumer,
    acknowledged,
    buses,
    consumer_info,
    delete_stream,
    message,
    stream_info,
    until_fetched,
)
from tests.support.waiting import until


@pytest.fixture
async def connect(nats_url, bus_prefix):
    """Factory for buses with this test's prefix."""
    async with buses(nats_url, bus_prefix) as start:
        yield start


@pytest.fixture
async def bus(connect):
    bus = await connect()
    await bus.ensure([JOBS, READER])
    return bus


@pytest.fixture
async def proxied_bus(connect, proxy, nats_url):
    """Factory for a bus behind a proxy; returns the bus and the proxy."""

    async def start(publish_timeout_s=0.3):
        address = urlsplit(nats_url)
        network = await proxy(address.hostname, address.port)
        bus = await connect(url=network.url(nats_url), publish_timeout_s=publish_timeout_s)
        await bus.ensure([JOBS, READER])
        return bus, network

    return start


async def test_wrong_password_is_refused_immediately_and_not_shown(nats_url):
    wrong = nats_url.replace(urlsplit(nats_url).password, "wr0ng-secret")
    with structlog.testing.capture_logs() as logs, pytest.raises(LoginRefused) as refused:
        await Bus.connect(NatsTarget(url=wrong, connect_timeout_s=30))
    assert "wr0ng-secret" not in f"{refused.value} {refused.value.facts} {logs}"


async def test_unreachable_server_is_reported_within_the_connect_timeout(unused_port):
    began = time.monotonic()
    with pytest.raises(NatsUnavailable, match=f"127.0.0.1:{unused_port} cannot be reached .ConnectionRefusedError"):
        await Bus.connect(NatsTarget(url=f"nats://user:s3cret@127.0.0.1:{unused_port}", connect_timeout_s=0.2))
    assert time.monotonic() - began < 2


@pytest.fixture
async def unused_port():
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


async def test_readiness_check_queries_jetstream(proxied_bus):
    bus, network = await proxied_bus()
    await bus.check()
    network.half_open()
    with pytest.raises(NatsUnavailable, match="no answer in time"):
        await bus.check()


async def test_repeated_and_concurrent_ensure_changes_nothing(connect):
    one, two = await connect(), await connect()
    await asyncio.gather(*(bus.ensure([JOBS, READER]) for bus in (one, two) * 4))
    await one.publish(message())
    created = (await stream_info(one))["created"]
    await asyncio.gather(*(bus.ensure([JOBS, READER]) for bus in (one, two)))
    info = await stream_info(two)
    assert (info["created"], info["state"]["messages"], info["state"]["consumer_count"]) == (created, 1, 1)


async def test_mutable_stream_and_consumer_settings_are_updated_in_place(bus):
    await bus.publish(message())
    await bus.ensure(
        [
            msgspec.structs.replace(JOBS, max_age_s=3600, max_msgs=7, subjects=("job.>", "more.>")),
            msgspec.structs.replace(READER, ack_wait_s=9, max_deliver=5, spare_deliveries=0, filter="job.a"),
        ]
    )
    info = await stream_info(bus)
    assert (info["config"]["max_msgs"], info["config"]["max_age"], info["state"]["messages"]) == (7, 3600 * 10**9, 1)
    config = (await consumer_info(bus))["config"]
    assert (config["ack_wait"], config["max_deliver"]) == (9 * 10**9, 5)
    assert config["filter_subject"].endswith(".job.a")


async def test_replicas_changing_a_stream_concurrently_both_succeed(connect):
    one, two = await connect(), await connect()
    await one.ensure([JOBS])
    changed = msgspec.structs.replace(JOBS, max_msgs=5)
    await asyncio.gather(*(bus.ensure([changed, READER]) for bus in (one, two) * 4))
    assert (await stream_info(one))["config"]["max_msgs"] == 5


@pytest.mark.parametrize("change", [{"retention": "workqueue"}, {"storage": "file"}])
async def test_immutable_stream_setting_is_refused_and_the_stream_is_unchanged(bus, change):
    before = (await stream_info(bus))["config"]
    with pytest.raises(SetupFailed, match=r"in place.*nats stream rm"):
        await bus.ensure([msgspec.structs.replace(JOBS, max_msgs=3, **change)])
    assert (await stream_info(bus))["config"] == before


async def test_immutable_consumer_setting_is_refused_with_the_remedy(bus):
    with pytest.raises(SetupFailed, match="nats consumer rm"):
        await bus.ensure([msgspec.structs.replace(READER, deliver="new")])


async def test_overlapping_streams_are_refused(bus):
    with pytest.raises(SetupFailed, match="overlap"):
        await bus.ensure([StreamSpec(name="OTHER", subjects=("job.a",), storage="memory")])


async def test_prefixes_isolate_two_users_of_one_server(connect, bus_prefix, bus):
    other = await connect(prefix=f"{bus_prefix}B")
    await other.ensure([JOBS, READER])
    try:
        await bus.publish(message(1))
        await other.publish(message(2))
        async with bus.consumer(READER) as mine, other.consumer(READER) as theirs:
            assert [d.data for d in await mine.fetch(wait_s=WAIT_S)] == [b"1"]
            assert [d.data for d in await theirs.fetch(wait_s=WAIT_S)] == [b"2"]
            assert await mine.fetch(wait_s=0.05) == []
    finally:
        await delete_stream(other)


async def test_message_id_is_stored_once(bus):
    first = await bus.publish(message())
    again = await bus.publish(message())
    assert (first.outcome, again.outcome) == (PublishOutcome.STORED, PublishOutcome.DUPLICATE)
    assert again.stream_seq == first.stream_seq
    assert again.settled
    assert (await stream_info(bus))["state"]["messages"] == 1


async def test_publish_many_returns_the_outcome_of_each_message(bus):
    await bus.publish(message(1))
    receipts = await bus.publish_many(
        [message(0), message(1), message(2, subject="job.*"), message(3, subject="nobody.takes.this"), message(4)]
    )
    assert [receipt.outcome for receipt in receipts] == [
        PublishOutcome.STORED,
        PublishOutcome.DUPLICATE,
        PublishOutcome.REJECTED,
        PublishOutcome.REJECTED,
        PublishOutcome.STORED,
    ]
    assert "no declared stream accepts subject 'nobody.takes.this'" in receipts[3].reason


async def test_large_batch_is_stored_in_order(bus):
    receipts = await bus.publish_many([message(n) for n in range(500)])
    assert [receipt.stream_seq for receipt in receipts] == list(range(1, 501))


async def test_headers_are_delivered_with_the_message(bus):
    await bus.publish(message(headers={"traceparent": "00-0af7-b7ad-01"}))
    async with bus.consumer(READER) as reader:
        (delivery,) = await reader.fetch(wait_s=WAIT_S)
    assert delivery.headers["traceparent"] == "00-0af7-b7ad-01"
    assert (delivery.msg_id, delivery.subject, delivery.stream_seq) == ("id0", "job.a", 1)


async def test_message_over_the_server_limit_is_refused_and_others_still_publish(bus):
    large = message(1, data=bytes(bus._connection.max_payload - 20))
    with pytest.raises(InvalidInput, match="NATS accepts"):
        await bus.publish(large)
    assert (await bus.publish(message(2))).outcome is PublishOutcome.STORED


async def test_full_stream_leaves_messages_unsettled(bus):
    await bus.ensure([msgspec.structs.replace(JOBS, max_msgs=1, discard="new")])
    receipts = await bus.publish_many([message(0), message(1)])
    assert [receipt.outcome for receipt in receipts] == [PublishOutcome.STORED, PublishOutcome.UNSETTLED]
    assert "maximum messages" in receipts[1].reason


async def test_publish_recreates_a_deleted_stream(bus):
    await delete_stream(bus)
    receipts = await bus.publish_many([message(0), message(1, subject="nobody.takes.this"), message(2)])
    assert [receipt.outcome for receipt in receipts] == [
        PublishOutcome.STORED,
        PublishOutcome.REJECTED,
        PublishOutcome.STORED,
    ]
    async with bus.consumer(READER) as reader:
        assert [delivery.data for delivery in await until_fetched(reader, 2)] == [b"0", b"2"]


async def test_lost_publish_ack_raises_unavailable_and_a_retry_is_a_duplicate(proxied_bus):
    bus, network = await proxied_bus()
    network.drop_replies()
    with pytest.raises(NatsUnavailable, match="same id"):
        await bus.publish(message())
    network.heal()
    assert (await bus.publish(message())).outcome is PublishOutcome.DUPLICATE


async def test_blocked_socket_ends_a_large_batch_in_time(proxied_bus):
    bus, network = await proxied_bus()
    network.half_open()
    network.delay_s = 60  # the server reads nothing, so the buffers of the client fill up
    began = time.monotonic()
    receipts = await bus.publish_many([message(n, data=bytes(500_000)) for n in range(64)])
    assert {receipt.outcome for receipt in receipts} == {PublishOutcome.UNSETTLED}
    assert time.monotonic() - began < 5


async def test_fetch_returns_batches_in_stream_order(bus):
    await bus.publish_many([message(n) for n in range(10)])
    async with bus.consumer(READER) as reader:
        first = await reader.fetch(4, WAIT_S)
        rest = await until_fetched(reader, 6)
        for delivery in (*first, *rest):
            await delivery.ack(sync=True)
    assert len(first) <= 4
    assert [delivery.stream_seq for delivery in (*first, *rest)] == list(range(1, 11))
    assert {(delivery.deliveries, delivery.last) for delivery in rest} == {(1, False)}
    assert await acknowledged(bus) == 10


async def test_pull_ends_at_its_number_of_bytes_and_the_next_one_follows_at_once(bus, monkeypatch):
    monkeypatch.setattr(consumer, "PULL_BYTES_MAX", 5000)
    monkeypatch.setattr(consumer, "PULL_RETRY_BACKOFF", Backoff(first_s=3600.0, longest_s=3600.0))
    await bus.publish_many([message(n, data=b"x" * 1000) for n in range(20)])
    async with bus.consumer(READER) as reader:
        deliveries = await until_fetched(reader, 20)
        pulls = reader._pulls
        for delivery in deliveries:
            await delivery.ack()
    assert [delivery.stream_seq for delivery in deliveries] == list(range(1, 21))
    assert pulls >= 5


async def test_idle_fetch_returns_empty_and_a_later_message_is_not_lost(bus):
    async with bus.consumer(READER) as reader:
        assert await reader.fetch(wait_s=0.05) == []
        await bus.publish(message())
        assert len(await reader.fetch(wait_s=WAIT_S)) == 1


async def test_fetch_without_waiting_returns_stored_messages_and_yields_to_other_tasks(bus):
    await bus.publish(message())
    iterations = 0

    async def others():
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    async with bus.consumer(READER) as reader:
        async with asyncio.timeout(WAIT_S):
            (delivery,) = await reader.fetch(wait_s=0)
        before = iterations
        assert await reader.fetch(wait_s=0) == []
        assert iterations > before
    running.cancel()
    assert delivery.data == b"0"


async def test_waiting_fetch_returns_without_a_full_batch(bus):
    async with bus.consumer(READER) as reader:
        waiting = asyncio.create_task(reader.fetch(256, wait_s=30))
        await until(lambda: reader._pull, what="the pull")
        await bus.publish(message())
        async with asyncio.timeout(WAIT_S):
            assert len(await waiting) == 1


async def test_nak_redelivers_after_its_delay(bus):
    await bus.publish(message())
    async with bus.consumer(READER) as reader:
        (first,) = await reader.fetch(wait_s=WAIT_S)
        await first.nak(0.2)
        began = time.monotonic()
        (second,) = await reader.fetch(wait_s=WAIT_S)
    assert time.monotonic() - began >= 0.15
    assert (second.deliveries, second.stream_seq) == (2, 1)


async def test_unanswered_message_is_redelivered_after_the_ack_wait(bus):
    await bus.ensure([SHORT_ACK_WAIT])
    await bus.publish(message())
    async with bus.consumer(SHORT_ACK_WAIT) as reader:
        (first,) = await reader.fetch(wait_s=WAIT_S)
        (second,) = await reader.fetch(wait_s=WAIT_S)
    assert (first.deliveries, second.deliveries) == (1, 2)


async def test_in_progress_heartbeat_keeps_a_message_beyond_its_ack_wait(bus):
    await bus.ensure([SHORT_ACK_WAIT])
    await bus.publish(message())
    async with bus.consumer(SHORT_ACK_WAIT) as reader:
        batch = await reader.fetch(wait_s=WAIT_S)
        async with keep_in_progress(lambda: batch, 0.08, SystemClock()):
            assert await reader.fetch(wait_s=2 * SHORT_ACK_WAIT.ack_wait_s) == []
        (again,) = await reader.fetch(wait_s=WAIT_S)
        assert again.deliveries == 2


async def test_terminated_message_is_not_redelivered(bus):
    await bus.ensure([SHORT_ACK_WAIT])
    await bus.publish_many([message(1), message(2)])
    async with bus.consumer(SHORT_ACK_WAIT) as reader:
        one, two = await until_fetched(reader, 2)
        await one.term()
        await two.nak()
        (again,) = await reader.fetch(wait_s=WAIT_S)
        assert again.data == b"2"
        await again.ack()
        assert await reader.fetch(wait_s=2 * SHORT_ACK_WAIT.ack_wait_s) == []


async def test_message_cannot_be_answered_twice(bus):
    await bus.publish(message())
    async with bus.consumer(READER) as reader:
        (delivery,) = await reader.fetch(wait_s=WAIT_S)
        await delivery.ack()
        with pytest.raises(AssertionError, match="answered twice"):
            await delivery.nak()


async def test_closing_consumer_returns_unfetched_messages_immediately(bus):
    await bus.publish(message(0))
    async with bus.consumer(READER) as reader:
        (taken,) = await reader.fetch(3, WAIT_S)
        await taken.ack()
        await bus.publish_many([message(1), message(2)])
        await until(lambda: len(reader._waiting) == 2, what="the rest of the pull")
    async with bus.consumer(READER) as other:
        again = await until_fetched(other, 2)
    assert [(delivery.data, delivery.deliveries) for delivery in again] == [(b"1", 2), (b"2", 2)]


async def test_message_buffered_longer_than_its_ack_wait_is_not_returned(bus):
    await bus.ensure([SHORT_ACK_WAIT])
    await bus.publish(message())
    async with bus.consumer(SHORT_ACK_WAIT) as reader:
        (delivery,) = await reader.fetch(wait_s=WAIT_S)
        delivery.expires_at = time.monotonic() - 0.001
        reader._waiting.append(delivery)
        (fresh,) = await reader.fetch(wait_s=WAIT_S)
    assert fresh.deliveries == 2


async def test_exhausted_deliveries_send_an_advisory_and_the_message_stays_stored(bus):
    spec = msgspec.structs.replace(SHORT_ACK_WAIT, max_deliver=2, spare_deliveries=0)
    await bus.ensure([spec])
    async with bus.max_deliveries_advisories() as advisories, bus.consumer(spec) as reader:
        await bus.publish(message(7))
        deliveries = [(await reader.fetch(wait_s=WAIT_S))[0] for _ in range(2)]
        async with asyncio.timeout(WAIT_S):
            advisory = await advisories.get()
    assert [(delivery.last, delivery.overdue) for delivery in deliveries] == [(False, False), (True, False)]
    assert (advisory.stream, advisory.consumer, advisory.stream_seq, advisory.deliveries) == ("JOBS", "reader", 1, 2)
    stored = await bus.get_message("JOBS", advisory.stream_seq)
    assert (stored.subject, stored.data, stored.stored_ns) == ("job.a", b"7", deliveries[0].stored_ns)
    assert await bus.get_message("JOBS", 99) is None


async def test_advisories_subscribed_during_an_outage_arrive_after_it(proxied_bus):
    bus, network = await proxied_bus(publish_timeout_s=WAIT_S)
    spec = msgspec.structs.replace(SHORT_ACK_WAIT, max_deliver=1, spare_deliveries=0)
    await bus.ensure([spec])
    network.cut()
    await until(lambda: not bus.connected)
    async with bus.max_deliveries_advisories() as advisories:
        network.heal()
        assert await bus.until_connected(WAIT_S)
        await bus.publish(message())
        async with bus.consumer(spec) as reader:
            await reader.fetch(wait_s=WAIT_S)  # never answered
            async with asyncio.timeout(WAIT_S):
                assert (await advisories.get()).stream_seq == 1


async def test_consumer_continues_after_a_disconnect_and_publishes_meanwhile_fail_fast(proxied_bus):
    bus, network = await proxied_bus(publish_timeout_s=WAIT_S)
    async with RunningConsumer(bus, READER, ack_sync=True) as work:
        await bus.publish(message(1))
        await until(lambda: work.handled() == [b"1"])
        network.cut()
        await until(lambda: not bus.connected, what="the disconnect to be noticed")
        began = time.monotonic()
        with pytest.raises(NatsUnavailable):
            await bus.publish(message(2))
        assert time.monotonic() - began < 1
        network.heal()
        assert await bus.until_connected(WAIT_S)
        await bus.publish(message(3))
        await until(lambda: work.handled() == [b"1", b"3"])
    assert (await stream_info(bus))["state"]["messages"] == 2


async def test_fetch_does_not_spin_while_the_library_reports_reconnecting(bus):
    await bus.publish(message())
    client = bus._connection._client
    async with bus.consumer(READER) as reader:
        client._status = client.RECONNECTING  # as between the loss and the library's callback
        asyncio.get_running_loop().call_later(0.02, setattr, client, "_status", client.CONNECTED)
        assert len(await reader.fetch(wait_s=2)) == 1


async def flush_subscriptions(client):
    """Wait until the server knows the client's subscriptions.

    PING is written before buffered commands, so the first flush may overtake SUB; the second cannot.
    """
    await client.flush()
    await client.flush()


@pytest.mark.parametrize("answer", [b"{}", b"hello", b'{"stream":"X"}', b'{"seq":1}', b"[]"])
async def test_foreign_reply_to_a_publish_does_not_count_as_stored(connect, nats_url, answer):
    bus = await connect(publish_timeout_s=0.1)
    other_client = await nats.connect(nats_url)

    async def reply(msg):
        await msg.respond(answer)

    await other_client.subscribe(bus._names.subject("job.a"), cb=reply)
    await flush_subscriptions(other_client)
    assert await bus.request("job.a", b"") == answer, "the other client replies"
    (receipt,) = await bus.publish_many([message()])
    await other_client.close()
    assert receipt.outcome is PublishOutcome.UNSETTLED


async def test_publish_ack_counts_although_a_foreign_reply_came_first(bus, nats_url):
    other_client = await nats.connect(nats_url)
    replied = asyncio.Event()

    async def reply(msg):
        await msg.respond(b"{}")
        replied.set()

    await other_client.subscribe(bus._names.subject("job.a"), cb=reply)
    await flush_subscriptions(other_client)
    receipts = await bus.publish_many([message(n) for n in range(100)])
    await replied.wait()
    await other_client.close()
    assert {receipt.outcome for receipt in receipts} == {PublishOutcome.STORED}


async def test_batch_interrupted_by_a_disconnect_ends_immediately(proxied_bus):
    bus, network = await proxied_bus(publish_timeout_s=30)
    network.drop_replies()
    publishing = asyncio.create_task(bus.publish_many([message(n) for n in range(10)]))
    await until(lambda: bus._publisher._batches)
    network.cut()
    async with asyncio.timeout(WAIT_S):
        receipts = await publishing
    assert {receipt.outcome for receipt in receipts} == {PublishOutcome.UNSETTLED}


async def test_connection_closed_by_the_server_is_reopened(bus):
    async with RunningConsumer(bus, READER, ack_sync=True) as work:
        client = bus._connection._client
        client._max_payload = 2**30  # lets the library send a message that makes the server close the connection
        await client.publish("job.large", bytes(2 * 2**20))
        await until(lambda: client.is_closed, what="the server to close the connection")
        assert await bus.until_connected(WAIT_S)
        await bus.publish(message(5))
        await until(lambda: work.handled() == [b"5"])
    assert bus._connection._client is not client


async def test_connection_closed_without_a_callback_is_reopened(connect, monkeypatch):
    monkeypatch.setattr(connection, "CLOSED_CHECK_INTERVAL_S", 0.02)
    bus = await connect()
    await bus.ensure([JOBS, READER])
    async with RunningConsumer(bus, READER, ack_sync=True) as work:
        client = bus._connection._client
        client._status = client.CLOSED  # as after a close by the library that failed midway
        await until(lambda: bus._connection._client is not client, what="a new client")
        await bus.publish(message(5))
        await until(lambda: work.handled() == [b"5"])


async def test_lost_pull_request_is_repeated(proxied_bus, monkeypatch):
    monkeypatch.setattr(consumer, "HEARTBEAT_INTERVAL_S", 0.02)
    bus, network = await proxied_bus()
    async with bus.consumer(READER) as reader:
        await bus.check()  # the server knows our inbox
        network.half_open()
        fetching = asyncio.create_task(reader.fetch(wait_s=WAIT_S))
        await until(lambda: reader._failures, what="the missing heartbeat to be noticed")
        network.heal()
        await bus.publish(message())
        assert len(await fetching) == 1


async def test_deleted_stream_is_recreated_and_consumption_continues(bus):
    async with RunningConsumer(bus, READER, ack_sync=True) as work:
        await bus.publish(message(1))
        await until(lambda: work.handled() == [b"1"])
        await delete_stream(bus)
        await until(lambda: stream_exists(bus), what="the stream to be recreated")
        await bus.publish(message(2))
        await until(lambda: work.handled() == [b"1", b"2"])


async def stream_exists(bus):
    return "error" not in await stream_info(bus)


async def test_server_that_lost_all_data_is_set_up_again(private_stack, bus_prefix):
    stack = await private_stack("nats")
    server = stack.servers["nats"]
    bus = await Bus.connect(NatsTarget(url=server.url, prefix=bus_prefix, publish_timeout_s=0.5))
    try:
        await bus.ensure([msgspec.structs.replace(JOBS, storage="file"), READER])
        async with RunningConsumer(bus, READER, ack_sync=True) as work:
            await bus.publish(message(1))
            await until(lambda: work.handled() == [b"1"])
            os.kill(server.process.pid, 9)
            await server.process.wait()
            shutil.rmtree(server.dir / "jetstream")
            await server.restart()
            await until(lambda: publishes(bus, message(2)), what="publishing after the loss")
            await until(lambda: work.handled() == [b"1", b"2"], within_s=25)
    finally:
        await bus.close()


async def publishes(bus, sent):
    try:
        return (await bus.publish(sent)).settled
    except NatsUnavailable:
        return False


async def test_bus_can_be_closed_twice_and_while_the_server_is_down(proxied_bus):
    bus, network = await proxied_bus()
    network.cut()
    await until(lambda: not bus.connected)
    await bus.close()
    await bus.close()
    with pytest.raises(NatsUnavailable):
        await bus.publish(message())

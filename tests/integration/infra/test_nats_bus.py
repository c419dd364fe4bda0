"""The bus against a real NATS: declaring, publishing, consuming, lost servers and lost data."""

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
from rota.model.errors import InvalidInput, LoginRefused, NatsUnavailable, SetupFailed
from tests.integration.infra.nats_support import (
    IMPATIENT,
    JOBS,
    READER,
    WAIT_S,
    Work,
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
    """Factory for a bus of this test's own prefix."""
    async with buses(nats_url, bus_prefix) as start:
        yield start


@pytest.fixture
async def bus(connect):
    bus = await connect()
    await bus.ensure([JOBS, READER])
    return bus


@pytest.fixture
async def far(connect, proxy, nats_url):
    """Factory for a bus behind a bad network: the bus and the network."""

    async def start(publish_timeout_s=0.3):
        address = urlsplit(nats_url)
        network = await proxy(address.hostname, address.port)
        bus = await connect(url=network.url(nats_url), publish_timeout_s=publish_timeout_s)
        await bus.ensure([JOBS, READER])
        return bus, network

    return start


async def test_a_wrong_password_is_refused_at_once_and_not_shown(nats_url):
    wrong = nats_url.replace(urlsplit(nats_url).password, "wr0ng-secret")
    with structlog.testing.capture_logs() as logs, pytest.raises(LoginRefused) as refused:
        await Bus.connect(NatsTarget(url=wrong, connect_timeout_s=30))
    assert "wr0ng-secret" not in f"{refused.value} {refused.value.facts} {logs}"


async def test_an_unreachable_server_is_named_within_the_connect_timeout(unused_port):
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


async def test_a_readiness_check_asks_jetstream_itself(far):
    bus, network = await far()
    await bus.check()
    network.half_open()
    with pytest.raises(NatsUnavailable, match="no answer in time"):
        await bus.check()


async def test_ensuring_twice_and_by_two_replicas_at_once_changes_nothing(connect):
    one, two = await connect(), await connect()
    await asyncio.gather(*(bus.ensure([JOBS, READER]) for bus in (one, two) * 4))
    await one.publish(message())
    created = (await stream_info(one))["created"]
    await asyncio.gather(*(bus.ensure([JOBS, READER]) for bus in (one, two)))
    info = await stream_info(two)
    assert (info["created"], info["state"]["messages"], info["state"]["consumer_count"]) == (created, 1, 1)


async def test_what_may_change_is_changed_in_place(bus):
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


async def test_two_replicas_that_change_a_stream_at_once_both_succeed(connect):
    one, two = await connect(), await connect()
    await one.ensure([JOBS])
    changed = msgspec.structs.replace(JOBS, max_msgs=5)
    await asyncio.gather(*(bus.ensure([changed, READER]) for bus in (one, two) * 4))
    assert (await stream_info(one))["config"]["max_msgs"] == 5


@pytest.mark.parametrize("change", [{"retention": "workqueue"}, {"storage": "file"}])
async def test_what_cannot_change_in_place_is_refused_and_left_alone(bus, change):
    before = (await stream_info(bus))["config"]
    with pytest.raises(SetupFailed, match=r"in place.*nats stream rm"):
        await bus.ensure([msgspec.structs.replace(JOBS, max_msgs=3, **change)])
    assert (await stream_info(bus))["config"] == before


async def test_a_consumer_that_cannot_change_in_place_is_refused_with_the_way_out(bus):
    with pytest.raises(SetupFailed, match="nats consumer rm"):
        await bus.ensure([msgspec.structs.replace(READER, deliver="new")])


async def test_two_streams_for_one_subject_are_refused(bus):
    with pytest.raises(SetupFailed, match="overlap"):
        await bus.ensure([StreamSpec(name="OTHER", subjects=("job.a",), storage="memory")])


async def test_prefixes_keep_two_users_of_one_server_apart(connect, bus_prefix, bus):
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


async def test_a_message_id_is_stored_once(bus):
    first = await bus.publish(message())
    again = await bus.publish(message())
    assert (first.outcome, again.outcome) == (PublishOutcome.STORED, PublishOutcome.DUPLICATE)
    assert again.stream_seq == first.stream_seq
    assert again.settled
    assert (await stream_info(bus))["state"]["messages"] == 1


async def test_a_batch_says_of_each_message_what_became_of_it(bus):
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


async def test_a_large_batch_is_stored_in_order(bus):
    receipts = await bus.publish_many([message(n) for n in range(500)])
    assert [receipt.stream_seq for receipt in receipts] == list(range(1, 501))


async def test_headers_travel_with_the_message(bus):
    await bus.publish(message(headers={"traceparent": "00-0af7-b7ad-01"}))
    async with bus.consumer(READER) as reader:
        (delivery,) = await reader.fetch(wait_s=WAIT_S)
    assert delivery.headers["traceparent"] == "00-0af7-b7ad-01"
    assert (delivery.msg_id, delivery.subject, delivery.stream_seq) == ("id0", "job.a", 1)


async def test_a_message_too_large_for_the_server_is_refused_and_hurts_nobody(bus):
    large = message(1, data=bytes(bus._connection.max_payload - 20))
    with pytest.raises(InvalidInput, match="NATS accepts"):
        await bus.publish(large)
    assert (await bus.publish(message(2))).outcome is PublishOutcome.STORED


async def test_a_full_stream_leaves_messages_unsettled_until_there_is_room(bus):
    await bus.ensure([msgspec.structs.replace(JOBS, max_msgs=1, discard="new")])
    receipts = await bus.publish_many([message(0), message(1)])
    assert [receipt.outcome for receipt in receipts] == [PublishOutcome.STORED, PublishOutcome.UNSETTLED]
    assert "maximum messages" in receipts[1].reason


async def test_a_stream_that_vanished_is_made_anew_under_a_publish(bus):
    await delete_stream(bus)
    receipts = await bus.publish_many([message(0), message(1, subject="nobody.takes.this"), message(2)])
    assert [receipt.outcome for receipt in receipts] == [
        PublishOutcome.STORED,
        PublishOutcome.REJECTED,
        PublishOutcome.STORED,
    ]
    async with bus.consumer(READER) as reader:
        assert [delivery.data for delivery in await until_fetched(reader, 2)] == [b"0", b"2"]


async def test_a_lost_acknowledgement_is_unavailable_and_repeating_it_is_harmless(far):
    bus, network = await far()
    network.drop_replies()
    with pytest.raises(NatsUnavailable, match="same id"):
        await bus.publish(message())
    network.heal()
    assert (await bus.publish(message())).outcome is PublishOutcome.DUPLICATE


async def test_a_socket_that_takes_nothing_ends_a_large_batch_in_time(far):
    bus, network = await far()
    network.half_open()
    network.delay_s = 60  # nobody reads any more, so our buffers fill up
    began = time.monotonic()
    receipts = await bus.publish_many([message(n, data=bytes(500_000)) for n in range(64)])
    assert {receipt.outcome for receipt in receipts} == {PublishOutcome.UNSETTLED}
    assert time.monotonic() - began < 5


async def test_messages_come_in_batches_with_their_numbers(bus):
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


async def test_an_idle_fetch_ends_empty_and_a_later_message_is_not_lost(bus):
    async with bus.consumer(READER) as reader:
        assert await reader.fetch(wait_s=0.05) == []
        await bus.publish(message())
        assert len(await reader.fetch(wait_s=WAIT_S)) == 1


async def test_a_reader_that_never_waits_gets_what_is_stored_and_lets_others_run(bus):
    await bus.publish(message())
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    async with bus.consumer(READER) as reader:
        async with asyncio.timeout(WAIT_S):
            (delivery,) = await reader.fetch(wait_s=0)
        before = turns
        assert await reader.fetch(wait_s=0) == []
        assert turns > before
    running.cancel()
    assert delivery.data == b"0"


async def test_a_waiting_reader_gets_a_message_without_waiting_for_a_full_batch(bus):
    async with bus.consumer(READER) as reader:
        waiting = asyncio.create_task(reader.fetch(256, wait_s=30))
        await until(lambda: reader._pull, what="the pull")
        await bus.publish(message())
        async with asyncio.timeout(WAIT_S):
            assert len(await waiting) == 1


async def test_a_nak_brings_the_message_again_after_its_delay(bus):
    await bus.publish(message())
    async with bus.consumer(READER) as reader:
        (first,) = await reader.fetch(wait_s=WAIT_S)
        await first.nak(0.2)
        began = time.monotonic()
        (second,) = await reader.fetch(wait_s=WAIT_S)
    assert time.monotonic() - began >= 0.15
    assert (second.deliveries, second.stream_seq) == (2, 1)


async def test_what_is_not_answered_comes_again_after_the_ack_wait(bus):
    await bus.ensure([IMPATIENT])
    await bus.publish(message())
    async with bus.consumer(IMPATIENT) as reader:
        (first,) = await reader.fetch(wait_s=WAIT_S)
        (second,) = await reader.fetch(wait_s=WAIT_S)
    assert (first.deliveries, second.deliveries) == (1, 2)


async def test_a_heartbeat_keeps_a_message_beyond_its_ack_wait(bus):
    await bus.ensure([IMPATIENT])
    await bus.publish(message())
    async with bus.consumer(IMPATIENT) as reader:
        batch = await reader.fetch(wait_s=WAIT_S)
        async with keep_in_progress(batch, 0.08, SystemClock()):
            assert await reader.fetch(wait_s=2 * IMPATIENT.ack_wait_s) == []
        (again,) = await reader.fetch(wait_s=WAIT_S)
        assert again.deliveries == 2


async def test_a_terminated_message_never_comes_again(bus):
    await bus.ensure([IMPATIENT])
    await bus.publish_many([message(1), message(2)])
    async with bus.consumer(IMPATIENT) as reader:
        one, two = await until_fetched(reader, 2)
        await one.term()
        await two.nak()
        (again,) = await reader.fetch(wait_s=WAIT_S)
        assert again.data == b"2"
        await again.ack()
        assert await reader.fetch(wait_s=2 * IMPATIENT.ack_wait_s) == []


async def test_a_message_is_answered_only_once(bus):
    await bus.publish(message())
    async with bus.consumer(READER) as reader:
        (delivery,) = await reader.fetch(wait_s=WAIT_S)
        await delivery.ack()
        with pytest.raises(AssertionError, match="answered twice"):
            await delivery.nak()


async def test_what_a_closing_reader_has_not_taken_goes_back_at_once(bus):
    await bus.publish(message(0))
    async with bus.consumer(READER) as reader:
        (taken,) = await reader.fetch(3, WAIT_S)
        await taken.ack()
        await bus.publish_many([message(1), message(2)])
        await until(lambda: len(reader._waiting) == 2, what="the rest of the pull")
    async with bus.consumer(READER) as other:
        again = await until_fetched(other, 2)
    assert [(delivery.data, delivery.deliveries) for delivery in again] == [(b"1", 2), (b"2", 2)]


async def test_what_lay_here_for_longer_than_its_ack_wait_is_not_handed_out(bus):
    await bus.ensure([IMPATIENT])
    await bus.publish(message())
    async with bus.consumer(IMPATIENT) as reader:
        (delivery,) = await reader.fetch(wait_s=WAIT_S)
        delivery.expires_at = time.monotonic() - 0.001
        reader._waiting.append(delivery)
        (fresh,) = await reader.fetch(wait_s=WAIT_S)
    assert fresh.deliveries == 2


async def test_used_up_deliveries_are_told_in_an_advisory_and_the_message_is_still_stored(bus):
    spec = msgspec.structs.replace(IMPATIENT, max_deliver=2, spare_deliveries=0)
    await bus.ensure([spec])
    async with bus.max_deliveries_advisories() as advisories, bus.consumer(spec) as reader:
        await bus.publish(message(7))
        deliveries = [(await reader.fetch(wait_s=WAIT_S))[0] for _ in range(2)]
        async with asyncio.timeout(WAIT_S):
            told = await advisories.get()
    assert [(delivery.last, delivery.overdue) for delivery in deliveries] == [(False, False), (True, False)]
    assert (told.stream, told.consumer, told.stream_seq, told.deliveries) == ("JOBS", "reader", 1, 2)
    stored = await bus.get_message("JOBS", told.stream_seq)
    assert (stored.subject, stored.data, stored.stored_ns) == ("job.a", b"7", deliveries[0].stored_ns)
    assert await bus.get_message("JOBS", 99) is None


async def test_advisories_that_were_asked_for_during_an_outage_come_after_it(far):
    bus, network = await far(publish_timeout_s=WAIT_S)
    spec = msgspec.structs.replace(IMPATIENT, max_deliver=1, spare_deliveries=0)
    await bus.ensure([spec])
    network.cut()
    await until(lambda: not bus.connected)
    async with bus.max_deliveries_advisories() as advisories:
        network.heal()
        assert await bus.until_connected(WAIT_S)
        await bus.publish(message())
        async with bus.consumer(spec) as reader:
            await reader.fetch(wait_s=WAIT_S)  # and never answered
            async with asyncio.timeout(WAIT_S):
                assert (await advisories.get()).stream_seq == 1


async def test_consuming_goes_on_after_a_cut_and_publishes_in_the_gap_fail_at_once(far):
    bus, network = await far(publish_timeout_s=WAIT_S)
    async with Work(bus, READER, ack_sync=True) as work:
        await bus.publish(message(1))
        await until(lambda: work.handled() == [b"1"])
        network.cut()
        await until(lambda: not bus.connected, what="the cut being noticed")
        began = time.monotonic()
        with pytest.raises(NatsUnavailable):
            await bus.publish(message(2))
        assert time.monotonic() - began < 1
        network.heal()
        assert await bus.until_connected(WAIT_S)
        await bus.publish(message(3))
        await until(lambda: work.handled() == [b"1", b"3"])
    assert (await stream_info(bus))["state"]["messages"] == 2


async def test_a_reader_does_not_spin_while_the_library_knows_of_a_loss_and_we_do_not(bus):
    await bus.publish(message())
    client = bus._connection._client
    async with bus.consumer(READER) as reader:
        client._status = client.RECONNECTING  # as it is between the loss and the library's callback
        asyncio.get_running_loop().call_later(0.02, setattr, client, "_status", client.CONNECTED)
        assert len(await reader.fetch(wait_s=2)) == 1


async def settled(client):
    """Wait until the server knows the client's subscriptions.

    A PING is written before what is still buffered, so the first may overtake SUB; the second cannot.
    """
    await client.flush()
    await client.flush()


@pytest.mark.parametrize("answer", [b"{}", b"hello", b'{"stream":"X"}', b'{"seq":1}', b"[]"])
async def test_what_somebody_else_answers_to_a_publish_does_not_count_as_stored(connect, nats_url, answer):
    bus = await connect(publish_timeout_s=0.1)
    stranger = await nats.connect(nats_url)

    async def reply(msg):
        await msg.respond(answer)

    await stranger.subscribe(bus._names.subject("job.a"), cb=reply)
    await settled(stranger)
    assert await bus.request("job.a", b"") == answer, "the stranger is heard"
    (receipt,) = await bus.publish_many([message()])
    await stranger.close()
    assert receipt.outcome is PublishOutcome.UNSETTLED


async def test_an_acknowledgement_counts_although_somebody_else_answered_before_it(bus, nats_url):
    stranger = await nats.connect(nats_url)
    told = asyncio.Event()

    async def reply(msg):
        await msg.respond(b"{}")
        told.set()

    await stranger.subscribe(bus._names.subject("job.a"), cb=reply)
    await settled(stranger)
    receipts = await bus.publish_many([message(n) for n in range(100)])
    await told.wait()
    await stranger.close()
    assert {receipt.outcome for receipt in receipts} == {PublishOutcome.STORED}


async def test_a_batch_that_is_cut_in_the_middle_ends_at_once(far):
    bus, network = await far(publish_timeout_s=30)
    network.drop_replies()
    publishing = asyncio.create_task(bus.publish_many([message(n) for n in range(10)]))
    await until(lambda: bus._publisher._batches)
    network.cut()
    async with asyncio.timeout(WAIT_S):
        receipts = await publishing
    assert {receipt.outcome for receipt in receipts} == {PublishOutcome.UNSETTLED}


async def test_a_connection_the_server_closed_for_good_is_dialled_anew(bus):
    async with Work(bus, READER, ack_sync=True) as work:
        client = bus._connection._client
        client._max_payload = 2**30  # so that the library sends what the server answers by closing
        await client.publish("job.large", bytes(2 * 2**20))
        await until(lambda: client.is_closed, what="the server closing the connection")
        assert await bus.until_connected(WAIT_S)
        await bus.publish(message(5))
        await until(lambda: work.handled() == [b"5"])
    assert bus._connection._client is not client


async def test_a_connection_that_was_given_up_in_silence_is_dialled_anew(connect, monkeypatch):
    monkeypatch.setattr(connection, "CLOSED_CHECK_INTERVAL_S", 0.02)
    bus = await connect()
    await bus.ensure([JOBS, READER])
    async with Work(bus, READER, ack_sync=True) as work:
        client = bus._connection._client
        client._status = client.CLOSED  # as after a close of the library's own that failed half-way
        await until(lambda: bus._connection._client is not client, what="a new client")
        await bus.publish(message(5))
        await until(lambda: work.handled() == [b"5"])


async def test_a_pull_that_was_lost_in_silence_is_asked_again(far, monkeypatch):
    monkeypatch.setattr(consumer, "HEARTBEAT_INTERVAL_S", 0.02)
    bus, network = await far()
    async with bus.consumer(READER) as reader:
        await bus.check()  # the server has heard of our inbox
        network.half_open()
        fetching = asyncio.create_task(reader.fetch(wait_s=WAIT_S))
        await until(lambda: reader._failures, what="the silence being noticed")
        network.heal()
        await bus.publish(message())
        assert len(await fetching) == 1


async def test_a_deleted_stream_is_made_anew_and_consuming_goes_on(bus):
    async with Work(bus, READER, ack_sync=True) as work:
        await bus.publish(message(1))
        await until(lambda: work.handled() == [b"1"])
        await delete_stream(bus)
        await until(lambda: stream_exists(bus), what="the stream being made anew")
        await bus.publish(message(2))
        await until(lambda: work.handled() == [b"1", b"2"])


async def stream_exists(bus):
    return "error" not in await stream_info(bus)


async def test_a_server_that_lost_all_its_data_is_set_up_again(private_stack, bus_prefix):
    stack = await private_stack("nats")
    server = stack.servers["nats"]
    bus = await Bus.connect(NatsTarget(url=server.url, prefix=bus_prefix, publish_timeout_s=0.5))
    try:
        await bus.ensure([msgspec.structs.replace(JOBS, storage="file"), READER])
        async with Work(bus, READER, ack_sync=True) as work:
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


async def test_closing_twice_and_while_the_server_is_away_leaves_nothing_behind(far):
    bus, network = await far()
    network.cut()
    await until(lambda: not bus.connected)
    await bus.close()
    await bus.close()
    with pytest.raises(NatsUnavailable):
        await bus.publish(message())

"""The outbox and its relay on real servers: committed messages are published whichever process crashes."""

import asyncio
import time
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec
import pytest

from rota.infra import outbox
from rota.infra.failpoints import CRASH_EXIT_STATUS
from rota.infra.nats import Bus, BusMessage, ConsumerSpec, NatsTarget, PublishOutcome, PublishReceipt
from rota.infra.outbox import OutboxRelay, relay
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.backoff import Backoff
from rota.model.errors import InvalidInput
from tests.integration.infra.outbox_relay_process import JOBS
from tests.support.queue import sessions_over
from tests.support.waiting import until

READER = ConsumerSpec(stream="JOBS", durable="reader")
WAIT_S = 10.0


@pytest.fixture
async def connect(nats_url, bus_prefix):
    opened = []

    async def start(**more):
        bus = await Bus.connect(NatsTarget(**{"url": nats_url, "prefix": bus_prefix, **more}))
        opened.append(bus)
        await bus.ensure([JOBS, READER])
        return bus

    yield start
    for bus in opened:
        await bus.close()


@pytest.fixture
async def bus(connect):
    return await connect()


class RunningRelay:
    """An outbox relay in its own task."""

    def __init__(self, *args, **more):
        self.relay = OutboxRelay(*args, **{"poll_s": 30, **more})
        self._draining = asyncio.Event()
        self._ready = asyncio.Event()

    async def __aenter__(self):
        self._task = asyncio.create_task(self.relay.run(Lifecycle(self._draining, self._ready.set)))
        await self._ready.wait()
        return self.relay

    async def __aexit__(self, *_):
        self._draining.set()
        await self._task


def message(number, **more):
    return BusMessage(**{"subject": "job.a", "data": b"%d" % number, "msg_id": f"id{number}", **more})


async def commit(database, messages):
    async with database.transaction() as transaction:
        await outbox.add(transaction, messages)


async def waiting(database):
    async with database.transaction() as transaction:
        return await transaction.connection.fetchval("SELECT count(*) FROM outbox")


async def stored(bus):
    info = await bus._connection.request(f"$JS.API.STREAM.INFO.{bus._names.stream('JOBS')}")
    return msgspec.json.decode(info)["state"]["messages"]


async def received(bus, count):
    taken = []
    async with bus.consumer(READER) as reader:
        async with asyncio.timeout(WAIT_S):
            async for batch in reader.batches():
                taken += batch
                if len(taken) >= count:
                    break
        for delivery in taken:
            await delivery.ack()
    return taken


async def test_committed_message_is_published_and_deleted(database, bus):
    await commit(database, [message(n, headers={"traceparent": f"00-{n}"}) for n in range(3)])
    async with RunningRelay(database, bus) as running:
        await until(running.drained.is_set)
    taken = await received(bus, 3)
    assert [(d.data, d.msg_id, d.headers["traceparent"]) for d in taken] == [
        (b"%d" % n, f"id{n}", f"00-{n}") for n in range(3)
    ]
    assert await waiting(database) == 0
    assert running.tally == relay.RelayCounts(stored=3)


async def test_rolled_back_message_is_never_published(database, bus):
    with suppress(ZeroDivisionError):
        async with database.transaction() as transaction:
            await outbox.add(transaction, [message(1)])
            raise ZeroDivisionError
    async with RunningRelay(database, bus) as running:
        await until(running.drained.is_set)
    assert (await stored(bus), await waiting(database)) == (0, 0)


async def test_commit_wakes_an_idle_relay(database, bus):
    async with RunningRelay(database, bus, poll_s=3600) as running:
        await until(running.drained.is_set)
        began = time.monotonic()
        await commit(database, [message(1)])
        await received(bus, 1)
        assert time.monotonic() - began < 5
        await until(running.drained.is_set)


async def test_relay_finds_messages_without_a_notification(database, bus):
    async with RunningRelay(database, bus, poll_s=0.05) as running:
        await until(running.drained.is_set)
        async with database.transaction() as transaction:
            await transaction.connection.execute(
                "INSERT INTO outbox (subject, msg_id, payload) VALUES ('job.a', 'silent', '')"
            )
        await received(bus, 1)
        await until(running.drained.is_set)


async def test_idle_relay_polls_without_a_transaction(database, bus, monkeypatch):
    begun, transaction = [], database.transaction
    monkeypatch.setattr(database, "transaction", lambda *args, **more: begun.append(args) or transaction(*args, **more))
    async with RunningRelay(database, bus, poll_s=0.01) as running:
        await until(running.drained.is_set)
        begun.clear()
        passes = running._passes
        await until(lambda: running._passes >= passes + 5, what="five polls")
    assert not begun


async def test_transaction_sends_one_notification(database):
    async with database.listen(outbox.CHANNEL) as notifications:
        async with database.transaction() as transaction:
            for number in range(3):
                await outbox.add(transaction, [message(number)])
        assert await notifications.next(WAIT_S) == ""
        assert await notifications.next(0.05) is None


async def test_messages_of_one_transaction_keep_their_order(database, bus):
    await commit(database, [message(n) for n in range(700)])
    async with RunningRelay(database, bus, batch=100) as running:
        await until(running.drained.is_set)
    assert [int(delivery.data) for delivery in await received(bus, 700)] == list(range(700))


@pytest.mark.parametrize(
    "point", ["outbox.after_claim", "outbox.after_publish_before_mark", "outbox.after_mark_before_commit"]
)
async def test_relay_crash_loses_and_duplicates_no_message(
    database, database_url, bus, bus_prefix, nats_url, spawn, point
):
    process = await spawn(
        "tests.integration.infra.outbox_relay_process",
        env={
            "TEST_POSTGRES_URL": database_url,
            "TEST_NATS_URL": nats_url,
            "TEST_PREFIX": bus_prefix,
            "CRASH_AT": point,
        },
    )
    await process.line()
    await commit(database, [message(n) for n in range(5)])
    assert await process.wait() == CRASH_EXIT_STATUS
    await sessions_over(database)
    assert await waiting(database) == 5
    assert await stored(bus) == (0 if point == "outbox.after_claim" else 5)
    async with RunningRelay(database, bus) as second:
        await until(second.drained.is_set)
    assert (await stored(bus), await waiting(database)) == (5, 0)
    assert second.tally.removed == 5
    assert second.tally.duplicate == (0 if point == "outbox.after_claim" else 5)


async def test_paused_relay_does_not_block_another_relay(database, database_url, bus, bus_prefix, nats_url, spawn):
    process = await spawn(
        "tests.integration.infra.outbox_relay_process",
        env={
            "TEST_POSTGRES_URL": database_url,
            "TEST_NATS_URL": nats_url,
            "TEST_PREFIX": bus_prefix,
            "TEST_PUBLISH_TIMEOUT_S": "0.2",
            "PAUSE_AT": "outbox.after_publish_before_mark",
        },
    )
    await process.line()
    await commit(database, [message(n) for n in range(5)])
    await until(lambda: stored_all(bus, 5), what="the publishes of the relay that pauses after them")
    async with RunningRelay(database, bus, poll_s=0.05) as second:
        await until(lambda: second.tally == relay.RelayCounts(duplicate=5))
        process.resume()
        await commit(database, [message(5)])
        await until(lambda: none_waiting(database))
    assert await stored(bus) == 6


async def stored_all(bus, count):
    return await stored(bus) == count


async def none_waiting(database):
    return await waiting(database) == 0


async def test_nats_outage_keeps_messages_without_holding_a_transaction(database, connect, proxy, nats_url, bus):
    address = urlsplit(nats_url)
    network = await proxy(address.hostname, address.port)
    remote_bus = await connect(url=network.url(nats_url), publish_timeout_s=0.3)
    async with RunningRelay(database, remote_bus) as running:
        await until(running.drained.is_set)
        network.cut()
        await until(lambda: not remote_bus.connected)
        await commit(database, [message(n) for n in range(20)])
        await until(running.stalled.is_set)
        assert await waiting(database) == 20
        assert await open_transactions(database) == 0
        network.heal()
        await until(lambda: running.tally.removed == 20)
    assert await stored(bus) == 20


async def open_transactions(database):
    async with database.transaction() as transaction:
        return await transaction.connection.fetchval(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL"
            " AND backend_type = 'client backend'"
        )


async def test_lost_acks_hold_a_transaction_only_for_the_publish_timeout(database, connect, proxy, nats_url, bus):
    address = urlsplit(nats_url)
    network = await proxy(address.hostname, address.port)
    remote_bus = await connect(url=network.url(nats_url), publish_timeout_s=0.3)
    async with RunningRelay(database, remote_bus) as running:
        await until(running.drained.is_set)
        network.drop_replies()
        await commit(database, [message(n) for n in range(20)])
        await until(lambda: open_transactions(database))
        began = time.monotonic()
        await until(running.stalled.is_set)
        assert time.monotonic() - began < 2
        assert await waiting(database) == 20
        network.heal()
        await until(lambda: running.tally.removed == 20)
    assert await stored(bus) == 20
    assert running.tally.duplicate > 0


async def test_unpublishable_messages_are_parked_with_a_reason_and_block_no_others(database, bus):
    async with database.transaction() as transaction:
        await transaction.connection.execute(
            "INSERT INTO outbox (subject, msg_id, payload) VALUES ('no good', 'a', ''), ('nobody.takes.this', 'b', '')"
        )
        await outbox.add(transaction, [message(1, data=bytes(2 * 2**20)), message(2)])
    async with RunningRelay(database, bus, measure_s=0) as running:
        await until(running.drained.is_set)
        assert [delivery.data for delivery in await received(bus, 1)] == [b"2"]
        parked_messages = await outbox.list_parked(database)
        assert [(entry.subject, entry.msg_id) for entry in parked_messages] == [
            ("no good", "a"),
            ("nobody.takes.this", "b"),
            ("job.a", "id1"),
        ]
        assert "wildcards" in parked_messages[0].reason
        assert "no declared stream" in parked_messages[1].reason
        assert "NATS accepts" in parked_messages[2].reason
        await until(lambda: metrics.REGISTRY.get_sample_value("rota_outbox_parked") == 3)
    assert await waiting(database) == 0


async def test_unparked_message_is_published_once_its_cause_is_gone(database, bus):
    await commit(database, [message(1, subject="late.a")])
    async with RunningRelay(database, bus) as running:
        await until(lambda: running.tally.parked == 1)
        await bus.ensure([msgspec.structs.replace(JOBS, subjects=("job.>", "late.>"))])
        (entry,) = await outbox.list_parked(database)
        assert await outbox.unpark(database, [entry.id, 99]) == 1
        assert [delivery.subject for delivery in await received(bus, 1)] == ["late.a"]
        await until(lambda: running.tally.stored == 1)
    assert await outbox.list_parked(database) == []


async def test_full_stream_does_not_block_other_streams(database, bus):
    full = msgspec.structs.replace(JOBS, name="FULL", subjects=("full.>",), max_msgs=1, discard="new")
    await bus.ensure([full])
    await commit(database, [message(n, subject="full.a") for n in range(30)] + [message(99)])
    async with RunningRelay(database, bus, batch=10) as running:
        assert [delivery.data for delivery in await received(bus, 1)] == [b"99"]
        await until(lambda: running.tally.stored == 2)
        assert await waiting(database) == 29
        await bus.ensure([msgspec.structs.replace(full, max_msgs=None)])
        await until(lambda: running.tally.stored == 31)


async def test_skipped_message_is_retried_before_all_others_are_sent(database, bus, monkeypatch):
    monkeypatch.setattr(relay, "RETRY_SKIPPED_EVERY", 4)
    await commit(database, [message(n) for n in range(300)])
    publish_many, seen = bus.publish_many, []

    async def one_lost_acknowledgement(messages):
        seen.extend(each.msg_id for each in messages)
        receipts = await publish_many(messages)
        return [PublishReceipt(PublishOutcome.UNSETTLED), *receipts[1:]] if len(seen) <= 10 else receipts

    monkeypatch.setattr(bus, "publish_many", one_lost_acknowledgement)
    async with RunningRelay(database, bus, batch=10) as running:
        await until(lambda: running.tally.removed == 300)
    again = seen.index("id0", 1)
    assert again < 100
    assert len(set(seen[again:])) > 200, "the skipped message was retried only after the others"


async def test_messages_unsendable_for_long_do_not_block_those_behind_them(database, bus, monkeypatch):
    await bus.ensure([msgspec.structs.replace(JOBS, name="FULL", subjects=("full.>",), max_msgs=1, discard="new")])
    monkeypatch.setattr(relay, "RETRY_BACKOFF", Backoff(0.001, 0.001))
    monkeypatch.setattr(relay, "RETRY_SKIPPED_EVERY", 2)
    await commit(database, [message(n, subject="full.a") for n in range(200)] + [message(n) for n in range(900, 1000)])
    async with RunningRelay(database, bus, batch=5) as running:
        await until(lambda: running.tally.stored == 101)
    assert await waiting(database) == 199


async def test_lock_on_the_outbox_only_pauses_the_relay(database_url, bus, monkeypatch):
    monkeypatch.setattr(relay, "RETRY_BACKOFF", Backoff(0.001, 0.001))
    limited = await Database.open(PostgresTarget(url=database_url, lock_timeout_s=0.01))
    operator = await Database.open(PostgresTarget(url=database_url))
    try:
        async with RunningRelay(limited, bus, poll_s=0.005) as running:
            async with operator.transaction() as transaction:
                await transaction.connection.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
                await outbox.add(transaction, [message(1)])
                await until(running.stalled.is_set)
            await until(lambda: running.tally.stored == 1)
    finally:
        await limited.close()
        await operator.close()


async def test_two_relays_share_the_work_without_duplicates(database, bus, connect):
    await commit(database, [message(n) for n in range(2000)])
    other = await connect()
    async with RunningRelay(database, bus, batch=50) as one, RunningRelay(database, other, batch=50) as two:
        await until(lambda: one.drained.is_set() and two.drained.is_set())
        await until(lambda: one.tally.removed + two.tally.removed == 2000)
    assert one.tally + two.tally == relay.RelayCounts(stored=2000)
    assert min(one.tally.stored, two.tally.stored) > 0
    assert await stored(bus) == 2000


async def test_large_messages_are_claimed_in_small_batches(database, bus, monkeypatch):
    monkeypatch.setattr(relay, "BATCH_BYTES_MAX", 1000)
    await commit(database, [message(n, data=bytes(600)) for n in range(5)])
    async with database.transaction() as transaction:
        rows = await transaction.rows(relay.CLAIM, 0, 512, relay.BATCH_BYTES_MAX, "1000")
        assert [row["msg_id"] for row in rows] == ["id0", "id1"]
    async with RunningRelay(database, bus) as running:
        await until(lambda: running.tally.stored == 5)


async def test_unpublishable_message_is_refused_before_it_is_queued(database):
    with pytest.raises(InvalidInput, match="wildcards"):
        await commit(database, [message(1), message(2, subject="job.*")])
    assert await waiting(database) == 0


async def test_depth_and_age_are_measured_while_messages_wait(database, bus):
    await commit(database, [message(n) for n in range(3)])
    await bus.close()
    async with RunningRelay(database, bus, measure_s=0.01) as running:
        await until(running.stalled.is_set)
        await until(lambda: metrics.REGISTRY.get_sample_value("rota_outbox_depth") == 3)
        assert 0 < metrics.REGISTRY.get_sample_value("rota_outbox_oldest_age_seconds") < 60


async def test_terminated_postgresql_connections_only_pause_the_relay(database, database_url, bus):
    operator = await Database.open(PostgresTarget(url=database_url))
    try:
        async with RunningRelay(database, bus) as running:
            await until(running.drained.is_set)
            async with operator.transaction() as transaction:
                await transaction.connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            await commit(operator, [message(1)])
            await until(lambda: running.tally.removed == 1)
    finally:
        await operator.close()


async def test_relay_drains_five_thousand_messages_quickly(database, bus, record_property):
    await commit(database, [message(n, data=bytes(200)) for n in range(5000)])
    began = time.monotonic()
    async with RunningRelay(database, bus) as running:
        await until(lambda: running.tally.stored == 5000, within_s=30)
        rate = 5000 / (time.monotonic() - began)
        await until(running.drained.is_set)
    record_property("rows_per_s", round(rate))
    print(f"{rate:,.0f} rows/s")
    assert await stored(bus) == 5000
    assert rate > 500, "a slow machine drains about ten times as many"

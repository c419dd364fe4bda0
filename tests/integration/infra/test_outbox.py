"""The outbox and its relay against real servers: what is committed is published, whoever dies in between."""

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


class Running:
    """A relay at work in a task of its own."""

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


async def test_what_is_committed_is_published_and_forgotten(database, bus):
    await commit(database, [message(n, headers={"traceparent": f"00-{n}"}) for n in range(3)])
    async with Running(database, bus) as running:
        await until(running.drained.is_set)
    taken = await received(bus, 3)
    assert [(d.data, d.msg_id, d.headers["traceparent"]) for d in taken] == [
        (b"%d" % n, f"id{n}", f"00-{n}") for n in range(3)
    ]
    assert await waiting(database) == 0
    assert running.tally == relay.RelayCounts(stored=3)


async def test_what_is_rolled_back_was_never_said(database, bus):
    with suppress(ZeroDivisionError):
        async with database.transaction() as transaction:
            await outbox.add(transaction, [message(1)])
            raise ZeroDivisionError
    async with Running(database, bus) as running:
        await until(running.drained.is_set)
    assert (await stored(bus), await waiting(database)) == (0, 0)


async def test_a_commit_wakes_an_idle_relay(database, bus):
    async with Running(database, bus, poll_s=3600) as running:
        await until(running.drained.is_set)
        began = time.monotonic()
        await commit(database, [message(1)])
        await received(bus, 1)
        assert time.monotonic() - began < 5
        await until(running.drained.is_set)


async def test_a_relay_finds_what_nobody_told_it_of(database, bus):
    async with Running(database, bus, poll_s=0.05) as running:
        await until(running.drained.is_set)
        async with database.transaction() as transaction:
            await transaction.connection.execute(
                "INSERT INTO outbox (subject, msg_id, payload) VALUES ('job.a', 'silent', '')"
            )
        await received(bus, 1)
        await until(running.drained.is_set)


async def test_one_notification_per_transaction(database):
    async with database.listen(outbox.CHANNEL) as told:
        async with database.transaction() as transaction:
            for number in range(3):
                await outbox.add(transaction, [message(number)])
        assert await told.next(WAIT_S) == ""
        assert await told.next(0.05) is None


async def test_messages_of_one_transaction_keep_their_order(database, bus):
    await commit(database, [message(n) for n in range(700)])
    async with Running(database, bus, batch=100) as running:
        await until(running.drained.is_set)
    assert [int(delivery.data) for delivery in await received(bus, 700)] == list(range(700))


@pytest.mark.parametrize(
    "point", ["outbox.after_claim", "outbox.after_publish_before_mark", "outbox.after_mark_before_commit"]
)
async def test_a_relay_that_dies_loses_nothing_and_says_nothing_twice(
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
    async with Running(database, bus) as second:
        await until(second.drained.is_set)
    assert (await stored(bus), await waiting(database)) == (5, 0)
    assert second.tally.removed == 5
    assert second.tally.duplicate == (0 if point == "outbox.after_claim" else 5)


async def test_a_relay_that_is_paused_does_not_keep_its_messages_from_another(
    database, database_url, bus, bus_prefix, nats_url, spawn
):
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
    await until(lambda: stored_all(bus, 5), what="the publishes of the relay that stops after them")
    async with Running(database, bus, poll_s=0.05) as second:
        await until(lambda: second.tally == relay.RelayCounts(duplicate=5))
        process.resume()
        await commit(database, [message(5)])
        await until(lambda: none_waiting(database))
    assert await stored(bus) == 6


async def stored_all(bus, count):
    return await stored(bus) == count


async def none_waiting(database):
    return await waiting(database) == 0


async def test_while_nats_is_away_messages_wait_and_no_transaction_is_held(database, connect, proxy, nats_url, bus):
    address = urlsplit(nats_url)
    network = await proxy(address.hostname, address.port)
    far = await connect(url=network.url(nats_url), publish_timeout_s=0.3)
    async with Running(database, far) as running:
        await until(running.drained.is_set)
        network.cut()
        await until(lambda: not far.connected)
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


async def test_lost_acknowledgements_hold_a_transaction_for_the_publish_timeout_only(
    database, connect, proxy, nats_url, bus
):
    address = urlsplit(nats_url)
    network = await proxy(address.hostname, address.port)
    far = await connect(url=network.url(nats_url), publish_timeout_s=0.3)
    async with Running(database, far) as running:
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


async def test_messages_that_can_never_leave_are_parked_with_a_reason_and_block_nobody(database, bus):
    async with database.transaction() as transaction:
        await transaction.connection.execute(
            "INSERT INTO outbox (subject, msg_id, payload) VALUES ('no good', 'a', ''), ('nobody.takes.this', 'b', '')"
        )
        await outbox.add(transaction, [message(1, data=bytes(2 * 2**20)), message(2)])
    async with Running(database, bus, measure_s=0) as running:
        await until(running.drained.is_set)
        assert [delivery.data for delivery in await received(bus, 1)] == [b"2"]
        aside = await outbox.list_parked(database)
        assert [(entry.subject, entry.msg_id) for entry in aside] == [
            ("no good", "a"),
            ("nobody.takes.this", "b"),
            ("job.a", "id1"),
        ]
        assert "wildcards" in aside[0].reason
        assert "no declared stream" in aside[1].reason
        assert "NATS accepts" in aside[2].reason
        await until(lambda: metrics.REGISTRY.get_sample_value("rota_outbox_parked") == 3)
    assert await waiting(database) == 0


async def test_a_parked_message_leaves_once_its_cause_is_gone(database, bus):
    await commit(database, [message(1, subject="late.a")])
    async with Running(database, bus) as running:
        await until(lambda: running.tally.parked == 1)
        await bus.ensure([msgspec.structs.replace(JOBS, subjects=("job.>", "late.>"))])
        (entry,) = await outbox.list_parked(database)
        assert await outbox.unpark(database, [entry.id, 99]) == 1
        assert [delivery.subject for delivery in await received(bus, 1)] == ["late.a"]
        await until(lambda: running.tally.stored == 1)
    assert await outbox.list_parked(database) == []


async def test_a_full_stream_does_not_hold_up_the_others(database, bus):
    full = msgspec.structs.replace(JOBS, name="FULL", subjects=("full.>",), max_msgs=1, discard="new")
    await bus.ensure([full])
    await commit(database, [message(n, subject="full.a") for n in range(30)] + [message(99)])
    async with Running(database, bus, batch=10) as running:
        assert [delivery.data for delivery in await received(bus, 1)] == [b"99"]
        await until(lambda: running.tally.stored == 2)
        assert await waiting(database) == 29
        await bus.ensure([msgspec.structs.replace(full, max_msgs=None)])
        await until(lambda: running.tally.stored == 31)


async def test_a_message_that_was_passed_by_is_tried_again_before_all_others_are_gone(database, bus, monkeypatch):
    monkeypatch.setattr(relay, "RETRY_SKIPPED_EVERY", 4)
    await commit(database, [message(n) for n in range(300)])
    publish_many, seen = bus.publish_many, []

    async def one_lost_acknowledgement(messages):
        seen.extend(each.msg_id for each in messages)
        receipts = await publish_many(messages)
        return [PublishReceipt(PublishOutcome.UNSETTLED), *receipts[1:]] if len(seen) <= 10 else receipts

    monkeypatch.setattr(bus, "publish_many", one_lost_acknowledgement)
    async with Running(database, bus, batch=10) as running:
        await until(lambda: running.tally.removed == 300)
    again = seen.index("id0", 1)
    assert again < 100
    assert len(set(seen[again:])) > 200, "the others were gone before"


async def test_messages_that_cannot_leave_for_long_keep_nobody_behind_them_waiting(database, bus, monkeypatch):
    await bus.ensure([msgspec.structs.replace(JOBS, name="FULL", subjects=("full.>",), max_msgs=1, discard="new")])
    monkeypatch.setattr(relay, "RETRY_BACKOFF", Backoff(0.001, 0.001))
    monkeypatch.setattr(relay, "RETRY_SKIPPED_EVERY", 2)
    await commit(database, [message(n, subject="full.a") for n in range(200)] + [message(n) for n in range(900, 1000)])
    async with Running(database, bus, batch=5) as running:
        await until(lambda: running.tally.stored == 101)
    assert await waiting(database) == 199


async def test_a_lock_on_the_outbox_is_only_a_pause(database_url, bus, monkeypatch):
    monkeypatch.setattr(relay, "RETRY_BACKOFF", Backoff(0.001, 0.001))
    limited = await Database.open(PostgresTarget(url=database_url, lock_timeout_s=0.01))
    operator = await Database.open(PostgresTarget(url=database_url))
    try:
        async with Running(limited, bus, poll_s=0.005) as running:
            async with operator.transaction() as transaction:
                await transaction.connection.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
                await outbox.add(transaction, [message(1)])
                await until(running.stalled.is_set)
            await until(lambda: running.tally.stored == 1)
    finally:
        await limited.close()
        await operator.close()


async def test_two_relays_share_the_work_and_say_nothing_twice(database, bus, connect):
    await commit(database, [message(n) for n in range(2000)])
    other = await connect()
    async with Running(database, bus, batch=50) as one, Running(database, other, batch=50) as two:
        await until(lambda: one.drained.is_set() and two.drained.is_set())
        await until(lambda: one.tally.removed + two.tally.removed == 2000)
    assert one.tally + two.tally == relay.RelayCounts(stored=2000)
    assert min(one.tally.stored, two.tally.stored) > 0
    assert await stored(bus) == 2000


async def test_large_messages_are_claimed_in_small_portions(database, bus, monkeypatch):
    monkeypatch.setattr(relay, "BATCH_BYTES_MAX", 1000)
    await commit(database, [message(n, data=bytes(600)) for n in range(5)])
    async with database.transaction() as transaction:
        rows = await transaction.rows(relay.CLAIM, 0, 512, relay.BATCH_BYTES_MAX, "1000")
        assert [row["msg_id"] for row in rows] == ["id0", "id1"]
    async with Running(database, bus) as running:
        await until(lambda: running.tally.stored == 5)


async def test_a_message_nobody_could_publish_is_refused_before_it_is_queued(database):
    with pytest.raises(InvalidInput, match="wildcards"):
        await commit(database, [message(1), message(2, subject="job.*")])
    assert await waiting(database) == 0


async def test_depth_and_age_are_measured_while_messages_wait(database, bus):
    await commit(database, [message(n) for n in range(3)])
    await bus.close()
    async with Running(database, bus, measure_s=0.01) as running:
        await until(running.stalled.is_set)
        await until(lambda: metrics.REGISTRY.get_sample_value("rota_outbox_depth") == 3)
        assert 0 < metrics.REGISTRY.get_sample_value("rota_outbox_oldest_age_seconds") < 60


async def test_connections_that_postgresql_ends_are_only_a_pause(database, database_url, bus):
    operator = await Database.open(PostgresTarget(url=database_url))
    try:
        async with Running(database, bus) as running:
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


async def test_five_thousand_messages_drain_quickly(database, bus, record_property):
    await commit(database, [message(n, data=bytes(200)) for n in range(5000)])
    began = time.monotonic()
    async with Running(database, bus) as running:
        await until(lambda: running.tally.stored == 5000, within_s=30)
        rate = 5000 / (time.monotonic() - began)
        await until(running.drained.is_set)
    record_property("rows_per_s", round(rate))
    print(f"{rate:,.0f} rows/s")
    assert await stored(bus) == 5000
    assert rate > 500, "a tenth of what a slow machine does"

"""A batch consumer on a real NATS: what is acknowledged, redelivered or sent to the dead letters."""

import asyncio

import msgspec
import pytest

from rota.infra.nats import Consumer, Nak, StreamSpec, Terminate, batch_consumer, batch_processor, consumer
from rota.infra.service import Lifecycle, RestartPolicy, Service, ServiceState
from rota.model.backoff import Backoff
from rota.model.errors import InvalidInput, PostgresUnavailable, SetupFailed
from rota.model.settings.servers import NatsSettings
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
    until_fetched,
)
from tests.support.waiting import until


@pytest.fixture
async def bus(nats_url, bus_prefix):
    async with buses(nats_url, bus_prefix) as connect:
        bus = await connect()
        await bus.ensure([JOBS, READER])
        yield bus


async def test_handled_batch_is_acknowledged(bus):
    await bus.publish_many([message(n) for n in range(5)])
    async with RunningConsumer(bus, READER, ack_sync=True) as work:
        await until(lambda: len(work.handled()) == 5)
    assert await acknowledged(bus) == 5


async def test_batch_with_unhandled_error_is_not_acknowledged(bus, monkeypatch):
    monkeypatch.setattr(
        batch_processor, "REDELIVERY_BACKOFF", msgspec.structs.replace(batch_processor.REDELIVERY_BACKOFF, first_s=0.02)
    )
    await bus.publish(message())
    tries = 0

    async def fails_once(_batch):
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("boom")

    async with RunningConsumer(bus, READER, fails_once, ack_sync=True) as work:
        await until(lambda: tries == 2)
    assert await acknowledged(bus) == 1
    assert not work.dead.is_set()


async def test_poison_message_blocks_no_other_and_its_dead_letter_precedes_termination(bus):
    await bus.publish_many([message(n) for n in range(5)])
    settled_before = []

    async def handler(batch):
        if any(delivery.data == b"2" for delivery in batch):
            raise InvalidInput("Message 2 is not JSON: send JSON.")

    async def dead_letter(delivery):
        settled_before.append(delivery.settled)

    async with RunningConsumer(bus, READER, handler, dead_letter) as work:
        await until(work.dead.is_set)
        await until(lambda: acknowledged_all(bus, 5), what="every message to be settled")
    letters = [event for event in work.events if event[0] == "dead letter"]
    assert letters == [("dead letter", b"2", "Message 2 is not JSON: send JSON.")]
    assert settled_before == [False]
    assert (await consumer_info(bus))["num_ack_pending"] == 0


async def acknowledged_all(bus, count):
    return await acknowledged(bus) == count


async def test_message_whose_dead_letter_write_fails_is_redelivered(bus):
    await bus.publish(message())
    tries = 0

    async def terminates(batch):
        return [Terminate("no such job")] * len(batch)

    async def dead_letter(_delivery):
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("boom")

    async with RunningConsumer(bus, READER, terminates, dead_letter, dead_letter_retry_s=0.02) as work:
        await until(work.dead.is_set)
        await until(lambda: acknowledged_all(bus, 1))
    assert [event[0] for event in work.events] == ["handled", "dead letter", "handled", "dead letter"]


def test_dead_letter_retry_delay_is_five_seconds():
    assert batch_processor.DEAD_LETTER_RETRY_S == NatsSettings().nak_delay == 5.0


async def test_last_failed_delivery_goes_to_the_dead_letters(bus, monkeypatch):
    monkeypatch.setattr(
        batch_processor, "REDELIVERY_BACKOFF", msgspec.structs.replace(batch_processor.REDELIVERY_BACKOFF, first_s=0.02)
    )
    spec = msgspec.structs.replace(READER, max_deliver=3)
    await bus.ensure([spec])
    await bus.publish(message())

    async def always_fails(_batch):
        raise RuntimeError("password=hunter2")

    async with RunningConsumer(bus, spec, always_fails) as work:
        await until(work.dead.is_set)
    assert len(work.handled()) == 3
    assert work.events[-1] == ("dead letter", b"0", "failed 3 times, last with RuntimeError: password=***")


async def test_message_with_exhausted_deliveries_is_not_handled_again(bus):
    spec = msgspec.structs.replace(READER, max_deliver=1)
    await bus.ensure([spec])
    await bus.publish(message())
    async with bus.consumer(spec) as reader:
        (crashed,) = await reader.fetch(most=1, wait_s=WAIT_S)
        await crashed.nak()
    async with RunningConsumer(bus, spec) as work:
        await until(work.dead.is_set)
    assert work.handled() == []


async def test_nak_uses_the_delay_requested_by_the_handler(bus):
    await bus.publish(message())
    results = iter([[Nak(0.05)], None])

    async def handler(_batch):
        return next(results)

    async with RunningConsumer(bus, READER, handler, ack_sync=True) as work:
        await until(lambda: len(work.handled()) == 2)
    assert await acknowledged(bus) == 1


UNAVAILABLE = PostgresUnavailable("PostgreSQL is away: wait.")


@pytest.fixture
def quick_backoff(monkeypatch):
    for module, name in ((batch_consumer, "OUTAGE_BACKOFF"), (batch_processor, "REDELIVERY_BACKOFF")):
        monkeypatch.setattr(module, name, Backoff(first_s=0.002, longest_s=0.002))


@pytest.mark.parametrize(
    "outage", [UNAVAILABLE, ExceptionGroup("two tasks", [UNAVAILABLE, UNAVAILABLE])], ids=["plain", "grouped"]
)
async def test_outage_behind_the_handler_consumes_no_deliveries(bus, quick_backoff, outage):
    await bus.publish_many([message(n) for n in range(3)])
    seen = []

    async def handler(batch):
        seen.append([delivery.deliveries for delivery in batch])
        if len(seen) < 30:
            raise outage

    async with RunningConsumer(bus, READER, handler):
        await until(lambda: acknowledged_all(bus, 3))
    assert {deliveries for batch in seen for deliveries in batch} == {1}


async def test_message_whose_handler_alone_is_unavailable_blocks_no_later_message(bus, quick_backoff):
    recovered, seen = asyncio.Event(), []

    async def needs_a_server_for_the_first(batch):
        seen.extend((delivery.data, delivery.deliveries) for delivery in batch)
        if any(delivery.data == b"0" for delivery in batch) and not recovered.is_set():
            raise UNAVAILABLE

    async with RunningConsumer(bus, READER, needs_a_server_for_the_first, ack_sync=True):
        await bus.publish(message(0))
        await until(lambda: (b"0", 1) in seen)
        await bus.publish_many([message(n) for n in range(1, 4)])
        await until(lambda: delivered_but_one(bus, 4), what="the other messages to be acknowledged")
        recovered.set()
        await until(lambda: acknowledged_all(bus, 4))
    assert {deliveries for _, deliveries in seen} == {1}


async def delivered_but_one(bus, count):
    """Whether `count` messages were delivered, and all but the first of them acknowledged."""
    info = await consumer_info(bus)
    return info["delivered"]["stream_seq"] == count and await one_unanswered(bus, acknowledged=0)


async def test_message_whose_handler_alone_is_unavailable_delays_no_other_of_its_batch(bus, quick_backoff):
    await bus.publish_many([message(n) for n in range(40)])
    recovered = asyncio.Event()

    async def needs_a_server_for_the_first(batch):
        if any(delivery.data == b"0" for delivery in batch) and not recovered.is_set():
            raise UNAVAILABLE

    async with RunningConsumer(bus, READER, needs_a_server_for_the_first, ack_sync=True):
        await until(lambda: delivered_but_one(bus, 40))
        recovered.set()
        await until(lambda: acknowledged_all(bus, 40))


async def test_outage_for_every_message_stops_pulling_and_is_over_at_once(bus, quick_backoff):
    await bus.publish_many([message(n) for n in range(60)])
    recovered, calls, seen = asyncio.Event(), [], set()

    async def handler(batch):
        calls.append(len(batch))
        seen.update((delivery.data, delivery.deliveries) for delivery in batch)
        if not recovered.is_set():
            raise UNAVAILABLE

    async with RunningConsumer(bus, READER, handler, most=10):
        await until(lambda: len(calls) > 300)
        assert len(seen) < 20, "it pulls no more than it may keep"
        recovered.set()
        await until(lambda: acknowledged_all(bus, 60))
    assert seen == {(b"%d" % n, 1) for n in range(60)}
    assert max(calls) <= 10


async def test_message_kept_during_an_outage_is_not_redelivered_after_its_ack_wait(bus, quick_backoff):
    await bus.ensure([SHORT_ACK_WAIT])
    await bus.publish(message())
    loop, seen = asyncio.get_running_loop(), set()
    over_at = loop.time() + 4 * SHORT_ACK_WAIT.ack_wait_s

    async def handler(batch):
        seen.update(delivery.deliveries for delivery in batch)
        if loop.time() < over_at:
            raise UNAVAILABLE

    async def acknowledged_it():
        return await acknowledged(bus, SHORT_ACK_WAIT) == 1

    async with RunningConsumer(bus, SHORT_ACK_WAIT, handler):
        await until(acknowledged_it)
    assert seen == {1}


async def test_outage_of_the_dead_letter_store_consumes_no_deliveries_and_delays_no_ack(bus, quick_backoff):
    await bus.publish_many([message(n) for n in range(2)])
    tries, recovered = [], asyncio.Event()

    async def terminates_the_first(batch):
        return [Terminate("no such job") if delivery.data == b"0" else None for delivery in batch]

    async def dead_letter(delivery):
        tries.append(delivery.deliveries)
        if not recovered.is_set():
            raise UNAVAILABLE

    async with RunningConsumer(bus, READER, terminates_the_first, dead_letter, ack_sync=True) as work:
        await until(lambda: len(tries) > 30)
        await until(lambda: one_unanswered(bus, acknowledged=0))
        recovered.set()
        await until(lambda: acknowledged_all(bus, 2))
    assert set(tries) == {1}
    assert work.handled() == [b"0", b"1"]


async def test_draining_ends_the_wait_for_an_unavailable_server_and_returns_the_batch(bus, monkeypatch):
    monkeypatch.setattr(batch_consumer, "OUTAGE_BACKOFF", Backoff(first_s=600, longest_s=600))
    await bus.publish(message())
    asked = asyncio.Event()

    async def handler(_batch):
        asked.set()
        raise UNAVAILABLE

    async with RunningConsumer(bus, READER, handler):
        await asked.wait()
    async with bus.consumer(READER) as other:
        (again,) = await other.fetch(wait_s=WAIT_S)
    assert again.deliveries == 2


async def test_restarted_consumer_continues_handling(bus, monkeypatch):
    monkeypatch.setattr(consumer, "PULL_RETRY_BACKOFF", Backoff(first_s=0.005, longest_s=0.01))
    conflicting = StreamSpec(name="SQUATTER", subjects=("job.>",), storage="memory")
    work = RunningConsumer(bus, READER, wait_s=1)
    service = Service("results", work.run, restarts=RestartPolicy(limit=10**6, pauses=Backoff(0.005, 0.01)))
    async with asyncio.TaskGroup() as tasks:
        service.start(tasks)
        await bus.publish(message(0))
        await until(lambda: work.handled() == [b"0"])
        await delete_stream(bus)
        await bus._jetstream.ensure([conflicting], [])
        await service.wait_for(ServiceState.RESTARTING)
        assert isinstance(service.error, SetupFailed)
        await delete_stream(bus, "SQUATTER")
        await bus.ensure([JOBS, READER])
        await bus.publish(message(7))
        await until(lambda: b"7" in work.handled())
        await service.stop(budget_s=1)


async def test_handler_cancelled_from_inside_counts_as_failed_and_blocks_no_other(bus):
    await bus.publish_many([message(n) for n in range(2)])
    done = []

    async def handler(batch):
        if any(delivery.data == b"0" for delivery in batch):
            raise asyncio.CancelledError  # as from awaiting a cancelled task
        done.extend(delivery.data for delivery in batch)

    async with RunningConsumer(bus, READER, handler) as work:
        await until(lambda: done == [b"1"] or work.task.done())
        assert not work.task.done()
        await until(lambda: one_unanswered(bus, acknowledged=0))


async def test_dead_letter_write_cancelled_from_inside_is_redelivered(bus):
    await bus.publish(message())
    tries = 0

    async def terminates(batch):
        return [Terminate("no such job")] * len(batch)

    async def dead_letter(_delivery):
        nonlocal tries
        tries += 1
        if tries == 1:
            raise asyncio.CancelledError

    async with RunningConsumer(bus, READER, terminates, dead_letter, dead_letter_retry_s=0.02) as work:
        await until(lambda: tries == 2 or work.task.done())
        assert not work.task.done()


async def test_handler_returning_the_wrong_number_of_results_counts_as_failed(bus, quick_backoff):
    await bus.publish(message())
    results = iter([[None, None], None])

    async def handler(_batch):
        return next(results)

    async with RunningConsumer(bus, READER, handler, ack_sync=True) as work:
        await until(lambda: len(work.handled()) == 2 or work.task.done())
        assert not work.task.done()


async def test_hanging_handler_is_cancelled_and_other_messages_are_handled(bus):
    await bus.publish_many([message(n) for n in range(3)])

    async def handler(batch):
        if any(delivery.data == b"1" for delivery in batch):
            await asyncio.Event().wait()

    async with RunningConsumer(bus, READER, handler, limit_s=0.1):
        await until(lambda: one_unanswered(bus, acknowledged=1))


async def one_unanswered(bus, acknowledged):
    """Whether exactly one message is unanswered, after the first `acknowledged` ones."""
    info = await consumer_info(bus)
    return info["ack_floor"]["stream_seq"] == acknowledged and info["num_ack_pending"] == 1


async def test_slow_handler_does_not_get_the_same_message_again(bus):
    await bus.ensure([SHORT_ACK_WAIT])
    await bus.publish(message())
    done = asyncio.Event()

    async def slow(_batch):
        await asyncio.sleep(2 * SHORT_ACK_WAIT.ack_wait_s)
        done.set()

    async with RunningConsumer(bus, SHORT_ACK_WAIT, slow, ack_sync=True) as work:
        await done.wait()
    assert len(work.handled()) == 1
    assert await acknowledged(bus, SHORT_ACK_WAIT) == 1


async def test_cancelled_consumer_returns_its_batch_immediately(bus):
    await bus.publish_many([message(n) for n in range(3)])
    begun = asyncio.Event()

    async def endless(_batch):
        begun.set()
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(RunningConsumer(bus, READER, endless).run(Lifecycle(asyncio.Event(), lambda: None)))
        await begun.wait()
        task.cancel()
    async with bus.consumer(READER) as other:
        again = await until_fetched(other, 3)
    assert again[0].deliveries == 2
    assert max(delivery.deliveries for delivery in again) == 2


async def test_batch_arriving_at_the_moment_of_cancellation_is_returned_immediately(bus, monkeypatch):
    await bus.publish(message())
    fetch = Consumer.fetch

    async def fetched_and_cancelled(reader, *more):
        batch = await fetch(reader, *more)
        asyncio.get_running_loop().call_soon(task.cancel)
        return batch

    with monkeypatch.context() as patched:
        patched.setattr(Consumer, "fetch", fetched_and_cancelled)
        task = asyncio.create_task(RunningConsumer(bus, READER).run(Lifecycle(asyncio.Event(), lambda: None)))
        await asyncio.wait([task])
    async with bus.consumer(READER) as other:
        (again,) = await other.fetch(wait_s=WAIT_S)
    assert again.deliveries == 2

"""Working off a consumer on a real NATS: what is acknowledged, what comes again, what goes to the dead letters."""

import asyncio

import msgspec
import pytest

from rota.infra.nats import Reject, Retry, handling
from rota.infra.service import Lifecycle
from rota.model.errors import InvalidInput, PostgresUnavailable
from tests.ground.waiting import until
from tests.integration.bus_ground import (
    IMPATIENT,
    JOBS,
    READER,
    WAIT_S,
    Work,
    acknowledged,
    buses,
    consumer_info,
    message,
    until_fetched,
)


@pytest.fixture
async def bus(nats_url, bus_prefix):
    async with buses(nats_url, bus_prefix) as connect:
        bus = await connect()
        await bus.ensure([JOBS, READER])
        yield bus


async def test_a_handled_batch_is_acknowledged(bus):
    await bus.publish_many([message(n) for n in range(5)])
    async with bus.consumer(READER) as reader, Work(reader, ack_sync=True) as work:
        await until(lambda: len(work.handled()) == 5)
    assert await acknowledged(bus) == 5


async def test_an_unhandled_error_is_never_acknowledged(bus, monkeypatch):
    monkeypatch.setattr(handling, "AGAIN", msgspec.structs.replace(handling.AGAIN, first_s=0.02))
    await bus.publish(message())
    tries = 0

    async def fails_once(_batch):
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("boom")

    async with bus.consumer(READER) as reader, Work(reader, fails_once, ack_sync=True) as work:
        await until(lambda: tries == 2)
    assert await acknowledged(bus) == 1
    assert not work.dead.is_set()


async def test_a_poison_message_blocks_nobody_and_its_dead_letter_is_written_before_it_ends(bus):
    await bus.publish_many([message(n) for n in range(5)])
    answered_before = []

    async def handler(batch):
        if any(delivery.data == b"2" for delivery in batch):
            raise InvalidInput("Message 2 is not JSON: send JSON.")

    async def dead_letter(delivery):
        answered_before.append(delivery.settled)

    async with bus.consumer(READER) as reader, Work(reader, handler, dead_letter) as work:
        await until(work.dead.is_set)
        await until(lambda: acknowledged_all(bus, 5), what="every message being done with")
    letters = [event for event in work.events if event[0] == "dead letter"]
    assert letters == [("dead letter", b"2", "Message 2 is not JSON: send JSON.")]
    assert answered_before == [False]
    assert (await consumer_info(bus))["num_ack_pending"] == 0


async def acknowledged_all(bus, count):
    return await acknowledged(bus) == count


async def test_a_message_whose_dead_letter_cannot_be_written_comes_again(bus, monkeypatch):
    monkeypatch.setattr(handling, "DEAD_LETTER_RETRY_S", 0.05)
    await bus.publish(message())
    tries = 0

    async def rejects(batch):
        return [Reject("no such job")] * len(batch)

    async def dead_letter(_delivery):
        nonlocal tries
        tries += 1
        if tries == 1:
            raise PostgresUnavailable("PostgreSQL is away: wait.")

    async with bus.consumer(READER) as reader, Work(reader, rejects, dead_letter) as work:
        await until(work.dead.is_set)
        await until(lambda: acknowledged_all(bus, 1))
    assert [event[0] for event in work.events] == ["handled", "dead letter", "handled", "dead letter"]


def test_a_dead_letter_is_tried_again_after_five_seconds():
    assert handling.DEAD_LETTER_RETRY_S == 5.0


async def test_the_last_failure_goes_to_the_dead_letters(bus, monkeypatch):
    monkeypatch.setattr(handling, "AGAIN", msgspec.structs.replace(handling.AGAIN, first_s=0.02))
    spec = msgspec.structs.replace(READER, max_deliver=3)
    await bus.ensure([spec])
    await bus.publish(message())

    async def always_fails(_batch):
        raise RuntimeError("password=hunter2")

    async with bus.consumer(spec) as reader, Work(reader, always_fails) as work:
        await until(work.dead.is_set)
    assert len(work.handled()) == 3
    assert work.events[-1] == ("dead letter", b"0", "failed 3 times, last with RuntimeError: password=***")


async def test_a_message_that_used_up_its_deliveries_is_not_handled_again(bus):
    spec = msgspec.structs.replace(READER, max_deliver=1)
    await bus.ensure([spec])
    await bus.publish(message())
    async with bus.consumer(spec) as reader:
        (crashed,) = await reader.fetch(wait_s=WAIT_S)
        await crashed.nak()
        async with Work(reader) as work:
            await until(work.dead.is_set)
    assert work.handled() == []


async def test_a_verdict_may_ask_for_its_own_delay(bus):
    await bus.publish(message())
    verdicts = iter([[Retry(0.05)], None])

    async def handler(_batch):
        return next(verdicts)

    async with bus.consumer(READER) as reader, Work(reader, handler, ack_sync=True) as work:
        await until(lambda: len(work.handled()) == 2)
    assert await acknowledged(bus) == 1


async def test_an_outage_behind_the_handler_uses_up_no_deliveries(bus, monkeypatch):
    monkeypatch.setattr(handling, "OUTAGE", msgspec.structs.replace(handling.OUTAGE, first_s=0.01))
    await bus.publish_many([message(n) for n in range(3)])
    seen = []

    async def handler(batch):
        seen.append([(delivery.data, delivery.deliveries) for delivery in batch])
        if len(seen) < 4:
            raise PostgresUnavailable("PostgreSQL is away: wait.")

    async with bus.consumer(READER) as reader, Work(reader, handler):
        await until(lambda: acknowledged_all(bus, 3))
    assert {deliveries for batch in seen for _, deliveries in batch} == {1}


async def test_a_handler_that_hangs_is_cut_off_and_its_neighbours_are_done(bus):
    await bus.publish_many([message(n) for n in range(3)])

    async def handler(batch):
        if any(delivery.data == b"1" for delivery in batch):
            await asyncio.Event().wait()

    async with bus.consumer(READER) as reader, Work(reader, handler, limit_s=0.1):
        await until(lambda: only_one_left(bus))


async def only_one_left(bus):
    info = await consumer_info(bus)
    return info["ack_floor"]["stream_seq"] == 1 and info["num_ack_pending"] == 1


async def test_a_long_handler_is_not_given_the_same_message_again(bus):
    await bus.ensure([IMPATIENT])
    await bus.publish(message())
    done = asyncio.Event()

    async def slow(_batch):
        await asyncio.sleep(2 * IMPATIENT.ack_wait_s)
        done.set()

    async with bus.consumer(IMPATIENT) as reader, Work(reader, slow, ack_sync=True) as work:
        await done.wait()
    assert len(work.handled()) == 1
    assert await acknowledged(bus, IMPATIENT) == 1


async def test_a_cancelled_handling_hands_its_batch_back_at_once(bus):
    await bus.publish_many([message(n) for n in range(3)])
    begun = asyncio.Event()

    async def endless(_batch):
        begun.set()
        await asyncio.Event().wait()

    async with bus.consumer(READER) as reader:
        work = Work(reader, endless)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work._handling.run(Lifecycle(asyncio.Event(), lambda: None)))
            await begun.wait()
            task.cancel()
    async with bus.consumer(READER) as other:
        again = await until_fetched(other, 3)
    assert again[0].deliveries == 2
    assert max(delivery.deliveries for delivery in again) == 2

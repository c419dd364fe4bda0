"""`sys.job.submit`: the same checks as the other interfaces, once per message, refusals become dead letters."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from rota.engine.submission.bus_consumer import SUBMIT_CONSUMER_SPEC, BusSubmissionConsumer
from rota.engine.submission.submitter import Submitter
from rota.infra.nats import BusMessage, StreamSpec
from rota.infra.service import Lifecycle
from rota.model.jobs.submission import LayerSpec, Submission, encode_submission
from rota.model.protocol import SUBMIT_SUBJECT
from rota.queue import DeadLetterFilter, Queue
from tests.integration.infra.nats_support import acknowledged, buses
from tests.support.jobs import NO_EVENTS, a_show, left, task
from tests.support.queue import agreed
from tests.support.waiting import until

SYS = StreamSpec(name="SYS", subjects=("sys.job.>",), storage="memory")


@pytest.fixture
async def bus(nats_url, bus_prefix):
    async with buses(nats_url, bus_prefix) as connect:
        bus = await connect()
        await bus.ensure([SYS, SUBMIT_CONSUMER_SPEC])
        yield bus


@pytest.fixture
async def submit_consumer(database):
    await a_show(database)
    return BusSubmissionConsumer(Submitter(database, NO_EVENTS), Queue(database).dead_letters)


@asynccontextmanager
async def running(submit_consumer, bus):
    draining = asyncio.Event()
    task = asyncio.create_task(submit_consumer.batch_consumer(bus).run(Lifecycle(draining, lambda: None)))
    yield
    draining.set()
    await task


async def publish(bus, *bodies):
    await bus.publish_many(
        [BusMessage(subject=SUBMIT_SUBJECT, data=body, msg_id=f"m{at}") for at, body in enumerate(bodies)]
    )


async def test_bus_submissions_are_written_and_refusals_become_dead_letters(bus, submit_consumer, database):
    keyed = task(idempotency_key="k")
    await Submitter(database, NO_EVENTS).submit([keyed])
    other = encode_submission(task("other", idempotency_key="k"))
    plain = json.dumps({"show": "film", "layers": [{"argv": ["true"]}]}).encode()
    bad = {
        b"\xffnothing": "not a valid submission",
        encode_submission(task(priority=9)): "requires the operator role",
        encode_submission(task(show="flim")): "did you mean film",
        other: "was used for another submission",
    }
    async with running(submit_consumer, bus):
        await publish(bus, encode_submission(task(layer={"frames": 4})), encode_submission(keyed), plain, *bad)
        await until(lambda: settled(bus, 3 + len(bad)), what="every message to be acknowledged")
    assert sum(counts["waiting"] for counts in (await agreed(database)).values()) == 4 + 1 + 1
    dead_letters = await Queue(database).dead_letters.find(DeadLetterFilter(kind="message"))
    assert {(dead_letter.payload, dead_letter.reason) for dead_letter in dead_letters} == {
        (body, "submission_refused") for body in bad
    }
    assert all(bad[dead_letter.payload] in dead_letter.error for dead_letter in dead_letters)


async def settled(bus, number):
    return await acknowledged(bus, SUBMIT_CONSUMER_SPEC) == number


async def test_redelivered_message_submits_nothing_again(bus, submit_consumer, database):
    await publish(bus, encode_submission(task()), encode_submission(task()), b"bad")
    async with bus.consumer(SUBMIT_CONSUMER_SPEC) as consumer:
        batch = []
        while len(batch) < 3:
            batch += await consumer.fetch(3, 5.0)
        for _ in range(2):
            verdicts = await submit_consumer.handle(batch)
            await submit_consumer.terminated(batch[2], verdicts[2].reason)
        for delivery in batch:
            await delivery.ack()
    assert await left(database) == {"jobs": 2, "layers": 2, "entries": 2, "keys": 2}
    assert await Queue(database).dead_letters.count(DeadLetterFilter()) == 1


async def test_recreated_stream_with_reused_sequence_numbers_submits_new_jobs(bus, submit_consumer, database):
    for _ in range(2):
        await publish(bus, encode_submission(task()))
        async with bus.consumer(SUBMIT_CONSUMER_SPEC) as consumer:
            batch = await consumer.fetch(1, 5.0)
            assert [delivery.stream_seq for delivery in batch] == [1]
            await submit_consumer.handle(batch)
            await batch[0].ack()
        await bus._connection.request(f"$JS.API.STREAM.DELETE.{bus._names.stream('SYS')}")
        await bus.ensure([SYS, SUBMIT_CONSUMER_SPEC])
    assert (await left(database))["jobs"] == 2


async def test_largest_submission_fits_through_the_bus(bus, submit_consumer, database):
    layers = tuple(LayerSpec(name=name, task="t", input="x" * 450_000) for name in ("a", "b"))
    await publish(bus, encode_submission(Submission(show="film", layers=layers)))
    async with running(submit_consumer, bus):
        await until(lambda: settled(bus, 1), what="the message to be acknowledged")
    assert (await left(database))["jobs"] == 1

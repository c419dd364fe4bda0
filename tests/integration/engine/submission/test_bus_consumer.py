"""`sys.job.submit`: the same checks as every other face, once however often it comes, refusals in the dead letters."""

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
from tests.support.jobs import a_show, left, task
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
async def intake(database):
    await a_show(database)
    return BusSubmissionConsumer(Submitter(database), Queue(database).dead_letters)


@asynccontextmanager
async def working(intake, bus):
    draining = asyncio.Event()
    task = asyncio.create_task(intake.batch_consumer(bus).run(Lifecycle(draining, lambda: None)))
    yield
    draining.set()
    await task


async def publish(bus, *bodies):
    await bus.publish_many(
        [BusMessage(subject=SUBMIT_SUBJECT, data=body, msg_id=f"m{at}") for at, body in enumerate(bodies)]
    )


async def test_submissions_are_written_and_acknowledged_and_refusals_are_dead_letters(bus, intake, database):
    keyed = task(idempotency_key="k")
    await Submitter(database).submit([keyed])
    other = encode_submission(task("other", idempotency_key="k"))
    plain = json.dumps({"show": "film", "layers": [{"argv": ["true"]}]}).encode()
    bad = {
        b"\xffnothing": "not a valid submission",
        encode_submission(task(priority=9)): "requires the operator role",
        encode_submission(task(show="flim")): "did you mean film",
        other: "was used for another submission",
    }
    async with working(intake, bus):
        await publish(bus, encode_submission(task(layer={"frames": 4})), encode_submission(keyed), plain, *bad)
        await until(lambda: settled(bus, 3 + len(bad)), what="every message to be answered")
    assert sum(counts["waiting"] for counts in (await agreed(database)).values()) == 4 + 1 + 1
    letters = await Queue(database).dead_letters.find(DeadLetterFilter(kind="message"))
    assert {(letter.payload, letter.reason) for letter in letters} == {(body, "submission_refused") for body in bad}
    assert all(bad[letter.payload] in letter.error for letter in letters)


async def settled(bus, number):
    return await acknowledged(bus, SUBMIT_CONSUMER_SPEC) == number


async def test_a_message_that_comes_again_submits_nothing_again(bus, intake, database):
    await publish(bus, encode_submission(task()), encode_submission(task()), b"bad")
    async with bus.consumer(SUBMIT_CONSUMER_SPEC) as consumer:
        batch = []
        while len(batch) < 3:
            batch += await consumer.fetch(3, 5.0)
        for _ in range(2):
            verdicts = await intake.handle(batch)
            await intake.terminated(batch[2], verdicts[2].reason)
        for delivery in batch:
            await delivery.ack()
    assert await left(database) == {"jobs": 2, "layers": 2, "entries": 2, "keys": 2}
    assert await Queue(database).dead_letters.count(DeadLetterFilter()) == 1


async def test_a_stream_that_was_made_anew_counts_from_one_and_its_messages_are_new(bus, intake, database):
    for _ in range(2):
        await publish(bus, encode_submission(task()))
        async with bus.consumer(SUBMIT_CONSUMER_SPEC) as consumer:
            batch = await consumer.fetch(1, 5.0)
            assert [delivery.stream_seq for delivery in batch] == [1]
            await intake.handle(batch)
            await batch[0].ack()
        await bus._connection.request(f"$JS.API.STREAM.DELETE.{bus._names.stream('SYS')}")
        await bus.ensure([SYS, SUBMIT_CONSUMER_SPEC])
    assert (await left(database))["jobs"] == 2


async def test_a_submission_of_the_largest_size_fits_through_the_bus(bus, intake, database):
    layers = tuple(LayerSpec(name=name, task="t", input="x" * 450_000) for name in ("a", "b"))
    await publish(bus, encode_submission(Submission(show="film", layers=layers)))
    async with working(intake, bus):
        await until(lambda: settled(bus, 1), what="the message to be answered")
    assert (await left(database))["jobs"] == 1

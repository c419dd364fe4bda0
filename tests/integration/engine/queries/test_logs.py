"""Frame logs: written in bounded batches, read in order with gaps reported."""

from contextlib import asynccontextmanager
from uuid import UUID

import pytest

from rota.engine.queries import logs
from rota.engine.queries.logs import DROPPED, LogReader, LogWriter
from rota.engine.submission.submitter import Submitter
from rota.infra.nats import CoreMessage
from rota.model.errors import InvalidInput, PostgresUnavailable
from rota.model.protocol import LOG_SUBJECT, LogChunk, encode
from tests.support.jobs import NO_EVENTS, a_show, task
from tests.support.queue import Dispatcher, sql

WORKER = UUID(int=7)
ROWS = sql("SELECT count(*) FROM rota.frame_log")


@pytest.fixture
async def job(database):
    await a_show(database)
    [one] = await Submitter(database, NO_EVENTS).submit([task(layer={"frames": "10-30x10"})])
    return one.job


@pytest.fixture
async def tokens(database, job):
    """The tokens of frames 10, 20 and 30, in this order."""
    dispatcher = await Dispatcher(database).enlisted()
    return await dispatcher.tokens(3)


@pytest.fixture
def writer(database):
    return LogWriter(database, None)


def chunk_message(token, at, data, *, stream="stdout", **more):
    return CoreMessage(LOG_SUBJECT, encode(LogChunk(WORKER, token, stream, at, data, **more)))


def dropped(reason):
    return DROPPED.labels(reason)._value.get()


@asynccontextmanager
async def counted(reason, number):
    before = dropped(reason)
    yield
    assert dropped(reason) - before == number


async def read(database, job, frame, **more):
    return [(chunk.stream, chunk.at, chunk.data) for chunk in await LogReader(database).read(job, frame, **more)]


async def test_chunks_of_several_frames_are_written_in_one_batch_and_read_per_frame(writer, tokens, job, database):
    ten, twenty, _ = tokens
    for message in (
        chunk_message(twenty, 0, b"b"),
        chunk_message(ten, 3, b"def"),
        chunk_message(ten, 0, b"abc"),
        chunk_message(ten, 0, b"!", stream="log"),
    ):
        writer.enqueue(message)
    await writer.flush()
    assert await read(database, job, 10) == [("log", 0, b"!"), ("stdout", 0, b"abc"), ("stdout", 3, b"def")]
    assert await read(database, job, 20, stream="stdout") == [("stdout", 0, b"b")]
    assert await read(database, job, 30) == []
    assert await read(database, job, None) == await read(database, job, 10)


async def test_read_reports_gaps_and_removes_duplicates(writer, tokens, job, database):
    for at, data, gone, last in (
        (0, b"ab", 0, False),
        (0, b"ab", 0, False),
        (10, b"cd", 5, False),
        (11, b"de", 0, True),
    ):
        writer.enqueue(chunk_message(tokens[0], at, data, dropped=gone, last=last))
    await writer.flush()
    chunks = await LogReader(database).read(job, 10, stream="stdout")
    assert [(p.at, p.data, p.dropped, p.lost, p.last) for p in chunks] == [
        (0, b"ab", 0, 0, False),
        (10, b"cd", 5, 3, False),
        (12, b"e", 0, 0, True),
    ]


async def test_stream_read_resumes_at_an_offset(writer, tokens, job, database):
    for at in range(0, 50, 10):
        writer.enqueue(chunk_message(tokens[0], at, b"%010d" % at))
    await writer.flush()
    text, after = b"", 0
    while chunks := await LogReader(database).read(job, 10, stream="stdout", after=after, most=2):
        assert not any(chunk.lost for chunk in chunks)
        text += b"".join(chunk.data for chunk in chunks)
        after = chunks[-1].at + len(chunks[-1].data)
    assert text == b"".join(b"%010d" % at for at in range(0, 50, 10))
    assert [p.data for p in await LogReader(database).read(job, 10, stream="stdout", after=45)] == [b"00040"]


async def test_latest_attempt_is_read_by_default(writer, tokens, job, database):
    writer.enqueue(chunk_message(tokens[0], 0, b"first"))
    await writer.flush()
    await writer.database.run(sql("UPDATE rota.frame_log SET attempt = 1"))
    add = "INSERT INTO rota.frame_log SELECT pk_layer, frame, 2, token + 1, stream, at, 0, 'second' FROM rota.frame_log"
    await database.run(sql(add))
    assert await read(database, job, 10) == [("stdout", 0, b"second")]
    assert await read(database, job, 10, attempt=1) == [("stdout", 0, b"first")]


async def test_invalid_chunks_are_dropped_and_counted(writer, tokens, database, monkeypatch):
    monkeypatch.setattr(logs, "FRAME_BYTES_MAX", 10)
    async with (
        counted("unreadable", 3),
        counted("too_large", 1),
        counted("frame_limit", 1),
        counted("unknown_frame", 1),
    ):
        writer.enqueue(CoreMessage(LOG_SUBJECT, b"\xff"))
        writer.enqueue(chunk_message(-1, 0, b""))
        writer.enqueue(chunk_message(tokens[0], -1, b"x"))
        writer.enqueue(chunk_message(tokens[0], 0, b"x" * (logs.CHUNK_BYTES_MAX + 1)))
        writer.enqueue(chunk_message(tokens[0], 0, b"12345678"))
        writer.enqueue(chunk_message(tokens[0], 8, b"9999"))
        writer.enqueue(chunk_message(2**50, 0, b"x"))
        await writer.flush()
    assert await database.value(ROWS) == 1


async def test_buffer_is_bounded_during_a_postgres_outage_and_keeps_accepted_chunks(
    writer, tokens, job, database, monkeypatch
):
    monkeypatch.setattr(logs, "BUFFER_BYTES", 10)

    class UnavailableDatabase:
        async def rows(self, *_):
            raise PostgresUnavailable("PostgreSQL is away.")

    writer.database = UnavailableDatabase()
    async with counted("full", 5):
        for at in range(10):
            writer.enqueue(chunk_message(tokens[0], 2 * at, b"xx"))
    with pytest.raises(PostgresUnavailable):
        await writer.flush()
    writer.database = database
    await writer.flush()
    assert [at for _, at, _ in await read(database, job, 10)] == [0, 2, 4, 6, 8]
    writer.enqueue(chunk_message(tokens[0], 20, b"xx"))
    assert writer._bytes == 2


async def test_batch_is_bounded_in_bytes(writer, tokens, monkeypatch):
    monkeypatch.setattr(logs, "BATCH_BYTES", 5)
    for at in range(4):
        writer.enqueue(chunk_message(tokens[0], at * 4, b"xxxx"))
    assert [len(writer._next_batch())] == [1]
    await writer.flush()
    assert await writer.database.value(ROWS) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frame": 11}, "has no frame 11"),
        ({"layer": "x"}, "has no layer 'x'"),
        ({"most": 0}, "not a valid number of segments"),
    ],
)
async def test_invalid_read_arguments_are_refused(database, job, arguments, message):
    with pytest.raises(InvalidInput, match=message):
        await LogReader(database).read(job, **arguments)

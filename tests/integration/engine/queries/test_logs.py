"""What frames write: kept in batches, bounded, and read back in order with what is missing."""

from contextlib import asynccontextmanager
from uuid import UUID

import pytest

from rota.engine.queries import logs
from rota.engine.queries.logs import DROPPED, LogReader, LogWriter
from rota.engine.submission.submitter import Submitter
from rota.infra.nats import CoreMessage
from rota.model.errors import InvalidInput, PostgresUnavailable
from rota.model.protocol import LOG_SUBJECT, LogChunk, encode
from tests.support.jobs import a_show, task
from tests.support.queue import Dispatcher, sql

WORKER = UUID(int=7)
ROWS = sql("SELECT count(*) FROM rota.frame_log")


@pytest.fixture
async def job(database):
    await a_show(database)
    [one] = await Submitter(database).submit([task(layer={"frames": "10-30x10"})])
    return one.job


@pytest.fixture
async def tokens(database, job):
    """Of frames 10, 20 and 30, in this order."""
    dispatcher = await Dispatcher(database).enlisted()
    return await dispatcher.tokens(3)


@pytest.fixture
def keeper(database):
    return LogWriter(database, None)


def heard(token, at, data, *, stream="stdout", **more):
    return CoreMessage(LOG_SUBJECT, encode(LogChunk(WORKER, token, stream, at, data, **more)))


def dropped(reason):
    return DROPPED.labels(reason)._value.get()


@asynccontextmanager
async def counted(reason, number):
    before = dropped(reason)
    yield
    assert dropped(reason) - before == number


async def read(database, job, frame, **more):
    return [(piece.stream, piece.at, piece.data) for piece in await LogReader(database).read(job, frame, **more)]


async def test_pieces_of_several_frames_are_written_together_and_read_apart(keeper, tokens, job, database):
    ten, twenty, _ = tokens
    for message in (
        heard(twenty, 0, b"b"),
        heard(ten, 3, b"def"),
        heard(ten, 0, b"abc"),
        heard(ten, 0, b"!", stream="log"),
    ):
        keeper.enqueue(message)
    await keeper.flush()
    assert await read(database, job, 10) == [("log", 0, b"!"), ("stdout", 0, b"abc"), ("stdout", 3, b"def")]
    assert await read(database, job, 20, stream="stdout") == [("stdout", 0, b"b")]
    assert await read(database, job, 30) == []
    assert await read(database, job, None) == await read(database, job, 10)


async def test_what_is_missing_is_told_and_what_came_twice_is_read_once(keeper, tokens, job, database):
    for at, data, gone, last in (
        (0, b"ab", 0, False),
        (0, b"ab", 0, False),
        (10, b"cd", 5, False),
        (11, b"de", 0, True),
    ):
        keeper.enqueue(heard(tokens[0], at, data, dropped=gone, last=last))
    await keeper.flush()
    pieces = await LogReader(database).read(job, 10, stream="stdout")
    assert [(p.at, p.data, p.dropped, p.lost, p.last) for p in pieces] == [
        (0, b"ab", 0, 0, False),
        (10, b"cd", 5, 3, False),
        (12, b"e", 0, 0, True),
    ]


async def test_a_stream_is_read_on_from_where_it_was_left(keeper, tokens, job, database):
    for at in range(0, 50, 10):
        keeper.enqueue(heard(tokens[0], at, b"%010d" % at))
    await keeper.flush()
    text, after = b"", 0
    while pieces := await LogReader(database).read(job, 10, stream="stdout", after=after, most=2):
        assert not any(piece.lost for piece in pieces)
        text += b"".join(piece.data for piece in pieces)
        after = pieces[-1].at + len(pieces[-1].data)
    assert text == b"".join(b"%010d" % at for at in range(0, 50, 10))
    assert [p.data for p in await LogReader(database).read(job, 10, stream="stdout", after=45)] == [b"00040"]


async def test_the_last_attempt_is_read_unless_another_is_named(keeper, tokens, job, database):
    keeper.enqueue(heard(tokens[0], 0, b"first"))
    await keeper.flush()
    await keeper.database.run(sql("UPDATE rota.frame_log SET attempt = 1"))
    add = "INSERT INTO rota.frame_log SELECT pk_layer, frame, 2, token + 1, stream, at, 0, 'second' FROM rota.frame_log"
    await database.run(sql(add))
    assert await read(database, job, 10) == [("stdout", 0, b"second")]
    assert await read(database, job, 10, attempt=1) == [("stdout", 0, b"first")]


async def test_what_nobody_can_keep_is_dropped_and_counted(keeper, tokens, database, monkeypatch):
    monkeypatch.setattr(logs, "FRAME_BYTES_MAX", 10)
    async with (
        counted("unreadable", 3),
        counted("too_large", 1),
        counted("frame_limit", 1),
        counted("unknown_frame", 1),
    ):
        keeper.enqueue(CoreMessage(LOG_SUBJECT, b"\xff"))
        keeper.enqueue(heard(-1, 0, b""))
        keeper.enqueue(heard(tokens[0], -1, b"x"))
        keeper.enqueue(heard(tokens[0], 0, b"x" * (logs.CHUNK_BYTES_MAX + 1)))
        keeper.enqueue(heard(tokens[0], 0, b"12345678"))
        keeper.enqueue(heard(tokens[0], 8, b"9999"))
        keeper.enqueue(heard(2**50, 0, b"x"))
        await keeper.flush()
    assert await database.value(ROWS) == 1


async def test_memory_is_bounded_while_postgres_is_away_and_nothing_taken_is_lost(
    keeper, tokens, job, database, monkeypatch
):
    monkeypatch.setattr(logs, "BUFFER_BYTES", 10)

    class Away:
        async def rows(self, *_):
            raise PostgresUnavailable("PostgreSQL is away.")

    keeper.database = Away()
    async with counted("full", 5):
        for at in range(10):
            keeper.enqueue(heard(tokens[0], 2 * at, b"xx"))
    with pytest.raises(PostgresUnavailable):
        await keeper.flush()
    keeper.database = database
    await keeper.flush()
    assert [at for _, at, _ in await read(database, job, 10)] == [0, 2, 4, 6, 8]
    keeper.enqueue(heard(tokens[0], 20, b"xx"))
    assert keeper._bytes == 2


async def test_a_batch_is_bounded_in_bytes(keeper, tokens, monkeypatch):
    monkeypatch.setattr(logs, "BATCH_BYTES", 5)
    for at in range(4):
        keeper.enqueue(heard(tokens[0], at * 4, b"xxxx"))
    assert [len(keeper._next_batch())] == [1]
    await keeper.flush()
    assert await keeper.database.value(ROWS) == 4


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"frame": 11}, "has no frame 11"),
        ({"layer": "x"}, "has no layer 'x'"),
        ({"most": 0}, "not a valid number of segments"),
    ],
)
async def test_asking_for_what_is_not_there_is_told(database, job, asked, told):
    with pytest.raises(InvalidInput, match=told):
        await LogReader(database).read(job, **asked)

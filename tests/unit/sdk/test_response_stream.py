"""Streams: lines however they are split, broken and silent servers, slow readers."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

from rota.client import response_stream
from rota.client.connection import ConnectError, ReadError, ReadTimeout, RemoteProtocolError
from rota.client.connection_pool import PoolLimits
from rota.client.connector import Connector
from rota.client.endpoint import ApiEndpoint
from rota.client.endpoint_client import EndpointClient
from rota.client.response_stream import open_stream
from tests.support.harness.effort import effort
from tests.support.waiting import until

HEAD = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
LONG_S = 60.0
SEEDS = effort(10, 300)


def chunk(data):
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@asynccontextmanager
async def sending(*parts, then=None):
    """A server that sends these parts in writes of their own; `then` is awaited before it closes the connection."""
    tasks = []

    async def accept(reader, writer):
        tasks.append(asyncio.current_task())
        try:
            await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            if then is not None:
                await then(writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def stream_of(server, read_timeout_s=LONG_S):
    return open_stream(Connector(server.url), HEAD, connect_timeout_s=LONG_S, read_timeout_s=read_timeout_s)


async def lines_of(server, **options):
    async with stream_of(server, **options) as stream:
        return [line async for line in stream.lines()]


async def forever(_writer):
    await asyncio.Event().wait()


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_lines_are_the_same_however_they_are_split(seed):
    rng = random.Random(seed)
    text = "id: 1\r\ndata: größe\n\ndata: \u2028 stays\nlast"
    encoded = text.encode()
    cuts = sorted(rng.sample(range(1, len(encoded)), 5))
    body = b"".join(chunk(encoded[a:b]) for a, b in zip([0, *cuts], [*cuts, None], strict=True)) + END
    whole = CHUNKED + body
    cuts = sorted(rng.sample(range(1, len(whole)), 8))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    async with sending(*parts) as server:
        assert await lines_of(server) == ["id: 1", "data: größe", "", "data: \u2028 stays", "last"]


async def test_status_and_headers_are_known_before_the_body_arrives():
    parts = (b"HTTP/1.1 100 Continue\r\n\r\n", OK + b"X-A: 1\r\n\r\n")
    async with sending(*parts, then=forever) as server, stream_of(server) as stream:
        assert (stream.status, stream.is_success, stream.headers) == (200, True, {"x-a": "1"})


async def test_body_of_a_refusal_is_read_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(response_stream, "BODY_BYTES_MAX", 10)
    parts = (b"HTTP/1.1 403 No\r\n\r\n", b"x" * 1000)
    async with sending(*parts, then=forever) as server, stream_of(server) as stream:
        assert (stream.is_success, await stream.read()) == (False, b"x" * 10)


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([], ReadError),
        ([OK], ReadError),
        ([CHUNKED + chunk(b"a\n")], ReadError),
        ([OK + b"content-length: 5\r\n\r\nabc"], ReadError),
        ([b"SSH-2.0\r\n\r\n"], RemoteProtocolError),
        ([CHUNKED + b"zz\r\n"], RemoteProtocolError),
        ([b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"], RemoteProtocolError),
    ],
)
async def test_broken_stream_raises(parts, kind):
    async with sending(*parts) as server:
        with pytest.raises(kind):
            await lines_of(server)


async def test_stream_without_a_length_ends_with_its_connection():
    async with sending(OK + b"\r\n", b"a\nb") as server:
        assert await lines_of(server) == ["a", "b"]


async def test_endless_line_is_refused(monkeypatch):
    monkeypatch.setattr(response_stream, "LINE_CHARS_MAX", 1000)
    async with sending(OK + b"\r\n", b"x" * 2000, then=forever) as server:
        with pytest.raises(RemoteProtocolError, match="too long"):
            await lines_of(server)


@pytest.mark.parametrize("parts", [[], [OK], [CHUNKED + chunk(b"a\n")]])
async def test_silent_server_is_reported_after_the_read_timeout(parts):
    async with sending(*parts, then=forever) as server:
        with pytest.raises(ReadTimeout):
            await lines_of(server, read_timeout_s=0.05)


async def test_server_that_is_gone_is_a_failure_to_connect():
    async with sending() as server:
        pass
    with pytest.raises(ConnectError):
        await lines_of(server)


async def test_slow_reader_holds_back_the_server_and_not_the_memory():
    async def flood(writer):
        while True:
            writer.write(chunk(b"x" * 65535 + b"\n"))
            await writer.drain()

    async with sending(CHUNKED, then=flood) as server, stream_of(server) as stream:
        assert len(await anext(stream.lines())) == 65535
        await until(lambda: stream._reader._paused, what="the pause of the connection")
        assert len(stream._reader._buffer) <= 2 * response_stream.BUFFER_BYTES + 256 * 1024  # one read of asyncio more


async def test_connection_is_closed_with_its_stream():
    closed = asyncio.Event()

    async def until_closed(writer):
        try:
            while True:
                writer.write(chunk(b"a\n"))
                await writer.drain()
                await asyncio.sleep(0)
        finally:
            closed.set()

    async with sending(CHUNKED, then=until_closed) as server:
        async with stream_of(server) as stream:
            assert await anext(stream.lines()) == "a"
        await until(closed.is_set, what="the end of the connection")


async def test_closing_the_client_ends_its_streams():
    limits = PoolLimits(connections_max=8, idle_max=8, keepalive_s=60, connect_timeout_s=5, line_timeout_s=60)
    async with sending(CHUNKED, then=forever) as server:
        client = EndpointClient(ApiEndpoint(server.url, "k"), limits, LONG_S)
        async with client.stream("/events", query=None, headers=None) as stream:
            reading = asyncio.ensure_future(anext(stream.lines()))
            await asyncio.sleep(0)
            await client.close()
            with pytest.raises(ReadError):
                await reading

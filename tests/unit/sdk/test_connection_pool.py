"""Connections of the client: reuse, limits, cancellation, timeouts, and servers that answer strangely or not at all."""

import asyncio
import random
import socket
import ssl
import threading
from contextlib import asynccontextmanager

import pytest

from rota.client.connection import (
    ConnectError,
    ConnectTimeout,
    PoolTimeout,
    ReadError,
    ReadTimeout,
    RemoteProtocolError,
    RequestError,
)
from rota.client.connection_pool import ConnectionPool, PoolLimits
from rota.client.connector import Connector
from rota.client.endpoint import ApiEndpoint
from rota.client.endpoint_client import EndpointClient
from rota.model.errors import InvalidSetting
from tests.support.answers import answer, answering
from tests.support.harness.effort import effort
from tests.support.waiting import until

LIMITS = {"connections_max": 8, "idle_max": 8, "keepalive_s": 60.0, "connect_timeout_s": 5.0, "line_timeout_s": 60.0}
HEAD = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
SHORT_S = 0.05
LONG_S = 60.0
SEEDS = effort(20, 1000)
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@asynccontextmanager
async def serving(handle):
    """A server that calls `handle(reader, writer, number of the connection)`."""
    tasks = []

    async def accept(reader, writer):
        tasks.append(asyncio.current_task())
        try:
            await handle(reader, writer, len(tasks))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    server.port = server.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answers_with(*responses, close=False):
    """Answers each request of a connection with the next response; then the last one, or the connection is closed."""

    async def handle(reader, writer, _number):
        remaining = list(responses)
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(remaining.pop(0) if len(remaining) > 1 or close else remaining[0])
            await writer.drain()
            if not remaining:
                return

    return handle


@asynccontextmanager
async def pool_to(port, **limits):
    pool = ConnectionPool(Connector(f"http://127.0.0.1:{port}"), PoolLimits(**(LIMITS | limits)))
    try:
        yield pool
    finally:
        await pool.close()


@asynccontextmanager
async def pool_of(handle, **limits):
    async with serving(handle) as server, pool_to(server.port, **limits) as pool:
        yield pool


async def get(pool, *, head=HEAD, body=None, read_timeout_s=LONG_S, timeout_s=LONG_S):
    return await pool.request(head, body, read_timeout_s=read_timeout_s, timeout_s=timeout_s)


class GatedServer:
    """Answers each request with its path once `gate` is set; counts connections and requests."""

    def __init__(self):
        self.gate = asyncio.Event()
        self.connections, self.open, self.open_max, self.paths = 0, 0, 0, []

    async def __call__(self, reader, writer, number):
        self.connections, self.open = number, self.open + 1
        self.open_max = max(self.open_max, self.open)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split()[1]
                self.paths.append(path)
                await self.gate.wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(path), path))
        finally:
            self.open -= 1


def head_of(path):
    return b"GET /%b HTTP/1.1\r\nhost: a\r\n\r\n" % str(path).encode()


async def test_connection_is_used_again_after_a_complete_response():
    server = GatedServer()
    server.gate.set()
    async with pool_of(server) as pool:
        for number in range(5):
            assert (await get(pool, head=head_of(number))).content == f"/{number}".encode()
    assert server.connections == 1


async def test_requests_over_the_limit_wait_in_line_and_keep_their_order():
    server = GatedServer()
    async with pool_of(server, connections_max=3) as pool:
        asked = [asyncio.create_task(get(pool, head=head_of(number))) for number in range(20)]
        await until(lambda: len(server.paths) == 3, what="three requests")
        server.gate.set()
        assert [found.content for found in await asyncio.gather(*asked)] == [b"/%d" % n for n in range(20)]
    assert (server.open_max, server.connections) == (3, 3)
    assert server.paths[3:] == [b"/%d" % number for number in range(3, 20)]


async def test_idle_connections_over_their_limit_are_closed():
    server = GatedServer()
    async with pool_of(server, idle_max=2) as pool:
        asked = [asyncio.create_task(get(pool)) for _ in range(8)]
        await until(lambda: server.open == 8, what="eight connections")
        server.gate.set()
        await asyncio.gather(*asked)
        await until(lambda: server.open == 2, what="the end of six connections")


async def test_idle_connection_past_its_keep_alive_is_replaced():
    server = GatedServer()
    server.gate.set()
    async with pool_of(server, keepalive_s=0.0) as pool:
        await get(pool)
        await get(pool)
    assert server.connections == 2


async def test_full_pool_is_reported_after_its_timeout_without_sending():
    server = GatedServer()
    async with pool_of(server, connections_max=1, line_timeout_s=SHORT_S) as pool:
        first = asyncio.create_task(get(pool, head=head_of("first")))
        await until(lambda: server.paths, what="the first request")
        with pytest.raises(PoolTimeout):
            await get(pool, head=head_of("second"))
        server.gate.set()
        await first
        await get(pool, head=head_of("third"))
    assert server.paths == [b"/first", b"/third"]


async def test_cancelled_request_closes_its_connection_and_the_next_gets_its_own_response():
    server = GatedServer()
    async with pool_of(server, connections_max=1) as pool:
        first = asyncio.create_task(get(pool, head=head_of("first")))
        await until(lambda: server.paths, what="the first request")
        second = asyncio.create_task(get(pool, head=head_of("second")))
        await asyncio.sleep(0)
        first.cancel()
        server.gate.set()
        assert (await second).content == b"/second"
        assert first.cancelled()
    assert server.connections == 2


def moody(chance):
    """Answers with the path, or closes the connection before or after that."""

    async def handle(reader, writer, _number):
        while head := await reader.readuntil(b"\r\n\r\n"):
            await iterations(chance.randrange(4))
            if chance.random() < 0.2:
                return
            path = head.split()[1]
            close = b"connection: close\r\n" if chance.random() < 0.2 else b""
            writer.write(b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (close, len(path), path))
            if close:
                return

    return handle


async def iterations(number):
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_no_connection_is_lost_whatever_is_cancelled(seed):
    chance = random.Random(seed)
    limits = {"connections_max": chance.choice([1, 2, 4]), "idle_max": chance.choice([0, 1, 4])}
    async with pool_of(moody(chance), **limits) as pool:
        asked = {}
        for number in range(60):
            asked[number] = asyncio.create_task(get(pool, head=head_of(number)))
            await iterations(chance.choice([0, 0, 1, 5]))
            if chance.random() < 0.3:
                chance.choice(list(asked.values())).cancel()
        await asyncio.wait(asked.values())
        for number, task in asked.items():
            if not task.cancelled() and not isinstance(task.exception(), RequestError):
                assert task.result().content == f"/{number}".encode()
        await until(lambda: pool._taken == len(pool._idle), what="the return of all connections")
        assert not [turn for turn in pool._line if not turn.done()]


@pytest.mark.parametrize(
    ("response", "status", "content"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", 200, b"abcde"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nx: 1\r\n\r\n" + OK, 200, b"ok"),
        (b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", 503, b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Y:  z \r\n\r\nok", 200, b"ok"),
    ],
)
@pytest.mark.parametrize("pieces", [1, 10_000])
async def test_response_is_read_however_it_is_split(response, status, content, pieces):
    async def handle(reader, writer, _number):
        while await reader.readuntil(b"\r\n\r\n"):
            size = -(-len(response) // pieces)
            for first in range(0, len(response), size):
                writer.write(response[first : first + size])
                await writer.drain()
                await asyncio.sleep(0)

    async with pool_of(handle) as pool:
        for _ in range(2):
            found = await get(pool)
            assert (found.status, found.content) == (status, content)
            assert found.headers.get("x-y", "z") == "z"
            assert "x" not in found.headers, "headers of an interim response"
        assert len(pool._all) == 1


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\n\r\nall until the end",
        b"HTTP/1.0 200 OK\r\n\r\nall until the end",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 17\r\n\r\nall until the end",
    ],
)
async def test_response_that_ends_with_its_connection_is_complete(response):
    async with pool_of(answers_with(response, close=True)) as pool:
        for _ in range(2):
            assert (await get(pool)).content == b"all until the end"


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (b"", ReadError),
        (b"HTTP/1.1 200 OK\r\ncontent-le", ReadError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", ReadError),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", ReadError),
        (b"SSH-2.0-OpenSSH_9.6\r\n", RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", RemoteProtocolError),
        (b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", RemoteProtocolError),
    ],
)
async def test_broken_response_raises_and_its_connection_is_not_used_again(response, kind):
    async with pool_of(answers_with(response, close=True)) as pool:
        for _ in range(2):
            with pytest.raises(kind):
                await get(pool)
        assert pool._taken == 0


async def test_closing_the_pool_does_not_complete_a_response_that_ends_with_its_connection():
    asked = asyncio.Event()

    async def handle(reader, writer, _number):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nthe first part")
        asked.set()
        await reader.read()

    async with pool_of(handle) as pool:
        response = asyncio.create_task(get(pool))
        await asked.wait()
        [connection] = pool._all
        await until(lambda: connection._chunks, what="the first part")
        await pool.close()
        with pytest.raises(ReadError):
            await response


async def test_unasked_data_ends_the_connection():
    async def handle(reader, writer, number):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + (OK.replace(b"ok", b"no") if number == 1 else b""))
        await reader.read()

    async with pool_of(handle) as pool:
        assert [(await get(pool)).content for _ in range(2)] == [b"ok", b"ok"]


async def test_data_on_an_idle_connection_closes_it():
    asked = asyncio.Event()

    async def handle(reader, writer, _number):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await asked.wait()
        writer.write(OK)
        await reader.read()

    async with pool_of(handle) as pool:
        await get(pool)
        [connection] = pool._idle
        asked.set()
        await until(lambda: connection.is_closed, what="the end of the connection")


async def test_connection_that_the_server_wants_closed_is_not_used_again():
    connections = []

    async def handle(reader, writer, number):
        connections.append(number)
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))

    async with pool_of(handle) as pool:
        assert [(await get(pool)).content for _ in range(2)] == [b"ok", b"ok"]
    assert connections == [1, 2]


async def test_connection_closed_by_the_server_while_the_loop_was_busy_is_not_used():
    """The loop has not read the end yet. A request that must not be repeated would be lost otherwise."""
    listener = socket.create_server(("127.0.0.1", 0))
    closed = threading.Event()

    def serve():
        for number in range(2):
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(OK)
            if number:
                connection.recv(1000)
            connection.close()
            closed.set()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    async with pool_to(listener.getsockname()[1]) as pool:
        await get(pool)
        closed.wait(10)  # blocks the loop on purpose
        assert (await get(pool)).content == b"ok"
    await asyncio.to_thread(thread.join, 10)
    listener.close()


async def test_silent_server_is_reported_after_the_read_timeout():
    server = GatedServer()
    async with pool_of(server) as pool:
        long = asyncio.create_task(get(pool, head=head_of("long")))
        await until(lambda: server.paths, what="a request with a long timeout")
        with pytest.raises(ReadTimeout):
            await get(pool, read_timeout_s=SHORT_S)
        assert not long.done()
        server.gate.set()
        await long


async def test_short_timeout_applies_on_a_connection_that_had_a_long_one():
    server = GatedServer()
    server.gate.set()
    async with pool_of(server) as pool:
        await get(pool, read_timeout_s=LONG_S)
        server.gate.clear()
        with pytest.raises(ReadTimeout):
            await get(pool, read_timeout_s=SHORT_S)
    assert server.connections == 1


async def test_endless_response_is_reported_after_the_whole_timeout():
    async def handle(reader, writer, _number):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"1\r\nx\r\n")
            await writer.drain()
            await asyncio.sleep(0)

    async with pool_of(handle) as pool:
        with pytest.raises(TimeoutError):
            await get(pool, timeout_s=4 * SHORT_S)


async def test_upload_that_makes_progress_is_not_timed_out():
    size, loop = 48 * 1024 * 1024, asyncio.get_running_loop()
    began_s = loop.time()
    took_s = 0.0

    async def handle(reader, writer, _number):
        nonlocal took_s
        await reader.readuntil(b"\r\n\r\n")
        left = size
        while left:
            left -= len(await reader.read(16 * 1024))
            await asyncio.sleep(0)
        took_s = loop.time() - began_s
        writer.write(OK)

    async with pool_of(handle) as pool:
        assert (await get(pool, body=bytes(size), read_timeout_s=SHORT_S)).content == b"ok"
    assert took_s > SHORT_S


async def test_response_before_the_end_of_the_upload_is_returned():
    async def handle(reader, writer, number):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n" if number == 1 else OK)
        await writer.drain()
        await reader.read(-1) if number == 1 else await reader.read()

    async with pool_of(handle) as pool:
        assert (await get(pool, body=bytes(32 * 1024 * 1024))).status == 413
        assert (await get(pool)).content == b"ok"


async def test_server_that_does_not_accept_raises_in_time():
    async def silent(reader, _writer, _number):
        await reader.read()

    async with serving(silent) as server:
        limits = PoolLimits(**(LIMITS | {"connect_timeout_s": SHORT_S}))
        pool = ConnectionPool(Connector(f"https://127.0.0.1:{server.port}"), limits)
        with pytest.raises(ConnectTimeout):
            await get(pool)
        assert pool._taken == 0
        await pool.close()


async def test_failed_connect_lets_the_next_in_line_try():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with pool_to(port, connections_max=1) as pool:
        failed = await asyncio.gather(*(get(pool) for _ in range(5)), return_exceptions=True)
        assert [type(error) for error in failed] == [ConnectError] * 5
        assert pool._taken == 0


async def test_closing_the_pool_ends_its_requests():
    server = GatedServer()
    async with pool_of(server, connections_max=1) as pool:
        first = asyncio.create_task(get(pool))
        await until(lambda: server.paths, what="the request")
        second = asyncio.create_task(get(pool))
        await asyncio.sleep(0)
        await pool.close()
        ended = await asyncio.gather(first, second, return_exceptions=True)
        assert [type(error) for error in ended] == [ReadError, ConnectError]
        server.gate.set()
        await until(lambda: not server.open, what="the end of all connections")


async def test_tls_connection_is_kept_and_its_certificate_checked(certificate, monkeypatch):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    async with answering(answer(body=5), ssl=tls) as server:
        strict = ConnectionPool(Connector(server.url), PoolLimits(**LIMITS))
        with pytest.raises(ConnectError, match="certificate verify failed"):
            await get(strict)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        trusting = ConnectionPool(Connector(server.url), PoolLimits(**LIMITS))
        for _ in range(3):
            assert (await get(trusting)).status == 200
        assert len(trusting._all) == 1
        await strict.close()
        await trusting.close()
    assert len(server.requests) == 3


KEY = "rota_0123456789_" + "k" * 39


@asynccontextmanager
async def client_to(url, key=KEY):
    client = EndpointClient(ApiEndpoint(url, key), PoolLimits(**LIMITS), LONG_S)
    try:
        yield client
    finally:
        await client.close()


async def call(client, method="GET", path="/jobs", *, query=None, content=None, trace=None):
    return await client.request(
        method, path, query=query, content=content, trace=trace or {}, read_timeout_s=LONG_S, timeout_s=LONG_S
    )


async def test_request_has_the_documented_head():
    async with answering(answer(body=5)) as server, client_to(f"{server.url}/base/") as client:
        query = {"q": "show:film x&y", "limit": 5, "after": None, "deep": True}
        await call(client, path="/shows/a%2Fb", query=query, trace={"traceparent": "00-1-2-01"})
        await call(client, "POST", "/jobs", content=b"\x80")
        await call(client, "POST", "/jobs/1/cancel")
    first, second, third = server.requests
    assert first.path == "/base/api/v1/shows/a%2Fb?q=show%3Afilm+x%26y&limit=5&deep=true"
    assert first.headers == {
        "host": server.url.removeprefix("http://"),
        "authorization": f"Bearer {KEY}",
        "accept": "application/msgpack",
        "user-agent": "rota-sdk",
        "traceparent": "00-1-2-01",
    }
    assert (second.headers["content-type"], second.body) == ("application/msgpack", b"\x80")
    assert (third.headers["content-length"], "content-type" in third.headers) == ("0", False)


async def test_nothing_the_caller_passes_adds_a_header_or_a_request():
    async with answering(answer(body=5)) as server:
        async with client_to(server.url) as client:
            evil = "x\r\nx-evil: 1\r\n\r\nGET /evil HTTP/1.1\r\n"
            await call(
                client, path=f"/jobs/{evil}", query={"q": evil}, trace={"tracestate": evil, "traceparent": "\x00"}
            )
        for key in (f"{KEY}\r\nx-evil: 1", f"{KEY}\n", "schlüssel"):
            with pytest.raises(InvalidSetting, match="copy it again"):
                EndpointClient(ApiEndpoint(server.url, key), PoolLimits(**LIMITS), LONG_S)
    [request] = server.requests
    assert not {"x-evil", "tracestate", "traceparent"} & set(request.headers)


@pytest.mark.parametrize(
    "url", ["", "rota.example", "ftp://x", "http://", "http://x:y", "http://x:99999", "http://[::1"]
)
async def test_invalid_url_is_refused(url):
    with pytest.raises(InvalidSetting, match="is not a valid URL"):
        EndpointClient(ApiEndpoint(url, KEY), PoolLimits(**LIMITS), LONG_S)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://rota.example", "rota.example"),
        ("http://rota.example:80/x", "rota.example"),
        ("https://rota.example:443", "rota.example"),
        ("https://rota.example:80", "rota.example:80"),
        ("http://[::1]:8080", "[::1]:8080"),
        ("http://bücher.example", "xn--bcher-kva.example"),
    ],
)
async def test_host_header_names_the_host_and_a_port_that_is_not_the_default(url, host):
    async with client_to(url) as client:
        assert f"host: {host}\r\n".encode() in client._fixed_head

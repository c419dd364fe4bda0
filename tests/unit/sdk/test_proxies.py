"""HTTP proxies of the environment: which hosts use them, what they see, and how they fail."""

import asyncio
import base64
import socket
import ssl
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import pytest
import uvloop

from rota.client.connection import ConnectError
from rota.client.connection_pool import ConnectionPool, PoolLimits
from rota.client.connector import Connector, Proxy, proxy_for
from rota.client.endpoint import ApiEndpoint
from rota.client.endpoint_client import EndpointClient
from rota.model.errors import InvalidSetting
from tests.support.answers import answer, answering

LONG_S = 60.0
LIMITS = PoolLimits(connections_max=8, idle_max=8, keepalive_s=60.0, connect_timeout_s=5.0, line_timeout_s=60.0)
HEAD = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
KEY = "rota_0123456789_" + "k" * 39


@asynccontextmanager
async def client_to(url, key=KEY):
    client = EndpointClient(ApiEndpoint(url, key), LIMITS, LONG_S)
    try:
        yield client
    finally:
        await client.close()


async def call(client, method="GET", path="/jobs", *, content=None, trace=None):
    return await client.request(
        method, path, query=None, content=content, trace=trace or {}, read_timeout_s=LONG_S, timeout_s=LONG_S
    )


@asynccontextmanager
async def tunnel_proxy(status=b"200 Connection established", *, tls=None):
    """A proxy for CONNECT; `proxy.heads` are the requests it got."""
    tasks, writers = [], []

    async def pipe(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def accept(reader, writer):
        tasks.append(asyncio.current_task())
        writers.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        proxy.heads.append(head.decode())
        writer.write(b"HTTP/1.1 " + status + b"\r\nvia: test\r\n\r\n")
        if status.startswith(b"200"):
            host, port = head.split()[1].decode().split(":")
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
            writers.append(there_writer)
            with suppress(asyncio.CancelledError):  # asyncio logs a handler that was cancelled
                await asyncio.gather(pipe(reader, there_writer), pipe(there_reader, writer), return_exceptions=True)
        writer.close()

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    proxy.heads, proxy.port = [], proxy.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        proxy.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


@pytest.fixture
def no_proxies(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


async def test_request_goes_through_the_proxy_of_the_environment(monkeypatch, no_proxies):
    async with answering(answer(201, 5), answer(503, b"busy")) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        async with client_to("http://rota.test:8080") as client:
            found = await call(client, "POST", "/jobs", content=b"\x05", trace={"traceparent": "00-1-2-01"})
            assert (found.status, found.content, found.is_success) == (201, b"\x05", True)
            assert (await call(client)).status == 503
    assert [request.path for request in proxy.requests] == [
        "http://rota.test:8080/api/v1/jobs",
        "http://rota.test:8080/api/v1/jobs",
    ]
    assert proxy.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert proxy.requests[0].headers["traceparent"] == "00-1-2-01"


async def test_proxy_that_does_not_answer_raises_as_a_server_would(monkeypatch, no_proxies):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("ALL_PROXY", f"http://127.0.0.1:{port}")
    async with client_to("http://rota.test:8080") as client:
        with pytest.raises(ConnectError):
            await call(client)


@pytest.mark.parametrize(
    ("url", "environment", "by_proxy"),
    [
        ("http://rota.test", {}, False),
        ("http://rota.test", {"HTTP_PROXY": "http://p:1"}, True),
        ("https://rota.test", {"HTTP_PROXY": "http://p:1"}, False),
        ("https://rota.test", {"https_proxy": "http://p:1"}, True),
        ("http://rota.test", {"ALL_PROXY": "http://p:1", "NO_PROXY": "rota.test"}, False),
        ("http://a.rota.test", {"ALL_PROXY": "http://p:1", "NO_PROXY": ".rota.test"}, False),
        ("http://127.0.0.1:8080", {"ALL_PROXY": "http://p:1"}, False),
        ("http://localhost:8080", {"HTTP_PROXY": "http://p:1"}, False),
    ],
)
async def test_proxy_is_used_only_for_hosts_that_need_it(monkeypatch, no_proxies, url, environment, by_proxy):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    async with client_to(url) as client:
        assert (client._connector.proxy is not None) is by_proxy


async def test_proxy_gets_its_credentials_and_nobody_else_does(monkeypatch, no_proxies):
    async with answering(answer(body=5)) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("//", "//anna:p%40ss@"))
        async with client_to("http://rota.test") as client:
            await call(client)
            assert "p@ss" not in repr(client._connector.proxy)
    expected = base64.b64encode(b"anna:p@ss").decode()
    assert proxy.requests[0].headers["proxy-authorization"] == f"Basic {expected}"
    assert proxy.requests[0].headers["host"] == "rota.test"


async def test_stream_goes_through_the_proxy_of_the_environment(monkeypatch, no_proxies):
    async with answering(answer(200, b"a\nb\n", kind="text/event-stream")) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        async with client_to("http://rota.test") as client, client.stream("/events", query=None, headers={}) as stream:
            assert [line async for line in stream.lines()] == ["a", "b"]
    assert proxy.requests[0].path == "http://rota.test/api/v1/events"


@pytest.mark.parametrize("proxy_has_tls", [False, True])
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
async def test_tls_goes_through_a_tunnel_in_which_the_proxy_reads_nothing(certificate, monkeypatch, run, proxy_has_tls):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)

    async def program(url, proxy):
        pool = ConnectionPool(Connector(url, proxy), LIMITS)
        answers = [await pool.request(HEAD, None, read_timeout_s=LONG_S, timeout_s=LONG_S) for _ in range(2)]
        await pool.close()
        return [(each.status, each.content) for each in answers]

    async with (
        answering(answer(body=5), ssl=tls) as server,
        tunnel_proxy(tls=tls if proxy_has_tls else None) as through,
    ):
        proxy = Proxy("127.0.0.1", through.port, tls=proxy_has_tls, authorization="Basic abc")
        assert await asyncio.to_thread(run, program(server.url, proxy)) == [(200, b"\x05")] * 2
    address = urlsplit(server.url).netloc
    assert through.heads == [f"CONNECT {address} HTTP/1.1\r\nhost: {address}\r\nproxy-authorization: Basic abc\r\n\r\n"]
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [b"407 Proxy Authentication Required", b"502 Bad Gateway", b"teapot"])
async def test_proxy_that_refuses_the_tunnel_is_a_failure_to_connect(status):
    async with tunnel_proxy(status) as through:
        pool = ConnectionPool(Connector("https://127.0.0.1:1", Proxy("127.0.0.1", through.port)), LIMITS)
        with pytest.raises(ConnectError, match="The proxy refused"):
            await pool.request(HEAD, None, read_timeout_s=LONG_S, timeout_s=LONG_S)
        await pool.close()


@pytest.mark.parametrize("text", ["socks5://secret:secret@p:1", "http://", "http://p:x"])
def test_unsupported_proxy_is_refused_without_quoting_it(monkeypatch, no_proxies, text):
    monkeypatch.setenv("ALL_PROXY", text)
    with pytest.raises(InvalidSetting, match="NO_PROXY") as raised:
        proxy_for(urlsplit("http://rota.test"))
    assert "secret" not in raised.value.sentence


@pytest.mark.parametrize(
    ("text", "proxy"),
    [
        ("p:3128", Proxy("p", 3128)),
        ("http://p", Proxy("p", 80)),
        ("https://p", Proxy("p", 443, tls=True)),
    ],
)
def test_proxy_is_read_as_other_programs_do(monkeypatch, no_proxies, text, proxy):
    monkeypatch.setenv("HTTP_PROXY", text)
    assert proxy_for(urlsplit("http://rota.test")) == proxy

"""What a connection takes for a request, and what it writes when, whatever the client sends after it.

`Connection` gives the protocol its reads one by one, so a test decides where packets end. Like a client that is in no
hurry, it waits for what each read starts.
"""

import asyncio
from contextlib import asynccontextmanager

import httptools
import pytest
import uvicorn
from uvicorn.server import ServerState

from rota.infra.service import serving
from tests.support.waiting import until

HOST = b"host: localhost\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\n" + HOST + b"\r\n"
NEXT = b"GET /next HTTP/1.1\r\n" + HOST + b"\r\n"
JOB = b"POST /job HTTP/1.1\r\n" + HOST + b"content-length: 5\r\n\r\nhello"
CHUNKED = b"POST /job HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n"
H2C = b"connection: upgrade\r\nupgrade: h2c\r\n"
LIMIT = serving.HEAD_BYTES_MAX


class App:
    """Reads each request and answers 200 with its path and body once `gate` is set.

    /refused is answered without reading the body, /stream at once and until the client is gone.
    """

    def __init__(self):
        self.requests, self.gone = [], []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, scope, receive, send):
        path, body = scope["path"], b""
        self.requests.append(path)
        if path == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"event", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.append(path)
            return
        has_more = path != "/refused"
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone.append(path)
                return
            body += message["body"]
            has_more = message["more_body"]
        await self.gate.wait()
        answer = path.encode() + b" " + body
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


class Transport(asyncio.Transport):
    """Keeps what is written; the connection is lost when it is closed."""

    def __init__(self):
        super().__init__()
        self.written, self.protocol = b"", None
        self.is_reading_paused = self._is_closing = False

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self._is_closing

    def close(self):
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def pause_reading(self):
        self.is_reading_paused = True

    def resume_reading(self):
        self.is_reading_paused = False


class Connection:
    def __init__(self, app):
        config = uvicorn.Config(app, interface="asgi3", lifespan="off", ws="none", log_config=None, access_log=False)
        self.state = ServerState()
        self.protocol = serving.HttpProtocol(config, self.state, {})
        self.transport = Transport()
        self.transport.protocol = self.protocol
        self.protocol.connection_made(self.transport)

    async def send(self, *reads):
        for data in reads:
            if self.protocol.parser is not None:
                self.protocol.data_received(data)
            for _ in range(5):
                await asyncio.sleep(0)

    async def idle(self):
        await until(lambda: not self.state.tasks, what="the end of all requests")

    async def answers(self):
        """The status and body of each response; fails for anything else that was written."""
        await self.idle()
        responses = Responses()
        responses.parser = httptools.HttpResponseParser(responses)
        responses.parser.feed_data(self.transport.written)
        assert responses.is_complete, self.transport.written
        return responses.found

    @property
    def is_closed(self):
        return self.transport.is_closing()


class Responses:
    def __init__(self):
        self.found, self.is_complete, self.parser, self._body = [], True, None, b""

    def on_message_begin(self):
        self._body, self.is_complete = b"", False

    def on_body(self, body):
        self._body += body

    def on_message_complete(self):
        self.found.append((self.parser.get_status_code(), self._body.decode()))
        self.is_complete = True


@pytest.fixture
def app():
    return App()


@pytest.fixture
async def connection(app):
    connection = Connection(app)
    yield connection
    app.gate.set()
    connection.transport.close()
    await connection.idle()


# Requests that ask for another protocol: the parser takes their bodies for data of that protocol

WITH_BODY = {
    "h2c": (b"POST", b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"),
    "websocket": (b"POST", b"connection: upgrade\r\nupgrade: websocket\r\n"),
    "CONNECT": (b"CONNECT", b""),
}


@pytest.mark.parametrize("kind", WITH_BODY)
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("is_split", [False, True], ids=["joined", "split"])
async def test_body_of_an_upgrade_is_not_taken_for_a_request(app, connection, kind, is_chunked, is_split):
    method, headers = WITH_BODY[kind]
    framing, body = b"content-length: %d\r\n" % len(SMUGGLED), SMUGGLED
    if is_chunked:
        framing, body = b"transfer-encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
    head = method + b" /job HTTP/1.1\r\n" + HOST + headers + framing + b"\r\n"
    await connection.send(*((head, body) if is_split else (head + body,)), NEXT)
    [(status, _)] = await connection.answers()
    assert (status, connection.is_closed, app.requests) == (400, True, [])


@pytest.mark.parametrize("line", [b"GET /up", b"POST /up", b"CONNECT /up"])
@pytest.mark.parametrize("length", [b"", b"content-length: 0\r\n"], ids=["no length", "length 0"])
@pytest.mark.parametrize("is_split", [False, True], ids=["joined", "split"])
async def test_upgrade_without_a_body_is_answered_and_ends_its_connection(app, connection, line, length, is_split):
    app.gate.clear()
    head = line + b" HTTP/1.1\r\n" + HOST + length + H2C + b"\r\n"
    await connection.send(*((head, NEXT) if is_split else (head + NEXT,)), NEXT)
    app.gate.set()
    assert await connection.answers() == [(200, "/up ")]
    assert b"connection: close\r\n" in connection.transport.written
    assert (connection.is_closed, app.requests) == (True, ["/up"])


async def test_upgrade_that_waits_for_its_turn_is_answered_after_the_first(app, connection):
    app.gate.clear()
    await connection.send(JOB, NEXT[:-2] + H2C + b"\r\n", SMUGGLED)
    app.gate.set()
    assert await connection.answers() == [(200, "/job hello"), (200, "/next ")]
    assert connection.is_closed


# Requests whose end or host is ambiguous


@pytest.mark.parametrize(
    "head",
    [
        b"GET /job HTTP/1.1\r\n\r\n",
        b"GET /job HTTP/1.1\r\nhost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /job HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n",
        b"POST /job HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /job HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /job HTTP/1.0\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /job HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        b"POST /job HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\nhello",
        b"GET /job HTTP/2.0\r\nhost: localhost\r\n\r\n",
        b"GET /job\r\n\r\n",
    ],
    ids=[
        "no host",
        "two hosts",
        "two hosts 1.0",
        "gzip",
        "two encodings",
        "chunked 1.0",
        "both",
        "lengths",
        "2",
        "0.9",
    ],
)
async def test_ambiguous_head_is_refused(app, connection, head):
    await connection.send(head + NEXT, NEXT)
    [(status, _)] = await connection.answers()
    assert (status, connection.is_closed, app.requests) == (400, True, [])


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /job HTTP/1.0\r\n\r\n",
        b"GET /job HTTP/1.1\r\nhost:\r\n\r\n",
        b"POST /job HTTP/1.1\r\nhost: a\r\nTransfer-Encoding: Chunked \r\n\r\n0\r\n\r\n",
        b"POST /job HTTP/1.1\r\nhost: a\r\nconnection: keep-alive\r\nupgrade: h2c\r\ncontent-length: 0\r\n\r\n",
    ],
    ids=["1.0", "empty host", "Chunked", "upgrade without its option"],
)
async def test_unambiguous_head_is_accepted(connection, sent):
    await connection.send(sent)
    assert await connection.answers() == [(200, "/job ")]


async def test_trailers_do_not_become_headers_of_the_next_request(app, connection):
    await connection.send(CHUNKED + b"5\r\nhello\r\n0\r\nhost: other\r\nx: y\r\n\r\n" + NEXT)
    assert await connection.answers() == [(200, "/job hello"), (200, "/next ")]
    assert connection.protocol.scope["headers"] == [(b"host", b"localhost")]


# What follows a request that is being answered


@pytest.mark.parametrize(
    "follow_up",
    [
        b"}",
        b"GET bad\r\n\r\n",
        b"GET /no-host HTTP/1.1\r\n\r\n",
        b"GET http://localhost HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /" + b"x" * 2 * LIMIT,
        CHUNKED + b"xyz\r\n",
        CHUNKED[:-2] + H2C + b"\r\n0\r\n\r\n",
    ],
    ids=["stray byte", "bad head", "refused head", "bad target", "large head", "bad body", "upgrade"],
)
@pytest.mark.parametrize("is_split", [False, True], ids=["joined", "split"])
async def test_bad_follow_up_leaves_the_running_response_alone(app, connection, follow_up, is_split):
    app.gate.clear()
    await connection.send(*((JOB, follow_up) if is_split else (JOB + follow_up,)), SMUGGLED)
    if not is_split and len(follow_up) > LIMIT:
        await connection.send(b"x" * 2 * LIMIT)  # the first read is that of the request before
    assert (connection.transport.written, connection.is_closed) == (b"", False)
    assert connection.protocol._head_timer is None, "it would end the response"
    app.gate.set()
    assert await connection.answers() == [(200, "/job hello")]
    assert (connection.is_closed, app.requests) == (True, ["/job"])


async def test_bad_follow_up_of_requests_in_line_leaves_their_responses_alone(app, connection):
    app.gate.clear()
    await connection.send(JOB + NEXT, CHUNKED + b"5\r\nhello\r\nxyz\r\n", SMUGGLED)
    app.gate.set()
    assert await connection.answers() == [(200, "/job hello"), (200, "/next ")]
    assert (connection.is_closed, app.requests) == (True, ["/job", "/next"])


async def test_bad_body_of_the_running_request_is_refused(app, connection):
    await connection.send(CHUNKED, b"xyz\r\n", SMUGGLED)
    [(status, _)] = await connection.answers()
    assert (status, connection.is_closed, app.gone) == (400, True, ["/job"])


async def test_bad_body_after_its_response_closes_the_connection_without_another_one(app, connection):
    await connection.send(CHUNKED.replace(b"/job", b"/refused"), b"5\r\nhello\r\n", b"xyz\r\n", SMUGGLED)
    assert await connection.answers() == [(200, "/refused ")]
    assert (connection.is_closed, app.requests) == (True, ["/refused"])


async def test_bad_body_during_its_response_closes_the_connection_without_another_one(app, connection):
    await connection.send(CHUNKED.replace(b"/job", b"/stream"), b"xyz\r\n")
    await until(lambda: app.gone)
    assert connection.transport.written.count(b"HTTP/1.1") == 1


async def test_body_before_a_partial_head_does_not_count_as_its_head(app, connection):
    app.gate.clear()
    body = b"x" * 2 * LIMIT
    head = b"POST /job HTTP/1.1\r\n" + HOST + b"content-length: %d\r\n\r\n" % len(body)
    await connection.send(head + body + NEXT[:30], NEXT[30:])
    app.gate.set()
    assert await connection.answers() == [(200, f"/job {body.decode()}"), (200, "/next ")]
    assert not connection.is_closed


# Bytes of a body that are no data


ENDLESS = {"trailer": b"0\r\nx: ", "trailer of data": b"5\r\nhello\r\n0\r\nx: ", "extension": b"5;x="}


@pytest.mark.parametrize("path", [b"/job", b"/refused"], ids=["unread", "answered"])
@pytest.mark.parametrize("endless", ENDLESS.values(), ids=ENDLESS)
async def test_endless_trailer_or_chunk_extension_is_refused(app, connection, path, endless):
    await connection.send(CHUNKED.replace(b"/job", path), endless)
    for sent in range(0, LIMIT + 4096, 4096):
        assert not connection.is_closed or sent >= LIMIT
        await connection.send(b"a" * 4096)
    assert connection.is_closed
    [(status, _)] = await connection.answers()
    assert status == (200 if path == b"/refused" else 400)


@pytest.mark.parametrize("path", [b"/job", b"/refused"], ids=["read", "answered"])
async def test_long_body_in_many_small_chunks_and_reads_is_read(connection, path):
    await connection.send(CHUNKED.replace(b"/job", path))
    for _ in range(LIMIT // 8 + 1):
        connection.protocol.data_received(b"1;e=1\r")
        connection.protocol.data_received(b"\nx\r\n")
    await connection.send(b"0\r\n\r\n", NEXT)
    [(_, first), (_, second)] = await connection.answers()
    assert (len(first.split(" ")[1]), second) == (LIMIT // 8 + 1 if path == b"/job" else 0, "/next ")


async def test_large_body_in_one_chunk_is_read(connection):
    await connection.send(CHUNKED + b"%x\r\n" % (4 * LIMIT), *[b"x" * LIMIT] * 4, b"\r\n0\r\nx: y\r\n\r\n")
    [(status, answer)] = await connection.answers()
    assert (status, len(answer)) == (200, 4 * LIMIT + len("/job "))


# The end of the connection


@pytest.mark.parametrize("is_split", [False, True], ids=["joined", "split"])
async def test_pipelined_request_does_not_hide_a_disconnect(app, connection, is_split):
    stream = NEXT.replace(b"/next", b"/stream")
    await connection.send(*((stream, NEXT) if is_split else (stream + NEXT,)))
    assert not connection.transport.is_reading_paused, "only reads show a disconnect"
    connection.transport.close()
    await until(lambda: app.gone, what="the end of the stream")
    assert app.requests == ["/stream"]


async def test_requests_in_line_are_bounded(app, connection):
    app.gate.clear()
    await connection.send(JOB, *[NEXT] * serving.PIPELINED_MAX)
    assert not connection.transport.is_reading_paused
    await connection.send(NEXT)
    assert connection.transport.is_reading_paused
    app.gate.set()
    assert len(await connection.answers()) == serving.PIPELINED_MAX + 2
    assert not connection.transport.is_reading_paused


@asynccontextmanager
async def served(app):
    """The port of a real server."""
    config = uvicorn.Config(
        app, http=serving.HttpProtocol, interface="asgi3", lifespan="off", ws="none", log_config=None, access_log=False
    )
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: serving.HttpProtocol(config, state, {}), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        for connection in list(state.connections):
            connection.transport.abort()
        await until(lambda: not state.tasks)


@pytest.mark.parametrize("has_follow_up", [False, True], ids=["alone", "pipelined"])
async def test_stream_of_a_client_that_is_gone_ends(app, has_follow_up):
    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(NEXT.replace(b"/next", b"/stream") + (NEXT if has_follow_up else b""))
        await reader.readuntil(b"event")
        writer.transport.abort()
        await until(lambda: app.gone, what="the end of the stream")


async def test_body_of_an_upgrade_reaches_no_app_of_a_server(app):
    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answered = asyncio.create_task(reader.read())
        writer.write(b"POST /job HTTP/1.1\r\n" + HOST + H2C + b"content-length: 99\r\n\r\n")
        answer = await asyncio.wait_for(answered, 10)
        writer.write(SMUGGLED)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert app.requests == []

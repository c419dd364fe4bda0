"""A response that is read while it arrives, line by line, over a connection of its own.

Unread data stays in the socket: a slow reader holds back the server, not the memory of this process. The connection is
closed with the stream.
"""

from __future__ import annotations

import asyncio
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import httptools

from rota.client.connection import ReadError, ReadTimeout, RemoteProtocolError
from rota.client.connector import Connector

CHUNK_BYTES: Final = 64 * 1024
BUFFER_BYTES: Final = 256 * 1024
"""At twice this the connection is not read from."""
BODY_BYTES_MAX: Final = 1024 * 1024
LINE_CHARS_MAX: Final = 64 * 1024 * 1024
_SUCCESS_MIN: Final = 200
_SUCCESS_MAX: Final = 299
_Utf8Decoder = getincrementaldecoder("utf-8")


class ResponseStream:
    """Complete after `read_head`; `lines` or `read` may be called once."""

    def __init__(self, transport: asyncio.Transport, reader: asyncio.StreamReader, read_timeout_s: float) -> None:
        self.headers: dict[str, str] = {}
        """Lower-case names."""
        self._transport = transport
        self._reader = reader
        self._read_timeout_s = read_timeout_s
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._has_head = False
        self._is_complete = False

    @property
    def status(self) -> int:
        return self._parser.get_status_code()

    @property
    def is_success(self) -> bool:
        return _SUCCESS_MIN <= self.status <= _SUCCESS_MAX

    def abort(self) -> None:
        """Whoever reads gets a RequestError."""
        self._transport.abort()

    async def read_head(self) -> None:
        while not self._has_head:
            await self._feed()

    async def read(self) -> bytes:
        """At most the first `BODY_BYTES_MAX` of the body."""
        body = b""
        async for chunk in self._body():
            body += chunk
            if len(body) >= BODY_BYTES_MAX:
                break
        return body[:BODY_BYTES_MAX]

    async def lines(self) -> AsyncIterator[str]:
        """Without their ends. Raises a RequestError if the response breaks."""
        decoder, rest = _Utf8Decoder(errors="replace"), ""
        async for chunk in self._body():
            *lines, rest = (rest + decoder.decode(chunk)).split("\n")
            for line in lines:
                yield line.removesuffix("\r")
            if len(rest) > LINE_CHARS_MAX:
                raise RemoteProtocolError("A line of the response is too long.")
        if rest := rest + decoder.decode(b"", final=True):
            yield rest.removesuffix("\r")

    async def _body(self) -> AsyncIterator[bytes]:
        while True:
            chunks, self._chunks = self._chunks, []
            for chunk in chunks:
                yield chunk
            if self._is_complete:
                return
            await self._feed()

    async def _feed(self) -> None:
        try:
            async with asyncio.timeout(self._read_timeout_s):
                data = await self._reader.read(CHUNK_BYTES)
        except TimeoutError as error:
            raise ReadTimeout from error
        except OSError as error:
            raise ReadError(str(error)) from error
        if data:
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                raise RemoteProtocolError(str(error)) from error
        elif self._has_head and not self.headers.keys() & {"content-length", "transfer-encoding"}:
            self._is_complete = True
        else:
            raise ReadError("The server closed the connection.")

    # Callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        self._has_head = self.status >= _SUCCESS_MIN

    def on_body(self, chunk: bytes) -> None:
        self._chunks.append(chunk)

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_complete = True
        else:  # an interim response
            self.headers = {}


@asynccontextmanager
async def open_stream(
    connector: Connector, head: bytes, *, connect_timeout_s: float, read_timeout_s: float
) -> AsyncIterator[ResponseStream]:
    """Sends a request without a body. Raises a RequestError."""
    reader = asyncio.StreamReader(limit=BUFFER_BYTES)
    transport, _ = await connector.connect(lambda: asyncio.StreamReaderProtocol(reader), connect_timeout_s)
    try:
        transport.write(head)
        stream = ResponseStream(transport, reader, read_timeout_s)
        await stream.read_head()
        yield stream
    finally:
        transport.abort()

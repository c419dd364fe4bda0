"""One HTTP/1.1 connection to the API: sends a request, reads its response with httptools (llhttp).

Invariants: one request at a time; a connection is used again only after a complete response that allows it. Every
failure is a `RequestError`, named after its cause because error sentences show the name; `NotSentError` means that no
byte of the request was sent. A response ends with its declared length, or when the server closes the connection if it
declares none.
"""

from __future__ import annotations

import asyncio
import select
from typing import Final, cast

import httptools
import msgspec

_SWITCHING_PROTOCOLS: Final = 101
_SUCCESS_MIN: Final = 200
_SUCCESS_MAX: Final = 299
JOINED_BODY_BYTES_MAX: Final = 64 * 1024
"""Up to this size head and body are one write."""


class HttpResponse(msgspec.Struct, frozen=True):
    status: int
    headers: dict[str, str]
    """Lower-case names."""
    content: bytes

    @property
    def is_success(self) -> bool:
        return _SUCCESS_MIN <= self.status <= _SUCCESS_MAX


class RequestError(Exception):
    """No response; whether the request had an effect is unknown."""


class NotSentError(RequestError):
    """No response, and the request certainly had no effect."""


class ConnectError(NotSentError):
    """No connection, or a certificate that is not trusted."""


class ConnectTimeout(NotSentError):
    """The server did not accept a connection in time."""


class PoolTimeout(NotSentError):
    """All connections of the pool were in use for too long."""


class ReadTimeout(RequestError):
    """Nothing was sent or received for too long."""


class ReadError(RequestError):
    """The connection was lost before the response was complete."""


class RemoteProtocolError(RequestError):
    """The response is not valid HTTP."""


class HttpConnection(asyncio.Protocol):
    def __init__(self) -> None:
        self.is_closed = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.idle_since_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._poll: select.poll | None = None
        self._answer: asyncio.Future[HttpResponse] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._active_at_s = 0.0
        self._unsent_bytes = 0
        self._read_timeout_s = 0.0
        self._deadline_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._is_head_complete = False

    async def request(
        self, head: bytes, body: bytes | None, *, read_timeout_s: float, deadline_s: float
    ) -> HttpResponse:
        """Sends a request. `deadline_s` is by the clock of the loop. After an error the connection is closed."""
        assert self._answer is None, "one request at a time"
        if self._transport is None or self.is_closed:
            raise ConnectError("The connection is closed.")
        self._answer = self._loop.create_future()
        self._read_timeout_s, self._deadline_s, self._unsent_bytes = read_timeout_s, deadline_s, 0
        self._arm_timer()
        try:
            if body is None or len(body) <= JOINED_BODY_BYTES_MAX:
                self._transport.write(head + body if body else head)
            else:
                self._transport.write(head)
                self._transport.write(body)
            return await self._answer
        except BaseException:
            self.abort()
            raise
        finally:
            self._answer = None

    def is_reusable(self) -> bool:
        """Whether it is idle and open, as far as this side can know: unread data of an idle connection is its end."""
        if self.is_closed or self._transport is None or self._transport.is_closing():
            return False
        return not (self._poll is not None and self._poll.poll(0))

    def abort(self) -> None:
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if (socket := transport.get_extra_info("socket")) is not None and hasattr(select, "poll"):
            self._poll = select.poll()
            self._poll.register(socket.fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.abort()  # data that no request has asked for
            return
        self._active_at_s = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(RemoteProtocolError(str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        is_aborted, self.is_closed = self.is_closed, True  # `abort` reports no error either
        if self._timer is not None:
            self._timer.cancel()
        if self._is_head_complete and error is None and not is_aborted and self._ends_with_connection():
            self._complete()
        else:
            closed_by = "client" if is_aborted else "server"
            self._fail(ReadError(str(error or f"The {closed_by} closed the connection.")))
        if not self.closed.done():
            self.closed.set_result(None)

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        if self._answer is None or self._answer.done():
            self.abort()  # a second response

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._is_head_complete = True

    def on_body(self, chunk: bytes) -> None:
        self._chunks.append(chunk)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status == _SWITCHING_PROTOCOLS:
            self._fail(RemoteProtocolError("The server switched the protocol."))
        elif status < _SUCCESS_MIN:  # an interim response
            self._headers, self._is_head_complete = [], False
        else:
            self._complete()

    def _complete(self) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1").strip() for name, value in self._headers}
        response = HttpResponse(self._parser.get_status_code(), headers, b"".join(self._chunks))
        unsent_bytes = self._transport.get_write_buffer_size() if self._transport is not None else 0
        if unsent_bytes or not self._parser.should_keep_alive():
            self.is_closed = True
        self._headers, self._chunks, self._is_head_complete = [], [], False
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(response)

    def _ends_with_connection(self) -> bool:
        names = {name.lower() for name, _ in self._headers}
        return not names & {b"content-length", b"transfer-encoding"}

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()

    # Timeouts: one timer, which is set for the earliest time at which a request could fail and moved when it fires

    def _arm_timer(self) -> None:
        self._active_at_s = self._loop.time()
        due_s = min(self._active_at_s + self._read_timeout_s, self._deadline_s)
        if self._timer is not None and self._timer.when() > due_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(due_s, self._check_timeouts)

    def _check_timeouts(self) -> None:
        self._timer = None
        if self._answer is None or self._answer.done() or self._transport is None:
            return
        now_s = self._loop.time()
        if (unsent_bytes := self._transport.get_write_buffer_size()) != self._unsent_bytes:
            self._unsent_bytes, self._active_at_s = unsent_bytes, now_s
        if now_s >= self._deadline_s:
            self._fail(TimeoutError())
        elif now_s >= self._active_at_s + self._read_timeout_s:
            self._fail(ReadTimeout())
        else:
            due_s = min(self._active_at_s + self._read_timeout_s, self._deadline_s)
            self._timer = self._loop.call_at(due_s, self._check_timeouts)

"""Requests to the HTTP API, msgpack-encoded both ways, over persistent connections; every request is bounded in time.

- At most once, unless idempotent. After a failure only `idempotent` requests are repeated: reads, assignments of a
  value, submissions with an idempotency key. Others are repeated only if they certainly had no effect: not sent, or
  refused by the rate limit (429). A lost reply raises, because the outcome is unknown.
- Retries back off exponentially and honour `Retry-After`. After `RETRY_BUDGET_S` the last error is raised.
- The API key is sent only to the endpoint it was discovered with: redirects are not followed, and no repr or log
  contains it. When the API is unreachable the endpoint is resolved again: a restarted `rota up` may use another port.
- Unclosed connections are closed with the event loop: an async generator, which the loop closes, owns those of each
  endpoint.
- An error response is raised as the exception with its code (`rota.client.errors`).
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any, Final, TypeVar

import msgspec

from rota.client.connection import HttpResponse, NotSentError, ReadTimeout, RequestError
from rota.client.connection_pool import PoolLimits
from rota.client.endpoint import ApiEndpoint
from rota.client.endpoint_client import API_PREFIX, EndpointClient
from rota.client.errors import error_from_response, parse_retry_after
from rota.client.response_stream import ResponseStream
from rota.infra.clock import Clock, SystemClock
from rota.infra.telemetry import tracing
from rota.model.backoff import Backoff
from rota.model.errors import InvalidInput, InvalidSetting, RotaError, Unavailable

T = TypeVar("T")
CONNECT_TIMEOUT_S: Final = 5.0
READ_TIMEOUT_S: Final = 30.0
"""Between two chunks of a response, in addition to the long-poll time."""
REQUEST_TIMEOUT_S: Final = 120.0
"""For a whole request, in addition to the long-poll time."""
POOL_TIMEOUT_S: Final = 60.0
"""To get a connection from the pool."""
RETRY_BUDGET_S: Final = 60.0
CONNECTIONS_MAX: Final = 256
LONG_POLL_S: Final = 30.0
LONG_POLLS_MAX: Final = CONNECTIONS_MAX // 2
EARLY_ANSWER_PAUSE_S: Final = 0.25
IDLE_CONNECTIONS_MAX: Final = 32
KEEPALIVE_S: Final = 3.0
"""Less than the servers' keep-alive, so that a request rarely races with a closing connection."""
RETRY_BACKOFF: Final = Backoff(0.1, 5.0)
STREAM_FAILURES_MAX: Final = 20
"""Consecutive failures of a stream: about a minute."""
_DECODERS: Final[dict[Any, msgspec.msgpack.Decoder[Any]]] = {}
_TOO_MANY_REQUESTS: Final = 429
_TRANSIENT_STATUSES: Final = frozenset({429, 502, 503, 504})


class StreamIdle(Unavailable):
    """No data on a stream for `READ_TIMEOUT_S`."""


class FailedAttempt(msgspec.Struct, frozen=True):
    """An attempt that may succeed when it is repeated."""

    error: RotaError
    undone: bool
    """The request certainly had no effect."""
    pause_s: float = 0.0


class HttpClient:
    """Belongs to the event loop it was first used on."""

    def __init__(
        self, resolve: Callable[[], ApiEndpoint], *, retry_budget_s: float | None = None, clock: Clock | None = None
    ) -> None:
        self._resolve = resolve
        self._clock = clock or SystemClock()
        self._retry_budget_s = RETRY_BUDGET_S if retry_budget_s is None else retry_budget_s
        self._endpoint: ApiEndpoint | None = None
        self._client: EndpointClient | None = None
        self._waiting = 0
        self._guards: list[AsyncGenerator[None, None]] = []
        """Of the endpoint, and of former ones, which other calls may still use."""

    def __repr__(self) -> str:
        return f"<connection to {self._endpoint.url if self._endpoint else 'no endpoint yet'}>"

    async def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        idempotent: bool,
        query: Mapping[str, object] | None = None,
        body: object = msgspec.UNSET,
        wait_s: float = 0.0,
        retry_budget_s: float | None = None,
    ) -> T:
        """Sends a request. `idempotent`: it may be repeated; `wait_s`: requested long-poll time."""
        content = None if body is msgspec.UNSET else encode_body(body)

        async def attempt() -> T | FailedAttempt:
            answer = await self.attempt(method, path, query=query, content=content, wait_s=wait_s)
            return answer if isinstance(answer, FailedAttempt) else decode_response(kind, answer, method, path)

        return await self.retry(attempt, idempotent=idempotent, budget_s=retry_budget_s)

    async def retry(
        self,
        attempt: Callable[[], Awaitable[T | FailedAttempt]],
        *,
        idempotent: bool,
        budget_s: float | None = None,
    ) -> T:
        """The first attempt that does not fail. `idempotent`: it may be repeated though it may have had an effect."""
        until = self._clock.monotonic() + (self._retry_budget_s if budget_s is None else budget_s)
        for number in count(1):
            answer = await attempt()
            if not isinstance(answer, FailedAttempt):
                return answer
            if not (idempotent or answer.undone):
                raise answer.error
            pause = max(answer.pause_s, RETRY_BACKOFF.pause_s(number, random.random()))  # noqa: S311 - no secret
            if self._clock.monotonic() + pause > until:
                raise answer.error
            await self._clock.sleep(pause)
            self._rediscover()
        raise AssertionError  # unreachable: count() is infinite

    async def attempt(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        content: bytes | None = None,
        wait_s: float = 0.0,
        trace: Mapping[str, str] | None = None,
    ) -> HttpResponse | FailedAttempt:
        """Sends a request once; raises what an attempt cannot change. `trace`: by default the caller's."""
        client = await self._ensure_client()
        try:
            answer = await client.request(
                method,
                path,
                query=query,
                content=content,
                trace=tracing.inject() if trace is None else trace,
                read_timeout_s=READ_TIMEOUT_S + wait_s,
                timeout_s=REQUEST_TIMEOUT_S + wait_s,
            )
        except NotSentError as error:
            return FailedAttempt(self._unavailable(error), undone=True)
        except (RequestError, TimeoutError) as error:
            return FailedAttempt(self._unavailable(error, " and the outcome of the request is unknown"), undone=False)
        if answer.is_success:
            return answer
        error_response = _response_error(answer.status, answer.headers, answer.content)
        if not is_transient(answer.status):
            raise error_response
        return FailedAttempt(
            error_response,
            undone=answer.status == _TOO_MANY_REQUESTS,
            pause_s=parse_retry_after(answer.headers.get("retry-after", "")),
        )

    async def long_poll(self, path: str, kind: type[T], within_s: float, is_done: Callable[[T], bool]) -> T:
        """Returns the answer once `is_done` holds for it, or after at most `within_s`.

        With many concurrent waiters each poll is shorter than `LONG_POLL_S`, so that all get a connection.
        """
        self._waiting += 1
        started_s = self._clock.monotonic()
        try:
            wait_s = round(min(within_s, LONG_POLL_S, LONG_POLL_S * LONG_POLLS_MAX / self._waiting), 3)
            retry_budget_s = min(RETRY_BUDGET_S, within_s)
            answer = await self.call(
                "GET", path, kind, idempotent=True, query={"wait": wait_s}, wait_s=wait_s, retry_budget_s=retry_budget_s
            )
        finally:
            self._waiting -= 1
        if not is_done(answer) and self._clock.monotonic() - started_s < wait_s / 2:
            await self._clock.sleep(min(EARLY_ANSWER_PAUSE_S, wait_s))  # a draining server answers polls early
        return answer

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, object] | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[ResponseStream]:
        """A streamed response. Failures raise Unavailable; resume after `pause`, or immediately after StreamIdle."""
        client = await self._ensure_client()
        try:
            async with client.stream(path, query=query, headers=headers) as answer:
                if not answer.is_success:
                    raise _response_error(answer.status, answer.headers, await answer.read())
                yield answer
        except ReadTimeout as error:
            raise StreamIdle(f"Rota sent nothing for {READ_TIMEOUT_S:g} s.") from error
        except RequestError as error:
            self._rediscover()
            raise self._unavailable(error) from error

    async def pause(self, streak: int, least_s: float = 0.0) -> None:
        """Backs off after failure number `streak` of a stream; raises after `STREAM_FAILURES_MAX`."""
        if streak > STREAM_FAILURES_MAX:
            raise Unavailable(f"{self!r} broke {streak} times in a row: check that Rota is up, and try again.")
        await self._clock.sleep(max(least_s, RETRY_BACKOFF.pause_s(streak, random.random())))  # noqa: S311 - no secret

    async def close(self) -> None:
        guards, self._guards = self._guards, []
        self._client, self._endpoint = None, None
        for each in guards:
            await each.aclose()

    async def _ensure_client(self) -> EndpointClient:
        if self._client is None:
            self._endpoint = self._resolve()
            self._client = EndpointClient(self._endpoint, _pool_limits(), READ_TIMEOUT_S)
            self._guards.append(_client_guard(self._client))
            await anext(self._guards[-1])
        return self._client

    def _rediscover(self) -> None:
        """The endpoint may have moved; keeps the old one while none is found."""
        with suppress(InvalidSetting):
            if self._client is not None and self._resolve() != self._endpoint:
                self._client = None

    def _unavailable(self, error: Exception, detail: str = "") -> Unavailable:
        where = self._endpoint.url if self._endpoint else "its address"
        unavailable = Unavailable(
            f"Rota at {where} does not answer ({type(error).__name__}){detail}: check that it is up, and try again.",
            url=where,
        )
        unavailable.__cause__ = error
        return unavailable


def is_transient(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status in _TRANSIENT_STATUSES


def encode_body(body: object) -> bytes:
    try:
        return msgspec.msgpack.encode(body)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"The request cannot be encoded: {str(error)[:300].rstrip('.')}.") from error


def decode_response(kind: type[T], answer: HttpResponse, method: str, path: str) -> T:
    try:
        return _decoder(kind).decode(answer.content)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RotaError(
            f"{method} {API_PREFIX}{path} returned an answer that this version of Rota cannot"
            f" decode ({str(error)[:200]}): use the SDK version of the server."
        ) from error


def _decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    if kind not in _DECODERS:
        _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
    return _DECODERS[kind]


def _pool_limits() -> PoolLimits:
    return PoolLimits(
        connections_max=CONNECTIONS_MAX,
        idle_max=IDLE_CONNECTIONS_MAX,
        keepalive_s=KEEPALIVE_S,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        line_timeout_s=POOL_TIMEOUT_S,
    )


async def _client_guard(client: EndpointClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.close()


def _response_error(status: int, headers: Mapping[str, str], content: bytes) -> RotaError:
    return error_from_response(status, headers.get("content-type", ""), content)

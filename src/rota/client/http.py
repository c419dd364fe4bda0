"""Calls of the HTTP API, in msgpack both ways: one pool of connections, and no call that could last for ever.

- Nothing is done twice. After a failure a call is repeated only if it says that it may be (`again`): reads, whatever
  sets a thing to a value, submissions with a key. Any other is repeated only when it cannot have begun: when it was not
  sent, or refused for its rate (429). If its reply is lost, that is raised: nobody knows whether it was carried out.
- Pauses between attempts double, and a server that names one (`Retry-After`) is given it. When failures have lasted
  for `PATIENCE_S` the last one is raised.
- The key goes to the endpoint that it was found with, and nowhere else: redirects are not followed, and nothing here
  shows it. Where Rota listens is looked up again when it cannot be reached, since a `rota up` may come back elsewhere.
- Connections that nobody closes are closed with the loop: it ends what is left of async generators, and each pool is
  held by one.
- A refusal is raised as the exception of its code (`rota.client.errors`).
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from itertools import count
from typing import Any, Final, TypeVar

import httpx
import msgspec

from rota.client.errors import error_from_response, parse_retry_after
from rota.infra.clock import Clock, SystemClock
from rota.infra.telemetry import tracing
from rota.local.api_key import ApiEndpoint
from rota.model.backoff import Backoff
from rota.model.errors import InvalidInput, InvalidSetting, RotaError, Unavailable

T = TypeVar("T")
API_PREFIX: Final = "/api/v1"
MSGPACK_MEDIA_TYPE: Final = "application/msgpack"
CONNECT_TIMEOUT_S: Final = 5.0
READ_TIMEOUT_S: Final = 30.0
"""Between two pieces of an answer, besides what the server was asked to wait."""
REQUEST_TIMEOUT_S: Final = 120.0
"""A whole call, besides that."""
POOL_TIMEOUT_S: Final = 60.0
"""For a connection of the pool."""
RETRY_BUDGET_S: Final = 60.0
CONNECTIONS_MAX: Final = 256
LONG_POLL_S: Final = 30.0
LONG_POLLS_MAX: Final = CONNECTIONS_MAX // 2
EARLY_ANSWER_PAUSE_S: Final = 0.25
IDLE_CONNECTIONS_MAX: Final = 32
KEEPALIVE_S: Final = 3.0
"""Less than servers keep an idle connection, so that a call hardly ever meets one that is being closed."""
RETRY_BACKOFF: Final = Backoff(0.1, 5.0)
STREAM_FAILURES_MAX: Final = 20
"""Of a stream that breaks again and again: about a minute."""
_DECODERS: Final[dict[Any, msgspec.msgpack.Decoder[Any]]] = {}
_TOO_MANY_REQUESTS: Final = 429
_TRANSIENT_STATUSES: Final = frozenset({429, 502, 503, 504})
_NOT_SENT_ERRORS: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class StreamIdle(Unavailable):
    """Of a stream: nothing came, and nothing has to."""


class _FailedAttempt(msgspec.Struct, frozen=True):
    error: RotaError
    undone: bool
    """It has had no effect for certain."""
    pause_s: float = 0.0


class HttpClient:
    """Belongs to the loop it was first used on."""

    def __init__(
        self, find: Callable[[], ApiEndpoint], *, patience_s: float | None = None, clock: Clock | None = None
    ) -> None:
        self._find = find
        self._clock = clock or SystemClock()
        self._patience_s = RETRY_BUDGET_S if patience_s is None else patience_s
        self._endpoint: ApiEndpoint | None = None
        self._client: httpx.AsyncClient | None = None
        self._waiting = 0
        self._held: list[AsyncGenerator[None, None]] = []
        """The pool, and those of places where Rota was before, which others may be using."""

    def __repr__(self) -> str:
        return f"<wire to {self._endpoint.url if self._endpoint else 'nobody yet'}>"

    async def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        again: bool,
        query: Mapping[str, object] | None = None,
        body: object = msgspec.UNSET,
        wait_s: float = 0.0,
        patience_s: float | None = None,
    ) -> T:
        """What the API answers. `again`: it may be repeated; `wait_s`: how long the server was asked to wait."""
        content = None if body is msgspec.UNSET else encode_body(body)
        until = self._clock.monotonic() + (self._patience_s if patience_s is None else patience_s)
        for attempt in count(1):
            answer = await self._attempt(method, path, query, content, wait_s)
            if isinstance(answer, httpx.Response):
                return decode_response(kind, answer)
            if not (again or answer.undone):
                raise answer.error
            pause = max(answer.pause_s, RETRY_BACKOFF.pause_s(attempt, random.random()))  # noqa: S311 - no secret
            if self._clock.monotonic() + pause > until:
                raise answer.error
            await self._clock.sleep(pause)
            self._rediscover()
        raise AssertionError  # counting has no end

    async def long_poll(self, path: str, kind: type[T], within_s: float, over: Callable[[T], bool]) -> T:
        """What is there once it is over, or after so long. When many wait at once, each question is kept open for less
        than `WAIT_S`, so that all have their turn."""
        self._waiting += 1
        began_s = self._clock.monotonic()
        try:
            wait_s = round(min(within_s, LONG_POLL_S, LONG_POLL_S * LONG_POLLS_MAX / self._waiting), 3)
            patience_s = min(RETRY_BUDGET_S, within_s)
            found = await self.call(
                "GET", path, kind, again=True, query={"wait": wait_s}, wait_s=wait_s, patience_s=patience_s
            )
        finally:
            self._waiting -= 1
        if not over(found) and self._clock.monotonic() - began_s < wait_s / 2:
            await self._clock.sleep(min(EARLY_ANSWER_PAUSE_S, wait_s))  # a server that is ending keeps nobody waiting
        return found

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, object] | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """An answer as it comes. A failure on the way is raised as Unavailable: who can goes on where it was after a
        `pause`, or at once when nothing came for a while (`Silent`)."""
        client = await self._ensure_client()
        try:
            async with client.stream("GET", API_PREFIX + path, params=_params(query), headers=headers) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise _response_error(answer)
                yield answer
        except httpx.ReadTimeout as error:
            raise StreamIdle(f"Rota has written nothing for {READ_TIMEOUT_S:g} s.") from error
        except httpx.RequestError as error:
            self._rediscover()
            raise self._unavailable(error) from error

    async def pause(self, streak: int, least_s: float = 0.0) -> None:
        """After failure number `streak` of a stream; raises when there have been too many."""
        if streak > STREAM_FAILURES_MAX:
            raise Unavailable(f"{self!r} broke {streak} times in a row: check that Rota is up, and try again.")
        await self._clock.sleep(max(least_s, RETRY_BACKOFF.pause_s(streak, random.random())))  # noqa: S311 - no secret

    async def close(self) -> None:
        held, self._held = self._held, []
        self._client, self._endpoint = None, None
        for each in held:
            await each.aclose()

    async def _attempt(
        self, method: str, path: str, query: Mapping[str, object] | None, content: bytes | None, wait_s: float
    ) -> httpx.Response | _FailedAttempt:
        try:
            answer = await self._send(method, path, query, content, wait_s)
        except _NOT_SENT_ERRORS as error:
            return _FailedAttempt(self._unavailable(error), undone=True)
        except (httpx.RequestError, TimeoutError) as error:
            return _FailedAttempt(
                self._unavailable(error, " and whether it did what it was asked is not known"), undone=False
            )
        if answer.is_success:
            return answer
        if answer.status_code not in _TRANSIENT_STATUSES:
            raise _response_error(answer)
        undone = answer.status_code == _TOO_MANY_REQUESTS
        return _FailedAttempt(
            _response_error(answer), undone=undone, pause_s=parse_retry_after(answer.headers.get("retry-after", ""))
        )

    async def _send(
        self, method: str, path: str, query: Mapping[str, object] | None, content: bytes | None, wait_s: float
    ) -> httpx.Response:
        client = await self._ensure_client()
        async with asyncio.timeout(REQUEST_TIMEOUT_S + wait_s):
            return await client.request(
                method,
                API_PREFIX + path,
                params=_params(query),
                content=content,
                headers=tracing.inject() | ({"content-type": MSGPACK_MEDIA_TYPE} if content is not None else {}),
                timeout=httpx.Timeout(
                    READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S + wait_s, pool=POOL_TIMEOUT_S
                ),
            )

    async def _ensure_client(self) -> httpx.AsyncClient:
        if self._client is None:
            self._endpoint = self._find()
            self._client = _build_client(self._endpoint)
            self._held.append(_client_guard(self._client))
            await anext(self._held[-1])
        return self._client

    def _rediscover(self) -> None:
        """Rota may listen elsewhere by now; while nobody knows where, the old place is tried on."""
        with suppress(InvalidSetting):
            if self._client is not None and self._find() != self._endpoint:
                self._client = None

    def _unavailable(self, error: Exception, besides: str = "") -> Unavailable:
        where = self._endpoint.url if self._endpoint else "its address"
        away = Unavailable(
            f"Rota at {where} does not answer ({type(error).__name__}){besides}: check that it is up, and try again.",
            url=where,
        )
        away.__cause__ = error
        return away


def encode_body(body: object) -> bytes:
    try:
        return msgspec.msgpack.encode(body)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"This cannot be sent: {str(error)[:300].rstrip('.')}.") from error


def decode_response(kind: type[T], answer: httpx.Response) -> T:
    try:
        return _decoder(kind).decode(answer.content)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RotaError(
            f"{answer.request.method} {answer.request.url.path} was answered with something else than this version of"
            f" Rota knows ({str(error)[:200]}): use the SDK of the version that the server has."
        ) from error


def _decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    if kind not in _DECODERS:
        _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
    return _DECODERS[kind]


def _build_client(endpoint: ApiEndpoint) -> httpx.AsyncClient:
    url = httpx.URL(endpoint.url)
    here = _is_loopback(url.host)
    return httpx.AsyncClient(
        base_url=endpoint.url,
        headers={"authorization": f"Bearer {endpoint.key}", "accept": MSGPACK_MEDIA_TYPE, "user-agent": "rota-sdk"},
        limits=httpx.Limits(
            max_connections=CONNECTIONS_MAX,
            max_keepalive_connections=IDLE_CONNECTIONS_MAX,
            keepalive_expiry=KEEPALIVE_S,
        ),
        timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=POOL_TIMEOUT_S),
        # A proxy that is set for this machine's way out knows nothing of its own addresses.
        trust_env=not here,
        verify=_tls_verification(url, here=here),
    )


def _tls_verification(url: httpx.URL, *, here: bool) -> ssl.SSLContext | bool:
    """What this machine trusts, or SSL_CERT_FILE says.

    Plain HTTP within this machine meets no TLS, of a proxy either, so no certificates are loaded, which takes 20 ms.
    """
    if url.scheme == "https":
        return ssl.create_default_context()
    return not (here and url.scheme == "http")


async def _client_guard(client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.aclose()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _response_error(answer: httpx.Response) -> RotaError:
    return error_from_response(answer.status_code, answer.headers.get("content-type", ""), answer.content)


def _params(query: Mapping[str, object] | None) -> dict[str, str]:
    """Without what is None; yes and no as JSON has them."""
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}

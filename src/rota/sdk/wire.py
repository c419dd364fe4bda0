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
- A refusal is raised as the exception of its code (`rota.sdk.problems`).
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

from rota.infra.clock import Clock, SystemClock
from rota.infra.telemetry import tracing
from rota.local.api_key import Endpoint
from rota.model.backoff import Backoff
from rota.model.errors import InvalidInput, InvalidSetting, RotaError, Unavailable
from rota.sdk.problems import pause_s, raised

T = TypeVar("T")
PREFIX: Final = "/api/v1"
MSGPACK: Final = "application/msgpack"
CONNECT_S: Final = 5.0
ANSWER_S: Final = 30.0
"""Between two pieces of an answer, besides what the server was asked to wait."""
WHOLE_S: Final = 120.0
"""A whole call, besides that."""
TURN_S: Final = 60.0
"""For a connection of the pool."""
PATIENCE_S: Final = 60.0
CONNECTIONS_MAX: Final = 256
WAIT_S: Final = 30.0
WAITING_MAX: Final = CONNECTIONS_MAX // 2
EARLY_S: Final = 0.25
IDLE_MAX: Final = 32
IDLE_S: Final = 3.0
"""Less than servers keep an idle connection, so that a call hardly ever meets one that is being closed."""
AGAIN: Final = Backoff(0.1, 5.0)
STREAK_MAX: Final = 20
"""Of a stream that breaks again and again: about a minute."""
_DECODERS: Final[dict[Any, msgspec.msgpack.Decoder[Any]]] = {}
_TOO_MANY: Final = 429
_TRANSIENT: Final = frozenset({429, 502, 503, 504})
_UNSENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class Silent(Unavailable):
    """Of a stream: nothing came, and nothing has to."""


class _Failed(msgspec.Struct, frozen=True):
    error: RotaError
    undone: bool
    """It has had no effect for certain."""
    pause_s: float = 0.0


class Wire:
    """Belongs to the loop it was first used on."""

    def __init__(
        self, find: Callable[[], Endpoint], *, patience_s: float | None = None, clock: Clock | None = None
    ) -> None:
        self._find = find
        self._clock = clock or SystemClock()
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._endpoint: Endpoint | None = None
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
        content = None if body is msgspec.UNSET else encoded(body)
        until = self._clock.monotonic() + (self._patience_s if patience_s is None else patience_s)
        for attempt in count(1):
            answer = await self._tried(method, path, query, content, wait_s)
            if isinstance(answer, httpx.Response):
                return decoded(kind, answer)
            if not (again or answer.undone):
                raise answer.error
            pause = max(answer.pause_s, AGAIN.pause_s(attempt, random.random()))  # noqa: S311 - no secret
            if self._clock.monotonic() + pause > until:
                raise answer.error
            await self._clock.sleep(pause)
            self._look_up()
        raise AssertionError  # counting has no end

    async def waited(self, path: str, kind: type[T], within_s: float, over: Callable[[T], bool]) -> T:
        """What is there once it is over, or after so long. When many wait at once, each question is kept open for less
        than `WAIT_S`, so that all have their turn."""
        self._waiting += 1
        began_s = self._clock.monotonic()
        try:
            wait_s = round(min(within_s, WAIT_S, WAIT_S * WAITING_MAX / self._waiting), 3)
            patience_s = min(PATIENCE_S, within_s)
            found = await self.call(
                "GET", path, kind, again=True, query={"wait": wait_s}, wait_s=wait_s, patience_s=patience_s
            )
        finally:
            self._waiting -= 1
        if not over(found) and self._clock.monotonic() - began_s < wait_s / 2:
            await self._clock.sleep(min(EARLY_S, wait_s))  # a server that is ending keeps nobody waiting
        return found

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, object] | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """An answer as it comes. A failure on the way is raised as Unavailable: who can goes on where it was after a
        `pause`, or at once when nothing came for a while (`Silent`)."""
        client = await self._opened()
        try:
            async with client.stream("GET", PREFIX + path, params=_params(query), headers=headers) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise _raised(answer)
                yield answer
        except httpx.ReadTimeout as error:
            raise Silent(f"Rota has written nothing for {ANSWER_S:g} s.") from error
        except httpx.RequestError as error:
            self._look_up()
            raise self._away(error) from error

    async def pause(self, streak: int, least_s: float = 0.0) -> None:
        """After failure number `streak` of a stream; raises when there have been too many."""
        if streak > STREAK_MAX:
            raise Unavailable(f"{self!r} broke {streak} times in a row: check that Rota is up, and try again.")
        await self._clock.sleep(max(least_s, AGAIN.pause_s(streak, random.random())))  # noqa: S311 - no secret

    async def close(self) -> None:
        held, self._held = self._held, []
        self._client, self._endpoint = None, None
        for each in held:
            await each.aclose()

    async def _tried(
        self, method: str, path: str, query: Mapping[str, object] | None, content: bytes | None, wait_s: float
    ) -> httpx.Response | _Failed:
        try:
            answer = await self._sent(method, path, query, content, wait_s)
        except _UNSENT as error:
            return _Failed(self._away(error), undone=True)
        except (httpx.RequestError, TimeoutError) as error:
            return _Failed(self._away(error, " and whether it did what it was asked is not known"), undone=False)
        if answer.is_success:
            return answer
        if answer.status_code not in _TRANSIENT:
            raise _raised(answer)
        undone = answer.status_code == _TOO_MANY
        return _Failed(_raised(answer), undone=undone, pause_s=pause_s(answer.headers.get("retry-after", "")))

    async def _sent(
        self, method: str, path: str, query: Mapping[str, object] | None, content: bytes | None, wait_s: float
    ) -> httpx.Response:
        client = await self._opened()
        async with asyncio.timeout(WHOLE_S + wait_s):
            return await client.request(
                method,
                PREFIX + path,
                params=_params(query),
                content=content,
                headers=tracing.inject() | ({"content-type": MSGPACK} if content is not None else {}),
                timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S, read=ANSWER_S + wait_s, pool=TURN_S),
            )

    async def _opened(self) -> httpx.AsyncClient:
        if self._client is None:
            self._endpoint = self._find()
            self._client = _client(self._endpoint)
            self._held.append(_held(self._client))
            await anext(self._held[-1])
        return self._client

    def _look_up(self) -> None:
        """Rota may listen elsewhere by now; while nobody knows where, the old place is tried on."""
        with suppress(InvalidSetting):
            if self._client is not None and self._find() != self._endpoint:
                self._client = None

    def _away(self, error: Exception, besides: str = "") -> Unavailable:
        where = self._endpoint.url if self._endpoint else "its address"
        away = Unavailable(
            f"Rota at {where} does not answer ({type(error).__name__}){besides}: check that it is up, and try again.",
            url=where,
        )
        away.__cause__ = error
        return away


def encoded(body: object) -> bytes:
    try:
        return msgspec.msgpack.encode(body)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"This cannot be sent: {str(error)[:300].rstrip('.')}.") from error


def decoded(kind: type[T], answer: httpx.Response) -> T:
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


def _client(endpoint: Endpoint) -> httpx.AsyncClient:
    url = httpx.URL(endpoint.url)
    here = _is_here(url.host)
    return httpx.AsyncClient(
        base_url=endpoint.url,
        headers={"authorization": f"Bearer {endpoint.key}", "accept": MSGPACK, "user-agent": "rota-sdk"},
        limits=httpx.Limits(
            max_connections=CONNECTIONS_MAX, max_keepalive_connections=IDLE_MAX, keepalive_expiry=IDLE_S
        ),
        timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S, pool=TURN_S),
        # A proxy that is set for this machine's way out knows nothing of its own addresses.
        trust_env=not here,
        verify=_verification(url, here=here),
    )


def _verification(url: httpx.URL, *, here: bool) -> ssl.SSLContext | bool:
    """What this machine trusts, or SSL_CERT_FILE says.

    Plain HTTP within this machine meets no TLS, of a proxy either, so no certificates are loaded, which takes 20 ms.
    """
    if url.scheme == "https":
        return ssl.create_default_context()
    return not (here and url.scheme == "http")


async def _held(client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.aclose()


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _raised(answer: httpx.Response) -> RotaError:
    return raised(answer.status_code, answer.headers.get("content-type", ""), answer.content)


def _params(query: Mapping[str, object] | None) -> dict[str, str]:
    """Without what is None; yes and no as JSON has them."""
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}

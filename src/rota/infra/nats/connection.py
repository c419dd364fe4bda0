"""One connection to NATS that comes back whatever ended it.

The client library reconnects by itself after a lost socket; told to, it tries for ever, with our pauses. It gives up
for good when the server *says* something is wrong (login revoked, protocol violation), now and then without telling us.
So `Connection` has a keeper that looks for that end and dials anew. Either way every subscription is put back, or made
if it was asked for meanwhile, before the watchers hear `up`.

Who keeps what:
- nothing is buffered for a server that is away: `send` refuses at once with `NatsUnavailable`. Bytes already handed to
  the library when the socket died may still be sent after the reconnect, so a failed publish means "unknown";
- every question has a timeout, and the wait for a slow socket is bounded by `pending_bytes` and `publish_timeout_s`;
- credentials are taken out of the URL before the library sees it, so none of its errors can hold them.

If we die, the server drops our subscriptions and unanswered pulls; unacknowledged messages are delivered again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from random import SystemRandom
from typing import Any, Protocol

import structlog
from nats import errors
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from rota.infra.asyncio_cancel import cancellable
from rota.infra.nats.target import NatsTarget
from rota.infra.telemetry import metrics
from rota.model.backoff import Backoff
from rota.model.errors import LoginRefused, NatsUnavailable, SetupFailed

log = structlog.get_logger(__name__)
DISCONNECTS = metrics.counter("rota_bus_disconnects", "Times the connection to NATS was lost.")
RECONNECTS = metrics.counter("rota_bus_reconnects", "Times the connection to NATS came back.")
SLOW_CONSUMER_DROPS = metrics.counter(
    "rota_bus_slow_consumer", "Messages dropped here because nobody took them in time."
)

RECONNECT_BACKOFF = Backoff(first_s=0.1, longest_s=5.0)
DIAL_TIMEOUT_S = 2.0
"""For one server of a cluster; the whole dial has `connect_timeout_s`."""
DIAL_PAUSE_S = 0.05
CLOSED_CHECK_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 2.0
CALLBACK_POLL_INTERVAL_S = 0.005
_jitter = SystemRandom().random

OnMessage = Callable[[Msg], Awaitable[None]]


class ConnectionWatcher(Protocol):
    """Whoever must know that questions in flight will not be answered any more."""

    def on_connected(self) -> None: ...

    def on_disconnected(self) -> None: ...


class BusSubscription:
    """A subscription as its owner sees it; it outlives the library's."""

    def __init__(self, subject: str, queue: str, on_message: OnMessage) -> None:
        self.subject = subject
        self.queue = queue
        self.on_message = on_message
        self.subscription: Subscription | None = None


class _TlsCheckingClient(Client):
    """The library's client, which would send credentials in the clear to a server that says it has no TLS."""

    def __init__(self, *, tls: bool) -> None:
        super().__init__()
        self._only_tls = tls

    def _connect_command(self) -> bytes:
        if self._only_tls and not self._server_info.get("tls_required"):
            raise errors.SecureConnRequiredError
        return super()._connect_command()


class NatsConnection:
    def __init__(self, target: NatsTarget) -> None:
        self.target = target
        self.watchers: set[ConnectionWatcher] = set()
        self._client: Client | None = None
        self._routes: list[BusSubscription] = []
        self._up = asyncio.Event()
        self._dialling = False
        self._closing = False
        self._given_up = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._last_error: Exception | None = None

    async def open(self) -> None:
        """Log in at any of the servers within `connect_timeout_s`."""
        self._client = await self._dial()
        self._up.set()
        self._keeper = asyncio.create_task(self._reopen_loop(), name="nats.keep")

    async def close(self) -> None:
        """End for good. May be called again."""
        self._closing = True
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait([keeper])
        self._notify_disconnected()
        if self._client is not None:
            await _close_client(self._client)

    @property
    def server_version(self) -> str:
        if self._client is None or not self.connected:
            return ""
        version = self._client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    @property
    def connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    @property
    def max_payload(self) -> int:
        """What the server takes in one message, headers included."""
        return self._connected_client().max_payload

    def new_inbox(self) -> str:
        return self._connected_client().new_inbox()

    async def until_connected(self, timeout_s: float) -> bool:
        """Wait for the connection; False when it did not come back in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.connected:
                    # The library changes its state a moment before it tells us. Whoever waits must let it speak.
                    await (asyncio.sleep(CALLBACK_POLL_INTERVAL_S) if self._up.is_set() else self._up.wait())
        return self.connected

    async def send(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Hand over for sending. Says nothing about arrival."""
        client = self._connected_client()
        try:
            with cancellable():
                await client.publish(subject, data, reply=reply, headers=headers)
        except (errors.Error, OSError) as error:
            raise self._unavailable("does not take messages", error) from error

    async def request(self, subject: str, data: bytes = b"") -> bytes:
        """The answer to one question, within `publish_timeout_s`."""
        client = self._connected_client()
        try:
            with cancellable():
                answer = await client.request(subject, data, timeout=self.target.publish_timeout_s)
        except errors.NoRespondersError as error:
            raise self._unavailable("has nobody who answers: is JetStream on?", error) from error
        except (errors.Error, OSError) as error:
            raise self._unavailable("does not answer", error) from error
        return answer.data

    async def subscribe(self, subject: str, on_message: OnMessage, *, queue: str = "") -> BusSubscription:
        """Messages on `subject` from now on, or from when NATS is back, through reconnects, until `unsubscribe`."""
        route = BusSubscription(subject, queue, on_message)
        self._routes.append(route)
        await self._subscribe_missing()
        return route

    async def unsubscribe(self, route: BusSubscription) -> None:
        """No more messages after what the server had already sent; that is handed over before this returns."""
        if route not in self._routes:
            return
        self._routes.remove(route)
        subscription, route.subscription = route.subscription, None
        if subscription is not None:
            with suppress(errors.Error, OSError):
                async with asyncio.timeout(self.target.publish_timeout_s):
                    await (subscription.drain() if self.connected else subscription.unsubscribe())  # type: ignore[no-untyped-call]

    async def _subscribe_missing(self) -> None:
        """Whatever ends the connection meanwhile, the next one has them all."""
        with suppress(errors.ConnectionClosedError, errors.ConnectionDrainingError, OSError):
            for route in self._routes:
                if route.subscription is None and self._client is not None and self.connected:
                    await _subscribe(route, self._client)

    def _connected_client(self) -> Client:
        if self._client is None or not self._client.is_connected:
            raise self._unavailable("is not connected", self._last_error)
        return self._client

    async def _dial(self) -> Client:
        """A client that is logged in and has every subscription."""
        client = _TlsCheckingClient(tls=self.target.tls)
        self._dialling = True
        try:
            async with asyncio.timeout(self.target.connect_timeout_s):
                await client.connect(**self._options(client))
                for route in self._routes:
                    await _subscribe(route, client)
        except BaseException as error:
            await _close_client(client)
            if isinstance(error, errors.Error | OSError):
                raise self._unavailable("cannot be reached", self._last_error or error) from None
            raise
        finally:
            self._dialling = False
        return client

    def _options(self, client: Client) -> dict[str, Any]:
        credentials = self.target.credentials
        return {
            "servers": self.target.servers,
            "name": self.target.name,
            "user": credentials.user,
            "password": credentials.password,
            "token": credentials.token,
            "connect_timeout": min(DIAL_TIMEOUT_S, self.target.connect_timeout_s),
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": DIAL_PAUSE_S,
            "reconnect_to_server_handler": partial(_next_server, client),
            "ping_interval": self.target.ping_interval_s,
            "max_outstanding_pings": 2,
            "pending_size": self.target.pending_bytes,
            "flush_timeout": self.target.publish_timeout_s,
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnected,
            "reconnected_cb": self._on_reconnected,
            "closed_cb": self._on_closed,
        }

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        if isinstance(error, errors.SlowConsumerError):
            SLOW_CONSUMER_DROPS.inc()
            log.warning("nats_slow_consumer", subject=error.subject)
        elif _is_login_refusal(error):
            refusal = LoginRefused(
                f"NATS at {self.target.address} refused our credentials: correct the user and password, or the token, "
                "in the NATS URL.",
                address=self.target.address,
            )
            if self._dialling:
                # The library would try the same credentials again; raising here is the way out of its loop.
                raise refusal
            log.error("nats_login_refused", code=refusal.code, reason=refusal.sentence)
        elif type(error) is errors.Error:
            # The server's own words, such as a permission that we lack.
            log.warning("nats_complained", said=_cause(error))
        else:
            log.debug("nats_error", kind=type(error).__name__)

    async def _on_disconnected(self) -> None:
        if not self._closing and self._up.is_set():
            DISCONNECTS.inc()
            log.warning("nats_disconnected", address=self.target.address)
        self._notify_disconnected()

    async def _on_reconnected(self) -> None:
        # The library has put back what it knew of; it has not heard of what was asked for while it was away.
        await self._subscribe_missing()
        self._notify_connected()

    async def _on_closed(self) -> None:
        self._given_up.set()

    async def _reopen_loop(self) -> None:
        """Dial anew whenever the library has given up. It may do so in silence, when its own closing fails."""
        while True:
            self._given_up.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSED_CHECK_INTERVAL_S):
                    await self._given_up.wait()
            if self._client is not None and self._client.is_closed:
                log.warning("nats_given_up", address=self.target.address, kind=type(self._last_error).__name__)
                self._notify_disconnected()
                await _close_client(self._client)
                await self._redial()

    async def _redial(self) -> None:
        for streak in itertools.count(1):
            await asyncio.sleep(RECONNECT_BACKOFF.pause_s(streak, _jitter()))
            try:
                self._client = await self._dial()
            except (NatsUnavailable, SetupFailed) as error:
                log.warning("nats_revival_failed", code=error.code, reason=error.sentence)
            else:
                self._notify_connected()
                return

    def _notify_connected(self) -> None:
        RECONNECTS.inc()
        log.info("nats_reconnected", address=self.target.address)
        self._up.set()
        for watcher in tuple(self.watchers):
            watcher.on_connected()

    def _notify_disconnected(self) -> None:
        self._up.clear()
        for watcher in tuple(self.watchers):
            watcher.on_disconnected()

    def _unavailable(self, what: str, error: Exception | None) -> NatsUnavailable:
        cause = f" ({_cause(error)})" if error is not None else ""
        return NatsUnavailable(
            f"NATS at {self.target.address} {what}{cause}: check that it runs and that the NATS URL is right.",
            address=self.target.address,
        )


async def _subscribe(route: BusSubscription, client: Client) -> None:
    route.subscription = await client.subscribe(route.subject, queue=route.queue, cb=route.on_message)


def _next_server(client: Client, servers: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
    """The server that failed least, after a pause that grows with its failures."""
    # The library leaves the socket of a reconnect that failed half-way open until it is collected.
    if leftover := client._transport:  # noqa: SLF001 - it has no public way to it
        leftover.close()  # type: ignore[no-untyped-call]
    chosen = min(servers, key=lambda server: server.reconnects)
    return chosen, RECONNECT_BACKOFF.pause_s(chosen.reconnects + 1, _jitter())


def _is_login_refusal(error: Exception) -> bool:
    said = str(error).lower()
    return isinstance(error, errors.AuthorizationError) or "authorization violation" in said or "authentication" in said


def _cause(error: Exception) -> str:
    """A short reason that cannot hold an address or a credential."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError):
        return type(error).__name__
    return str(error).removeprefix("nats: ")


async def _close_client(client: Client) -> None:
    """Close, and close again when the socket failed under it, for then the library leaves tasks behind."""
    for _ in range(2):
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await client.close()
        except (errors.Error, OSError) as error:
            log.info("nats_close_failed", kind=type(error).__name__)
        if not client._subs:  # noqa: SLF001 - emptied by a close that went through
            break
        client._status = Client.DISCONNECTED  # noqa: SLF001 - a closed one would not be closed again
    # The library's tasks were cancelled and need a turn of the loop to end.
    await asyncio.sleep(0)

"""One connection to NATS that recovers from every kind of failure.

The client library reconnects by itself after a lost socket; it is configured to retry forever with Rota's back-off. It
closes for good when the server *reports* an error (login revoked, protocol violation), sometimes without a callback. So
`NatsConnection` runs a task that detects a closed client and opens a new one. Either way every subscription is
restored, including those requested meanwhile, before watchers get `on_connected`.

Guarantees:
- nothing is buffered while disconnected: `send` raises `NatsUnavailable` immediately. Bytes already passed to the
  library when the socket died may still be sent after the reconnect, so a failed publish has an unknown outcome;
- every request has a timeout, and the wait for a slow socket is bounded by `pending_bytes` and `publish_timeout_s`;
- credentials are removed from the URL before the library sees it, so its errors cannot contain them.

If this process dies, the server drops its subscriptions and open pulls and redelivers unacknowledged messages.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from random import SystemRandom
from typing import Any, NoReturn, Protocol

import structlog
from nats import errors
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from rota.infra.asyncio_cancel import cancellable, run_within
from rota.infra.nats import failures
from rota.infra.nats.target import NatsTarget
from rota.infra.telemetry import metrics
from rota.model.backoff import Backoff
from rota.model.errors import LoginRefused, NatsUnavailable, SetupFailed

log = structlog.get_logger(__name__)
DISCONNECTS = metrics.counter("rota_bus_disconnects", "Times the connection to NATS was lost.")
RECONNECTS = metrics.counter("rota_bus_reconnects", "Times the connection to NATS was restored.")
SLOW_CONSUMER_DROPS = metrics.counter(
    "rota_bus_slow_consumer", "Messages dropped here because their consumer was too slow."
)

RECONNECT_BACKOFF = Backoff(first_s=0.1, longest_s=3.0)
DIAL_TIMEOUT_S = 2.0
"""Per server of a cluster; `connect_timeout_s` bounds the whole attempt."""
DIAL_PAUSE_S = 0.05
CLOSED_CHECK_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 2.0
CALLBACK_POLL_INTERVAL_S = 0.005
_jitter = SystemRandom().random

OnMessage = Callable[[Msg], Awaitable[None]]


class ConnectionWatcher(Protocol):
    """Notified of connection changes: requests in flight on a lost connection get no reply."""

    def on_connected(self) -> None: ...

    def on_disconnected(self) -> None: ...


class BusSubscription:
    """A subscription that survives reconnects, unlike the library's."""

    def __init__(self, subject: str, queue: str, on_message: OnMessage) -> None:
        self.subject = subject
        self.queue = queue
        self.on_message = on_message
        self.subscription: Subscription | None = None


class _TlsCheckingClient(Client):
    """Refuses to send credentials in clear text: the library's client would, to a server that reports no TLS."""

    def __init__(self, *, tls: bool) -> None:
        super().__init__()
        self._require_tls = tls

    def _connect_command(self) -> bytes:
        if self._require_tls and not self._server_info.get("tls_required"):
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
        self._client_closed = asyncio.Event()
        self._reopen_task: asyncio.Task[None] | None = None
        self._last_error: Exception | None = None

    async def open(self) -> None:
        """Log in to any of the servers within `connect_timeout_s`."""
        self._client = await self._dial()
        self._up.set()
        self._reopen_task = asyncio.create_task(self._reopen_loop(), name="nats.reopen")

    async def close(self) -> None:
        """Close for good. Idempotent."""
        self._closing = True
        task, self._reopen_task = self._reopen_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
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
        """The server's limit for one message in bytes, headers included."""
        return self._connected_client().max_payload

    def new_inbox(self) -> str:
        return self._connected_client().new_inbox()

    async def until_connected(self, timeout_s: float) -> bool:
        """Wait for the connection; False when it is not back in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.connected:
                    # The library changes its state shortly before its callback; let the callback run first.
                    await (asyncio.sleep(CALLBACK_POLL_INTERVAL_S) if self._up.is_set() else self._up.wait())
        return self.connected

    async def send(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Pass a message to the library for sending. Does not confirm arrival."""
        client = self._connected_client()
        try:
            with cancellable():
                await client.publish(subject, data, reply=reply, headers=headers)
        except (errors.Error, OSError) as error:
            self._raise(error, "does not accept messages")

    async def request(self, subject: str, data: bytes = b"") -> bytes:
        """The reply to one request, within `publish_timeout_s`."""
        client = self._connected_client()
        try:
            with cancellable():
                reply_message = await client.request(subject, data, timeout=self.target.publish_timeout_s)
        except (errors.Error, OSError) as error:
            self._raise(error, "does not answer")
        return reply_message.data

    async def subscribe(self, subject: str, on_message: OnMessage, *, queue: str = "") -> BusSubscription:
        """Messages on `subject` from now on, or from the next connection, across reconnects, until `unsubscribe`."""
        route = BusSubscription(subject, queue, on_message)
        self._routes.append(route)
        await self._subscribe_missing()
        return route

    async def unsubscribe(self, route: BusSubscription) -> None:
        """Stop the subscription; messages that the server already sent are passed on before this returns."""
        if route not in self._routes:
            return
        self._routes.remove(route)
        subscription, route.subscription = route.subscription, None
        if subscription is None:
            return
        try:
            with suppress(errors.Error, OSError):
                async with asyncio.timeout(self.target.publish_timeout_s):
                    await (subscription.drain() if self.connected else subscription.unsubscribe())  # type: ignore[no-untyped-call]
        finally:
            _forget(subscription)

    async def _subscribe_missing(self) -> None:
        """Restore missing subscriptions; if the connection ends meanwhile, the next one restores them all."""
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
            await run_within(self._connect(client), self.target.connect_timeout_s)
        except BaseException as error:
            await _close_client(client)
            if isinstance(error, errors.Error | OSError):
                raise self._unavailable("cannot be reached", self._last_error or error) from None
            raise
        finally:
            self._dialling = False
        return client

    async def _connect(self, client: Client) -> None:
        await client.connect(**self._options(client))
        for route in self._routes:
            await _subscribe(route, client)

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
                f"NATS at {self.target.address} refused the credentials: correct the user and password, or the token, "
                "in the NATS URL.",
                address=self.target.address,
            )
            if self._dialling:
                # The library would retry the same credentials; only raising here breaks its loop.
                raise refusal
            log.error("nats_login_refused", code=refusal.code, reason=refusal.sentence)
        elif type(error) is errors.Error:
            # A message of the server itself, such as a missing permission.
            log.warning("nats_server_error", description=failures.cause(error))
        else:
            log.debug("nats_error", kind=type(error).__name__)

    async def _on_disconnected(self) -> None:
        if not self._closing and self._up.is_set():
            DISCONNECTS.inc()
            log.warning("nats_disconnected", address=self.target.address)
        self._notify_disconnected()

    async def _on_reconnected(self) -> None:
        # The library restored its own subscriptions, not those requested while it was disconnected.
        await self._subscribe_missing()
        self._notify_connected()

    async def _on_closed(self) -> None:
        self._client_closed.set()

    async def _reopen_loop(self) -> None:
        """Open a new client whenever the library closed for good, which it may do without a callback."""
        while True:
            self._client_closed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSED_CHECK_INTERVAL_S):
                    await self._client_closed.wait()
            if self._client is not None and self._client.is_closed:
                log.warning("nats_client_closed", address=self.target.address, kind=type(self._last_error).__name__)
                self._notify_disconnected()
                await _close_client(self._client)
                await self._redial()

    async def _redial(self) -> None:
        for attempt in itertools.count(1):
            await asyncio.sleep(RECONNECT_BACKOFF.pause_s(attempt, _jitter()))
            try:
                self._client = await self._dial()
            except (NatsUnavailable, SetupFailed) as error:
                log.warning("nats_reopen_failed", code=error.code, reason=error.sentence)
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
        return failures.unavailable(what, error, self.target.address)

    def _raise(self, error: Exception, what: str) -> NoReturn:
        translated = failures.to_rota_error(error, what, self.target.address)
        if translated is None:
            raise error
        raise translated from error


async def _subscribe(route: BusSubscription, client: Client) -> None:
    route.subscription = await client.subscribe(route.subject, queue=route.queue, cb=route.on_message)


def _forget(subscription: Subscription) -> None:
    """The library keeps a subscription whose end it could not announce, and restores it with the next connection."""
    subscription._stop_processing()  # noqa: SLF001 - no public API
    subscription._conn._remove_sub(subscription._id)  # noqa: SLF001


def _next_server(client: Client, servers: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
    """The server with the fewest failures, after a delay that grows with them."""
    # The library leaves the socket of a half-failed reconnect open until garbage collection.
    if stale_transport := client._transport:  # noqa: SLF001 - no public API
        stale_transport.close()  # type: ignore[no-untyped-call]
    chosen = min(servers, key=lambda server: server.reconnects)
    return chosen, RECONNECT_BACKOFF.pause_s(chosen.reconnects + 1, _jitter())


def _is_login_refusal(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, errors.AuthorizationError) or "authorization violation" in text or "authentication" in text


async def _close_client(client: Client) -> None:
    """Close, and close again after a socket failure, because the library then leaves tasks behind."""
    for _ in range(2):
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await client.close()
        except (errors.Error, OSError) as error:
            log.info("nats_close_failed", kind=type(error).__name__)
        if not client._subs:  # noqa: SLF001 - empty after a complete close
            break
        client._status = Client.DISCONNECTED  # noqa: SLF001 - a CLOSED client ignores close
    # Let the library's cancelled tasks finish.
    await asyncio.sleep(0)

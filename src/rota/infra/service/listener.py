"""The HTTP listener of a process: /health, /ready, /metrics, and a mounted app for every other path.

    /health    200 while no service has failed for good: is a new process needed?
    /ready     200 while all services are ready and all checks pass: may traffic be sent here?
    /metrics   Prometheus' text format; authorized by the mounted app, if there is one

Invariants:
- bound to loopback by default, and then only for requests that name this machine: any other Host header is a DNS
  rebinding attack by a web page, and is refused;
- responses contain names, states and error codes, never an error's text;
- a client that does not send its request is disconnected (`serving`);
- a hanging check costs its own timeout once a second, for any number of requests;
- started first and stopped last, so that it reports the state of the other services until the end.

Signals are handled by the supervisor. A streaming response of the mounted app must end when `Supervisor.until_stopping`
returns, or it is aborted after `close_s`.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from ipaddress import ip_address
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
import structlog
import uvicorn

from rota.infra.service.lifecycle import Lifecycle, Service
from rota.infra.service.serving import HttpProtocol, UvicornServer
from rota.infra.service.supervisor import Supervisor, error_kind
from rota.infra.telemetry import metrics
from rota.model.errors import PortTaken, SetupFailed

log = structlog.get_logger(__name__)
ACTIVE_TASKS = metrics.gauge("rota_active_tasks", "Asyncio tasks of this process at the time of the scrape.")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Check = Callable[[], Awaitable[object]]
PlainResponse = tuple[int, str, bytes]

_JSON = "application/json"


class ReadinessChecks:
    """Checks of dependencies (does PostgreSQL answer?) that must all pass. A check fails by raising."""

    def __init__(self, fresh_s: float = 1.0) -> None:
        self._fresh_s = fresh_s
        self._checks: dict[str, tuple[Check, float]] = {}
        self._failing: dict[str, str] = {}
        self._checked_at = float("-inf")
        self._lock = asyncio.Lock()

    def add(self, name: str, check: Check, timeout_s: float = 1.0) -> None:
        assert name not in self._checks, f"two checks {name!r}"
        self._checks[name] = (check, timeout_s)

    async def failing(self) -> dict[str, str]:
        """Failing checks with the kind of their error; the result is cached for `fresh_s`."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            if loop.time() - self._checked_at >= self._fresh_s:
                self._failing = await self._run_all()
                self._checked_at = loop.time()
            return self._failing

    async def _run_all(self) -> dict[str, str]:
        async with asyncio.TaskGroup() as tasks:
            results = {
                name: tasks.create_task(_run_check(check, timeout_s))
                for name, (check, timeout_s) in self._checks.items()
            }
        return {name: problem for name, task in results.items() if (problem := task.result())}


async def _run_check(check: Check, timeout_s: float) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            await check()
    except TimeoutError:
        return "timeout"
    except Exception as error:  # noqa: BLE001 - any error means "not ready"
        return error_kind(error)
    return ""


class MountedApp(Protocol):
    """An app that authenticates callers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def check(self) -> None:
        """Called before the port is opened; raises when the app must not be served."""
        ...

    async def authorize_metrics(self, scope: Scope, send: Send) -> bool:
        """Whether the caller may read metrics; if not, the refusal was sent."""
        ...


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files."""

    cert: str
    key: str


class HttpListener:
    """Add `service` to the supervisor before all others. `port` 0 takes a free port, known once ready."""

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: TlsFiles | None = None,
        close_s: int = 5,
    ) -> None:
        self.host = host
        self.port = port
        self.checks = ReadinessChecks()
        self.service = Service("listener", self._run)
        self._supervisor = supervisor
        self._mounted: MountedApp | None = None
        self._tls = tls
        self._close_s = close_s

    def mount(self, app: MountedApp) -> None:
        """Let `app` answer every other path; call before start."""
        assert self._mounted is None, "an app is mounted already"
        self._mounted = app

    @cached_property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return _is_loopback(self.host)

    @property
    def url(self) -> str:
        """Known once ready."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self._tls else 'http'}://{host}:{self.port}"

    async def _run(self, lifecycle: Lifecycle) -> None:
        if self._mounted is not None:
            await self._mounted.check()
        with self._bind() as bound:
            # A restart binds the port that clients know.
            self.port = bound.getsockname()[1]
            server = UvicornServer(self._config(), lifecycle)
            self._check_tls(server.config)
            try:
                await server.serve([bound])
            finally:
                await server.abort()

    @contextmanager
    def _bind(self) -> Iterator[socket.socket]:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            bound = socket.create_server((self.host, self.port), family=family)
        except OSError as error:
            raise _bind_error(self.host, self.port, error) from error
        # Head and body of a response are written separately: without TCP_NODELAY the body would wait for the delayed
        # ACK of the head (40 ms). asyncio sets it only on sockets that name their protocol.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with bound:
            yield bound

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._dispatch,
            interface="asgi3",
            http=HttpProtocol,
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=self._close_s,
            ssl_certfile=self._tls.cert if self._tls else None,
            ssl_keyfile=self._tls.key if self._tls else None,
        )

    def _check_tls(self, config: uvicorn.Config) -> None:
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise SetupFailed(
                "HTTPS cannot be served: check that listen.tls_cert and listen.tls_key are PEM files that can be read"
                f" and belong together ({type(error).__name__}).",
            ) from error

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics}.get(scope["path"])
        if not self._is_host_allowed(scope):
            await _send_response(send, (421, _JSON, b'{"error":"misdirected"}'))
        elif route is None and self._mounted is not None:
            await self._mounted(scope, receive, send)
        elif route is None:
            await _send_response(send, (404, _JSON, b'{"error":"not_found"}'))
        elif (
            route == self._metrics
            and self._mounted is not None
            and not await self._mounted.authorize_metrics(scope, send)
        ):
            return
        elif scope["method"] not in ("GET", "HEAD"):
            await _send_response(send, (405, _JSON, b'{"error":"method_not_allowed"}'))
        else:
            await _send_response(send, await route())

    def _is_host_allowed(self, scope: Scope) -> bool:
        """Whether the Host header names this machine. A request without one is not from a browser."""
        if not self.is_local:
            return True
        return all(_names_this_machine(value) for header, value in scope["headers"] if header == b"host")

    async def _health(self) -> PlainResponse:
        failed = self._supervisor.failed()
        return _status_response(not failed, "healthy" if not failed else "failed", failed)

    async def _ready(self) -> PlainResponse:
        missing = self._supervisor.unready() | await self.checks.failing()
        return _status_response(not missing, "ready" if not missing else "not_ready", missing)

    async def _metrics(self) -> PlainResponse:
        ACTIVE_TASKS.set(len(asyncio.all_tasks()))
        return 200, metrics.CONTENT_TYPE, metrics.render()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@lru_cache(maxsize=64)
def _names_this_machine(host_header: bytes) -> bool:
    name = _host_name(host_header.decode("latin-1"))
    return _is_loopback(name) or name == socket.gethostname().lower()


def _host_name(host: str) -> str:
    """The lower-case name or address in a Host header, without its port; empty when malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _bind_error(host: str, port: int, error: OSError) -> SetupFailed:
    if error.errno == errno.EADDRINUSE:
        return PortTaken(
            f"Port {port} on {host} is taken: stop the process that uses it, or choose another port (0 takes any free"
            " one).",
            host=host,
            port=port,
        )
    return SetupFailed(
        f"Cannot listen on {host} port {port}: {error.strerror or error}. Choose an address of this machine and a "
        "port you may use.",
        host=host,
        port=port,
    )


def _status_response(good: bool, status: str, parts: dict[str, str]) -> PlainResponse:
    body = {"status": status, "parts": parts} if parts else {"status": status}
    return 200 if good else 503, _JSON, msgspec.json.encode(body)


async def _send_response(send: Send, response: PlainResponse) -> None:
    status, content_type, body = response
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    if status == 405:
        headers.append((b"allow", b"GET, HEAD"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

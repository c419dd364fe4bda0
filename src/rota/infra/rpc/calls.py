"""Rota's gRPC server: binding, authentication and error mapping.

- Loopback by default, and elsewhere only with TLS, because the secret travels with every call: other settings are
  rejected when they are read (`rota.model.settings.rules`).
- `SharedSecretInterceptor` checks every call before method lookup. Serving without a secret must be allowed explicitly,
  and only on loopback.
- A port in use is an error, never shared: half of the calls would go to another process.
- A Rota error is returned as a status with its sentence. Any other error is a bug: it is logged, and the caller only
  gets INTERNAL.

If this process dies during a call, its commits stand and the caller sees UNAVAILABLE; calls may be repeated. While
draining, new calls are refused and running ones finish.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, Never, Protocol
from urllib.parse import unquote

import grpc  # type: ignore[import-untyped]  # ships no types
import msgspec
import structlog

from rota.infra.rpc.auth import SharedSecretInterceptor
from rota.infra.rpc.protobuf import MessageT, ProtobufMessage, decode, encode
from rota.infra.service import Lifecycle, Service
from rota.infra.telemetry import metrics
from rota.model.errors import InvalidInput, InvalidSetting, PortTaken, Refused, RotaError, SetupFailed, Unavailable
from rota.model.settings.lifecycle import SafetyKernelSettings
from rota.model.settings.process import GrpcSettings

log = structlog.get_logger(__name__)
CALLS = metrics.counter("rota_rpc_calls", "gRPC calls answered.", labels=("method", "status"))

MAX_CONCURRENT_CALLS: Final = 64
REQUEST_BYTES_MAX: Final = 64 * 1024
SERVER_OPTIONS: Final = (("grpc.so_reuseport", 0),)
DRAIN_TIMEOUT_S: Final = 10.0
INTERNAL_ERROR_TEXT: Final = "Internal error: see the log of the server, and please report it."


class RpcMethod(msgspec.Struct, Generic[MessageT], frozen=True):
    """One method: its request type and handler. The handler's second argument names the caller for the audit log."""

    request: type[MessageT]
    answer: Callable[[MessageT, str], Awaitable[ProtobufMessage]]


class RpcService(Protocol):
    """The methods served under one service name of a `.proto` file."""

    name: str

    def methods(self) -> Mapping[str, RpcMethod[Any]]: ...


RpcSettings = GrpcSettings | SafetyKernelSettings
"""Settings sections with host, port, TLS files and secret."""


class RpcLimits(msgspec.Struct, frozen=True):
    calls_at_once: int = MAX_CONCURRENT_CALLS
    request_bytes_max: int = REQUEST_BYTES_MAX


class RpcServer:
    """Serves `services` as configured in `place`, the settings section `section`; `port` is known once ready.

    `needs_secret`: a shared secret must be configured.
    """

    def __init__(
        self,
        place: RpcSettings,
        services: Sequence[RpcService],
        section: str = "grpc",
        *,
        needs_secret: bool = True,
        limits: RpcLimits | None = None,
    ) -> None:
        self.port = place.port
        self.service = Service(section, self._run)
        self._settings = place
        self._section = section
        self._needs_secret = needs_secret
        self._limits = limits or RpcLimits()
        self._handlers = [_service_handler(service) for service in services]

    async def _run(self, lifecycle: Lifecycle) -> None:
        secret = self._settings.shared_secret
        interceptors = [SharedSecretInterceptor([secret] if secret else [])] if secret or self._needs_secret else []
        options = (*SERVER_OPTIONS, ("grpc.max_receive_message_length", self._limits.request_bytes_max))
        server = grpc.aio.server(
            interceptors=interceptors, options=options, maximum_concurrent_rpcs=self._limits.calls_at_once
        )
        server.add_generic_rpc_handlers(self._handlers)
        # A restart binds the port that clients know.
        self.port = self._bind(server)
        try:
            await server.start()
            log.info(
                "grpc_serving",
                section=self._section,
                host=self._settings.host,
                port=self.port,
                tls=bool(self._settings.tls_cert),
            )
            lifecycle.ready()
            await lifecycle.until_draining()
            await server.stop(DRAIN_TIMEOUT_S)
        finally:
            await server.stop(None)

    def _bind(self, server: Any) -> int:
        host = self._settings.host
        _check_port_free(self._section, host, self.port)
        address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        try:
            if self._settings.tls_cert:
                return int(server.add_secure_port(address, self._credentials()))
            return int(server.add_insecure_port(address))
        except RuntimeError as error:
            raise SetupFailed(
                f"gRPC cannot be served on {address}: check host, port, tls_cert and tls_key of {self._section}, and "
                "that the last two belong together."
            ) from error

    def _credentials(self) -> Any:
        key, cert = (
            _read_pem(f"{self._section}.{name}", getattr(self._settings, name)) for name in ("tls_key", "tls_cert")
        )
        return grpc.ssl_server_credentials([(key, cert)])


def _check_port_free(section: str, host: str, port: int) -> None:
    """gRPC reports only that binding failed, not why."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"Port {port} on {host} is taken: stop the process that uses it, or set {section}.port (0 takes any"
                " free one).",
                host=host,
                port=port,
            ) from error
        raise SetupFailed(
            f"Cannot serve gRPC on {host} port {port}: {error.strerror or error}. Set {section}.host to an address of "
            f"this machine and {section}.port to a port you may use."
        ) from error


def _read_pem(setting: str, path: str | None) -> bytes:
    try:
        return Path(path or "").read_bytes()
    except OSError as error:
        raise InvalidSetting(f"{setting} cannot be read ({error.strerror or error}): name a PEM file.") from error


def _service_handler(service: RpcService) -> Any:
    methods = {
        method: grpc.unary_unary_rpc_method_handler(_method_handler(method, call))
        for method, call in service.methods().items()
    }
    return grpc.method_handlers_generic_handler(service.name, methods)


def _method_handler(method: str, call: RpcMethod[Any]) -> Callable[[bytes, Any], Awaitable[bytes]]:
    async def answer(data: bytes, context: Any) -> bytes:
        try:
            reply = encode(await call.answer(decode(data, call.request), caller_name(context.peer())))
        except RotaError as error:
            await _abort(method, context, status_of(error), error.sentence)
        except Exception:
            log.exception("rpc_internal_error", method=method)
            # gRPC would send the error's text to the caller.
            await _abort(method, context, grpc.StatusCode.INTERNAL, INTERNAL_ERROR_TEXT)
        CALLS.labels(method, "OK").inc()
        return reply

    return answer


async def _abort(method: str, context: Any, status: Any, sentence: str) -> Never:
    CALLS.labels(method, status.name).inc()
    await context.abort(status, sentence)
    raise AssertionError("abort always raises")


def caller_name(peer: str) -> str:
    """`ipv4:127.0.0.1:50312` without the port, which changes. All callers share one secret, so it identifies none."""
    return "grpc:" + unquote(peer).partition(":")[2].rpartition(":")[0]


def status_of(error: RotaError) -> Any:
    match error:
        case InvalidInput() if "nearest" in error.facts:
            return grpc.StatusCode.NOT_FOUND
        case InvalidInput():
            return grpc.StatusCode.INVALID_ARGUMENT
        case Refused():
            return grpc.StatusCode.FAILED_PRECONDITION
        case Unavailable():
            return grpc.StatusCode.UNAVAILABLE
        case _:
            return grpc.StatusCode.INTERNAL

"""A shared secret on every gRPC call: `authorization: Bearer <secret>`.

    server = grpc.aio.server(interceptors=[SharedSecretInterceptor([current, previous])])
    channel = grpc.aio.insecure_channel(address, interceptors=bearer_interceptors(current))

`SharedSecretInterceptor` checks before method lookup, so a caller without the secret learns nothing, not even which
methods exist; methods are open only if named. Secrets are compared by digest in constant time, all of them on every
call. The server keeps only digests; the client's copy is hidden from repr, and no header is logged here. A secret sent
in clear text protects against other users of the machine, not on the network: outside loopback the channel must use
TLS.

To rotate: let servers accept the new secret beside the old one, change the clients, then remove the old one.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final, Never

import grpc  # type: ignore[import-untyped]  # ships no types
import structlog

from rota.infra.telemetry import metrics
from rota.model.errors import InvalidSetting, Unauthenticated

log = structlog.get_logger(__name__)
CALLS_REFUSED = metrics.counter(
    "rota_rpc_refused", "gRPC calls refused for a missing or wrong secret.", labels=("reason",)
)

SECRET_LENGTH_MIN: Final = 16
DRAIN_TIMEOUT_S: Final = 0.1
DRAIN_REQUESTS_MAX: Final = 16
_HEADER = "authorization"
_SCHEME = "bearer "

Handler = Any
Continuation = Callable[[Any], Awaitable[Handler]]


class SharedSecretInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # gRPC ships no types
    """Answers UNAUTHENTICATED to every call without one of `secrets`, of any kind, for existing methods or not."""

    def __init__(self, secrets: Collection[str], *, open_methods: Iterable[str] = ()) -> None:
        """`open_methods` are full names such as `/grpc.health.v1.Health/Check`."""
        if not secrets:
            raise InvalidSetting("No shared secret for gRPC is set, so every call would be refused: set one.")
        self._digests = [_digest(_check_strength(secret)) for secret in secrets]
        self._open = frozenset(open_methods)

    def __repr__(self) -> str:
        return f"SharedSecretInterceptor({len(self._digests)} accepted, open={sorted(self._open)})"

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Handler:
        if handler_call_details.method in self._open:
            return await continuation(handler_call_details)
        refusal = self._refusal(handler_call_details.invocation_metadata)
        if refusal is None:
            return await continuation(handler_call_details)
        reason, error = refusal
        CALLS_REFUSED.labels(reason).inc()
        log.warning("rpc_refused", reason=reason, code=error.code)
        return _refusal_handler(error)

    def _refusal(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[str, Unauthenticated] | None:
        credentials = [value for key, value in metadata or () if key == _HEADER]
        if not credentials:
            return "missing", Unauthenticated(
                "This call carries no secret: send `authorization: Bearer <secret>` with the secret of this server."
            )
        if len(credentials) == 1 and self._accepts(_credential(credentials[0])):
            return None
        return "wrong", Unauthenticated(
            "The secret of this call is not accepted: use the secret that is set on this server."
        )

    def _accepts(self, secret: str) -> bool:
        digest = _digest(secret)
        matched = False
        for accepted in self._digests:
            # No early exit: the timing must not reveal which one matched.
            matched |= hmac.compare_digest(digest, accepted)
        return matched


def bearer_interceptors(secret: str) -> list[Any]:
    """Client interceptors that send `secret` with every call, unary or streaming."""
    holder = _Secret(_check_strength(secret))
    return [_UnaryUnary(holder), _UnaryStream(holder), _StreamUnary(holder), _StreamStream(holder)]


class _Secret:
    """A secret that only `authorize` reveals."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "_Secret(***)"

    def authorize(self, details: Any) -> Any:
        """The call's details with this header in place of any other `authorization`."""
        kept = [(key, value) for key, value in details.metadata or () if key.lower() != _HEADER]
        metadata = grpc.aio.Metadata(*kept, (_HEADER, f"Bearer {self._value}"))
        return details._replace(metadata=metadata)


class _BearerInterceptor:
    """Adds the header to a call. gRPC uses each interceptor for one kind of call only."""

    def __init__(self, secret: _Secret) -> None:
        self._secret = secret

    async def authorize(self, continuation: Callable[..., Awaitable[Any]], details: Any, request: Any) -> Any:
        return await continuation(self._secret.authorize(details), request)


class _UnaryUnary(_BearerInterceptor, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    intercept_unary_unary = _BearerInterceptor.authorize


class _UnaryStream(_BearerInterceptor, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[misc]
    intercept_unary_stream = _BearerInterceptor.authorize


class _StreamUnary(_BearerInterceptor, grpc.aio.StreamUnaryClientInterceptor):  # type: ignore[misc]
    intercept_stream_unary = _BearerInterceptor.authorize


class _StreamStream(_BearerInterceptor, grpc.aio.StreamStreamClientInterceptor):  # type: ignore[misc]
    intercept_stream_stream = _BearerInterceptor.authorize


def _refusal_handler(error: Unauthenticated) -> Handler:
    async def abort(requests: AsyncIterator[bytes], context: Any) -> Never:
        await _drain_requests(requests)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.sentence)
        raise AssertionError("abort always raises")

    # Streaming in both directions, because any other handler would wait for a request before it runs.
    return grpc.stream_stream_rpc_method_handler(abort)


async def _drain_requests(requests: AsyncIterator[bytes]) -> None:
    """Consume a short request stream, unread.

    gRPC's asyncio client reports INTERNAL instead of our status when the end of a call races with its writes.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            for _ in range(DRAIN_REQUESTS_MAX):
                if await anext(requests, None) is None:
                    return


def _credential(value: str | bytes) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return text[len(_SCHEME) :] if text[: len(_SCHEME)].lower() == _SCHEME else ""


def _digest(secret: str) -> bytes:
    return sha256(secret.encode(errors="surrogateescape")).digest()


def _check_strength(secret: str) -> str:
    if len(secret) < SECRET_LENGTH_MIN or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise InvalidSetting(
            f"A shared secret for gRPC must be at least {SECRET_LENGTH_MIN} printable ASCII characters without spaces: "
            "make one with `openssl rand -hex 32`."
        )
    return secret

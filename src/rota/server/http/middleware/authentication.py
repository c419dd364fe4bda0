"""The way in: who asks, and whether there is room for it, is known before the API sees a request, whatever its path."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import structlog

from rota.infra.service import Lifecycle
from rota.infra.service.listener import App, HttpListener, Receive, Scope, Send
from rota.model.api_key_format import key_from_headers
from rota.model.errors import RotaError, SetupFailed
from rota.server.access import ApiKeyStore, KeyCheck
from rota.server.http import problem_details
from rota.server.http.middleware.rate_limit import RateLimiter

log = structlog.get_logger(__name__)
PREFIX: Final = "/api/v1"
WARM_UP_DELAY_S: Final = 1.0


class AuthenticationMiddleware:
    """`build` makes the app that is behind it: in a thread, when it is first asked for or a moment after the start, so
    that a server is up before it."""

    def __init__(
        self,
        build: Callable[[], App],
        check: KeyCheck,
        pressure: RateLimiter,
        listener: HttpListener,
        keys: ApiKeyStore,
    ) -> None:
        self._build = build
        self._listener = listener
        self._keys = keys
        self._built: asyncio.Task[App] | None = None
        self._check = check
        self._pressure = pressure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            actor = await self._check.check(_presented_key(scope))
            with self._pressure.admit(actor.key) as turn:
                app = await asyncio.shield(self._app())
                await app(_head_as_get(scope) | {"user": actor, "auth": turn}, receive, send)
        except RotaError as error:
            await _send_problem(send, problem_details.response_for_error(error))

    async def check(self) -> None:
        """Whoever listens wider than this machine has a key, or could let nobody in."""
        if self._listener.is_local:
            return
        if not any(key.state == "active" for key in await self._keys.list()):
            raise SetupFailed(
                f"There is no key, so nothing is served on {self._listener.host}: make one with `rota keys create NAME"
                " --role admin`, or listen on 127.0.0.1."
            )
        if not self._listener.url.startswith("https"):
            log.warning(
                "keys_in_the_clear",
                host=self._listener.host,
                remedy="set listen.tls_cert and listen.tls_key, or let a proxy before this server speak TLS",
            )

    async def authorize_metrics(self, scope: Scope, send: Send) -> bool:
        try:
            await self._check.check(_presented_key(scope))
        except RotaError as error:
            await _send_problem(send, problem_details.response_for_error(error))
            return False
        return True

    async def run(self, life: Lifecycle) -> None:
        life.ready()
        with suppress(TimeoutError):
            async with asyncio.timeout(WARM_UP_DELAY_S):
                await life.until_draining()
                return
        await self._app()
        await life.until_draining()

    def _app(self) -> asyncio.Task[App]:
        if self._built is None:
            self._built = asyncio.create_task(asyncio.to_thread(self._build), name="http.build")
        return self._built


def _head_as_get(scope: Scope) -> dict[str, Any]:
    """HEAD is GET to the app; the server below us sends no body to whoever asked with it."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else dict(scope)


def _presented_key(scope: Scope) -> str:
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    return key_from_headers(headers.get(b"authorization"), headers.get(b"x-api-key"))


async def _send_problem(send: Send, answer: problem_details.ProblemResponse) -> None:
    """The handlers of the app answer what these refuse, so nothing was sent when we come here."""
    headers = {"content-type": problem_details.MEDIA_TYPE, "content-length": str(len(answer.body)), **answer.headers}
    await send(
        {
            "type": "http.response.start",
            "status": answer.problem.status,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": answer.body})

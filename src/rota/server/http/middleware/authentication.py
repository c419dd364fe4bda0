"""Authenticates and rate-limits every request before the app sees it, whatever its path."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import structlog

from rota.infra.service import Lifecycle
from rota.infra.service.listener import App, HttpListener, Receive, Scope, Send
from rota.model.errors import RotaError, SetupFailed
from rota.model.identity.api_key_format import key_from_headers
from rota.server.access import ApiKeyStore, KeyCheck
from rota.server.http import problem_details
from rota.server.http.middleware.encoded_slashes import keep_encoded_slashes
from rota.server.http.middleware.rate_limit import RateLimiter

log = structlog.get_logger(__name__)
PREFIX: Final = "/api/v1"
HEAD_KEY: Final = "rota.head"
"""ASGI scope key: the method of this request was HEAD."""


class AuthenticationMiddleware:
    """Wraps the app. `build` makes it in a thread, because it takes a second of CPU: the rest of the server starts
    meanwhile, and the server is not ready before, so that traffic does not meet a busy one."""

    def __init__(
        self,
        build: Callable[[], App],
        check: KeyCheck,
        rate_limiter: RateLimiter,
        listener: HttpListener,
        keys: ApiKeyStore,
    ) -> None:
        self._build = build
        self._listener = listener
        self._keys = keys
        self._build_task: asyncio.Task[App] | None = None
        self._check = check
        self._rate_limiter = rate_limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            actor = await self._check.check(_presented_key(scope))
            async with self._rate_limiter.admit(actor.key) as slot:
                app = await asyncio.shield(self._app())
                await app(_app_scope(scope) | {"user": actor, "auth": slot}, receive, send)
        except RotaError as error:
            await problem_details.send_problem(send, problem_details.response_for_error(error))

    async def check(self) -> None:
        """Fail if the server listens beyond localhost without an active key: it could serve no request."""
        if self._listener.is_local:
            return
        if not any(key.state == "active" for key in await self._keys.list()):
            raise SetupFailed(
                f"No API key exists, so nothing is served on {self._listener.host}: create one with `rota keys"
                " create NAME --role admin`, or listen on 127.0.0.1."
            )
        if not self._listener.url.startswith("https"):
            log.warning(
                "api_keys_unencrypted",
                host=self._listener.host,
                remedy="set listen.tls_cert and listen.tls_key, or terminate TLS at a proxy",
            )

    async def authorize_metrics(self, scope: Scope, send: Send) -> bool:
        try:
            await self._check.check(_presented_key(scope))
        except RotaError as error:
            await problem_details.send_problem(send, problem_details.response_for_error(error))
            return False
        return True

    async def run(self, life: Lifecycle) -> None:
        await asyncio.shield(self._app())
        life.ready()
        await life.until_draining()

    def _app(self) -> asyncio.Task[App]:
        if self._build_task is None:
            self._build_task = asyncio.create_task(asyncio.to_thread(self._build), name="http.build")
        return self._build_task


def _app_scope(scope: Scope) -> dict[str, Any]:
    """The app handles HEAD as GET, without waiting or streaming; the HTTP server omits the body."""
    is_head = scope["method"] == "HEAD"
    method = "GET" if is_head else scope["method"]
    return {**scope, "path": keep_encoded_slashes(scope), "method": method, HEAD_KEY: is_head}


def _presented_key(scope: Scope) -> str:
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    return key_from_headers(headers.get(b"authorization"), headers.get(b"x-api-key"))

"""Requests to one endpoint over its connection pool, and streams, each over a connection of its own.

The key, the path and the trace are checked, so that none can add a header.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import SplitResult, quote, urlencode, urlsplit

from rota.client.connection import HttpResponse
from rota.client.connection_pool import ConnectionPool, PoolLimits
from rota.client.connector import DEFAULT_PORTS, Connector, proxy_for
from rota.client.endpoint import ApiEndpoint
from rota.client.response_stream import ResponseStream, open_stream
from rota.model.errors import InvalidSetting

API_PREFIX: Final = "/api/v1"
MSGPACK_MEDIA_TYPE: Final = "application/msgpack"
_UNSAFE_IN_PATH: Final = re.compile(r"[^\w/%:@!$&'()*+,;=~.-]", re.ASCII)
_SAFE_IN_PATH: Final = "/%:@!$&'()*+,;=~"


class EndpointClient:
    """Belongs to the event loop it is created on."""

    def __init__(self, endpoint: ApiEndpoint, limits: PoolLimits, read_timeout_s: float) -> None:
        url = _split(endpoint.url)
        self._limits = limits
        self._read_timeout_s = read_timeout_s
        self._connector = Connector(endpoint.url, proxy_for(url))
        self._prefix = _quote_path(url.path.rstrip("/") + API_PREFIX)
        headers = {"host": _host_header(url), **_headers(endpoint.key)}
        if (proxy := self._connector.proxy) is not None and self._connector.forwards_requests:
            self._prefix = f"http://{headers['host']}{self._prefix}"
            headers |= {"proxy-authorization": proxy.authorization} if proxy.authorization else {}
        self._fixed_head = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("ascii")
        self._pool = ConnectionPool(self._connector, limits)
        self._streams: set[ResponseStream] = set()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None,
        content: bytes | None,
        trace: Mapping[str, str],
        read_timeout_s: float,
        timeout_s: float,
    ) -> HttpResponse:
        """Raises RequestError, or TimeoutError after `timeout_s`."""
        headers = _without_control_characters(trace)
        if content is not None:
            headers["content-type"] = MSGPACK_MEDIA_TYPE
        if method != "GET":
            headers["content-length"] = str(len(content or b""))
        head = self._head(method, path, query, headers)
        return await self._pool.request(head, content, read_timeout_s=read_timeout_s, timeout_s=timeout_s)

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, object] | None, headers: Mapping[str, str] | None
    ) -> AsyncIterator[ResponseStream]:
        """Raises RequestError."""
        opening = open_stream(
            self._connector,
            self._head("GET", path, query, _without_control_characters(headers or {})),
            connect_timeout_s=self._limits.connect_timeout_s,
            read_timeout_s=self._read_timeout_s,
        )
        async with opening as stream:
            self._streams.add(stream)
            try:
                yield stream
            finally:
                self._streams.discard(stream)

    async def close(self) -> None:
        for stream in self._streams:
            stream.abort()
        await self._pool.close()

    def _head(self, method: str, path: str, query: Mapping[str, object] | None, headers: Mapping[str, str]) -> bytes:
        target = self._prefix + _quote_path(path)
        if params := _params(query):
            target += f"?{urlencode(params)}"
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return b"%b HTTP/1.1\r\n%b%b\r\n" % (
            f"{method} {target}".encode("ascii"),
            self._fixed_head,
            lines.encode("ascii"),
        )


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.scheme in DEFAULT_PORTS and parts.hostname and parts.port != 0:
            return parts
    except ValueError:
        pass
    raise InvalidSetting(f"{url[:200]!r} is not a valid URL of the API: use one such as http://127.0.0.1:8080.")


def _headers(key: str) -> dict[str, str]:
    if not (key.isascii() and key.isprintable()):
        raise InvalidSetting("The API key has characters that keys do not have: copy it again, without line breaks.")
    return {"authorization": f"Bearer {key}", "accept": MSGPACK_MEDIA_TYPE, "user-agent": "rota-sdk"}


def _host_header(url: SplitResult) -> str:
    host = (url.hostname or "").encode("idna").decode() if not (url.hostname or "").isascii() else url.hostname or ""
    bracketed = f"[{host}]" if ":" in host else host
    return bracketed if url.port in (None, DEFAULT_PORTS[url.scheme]) else f"{bracketed}:{url.port}"


def _quote_path(path: str) -> str:
    return quote(path, safe=_SAFE_IN_PATH) if _UNSAFE_IN_PATH.search(path) else path


def _params(query: Mapping[str, object] | None) -> dict[str, str]:
    """Omits None; booleans as in JSON."""
    present = {name: value for name, value in (query or {}).items() if value is not None}
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in present.items()}


def _without_control_characters(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if value.isascii() and value.isprintable()}

"""Requests to one endpoint: over its connection pool, or by httpx through the HTTP proxy of the environment.

httpx also serves streams; it is loaded when the first stream or proxy needs it (0.07 s of CPU). Headers are the same
either way. The key, the path and the trace are checked, so that none can add a header.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, quote, urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

from rota.client import connection
from rota.client.connection import HttpResponse, ReadError, RequestError
from rota.client.connection_pool import DEFAULT_PORTS, ConnectionPool, PoolLimits, tls_context
from rota.client.endpoint import ApiEndpoint
from rota.model.errors import InvalidSetting

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    import httpx

API_PREFIX: Final = "/api/v1"
MSGPACK_MEDIA_TYPE: Final = "application/msgpack"
_UNSAFE_IN_PATH: Final = re.compile(r"[^\w/%:@!$&'()*+,;=~.-]", re.ASCII)
_SAFE_IN_PATH: Final = "/%:@!$&'()*+,;=~"


class EndpointClient:
    """Belongs to the event loop it is created on."""

    def __init__(self, endpoint: ApiEndpoint, limits: PoolLimits, read_timeout_s: float) -> None:
        url = _split(endpoint.url)
        self._endpoint = endpoint
        self._limits = limits
        self._read_timeout_s = read_timeout_s
        self._prefix = _quote_path(url.path.rstrip("/") + API_PREFIX)
        headers = {"host": _host_header(url), **_headers(endpoint.key)}
        self._fixed_head = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("ascii")
        self._pool = None if _uses_proxy(url) else ConnectionPool(endpoint.url, limits)
        self._httpx: httpx.AsyncClient | None = None

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
        headers = {name: value for name, value in trace.items() if value.isascii() and value.isprintable()}
        if content is not None:
            headers["content-type"] = MSGPACK_MEDIA_TYPE
        if self._pool is None:
            return await self._request_by_proxy(
                method,
                path,
                query=query,
                content=content,
                headers=headers,
                read_timeout_s=read_timeout_s,
                timeout_s=timeout_s,
            )
        target = self._prefix + _quote_path(path)
        if params := _params(query):
            target += f"?{urlencode(params)}"
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        length = f"content-length: {len(content or b'')}\r\n" if method != "GET" else ""
        head = b"%b HTTP/1.1\r\n%b%b\r\n" % (
            f"{method} {target}".encode("ascii"),
            self._fixed_head,
            f"{lines}{length}".encode("ascii"),
        )
        return await self._pool.request(head, content, read_timeout_s=read_timeout_s, timeout_s=timeout_s)

    def stream(
        self, path: str, *, query: Mapping[str, object] | None, headers: Mapping[str, str] | None
    ) -> AbstractAsyncContextManager[httpx.Response]:
        """Raises httpx.RequestError."""
        return self._by_httpx().stream("GET", API_PREFIX + path, params=_params(query), headers=headers)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        if self._httpx is not None:
            await self._httpx.aclose()

    async def _request_by_proxy(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None,
        content: bytes | None,
        headers: Mapping[str, str],
        read_timeout_s: float,
        timeout_s: float,
    ) -> HttpResponse:
        import httpx

        timeouts = httpx.Timeout(
            self._read_timeout_s,
            connect=self._limits.connect_timeout_s,
            read=read_timeout_s,
            pool=self._limits.line_timeout_s,
        )
        url = API_PREFIX + path
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._by_httpx().request(
                    method, url, params=_params(query), content=content, headers=headers, timeout=timeouts
                )
        except httpx.RequestError as error:
            raise _own_error(error) from error
        return HttpResponse(answer.status_code, dict(answer.headers), answer.content)

    def _by_httpx(self) -> httpx.AsyncClient:
        if self._httpx is None:
            import httpx

            url = _split(self._endpoint.url)
            is_local = _is_loopback(url.hostname or "")
            self._httpx = httpx.AsyncClient(
                base_url=self._endpoint.url,
                headers=_headers(self._endpoint.key),
                limits=httpx.Limits(
                    max_connections=self._limits.connections_max,
                    max_keepalive_connections=self._limits.idle_max,
                    keepalive_expiry=self._limits.keepalive_s,
                ),
                timeout=httpx.Timeout(
                    self._read_timeout_s, connect=self._limits.connect_timeout_s, pool=self._limits.line_timeout_s
                ),
                # A proxy from the environment cannot reach this host's loopback addresses.
                trust_env=not is_local,
                verify=_tls_verification(url, is_local=is_local),
            )
        return self._httpx


def _own_error(error: httpx.RequestError) -> RequestError:
    """The error of the same name."""
    kind = getattr(connection, type(error).__name__, ReadError)
    return kind(str(error)) if isinstance(kind, type) and issubclass(kind, RequestError) else ReadError(str(error))


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


def _uses_proxy(url: SplitResult) -> bool:
    """Whether the environment names a proxy for this URL. None can reach this host's loopback addresses."""
    host = url.hostname or ""
    if _is_loopback(host):
        return False
    proxies = getproxies()
    port = url.port or DEFAULT_PORTS[url.scheme]
    return (url.scheme in proxies or "all" in proxies) and not proxy_bypass(f"{host}:{port}")


def _tls_verification(url: SplitResult, *, is_local: bool) -> ssl.SSLContext | bool:
    """Plain HTTP on loopback never uses TLS, not even to a proxy, so certificates (20 ms) are not loaded."""
    return tls_context() if url.scheme == "https" else not is_local


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""Opens connections to one endpoint: directly, or through the HTTP proxy that the environment names for it.

A proxy gets a plain request with its whole URL. For TLS it opens a tunnel, so it sees neither the key nor the content.
Proxies never get requests to this host's loopback addresses, which they could not reach.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from base64 import b64encode
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, Final, TypeVar, cast
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from rota.client.connection import ConnectError, ConnectTimeout
from rota.model.errors import InvalidSetting

P = TypeVar("P", bound=asyncio.Protocol)
HAPPY_EYEBALLS_DELAY_S: Final = 0.25
"""Then the next address of the host is tried, too."""
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
TUNNEL_HEAD_BYTES_MAX: Final = 64 * 1024
_END_OF_HEAD: Final = b"\r\n\r\n"
_TUNNEL_OPENED: Final = re.compile(rb"HTTP/1\.[01] 2\d\d\b")


class Proxy(msgspec.Struct, frozen=True):
    host: str
    port: int
    tls: bool = False
    authorization: str = ""
    """The value of its header; empty: none. A secret."""

    def __repr__(self) -> str:
        return f"Proxy({self.host}:{self.port})"


class Connector:
    """Belongs to the event loop it is created on."""

    def __init__(self, url: str, proxy: Proxy | None = None) -> None:
        parts = urlsplit(url)
        self.proxy = proxy
        self._host = parts.hostname or ""
        self._port = parts.port or DEFAULT_PORTS[parts.scheme]
        self._tls = tls_context() if parts.scheme == "https" else None
        self._proxy_tls = tls_context() if proxy is not None and proxy.tls else None
        self._loop = asyncio.get_running_loop()

    @property
    def forwards_requests(self) -> bool:
        """Whether a proxy reads the requests, which then need their whole URL and its credentials."""
        return self.proxy is not None and self._tls is None

    async def connect(self, make: Callable[[], P], timeout_s: float) -> tuple[asyncio.Transport, P]:
        """Raises ConnectError or ConnectTimeout."""
        try:
            async with asyncio.timeout(timeout_s):
                if self.proxy is None:
                    return await self._open(make, self._host, self._port, self._tls)
                if self._tls is None:
                    return await self._open(make, self.proxy.host, self.proxy.port, self._proxy_tls)
                return await self._open_tunnel(make, self.proxy, self._tls)
        except TimeoutError as error:
            raise ConnectTimeout from error
        except (OSError, UnicodeError) as error:
            raise ConnectError(str(error)) from error

    async def _open(
        self, make: Callable[[], P], host: str, port: int, tls: ssl.SSLContext | None
    ) -> tuple[asyncio.Transport, P]:
        options: dict[str, Any] = {}
        has_addresses = not (host == "localhost" or _is_address(host))  # more than one, of which some may not answer
        if has_addresses and isinstance(self._loop, asyncio.BaseEventLoop):  # uvloop does not know the option
            options["happy_eyeballs_delay"] = HAPPY_EYEBALLS_DELAY_S
        transport, protocol = await self._loop.create_connection(make, host, port, ssl=tls, **options)
        return transport, protocol

    async def _open_tunnel(
        self, make: Callable[[], P], proxy: Proxy, tls: ssl.SSLContext
    ) -> tuple[asyncio.Transport, P]:
        address = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        credentials = f"proxy-authorization: {proxy.authorization}\r\n" if proxy.authorization else ""
        head = f"CONNECT {address} HTTP/1.1\r\nhost: {address}\r\n{credentials}\r\n".encode("ascii")
        transport, tunnel = await self._open(lambda: _Tunnel(head), proxy.host, proxy.port, self._proxy_tls)
        try:
            await tunnel.opened
            protocol = make()
            upgraded = await self._loop.start_tls(transport, protocol, tls, server_hostname=self._host)
        except BaseException:
            transport.abort()
            raise
        if upgraded is None:
            raise ConnectError("The proxy closed the tunnel.")
        protocol.connection_made(upgraded)  # start_tls leaves this to its caller
        return upgraded, protocol


class _Tunnel(asyncio.Protocol):
    """Asks a proxy for a connection, and reads the head of its answer."""

    def __init__(self, head: bytes) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head = head
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._head)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self.opened.done():
            return
        if _TUNNEL_OPENED.match(self._received) and _END_OF_HEAD in self._received:
            self.opened.set_result(None)
        elif _END_OF_HEAD in self._received or len(self._received) > TUNNEL_HEAD_BYTES_MAX:
            status_line = self._received[:100].partition(b"\r")[0].decode("latin-1")
            self.opened.set_exception(ConnectError(f"The proxy refused: {status_line}"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.opened.done():
            self.opened.set_exception(ConnectError(str(error or "The proxy closed the connection.")))


def proxy_for(url: SplitResult) -> Proxy | None:
    """The proxy that the environment names for this URL."""
    host = url.hostname or ""
    if _is_loopback(host):
        return None
    proxies = getproxies()
    found = proxies.get(url.scheme) or proxies.get("all")
    if not found or proxy_bypass(f"{host}:{url.port or DEFAULT_PORTS[url.scheme]}"):
        return None
    return _parse_proxy(found if "://" in found else f"http://{found}")


def tls_context() -> ssl.SSLContext:
    """Trusts the certificates of the system, or of SSL_CERT_FILE."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _parse_proxy(text: str) -> Proxy:
    try:
        parts = urlsplit(text)
        if parts.scheme in DEFAULT_PORTS and parts.hostname:
            pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
            authorization = f"Basic {b64encode(pair.encode()).decode()}" if pair != ":" else ""
            port = parts.port or DEFAULT_PORTS[parts.scheme]
            return Proxy(parts.hostname, port, tls=parts.scheme == "https", authorization=authorization)
    except ValueError:
        pass
    raise InvalidSetting(  # not quoted: it may hold a password
        "The proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY is not supported: use the URL of an HTTP proxy, such as "
        "http://proxy:3128, or add the host of the API to NO_PROXY."
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True

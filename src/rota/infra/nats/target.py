"""Connection parameters of NATS: URL, timeouts, and the prefix that separates installations on one server."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from rota.model import urls
from rota.model.errors import InvalidSetting

_PREFIX = re.compile(r"[A-Z][A-Z0-9]{0,31}")


class Credentials(msgspec.Struct, frozen=True):
    """Login for NATS. Removed from every URL that leaves this module; `repr` hides it."""

    user: str | None = None
    password: str | None = None
    token: str | None = None

    def __repr__(self) -> str:
        return "Credentials(***)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []


class NatsTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One NATS server, or the servers of one cluster separated by commas.

    `url` is `nats://user:password@host:port` or `nats://token@host:port`; `repr` omits it. With `prefix="BLUE"` stream
    SYS is named BLUE_SYS and subject job.submit becomes blue.job.submit on the wire; callers see neither.
    """

    url: str
    prefix: str = ""
    name: str = "rota"
    connect_timeout_s: float = 5.0
    """For finding a server, login and the JetStream check together."""
    publish_timeout_s: float = 2.0
    """For a batch of publishes until its last acknowledgement, and for every other request."""
    ping_interval_s: float = 10.0
    """A silently dead connection is detected after two unanswered pings."""
    pending_bytes: int = 8 * 1024 * 1024
    """Write buffer for a slow server; publishers block when it is full."""

    def __post_init__(self) -> None:
        if self.prefix and not _PREFIX.fullmatch(self.prefix):
            # No underscore: A_B + C and A + B_C would give the same stream name.
            raise InvalidSetting(
                f"The NATS prefix {self.prefix!r} is not valid: use up to 32 upper-case letters and digits that "
                "begin with a letter.",
                prefix=self.prefix,
            )
        if not all(_is_server(url) for url in self._urls()):
            raise InvalidSetting(
                "The NATS URL cannot be read: write nats://user:password@host:port with special characters of the "
                "password percent-encoded, and separate the servers of a cluster by commas."
            )

    def __repr__(self) -> str:
        return f"NatsTarget({self.address}, prefix={self.prefix!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("address", self.address), ("prefix", self.prefix)]

    @property
    def address(self) -> str:
        """Hosts and ports for display."""
        return ",".join(urls.address(url) for url in self._urls())

    @property
    def servers(self) -> list[str]:
        """URLs without credentials: the client library may put them into its errors."""
        return [f"{part.scheme}://{part.netloc.rpartition('@')[2]}" for part in self._parts()]

    @property
    def tls(self) -> bool:
        """Whether clear text is forbidden: one `tls://` among the servers is enough."""
        return any(part.scheme == "tls" for part in self._parts())

    @property
    def credentials(self) -> Credentials:
        for part in self._parts():
            if part.username and part.password is None:
                return Credentials(token=unquote(part.username))
            if part.username:
                return Credentials(user=unquote(part.username), password=unquote(part.password or ""))
        return Credentials()

    def _parts(self) -> list[SplitResult]:
        return [urlsplit(url) for url in self._urls()]

    def _urls(self) -> list[str]:
        return [url.strip() for url in self.url.split(",")]


def _is_server(url: str) -> bool:
    try:
        part = urlsplit(urls.validate_url(url))
        return part.scheme in ("nats", "tls") and bool(part.hostname) and part.port != 0
    except ValueError:
        return False

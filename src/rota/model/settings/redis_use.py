"""Redis client configuration of each component.

There is one `redis.url`. `accounting.redis_url` replaces it for accounting; `accounting.redis.host` and `.port` replace
those parts of it and keep credentials and database. If two settings bound the same call, the smaller one applies.
"""

from __future__ import annotations

from typing import Any, Final, Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec

from rota.model.errors import InvalidSetting
from rota.model.settings.masking import masked_url
from rota.model.settings.tree import Settings

RedisPurpose = Literal["accounting", "agents", "scheduler"]
REDIS_PORT: Final = 6379


class RedisClientConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a client. `url` contains the password; repr does not."""

    url: str
    pool_size: int
    op_timeout_s: float
    connect_timeout_s: float
    pool_wait_s: float

    def __repr__(self) -> str:
        return (
            f"RedisClientConfig({masked_url(self.url)}, pool_size={self.pool_size}, op_timeout_s={self.op_timeout_s})"
        )

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("url", masked_url(self.url))]


def redis_for(settings: Settings, user: RedisPurpose, local_url: str | None = None) -> RedisClientConfig:
    """How `user` connects to Redis. `local_url` is the server of `rota up`, used if no URL is set."""
    connection = settings.redis.connection
    return RedisClientConfig(
        url=_url(settings, user, local_url),
        pool_size=_pool_size(settings, user),
        op_timeout_s=_op_timeout_s(settings, user),
        connect_timeout_s=connection.connect_timeout,
        pool_wait_s=connection.pool.max_wait_millis / 1000,
    )


def _url(settings: Settings, user: RedisPurpose, local_url: str | None) -> str:
    url = settings.redis.url or local_url
    if user == "accounting":
        accounting = settings.accounting
        url = accounting.redis_url or url
        if accounting.redis.host or accounting.redis.port:
            return _with_host_and_port(url or "redis://127.0.0.1", accounting.redis.host, accounting.redis.port)
    if url is None:
        raise InvalidSetting("No Redis is configured: set redis.url, or use `rota up`, which runs one.")
    return url


def _pool_size(settings: Settings, user: RedisPurpose) -> int:
    most = settings.redis.connection.pool.max_total
    return min(most, settings.accounting.redis_pool_size) if user == "accounting" else most


def _op_timeout_s(settings: Settings, user: RedisPurpose) -> float:
    # Booking and dispatch are store operations of the scheduler; agents have only the connection's timeout.
    longest = settings.redis.connection.timeout
    return longest if user == "agents" else min(longest, settings.scheduler.store_op_timeout)


def host_and_port(url: str) -> tuple[str | None, int]:
    parts = urlsplit(url)
    return parts.hostname, parts.port or REDIS_PORT


def _with_host_and_port(url: str, host: str | None, port: int | None) -> str:
    """`url` with another host or port. A socket path is replaced as well."""
    parts = urlsplit(url)
    credentials, at, place = parts.netloc.rpartition("@")
    is_socket = parts.scheme == "unix"
    old_host, old_port = (None, None) if is_socket else (parts.hostname if place else None, parts.port)
    new_host = host or old_host or "127.0.0.1"
    bracketed = f"[{new_host}]" if ":" in new_host else new_host
    netloc = f"{credentials}{at}{bracketed}:{port or old_port or REDIS_PORT}"
    scheme, path = ("redis", "") if is_socket else (parts.scheme, parts.path)
    return urlunsplit((scheme, netloc, path, parts.query, ""))

"""Connection parameters of Redis: URL, pool size and timeouts."""

from __future__ import annotations

import msgspec

from rota.model import urls


class RedisTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One Redis or Valkey. Every wait is bounded. `url` contains the password, so `repr` omits it.

    A command takes at most `pool_wait_s` for a connection, `connect_timeout_s` if it must be opened, and
    `op_timeout_s` for each reply.
    """

    url: str
    pool_size: int = 50
    op_timeout_s: float = 3.0
    connect_timeout_s: float = 2.0
    pool_wait_s: float = 5.0
    client_name: str = "rota"

    def __post_init__(self) -> None:
        assert self.pool_size >= 1, "a pool needs at least one connection"
        assert min(self.op_timeout_s, self.connect_timeout_s, self.pool_wait_s) > 0, "0 would mean no timeout"

    def __repr__(self) -> str:
        return f"RedisTarget({self.address}, pool_size={self.pool_size})"

    @property
    def address(self) -> str:
        """Host, port and database for display: `127.0.0.1:6379/0`."""
        return urls.address(self.url)

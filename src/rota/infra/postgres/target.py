"""Connection parameters of PostgreSQL: URL, pool size and timeouts."""

from __future__ import annotations

import msgspec

from rota.model import urls

# The server's timeout fires first and carries a reason; the client's covers a server that no longer answers.
ANSWER_GRACE_S = 2.0
LOST_CLIENT_CHECK_S = 2.0
"""Within this time PostgreSQL ends the statement of a client that has gone, and with it its locks."""
PAUSED_CLIENT_S = 3.0
"""Within this time PostgreSQL ends a transaction that waits for nothing but its client, and with it its locks."""


class PostgresTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One database. Every wait is bounded. `url` contains the password, so `repr` omits it."""

    url: str
    pool_min: int = 1
    pool_max: int = 10
    connect_timeout_s: float = 5.0
    acquire_timeout_s: float = 5.0
    statement_timeout_s: float = 30.0
    lock_timeout_s: float = 5.0
    idle_in_transaction_s: float = 60.0
    idle_default_s: float = PAUSED_CLIENT_S
    application_name: str = "rota"

    def __post_init__(self) -> None:
        assert 0 <= self.pool_min <= self.pool_max, "pool_min must lie between 0 and pool_max"
        assert self.pool_max >= 1, "a pool needs at least one connection"

    def __repr__(self) -> str:
        return f"PostgresTarget({self.address}, pool_max={self.pool_max})"

    @property
    def address(self) -> str:
        """Host, port and database for display: `127.0.0.1:5432/rota`."""
        return urls.address(self.url)

    @property
    def transaction_idle_s(self) -> float:
        """Limit of a transaction that sets none of its own: it is idle only if its process is paused."""
        return min(self.idle_default_s, self.idle_in_transaction_s)

    @property
    def command_timeout_s(self) -> float:
        return self.statement_timeout_s + ANSWER_GRACE_S

    def server_settings(self) -> dict[str, str]:
        """Session settings sent in the startup packet: no extra round trip, in effect from the first statement."""
        return {
            "application_name": self.application_name,
            "search_path": "rota, public",
            "timezone": "UTC",
            "jit": "off",
            "statement_timeout": milliseconds(self.statement_timeout_s),
            "lock_timeout": milliseconds(self.lock_timeout_s),
            "idle_in_transaction_session_timeout": milliseconds(self.transaction_idle_s),
            "client_connection_check_interval": milliseconds(LOST_CLIENT_CHECK_S),
        }


def milliseconds(seconds: float) -> str:
    """A PostgreSQL timeout; at least 1 ms, because 0 means "no limit"."""
    return str(max(1, round(seconds * 1000)))

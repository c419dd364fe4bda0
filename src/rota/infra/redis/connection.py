"""Connections that close themselves when their server has become a replica.

After a failover behind one address (a DNS name, a proxy, a hosted Redis) open connections stay with the old primary,
which answers every write with READONLY. A connection that gets this answer is closed, so that its next use connects
to the address again, and so reaches the new primary.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import connection
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ReadOnlyError


class _ClosedWhenReadOnly(AbstractConnection):
    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ReadOnlyError:
            await self.disconnect(nowait=True)
            raise


class TcpConnection(_ClosedWhenReadOnly, connection.Connection):
    pass


class TlsConnection(_ClosedWhenReadOnly, connection.SSLConnection):
    pass


class UnixConnection(_ClosedWhenReadOnly, connection.UnixDomainSocketConnection):
    pass


CONNECTION_CLASSES: dict[type[AbstractConnection], type[AbstractConnection]] = {
    connection.Connection: TcpConnection,
    connection.SSLConnection: TlsConnection,
    connection.UnixDomainSocketConnection: UnixConnection,
}
"""By the class that redis-py would use for a URL."""

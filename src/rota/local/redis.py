"""Local Valkey (or Redis): loopback, a password, no persistence and no eviction.

Its data can always be rebuilt from PostgreSQL, so nothing is persisted. It must never evict a key, because the
accounting counters live in it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from rota.infra.data_dir import write_private
from rota.local.binaries import Binary
from rota.local.datadir import DataDir
from rota.local.server import LocalServer


class RedisServer(LocalServer):
    name = "redis"

    def __init__(self, home: DataDir, binary: Binary, fixed_port: int | None, *, databases: int, cluster: bool) -> None:
        super().__init__(home, binary, fixed_port)
        self.databases = databases
        self.cluster = cluster

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def _conf(self) -> Path:
        return self.dir / "server.conf"

    async def prepare(self) -> None:
        lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f'requirepass "{self.password}"',
            'save ""',
            "appendonly no",
            "maxmemory-policy noeviction",
            f"databases {1 if self.cluster else self.databases}",
            *self._cluster_options(),
        ]
        write_private(self._conf, "\n".join(lines) + "\n")

    def _cluster_options(self) -> list[str]:
        """Set the bus port: the default, port + 10000, is in the ephemeral range and may be taken."""
        return ["cluster-enabled yes", f"cluster-port {self.home.port('redis-bus')}"] if self.cluster else []

    def argv(self) -> list[str | Path]:
        # Read the configuration from standard input: a path argument with `[` or `*` is treated as a pattern, and if no
        # file matches the server runs with its defaults, without a password.
        return [self.binary.path, "-"]

    @property
    def stdin(self) -> Path:
        return self._conf

    async def probe(self) -> None:
        # Without the client library: importing it takes longer than starting all three servers.
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(f"AUTH {self.password}\r\nPING\r\n".encode())
            replies = [await reader.readline() for _ in range(2)]
        finally:
            writer.transport.abort()
        if replies != [b"+OK\r\n", b"+PONG\r\n"]:
            raise ConnectionError(f"unexpected reply to PING: {replies!r}")

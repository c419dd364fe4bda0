"""Local Valkey (or Redis): loopback, a password, no persistence and no eviction.

What is in it can always be rebuilt from PostgreSQL, so it is kept nowhere; and it must never drop a key on its own,
because the books are counted from what it holds.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from rota.local.binaries import Binary
from rota.local.datadir import DataDir, write_private
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
        """Ten thousand above its port, where its bus would be, are ports that connections have for a while."""
        return ["cluster-enabled yes", f"cluster-port {self.home.port('redis-bus')}"] if self.cluster else []

    def argv(self) -> list[str | Path]:
        # From standard input: as an argument, a path with `[` or `*` is taken for a pattern, and a server that finds no
        # file by it runs on its defaults, open to everybody.
        return [self.binary.path, "-"]

    @property
    def stdin(self) -> Path:
        return self._conf

    async def probe(self) -> None:
        # By hand: importing the client takes longer than starting all three servers.
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(f"AUTH {self.password}\r\nPING\r\n".encode())
            answers = [await reader.readline() for _ in range(2)]
        finally:
            writer.transport.abort()
        if answers != [b"+OK\r\n", b"+PONG\r\n"]:
            raise ConnectionError(f"unexpected answer to PING: {answers!r}")

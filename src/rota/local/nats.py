"""Local NATS with JetStream: loopback, one user with a password. It only carries messages; PostgreSQL is the record."""

from __future__ import annotations

import json
from pathlib import Path

from rota.infra.data_dir import write_private
from rota.local.server import PROBE_TIMEOUT_S, LocalServer

USER = "rota"


class NatsServer(LocalServer):
    name = "nats"

    @property
    def url(self) -> str:
        return f"nats://{USER}:{self.password}@127.0.0.1:{self.port}"

    @property
    def _conf(self) -> Path:
        return self.dir / "server.conf"

    async def prepare(self) -> None:
        store = json.dumps(str(self.dir), ensure_ascii=False)
        text = f"""
listen: "127.0.0.1:{self.port}"
server_name: "rota-local"
authorization {{ user: "{USER}", password: "{self.password}" }}
jetstream {{ store_dir: {store}, max_memory_store: 256MB, max_file_store: 4GB }}
"""
        write_private(self._conf, text)

    def argv(self) -> list[str | Path]:
        return [self.binary.path, "-c", self._conf]

    async def probe(self) -> None:
        import nats

        client = await nats.connect(
            self.url,
            allow_reconnect=False,
            connect_timeout=PROBE_TIMEOUT_S,
            max_reconnect_attempts=0,
            # The delay before the first retry; the default is two seconds.
            reconnect_time_wait=0.01,
            error_cb=_ignore_error,
        )
        try:
            await client.jetstream().account_info()
        finally:
            await client.close()


async def _ignore_error(_error: Exception) -> None:
    """Errors are expected until the server is up; `start` reports if it never comes up."""

"""A server in a process of its own, for whoever measures its API."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from bench.e2e.setup import Ground

WITHIN_S: Final = 60.0


@asynccontextmanager
async def serving(ground: Ground, url: str, prefix: str) -> AsyncIterator[int]:
    """`rota server`, and the port it listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ROTA_")}
    env = kept | {
        "ROTA_POSTGRES_URL": url,
        "ROTA_REDIS_URL": ground.redis_url(1),
        "ROTA_NATS_URL": ground.nats_url,
        "ROTA_NATS_PREFIX": prefix,
        "ROTA_LISTEN_PORT": str(port),
        "ROTA_LOG_LEVEL": "warning",
        "ROTA_API_REQUESTS_PER_S": "0",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rota.cli", "server", cwd=ground.folder, env=env, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + WITHIN_S
        while not await _answers(port):
            assert time.monotonic() < deadline, "the server does not answer"
            await asyncio.sleep(0.05)
        yield port
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def _answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True

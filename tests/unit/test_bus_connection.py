"""What the connection to NATS promises to those who wait for it."""

import asyncio
from types import SimpleNamespace

from rota.infra.nats import NatsTarget
from rota.infra.nats.connection import Connection


async def test_waiting_lets_others_run_while_the_library_has_lost_the_connection_and_not_told_yet():
    connection = Connection(NatsTarget(url="nats://127.0.0.1:1"))
    connection._client = SimpleNamespace(is_connected=False)
    connection._up.set()
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    for _ in range(5):
        assert not await connection.until_connected(0.01)
    running.cancel()
    assert turns > 5

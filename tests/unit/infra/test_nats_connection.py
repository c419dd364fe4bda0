"""The NATS connection: waiting for it, and its credentials."""

import asyncio
from types import SimpleNamespace

import pytest

from rota.infra.nats import NatsTarget
from rota.infra.nats.connection import NatsConnection
from rota.model.errors import NatsUnavailable


async def test_until_connected_yields_to_other_tasks_before_the_library_reports_the_lost_connection():
    connection = NatsConnection(NatsTarget(url="nats://127.0.0.1:1"))
    connection._client = SimpleNamespace(is_connected=False)
    connection._up.set()
    iterations = 0

    async def others():
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    for _ in range(5):
        assert not await connection.until_connected(0.01)
    running.cancel()
    assert iterations > 5


async def test_credentials_are_not_sent_in_clear_text_to_a_server_without_tls():
    received = bytearray()

    async def fake_server(reader, writer):
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"auth_required":true}\r\n')
        received.extend(await reader.read(1024))
        writer.close()

    async with await asyncio.start_server(fake_server, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"tls://user:hunter2@127.0.0.1:{port}"
        with pytest.raises(NatsUnavailable, match="cannot be reached"):
            await NatsConnection(NatsTarget(url=url, connect_timeout_s=1)).open()
    assert not received

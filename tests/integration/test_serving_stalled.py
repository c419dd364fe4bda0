"""Clients that take nothing of their answer."""

import asyncio

from rota.infra.service import Supervisor, serving
from rota.infra.service.listener import Listener
from tests.ground.waiting import until


async def test_an_answer_that_nobody_takes_is_cut_off(monkeypatch):
    monkeypatch.setattr(serving, "STALL_S", 0.05)
    ended = asyncio.Event()

    async def endless(_scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.create_task(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        ended.set()

    supervisor = Supervisor()
    listener = Listener(supervisor)
    listener.mount(endless)
    supervisor.add(listener.service)
    async with supervisor.running():
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port, limit=1)
        writer.write(b"GET /endless HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        await until(ended.is_set, what="the end of the answer")
        writer.close()

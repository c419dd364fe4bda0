"""A server is ready once its API can be served without being built first."""

import asyncio
import threading

import pytest

from rota.infra.service import Service, Supervisor
from rota.infra.service.listener import HttpListener
from rota.server.http.middleware.authentication import AuthenticationMiddleware
from tests.support.waiting import until


async def test_server_is_not_ready_before_the_api_is_built():
    building, build = threading.Event(), threading.Event()

    def built():
        building.set()
        build.wait(10)

    supervisor = Supervisor(abandon=lambda status: pytest.fail(f"abandoned with {status}"))
    listener = HttpListener(supervisor)
    api = AuthenticationMiddleware(built, None, None, listener, None)
    supervisor.add(Service("api", api.run))
    running = asyncio.create_task(started(supervisor))
    try:
        await until(building.is_set, what="the API to be built")
        assert "api" in supervisor.unready()
        build.set()
        await until(lambda: "api" not in supervisor.unready(), what="readiness")
    finally:
        build.set()
        running.cancel()
        await asyncio.wait([running])


async def started(supervisor):
    async with supervisor.running():
        await asyncio.Event().wait()

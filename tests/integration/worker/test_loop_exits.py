"""Loop callbacks of tasks that try to end the process of their worker, on the event loop of `rota worker`."""

import sys

import msgspec
import pytest

from tests.integration.worker.worker_support import APP, ROOT, serving
from tests.support.waiting import until


@pytest.fixture
async def server(nats_url, bus_prefix):
    async with serving(nats_url, bus_prefix) as running:
        yield running


async def test_exit_in_a_loop_callback_is_logged_and_does_not_end_the_worker(server, spawn, nats_url, bus_prefix):
    env = {"ROTA_NATS_URL": nats_url, "ROTA_NATS_PREFIX": bus_prefix, "PYTHONPATH": str(ROOT / "src")}
    argv = [sys.executable, "-m", "rota.cli", "worker", APP, "--slots", "8", "--cores", "8"]
    process = await spawn(None, argv=argv, env=env, cwd=ROOT)
    await until(lambda: server.workers and server.beats(), within_s=30, what="the worker")
    neighbour = await server.send("waits")
    await server.began(neighbour)
    for kind, name in (("exit", "SystemExit"), ("interrupt", "KeyboardInterrupt")):
        for how in ("soon", "later", "thread", "done", "reader"):
            end = await server.run("exits_in_a_callback", args=[how, kind])
            assert msgspec.msgpack.decode(end.value) == "called"
            logged = await process.until_logged("loop_callback_exit_ignored")
            assert name in await process.until_logged(f"{name}: 3"), logged
    assert neighbour not in server.ends
    assert process.status is None
    process.send(15)
    await process.until_logged("worker_draining")
    await server.cancel(neighbour)
    assert await process.wait(30) == 0

"""Policy kernels for tests: a real one in this or a separate process, and a faulty one."""

import asyncio
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import grpc
import msgspec

from rota.model.ids import JobId
from rota.model.policy.decision import PolicyRequest, PolicyRequestGroup
from rota.model.settings import Settings
from rota.model.settings.lifecycle import PolicySettings, SafetyKernelSettings, SafetySettings
from rota.policy.grpc.kernel_process import KernelProcess

ROTA = str(Path(sys.executable).with_name("rota"))
ALLOWING = "rules: [{id: a, decision: allow}]\n"
DENYING = "rules: [{id: b, decision: deny}]\n"


def client_settings(port, **safety):
    """Client settings for a kernel on this port; the circuit breaker stays open long by default."""
    return Settings(
        safety_kernel=SafetyKernelSettings(addr=f"127.0.0.1:{port}"),
        safety=SafetySettings(**{"timeout": 2.0, "circuit_open_for": 30.0, **safety}),
    )


def kernel_settings(path, **kernel):
    """Kernel settings."""
    return Settings(
        policy=PolicySettings(file=str(path)),
        safety_kernel=SafetyKernelSettings(**{"port": 0, "health_port": 0, **kernel}),
    )


def question(topic="job.a", count=1, **more):
    return PolicyRequestGroup(
        PolicyRequest(show="alpha", topic=topic, **more), tuple(JobId(uuid4()) for _ in range(count))
    )


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@asynccontextmanager
async def serving(path, redis=None, **kernel):
    """A kernel in this process."""
    process = KernelProcess(kernel_settings(path, **kernel), redis)
    async with process.supervisor.running():
        yield process


async def spawned(spawn, path, port, health_port=0):
    """A kernel in a separate process."""
    env = {
        "ROTA_POLICY_FILE": str(path),
        "ROTA_SAFETY_KERNEL_PORT": str(port),
        "ROTA_SAFETY_KERNEL_HEALTH_PORT": str(health_port),
    }
    return await spawn(None, argv=[ROTA, "kernel"], env=env)


class FaultyKernel:
    """Answers every call with `says(request)`: bytes, or a status code to fail with."""

    def __init__(self, says):
        self.says = says
        self.calls = 0
        self.let_go = asyncio.Event()
        self.let_go.set()
        self.arrived = asyncio.Semaphore(0)

    @asynccontextmanager
    async def serving(self):
        server = grpc.aio.server()

        class Every(grpc.GenericRpcHandler):
            def service(_, call_details):
                return grpc.unary_unary_rpc_method_handler(self._answer)

        server.add_generic_rpc_handlers([Every()])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield port
        finally:
            self.let_go.set()
            await server.stop(0)
            # gRPC ends its tasks a moment after the server.
            tasks = {task for task in asyncio.all_tasks() if task.get_name().startswith(("rpc_task", "HandleExc"))}
            if tasks:
                await asyncio.wait(tasks, timeout=5)

    async def _answer(self, data, context):
        self.calls += 1
        self.arrived.release()
        await self.let_go.wait()
        reply = self.says(data)
        if isinstance(reply, grpc.StatusCode):
            await context.abort(reply, "told so")
        return reply


def replaced(settings, section, **values):
    changed = msgspec.structs.replace(getattr(settings, section), **values)
    return msgspec.structs.replace(settings, **{section: changed})

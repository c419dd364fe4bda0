"""The process of `rota kernel`: serves a policy file over gRPC.

It needs no PostgreSQL, and Redis only for velocity limits. Any number of processes can serve the same file: they decide
alike and share their counts.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from redis.asyncio import Redis

from rota.infra import redis as redis_infra
from rota.infra.redis import RedisTarget
from rota.infra.rpc.calls import RpcLimits, RpcServer, RpcService
from rota.infra.service import Supervisor, run_until_signalled
from rota.infra.service.listener import HttpListener
from rota.model.errors import InvalidSetting
from rota.model.settings import Settings
from rota.policy.factory import open_local_kernel
from rota.policy.grpc.service import OutputChecker, OutputPolicyService, SafetyKernelService
from rota.policy.output.checker import FileOutputPolicySource, LocalContentChecker

LIMITS = RpcLimits(calls_at_once=256, request_bytes_max=16 * 1024 * 1024)


class KernelProcess:
    """The parts of the process. `calls.port` and `listener.port` are known once it is ready."""

    def __init__(self, settings: Settings, redis: Redis | None, outputs: OutputChecker | None = None) -> None:
        kernel = open_local_kernel(settings, redis)
        if kernel is None:
            raise InvalidSetting("policy.file is not set: name the policy file of the kernel.")
        self.kernel = kernel
        address = settings.safety_kernel
        self.supervisor = Supervisor(drain_budget_s=settings.service.drain_timeout)
        self.listener = HttpListener(self.supervisor, host=settings.listen.host, port=address.health_port)
        scan_s = settings.output_policy.content_timeout
        checker = outputs or LocalContentChecker(FileOutputPolicySource(self.kernel.snapshots), scan_s)
        services: list[RpcService] = [SafetyKernelService(self.kernel), OutputPolicyService(checker)]
        self.calls = RpcServer(address, services, "safety_kernel", needs_secret=False, limits=LIMITS)
        self.supervisor.add(self.listener.service, *self.kernel.services(), self.calls.service)


async def serve(settings: Settings, target: RedisTarget | None, outputs: OutputChecker | None = None) -> int:
    """Run until a signal or a failure; returns the exit status."""
    async with AsyncExitStack() as stack:
        redis = None
        if target is not None:
            redis = redis_infra.connect(target)
            stack.push_async_callback(redis.aclose)
        return await run_until_signalled(KernelProcess(settings, redis, outputs).supervisor)

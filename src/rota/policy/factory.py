"""Which kernel a process asks, by its settings: one elsewhere, one of its own by the policy file, or none.

Nothing is connected to and no file read before it is needed, except the policy file of a kernel of our own, which must
be good at the start.
"""

from __future__ import annotations

from redis.asyncio import Redis

from rota.infra.redis import RedisKeys
from rota.model.policy.decision import Kernel
from rota.model.settings import Settings
from rota.model.settings.lifecycle import FailMode
from rota.policy.file_watch import PolicyFile, PolicyWatch
from rota.policy.kernel import LocalKernel, PolicyKernel
from rota.policy.rate_limits import VelocityCounter


def has_policy(settings: Settings) -> bool:
    """Whether anybody is asked before jobs run."""
    return bool(settings.safety_kernel.addr or settings.policy.file)


def open_kernel(settings: Settings, redis: Redis | None) -> PolicyKernel | None:
    """Its `services` are to be supervised, and it is to be closed. Raises InvalidInput for a file that is wrong."""
    if settings.safety_kernel.addr:
        from rota.policy.grpc.client import RemoteKernel

        return RemoteKernel(settings, redis)
    return open_local_kernel(settings, redis)


def open_local_kernel(settings: Settings, redis: Redis | None) -> LocalKernel | None:
    """One of this process, by the policy file; None where none is named."""
    file = PolicyFile.of(settings)
    if file is None:
        return None
    counter = VelocityCounter(redis, RedisKeys()) if redis is not None else None
    return LocalKernel.from_watch(PolicyWatch(file, settings.policy.reload_interval), counter)


def effective_fail_mode(settings: Settings, kernel: Kernel | None) -> FailMode:
    """What silence means now: as the settings say, else as the policy file does that spoke last, else closed."""
    if settings.input_policy.fail_mode is not None:
        return settings.input_policy.fail_mode
    return "open" if isinstance(kernel, PolicyKernel) and kernel.fail_mode == "open" else "closed"

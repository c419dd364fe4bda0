"""Chooses the policy engine of a process by its settings: remote, local with the policy file, or none.

Nothing connects or reads a file before first use, except that a local engine needs a valid policy file at the start.
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
    """Whether a policy decides before jobs run."""
    return bool(settings.safety_kernel.addr or settings.policy.file)


def open_kernel(settings: Settings, redis: Redis | None) -> PolicyKernel | None:
    """The caller supervises its `services` and closes it. Raises InvalidInput for an invalid file."""
    if settings.safety_kernel.addr:
        from rota.policy.grpc.client import RemoteKernel

        return RemoteKernel(settings, redis)
    return open_local_kernel(settings, redis)


def open_local_kernel(settings: Settings, redis: Redis | None) -> LocalKernel | None:
    """An engine in this process with the policy file; None if no file is set."""
    file = PolicyFile.of(settings)
    if file is None:
        return None
    counter = VelocityCounter(redis, RedisKeys()) if redis is not None else None
    return LocalKernel.from_watch(PolicyWatch(file, settings.policy.reload_interval), counter)


def effective_fail_mode(settings: Settings, kernel: Kernel | None) -> FailMode:
    """What happens when the kernel does not answer: by the settings, else by the latest policy file, else closed."""
    if settings.input_policy.fail_mode is not None:
        return settings.input_policy.fail_mode
    return "open" if isinstance(kernel, PolicyKernel) and kernel.fail_mode == "open" else "closed"

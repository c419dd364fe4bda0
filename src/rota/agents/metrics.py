"""Gauges of the agent loop, by the seed's names, set after each cycle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from redis.asyncio import Redis

from rota.infra.redis import pool_use
from rota.infra.telemetry import metrics

if TYPE_CHECKING:
    from rota.agents.health import CycleSnapshot

_SCHEDULER_HELP: Final = {
    "registered_agents": "Agents that may run in this process.",
    "active_agents": "Agents running in this process.",
    "ready_count": "Due agents that may run here, of those examined.",
    "oldest_overdue_seconds": "How long the oldest due agent has been due.",
    "degraded": "1 when agents wait longer than they should, else 0.",
    "capacity_per_cycle": "Agents that a cycle could have started.",
    "ready_to_capacity_ratio": "Due agents that may run here, per free permit.",
    "semaphore_available": "Free permits.",
    "permit_mismatch": "Permits held by no run; expected 0.",
    "queue_depth": "Due agents, including those of other members.",
    "completion_queue_size": "Ends of runs not yet written to PostgreSQL or Redis.",
    "time_offset_ms": "How far the clock of Redis is ahead of this machine's.",
}
_POOL_HELP: Final = {
    "active": "Redis connections in use by agents.",
    "idle": "Idle Redis connections of agents.",
    "waiters": "Agent calls waiting for a Redis connection.",
}
SCHEDULER_GAUGES: Final = {
    name: metrics.gauge(f"rota_agents_scheduler_{name}", help_text) for name, help_text in _SCHEDULER_HELP.items()
}
POOL_GAUGES: Final = {
    name: metrics.gauge(f"rota_agents_redis_pool_{name}", help_text) for name, help_text in _POOL_HELP.items()
}


def set_scheduler_gauges(tick: CycleSnapshot, *, degraded: bool) -> None:
    seen = tick.seen
    SCHEDULER_GAUGES["registered_agents"].set(tick.registered)
    SCHEDULER_GAUGES["active_agents"].set(tick.active + tick.stuck)
    SCHEDULER_GAUGES["ready_count"].set(seen.mine)
    SCHEDULER_GAUGES["oldest_overdue_seconds"].set(seen.oldest_overdue_ms / 1000)
    SCHEDULER_GAUGES["degraded"].set(1 if degraded else 0)
    SCHEDULER_GAUGES["capacity_per_cycle"].set(tick.slots)
    SCHEDULER_GAUGES["ready_to_capacity_ratio"].set(seen.mine / max(1, tick.slots))
    SCHEDULER_GAUGES["semaphore_available"].set(tick.permits_free)
    SCHEDULER_GAUGES["permit_mismatch"].set(tick.permits_held - tick.active)
    SCHEDULER_GAUGES["queue_depth"].set(seen.ready)
    SCHEDULER_GAUGES["completion_queue_size"].set(tick.completions)
    if seen.now_ms:
        SCHEDULER_GAUGES["time_offset_ms"].set(seen.offset_ms)


def set_pool_gauges(client: Redis) -> None:
    used = pool_use(client)
    POOL_GAUGES["active"].set(used.active)
    POOL_GAUGES["idle"].set(used.idle)
    POOL_GAUGES["waiters"].set(used.waiters)

"""When the agents' calls stop for a while: two breakers of this process.

"acquisition" has the numbers of the settings and counts whatever a cycle fails of. "redis" is quicker on both sides and
counts an absent Redis alone; it guards every call to Redis that can wait, and is what `redis_stall` looks at. A cycle
makes a call also when the pool is full, so half-open ends in time however busy we are.
"""

from __future__ import annotations

from typing import Final

from rota.infra.breaker import Breaker
from rota.infra.clock import Clock
from rota.model.circuit_breaker import BreakerConfig, BreakerPhase, ProbesByDuration, WindowedFailures
from rota.model.errors import BreakerOpen, RedisUnavailable
from rota.model.settings.agents import CircuitBreakerSettings

DISABLED_THRESHOLD: Final = 2**31 - 1
"""Failures that open a breaker which is switched off."""
_REDIS_THRESHOLD_MIN: Final = 3
_REDIS_WINDOW_MAX_MS: Final = 5_000
_REDIS_COOLDOWN_RATIO: Final = 0.7
_REDIS_HALF_OPEN_RATIO: Final = 0.6


class Breakers:
    def __init__(self, wanted: CircuitBreakerSettings, clock: Clock) -> None:
        self.acquisition = Breaker.in_process(
            "agents_acquisition", acquisition_rules(wanted), clock, counts=_is_failure
        )
        self.redis = Breaker.in_process("agents_redis", redis_rules(wanted), clock, counts=_is_redis_failure)

    @property
    def closed(self) -> bool:
        return self.redis_closed and self.acquisition.phase is BreakerPhase.CLOSED

    @property
    def redis_closed(self) -> bool:
        return self.redis.phase is BreakerPhase.CLOSED


def acquisition_rules(wanted: CircuitBreakerSettings) -> BreakerConfig:
    return BreakerConfig(
        counting=WindowedFailures(
            wanted.failure_threshold if wanted.enabled else DISABLED_THRESHOLD, wanted.failure_window_ms
        ),
        open_ms=wanted.cooldown_ms,
        probing=ProbesByDuration(wanted.half_open_duration_ms),
    )


def redis_rules(wanted: CircuitBreakerSettings) -> BreakerConfig:
    """Derived: fewer failures in a shorter window open it, and it tries again sooner."""
    threshold = max(_REDIS_THRESHOLD_MIN, wanted.failure_threshold - 2) if wanted.enabled else DISABLED_THRESHOLD
    return BreakerConfig(
        counting=WindowedFailures(threshold, min(_REDIS_WINDOW_MAX_MS, wanted.failure_window_ms)),
        open_ms=max(1, round(wanted.cooldown_ms * _REDIS_COOLDOWN_RATIO)),
        probing=ProbesByDuration(max(1, round(wanted.half_open_duration_ms * _REDIS_HALF_OPEN_RATIO))),
    )


def _is_failure(error: Exception) -> bool:
    return not isinstance(error, BreakerOpen)


def _is_redis_failure(error: Exception) -> bool:
    return isinstance(error, RedisUnavailable)

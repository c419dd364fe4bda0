"""Circuit breakers of the agent scheduler, two per process.

"acquisition" uses the configured values and counts every failure of a cycle. "redis" opens and closes faster and
counts only Redis unavailability; it guards every Redis call that can wait, and `redis_stall` reports its state. A
cycle calls Redis even with a full pool, so half-open always resolves.
"""

from __future__ import annotations

from typing import Final

from rota.infra.breaker import Breaker
from rota.infra.clock import Clock
from rota.model.circuit_breaker import BreakerConfig, BreakerPhase, ProbesByDuration, WindowedFailures
from rota.model.errors import BreakerOpen, RedisUnavailable
from rota.model.settings.agents import CircuitBreakerSettings

DISABLED_THRESHOLD: Final = 2**31 - 1
"""Failures that open a disabled breaker."""
_REDIS_THRESHOLD_MIN: Final = 3
_REDIS_WINDOW_MAX_MS: Final = 5_000
_REDIS_COOLDOWN_RATIO: Final = 0.7
_REDIS_HALF_OPEN_RATIO: Final = 0.6


class Breakers:
    def __init__(self, options: CircuitBreakerSettings, clock: Clock) -> None:
        self.acquisition = Breaker.in_process(
            "agents_acquisition", acquisition_rules(options), clock, counts=_is_failure
        )
        self.redis = Breaker.in_process("agents_redis", redis_rules(options), clock, counts=_is_redis_failure)

    @property
    def closed(self) -> bool:
        return self.redis_closed and self.acquisition.phase is BreakerPhase.CLOSED

    @property
    def redis_closed(self) -> bool:
        return self.redis.phase is BreakerPhase.CLOSED


def acquisition_rules(options: CircuitBreakerSettings) -> BreakerConfig:
    return BreakerConfig(
        counting=WindowedFailures(
            options.failure_threshold if options.enabled else DISABLED_THRESHOLD, options.failure_window_ms
        ),
        open_ms=options.cooldown_ms,
        probing=ProbesByDuration(options.half_open_duration_ms),
    )


def redis_rules(options: CircuitBreakerSettings) -> BreakerConfig:
    """Derived: fewer failures in a shorter window open it, and it retries sooner."""
    threshold = max(_REDIS_THRESHOLD_MIN, options.failure_threshold - 2) if options.enabled else DISABLED_THRESHOLD
    return BreakerConfig(
        counting=WindowedFailures(threshold, min(_REDIS_WINDOW_MAX_MS, options.failure_window_ms)),
        open_ms=max(1, round(options.cooldown_ms * _REDIS_COOLDOWN_RATIO)),
        probing=ProbesByDuration(max(1, round(options.half_open_duration_ms * _REDIS_HALF_OPEN_RATIO))),
    )


def _is_failure(error: Exception) -> bool:
    return not isinstance(error, BreakerOpen)


def _is_redis_failure(error: Exception) -> bool:
    return isinstance(error, RedisUnavailable)

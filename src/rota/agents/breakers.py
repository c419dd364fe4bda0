"""When the agents' calls stop for a while: two breakers of this process.

"acquisition" has the numbers of the settings and counts whatever a cycle fails of. "redis" is quicker on both sides and
counts an absent Redis alone; it guards every call to Redis that can wait, and is what `redis_stall` looks at. A cycle
makes a call also when the pool is full, so half-open ends in time however busy we are.
"""

from __future__ import annotations

from typing import Final

from rota.infra.breaker import Breaker
from rota.infra.clock import Clock
from rota.model.breaker import Phase, ProbesByDuration, Rules, Windowed
from rota.model.errors import BreakerOpen, RedisUnavailable
from rota.model.settings.agents import CircuitBreaker

NEVER: Final = 2**31 - 1
"""Failures that open a breaker which is switched off."""
_LEAST: Final = 3
_WINDOW_MAX_MS: Final = 5_000
_SOONER: Final = 0.7
_SHORTER: Final = 0.6


class Breakers:
    def __init__(self, wanted: CircuitBreaker, clock: Clock) -> None:
        self.acquisition = Breaker.process("agents_acquisition", acquisition_rules(wanted), clock, counts=_is_failure)
        self.redis = Breaker.process("agents_redis", redis_rules(wanted), clock, counts=_is_redis)

    @property
    def closed(self) -> bool:
        return self.redis_closed and self.acquisition.phase is Phase.CLOSED

    @property
    def redis_closed(self) -> bool:
        return self.redis.phase is Phase.CLOSED


def acquisition_rules(wanted: CircuitBreaker) -> Rules:
    return Rules(
        counting=Windowed(wanted.failure_threshold if wanted.enabled else NEVER, wanted.failure_window_ms),
        open_ms=wanted.cooldown_ms,
        probing=ProbesByDuration(wanted.half_open_duration_ms),
    )


def redis_rules(wanted: CircuitBreaker) -> Rules:
    """Derived: fewer failures in a shorter window open it, and it tries again sooner."""
    threshold = max(_LEAST, wanted.failure_threshold - 2) if wanted.enabled else NEVER
    return Rules(
        counting=Windowed(threshold, min(_WINDOW_MAX_MS, wanted.failure_window_ms)),
        open_ms=max(1, round(wanted.cooldown_ms * _SOONER)),
        probing=ProbesByDuration(max(1, round(wanted.half_open_duration_ms * _SHORTER))),
    )


def _is_failure(error: Exception) -> bool:
    return not isinstance(error, BreakerOpen)


def _is_redis(error: Exception) -> bool:
    return isinstance(error, RedisUnavailable)

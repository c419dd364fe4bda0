"""Storage of a breaker's state: in this process, or in Redis for all replicas.

`SharedStateMachine` runs one script per step, so replicas share one state and one clock. While Redis is unavailable
each replica continues alone from the last state it saw, and returns to the shared state when Redis answers again;
failures counted meanwhile are dropped. A small breaker decides whether to try Redis, so that an unavailable Redis costs
a caller `patience_s` occasionally and not on every call.

Crash cases: if this process dies between a permit and its report, a probe slot is freed after `lost_after_ms`; any
other missing report is a failure not counted. If the script's reply is lost, the step may have been applied: at worst a
probe slot is occupied until it counts as lost, or one failure is counted both in Redis and locally.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

import redis.asyncio
import structlog

from rota.infra import failpoints
from rota.infra.clock import Clock
from rota.infra.redis import RedisKeys, script
from rota.model.circuit_breaker import (
    BreakerConfig,
    BreakerEvent,
    BreakerPhase,
    BreakerResult,
    BreakerSnapshot,
    BreakerState,
    CallPermitted,
    CallRejected,
    ConsecutiveFailures,
    ProbesByCount,
    ProbesByDuration,
    WindowedFailures,
    fallback_state,
    step,
)
from rota.model.errors import RotaError

log = structlog.get_logger(__name__)

STEP: Final = script("rota.infra.breaker", "step", replies=CallPermitted | CallRejected | BreakerSnapshot)

REDIS_BREAKER_RULES: Final = BreakerConfig(
    counting=ConsecutiveFailures(1), open_ms=1000, probing=ProbesByCount(1, successes=1, lost_after_ms=5000)
)


class BreakerPermit:
    """One permitted call. Reported once, to the machine that granted it."""

    __slots__ = ("generation", "granted_by", "probe", "reported")

    def __init__(self, granted: CallPermitted, granted_by: BreakerStateMachine) -> None:
        self.generation = granted.generation
        self.probe = granted.phase is BreakerPhase.HALF_OPEN
        self.granted_by = granted_by
        self.reported = False


class BreakerStateMachine(Protocol):
    async def step(
        self, event: BreakerEvent, permit: BreakerPermit | None = None
    ) -> tuple[BreakerResult, BreakerStateMachine]:
        """Apply one event; returns the result and the machine that applied it."""
        ...


class LocalStateMachine:
    """State in this process, on its monotonic clock."""

    def __init__(self, rules: BreakerConfig, clock: Clock, state: BreakerState | None = None) -> None:
        self._rules = rules
        self._clock = clock
        self.state = state or BreakerState()

    async def step(
        self, event: BreakerEvent, permit: BreakerPermit | None = None
    ) -> tuple[BreakerResult, BreakerStateMachine]:
        return self.apply_event(event, permit.generation if permit else 0), self

    def apply_event(self, event: BreakerEvent, generation: int = 0) -> BreakerResult:
        self.state, result = step(self._rules, self.state, event, generation, monotonic_ms(self._clock))
        return result


class SharedStateMachine:
    """State in Redis, with a local fallback while Redis is unavailable."""

    def __init__(
        self,
        name: str,
        rules: BreakerConfig,
        clock: Clock,
        client: redis.asyncio.Redis,
        keys: RedisKeys,
        patience_s: float,
    ) -> None:
        self._name = name
        self._rules = rules
        self._clock = clock
        self._client = client
        self._patience_s = patience_s
        self._script_parameters = {
            "counter": keys.breaker_failures(name),
            "record": keys.breaker_state(name),
            **_script_args(rules),
        }
        self._redis = LocalStateMachine(REDIS_BREAKER_RULES, clock)
        self._last_result: BreakerResult = BreakerSnapshot(BreakerPhase.CLOSED, BreakerPhase.CLOSED, 0, 0)
        self._last_result_ms = monotonic_ms(clock)
        self._fallback: LocalStateMachine | None = None

    @property
    def uses_fallback(self) -> bool:
        return self._fallback is not None

    async def step(
        self, event: BreakerEvent, permit: BreakerPermit | None = None
    ) -> tuple[BreakerResult, BreakerStateMachine]:
        if permit is not None and permit.granted_by is not self:
            return await self._report_to_fallback(event, permit)
        redis_permit = self._redis.apply_event(BreakerEvent.ALLOW)
        if isinstance(redis_permit, CallPermitted):
            result = await self._step_in_redis(event, permit.generation if permit else 0, redis_permit.generation)
            if result is not None:
                return result, self
        fallback = self._fall_back()
        return _apply_to_fallback(fallback, event), fallback

    async def _report_to_fallback(
        self, event: BreakerEvent, permit: BreakerPermit
    ) -> tuple[BreakerResult, BreakerStateMachine]:
        if self._fallback is not None and permit.granted_by is self._fallback:
            return await self._fallback.step(event, permit)
        # Granted by a fallback that is gone: the shared state is back in use and does not know that call.
        return BreakerSnapshot(self._last_result.phase, self._last_result.phase, self._last_result.failures, 0), self

    async def _step_in_redis(self, event: BreakerEvent, generation: int, redis_generation: int) -> BreakerResult | None:
        try:
            async with asyncio.timeout(self._patience_s):
                result = await STEP(
                    self._client, event=event, generation=generation, at_ms=0, **self._script_parameters
                )
            failpoints.after_send("breaker.step")
        except (RotaError, OSError) as error:
            self._redis.apply_event(BreakerEvent.FAILURE, redis_generation)
            self._fall_back(why=str(error) or "no answer in time")
            return None
        except BaseException:
            self._redis.apply_event(BreakerEvent.CANCEL, redis_generation)
            raise
        self._redis.apply_event(BreakerEvent.SUCCESS, redis_generation)
        self._resume_shared(result)
        return result

    def _resume_shared(self, result: BreakerResult) -> None:
        self._last_result, self._last_result_ms = result, monotonic_ms(self._clock)
        if self._fallback is not None:
            self._fallback = None
            log.info("breaker_fallback_ended", breaker=self._name, phase=result.phase)

    def _fall_back(self, why: str = "") -> LocalStateMachine:
        if self._fallback is None:
            now_ms = monotonic_ms(self._clock)
            state = fallback_state(self._rules, self._last_result, now_ms - self._last_result_ms, now_ms)
            self._fallback = LocalStateMachine(self._rules, self._clock, state)
            log.warning("breaker_fallback_started", breaker=self._name, phase=state.phase, why=why)
        return self._fallback


def monotonic_ms(clock: Clock) -> int:
    return int(clock.monotonic() * 1000)


def _apply_to_fallback(fallback: LocalStateMachine, event: BreakerEvent) -> BreakerResult:
    """Apply an event. A report on a call that Redis granted counts only while the fallback is closed."""
    closed = fallback.state.phase is BreakerPhase.CLOSED
    return fallback.apply_event(event, fallback.state.generation if closed else -1)


def _script_args(rules: BreakerConfig) -> dict[str, int]:
    """The configuration as arguments of the script."""
    arguments = {"limit": rules.counting.failures, "window_ms": 0, "open_ms": rules.open_ms}
    match rules.counting:
        case WindowedFailures(window_ms=window_ms):
            arguments["window_ms"] = window_ms
    match rules.probing:
        case ProbesByCount(probes_max, successes, lost_after_ms):
            return {**arguments, "probes_max": probes_max, "enough": successes, "probe_ms": lost_after_ms}
        case ProbesByDuration(duration_ms):
            return {**arguments, "probes_max": 0, "enough": 0, "probe_ms": duration_ms}

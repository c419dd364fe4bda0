"""Where a breaker's state lives: in this process, or in Redis for all replicas.

`SharedMachine` runs one script per step, so replicas see one state, by one clock. While Redis is away each replica goes
on alone from what it last saw, and returns to the shared state when Redis answers again; what it counted meanwhile is
dropped. Whether to try Redis is itself decided by a small breaker, so that an absent Redis costs a caller
`patience_s` once in a while and not at every call.

If we die between a grant and its report, a probe's place is freed after `lost_after_ms`; a report that was not made is
a failure not counted. If the script's reply is lost, the step may have been taken: at worst a probe's place is held
until it counts as lost, or one failure is counted here and there.
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
    """One call that was let through. It is reported on once, to the machine that granted it."""

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
        """Takes one step; says what came of it and which machine took it."""
        ...


class LocalStateMachine:
    """State in this process, by its monotonic clock."""

    def __init__(self, rules: BreakerConfig, clock: Clock, state: BreakerState | None = None) -> None:
        self._rules = rules
        self._clock = clock
        self.state = state or BreakerState()

    async def step(
        self, event: BreakerEvent, permit: BreakerPermit | None = None
    ) -> tuple[BreakerResult, BreakerStateMachine]:
        return self.apply_event(event, permit.generation if permit else 0), self

    def apply_event(self, event: BreakerEvent, generation: int = 0) -> BreakerResult:
        self.state, verdict = step(self._rules, self.state, event, generation, monotonic_ms(self._clock))
        return verdict


class SharedStateMachine:
    """State in Redis, with a stand-in of our own while Redis is away."""

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
        self._given = {
            "counter": keys.breaker_failures(name),
            "record": keys.breaker_state(name),
            **_script_args(rules),
        }
        self._redis = LocalStateMachine(REDIS_BREAKER_RULES, clock)
        self._seen: BreakerResult = BreakerSnapshot(BreakerPhase.CLOSED, BreakerPhase.CLOSED, 0, 0)
        self._seen_ms = monotonic_ms(clock)
        self._stand_in: LocalStateMachine | None = None

    @property
    def uses_fallback(self) -> bool:
        return self._stand_in is not None

    async def step(
        self, event: BreakerEvent, permit: BreakerPermit | None = None
    ) -> tuple[BreakerResult, BreakerStateMachine]:
        if permit is not None and permit.granted_by is not self:
            return await self._report_to_fallback(event, permit)
        asked = self._redis.apply_event(BreakerEvent.ALLOW)
        if isinstance(asked, CallPermitted):
            verdict = await self._step_in_redis(event, permit.generation if permit else 0, asked.generation)
            if verdict is not None:
                return verdict, self
        stand_in = self._fall_back()
        return _apply_to_fallback(stand_in, event), stand_in

    async def _report_to_fallback(
        self, event: BreakerEvent, permit: BreakerPermit
    ) -> tuple[BreakerResult, BreakerStateMachine]:
        if self._stand_in is not None and permit.granted_by is self._stand_in:
            return await self._stand_in.step(event, permit)
        # Granted while Redis was away; by now the shared state rules again and knows nothing of that call.
        return BreakerSnapshot(self._seen.phase, self._seen.phase, self._seen.failures, 0), self

    async def _step_in_redis(self, event: BreakerEvent, generation: int, asked: int) -> BreakerResult | None:
        try:
            async with asyncio.timeout(self._patience_s):
                verdict = await STEP(self._client, event=event, generation=generation, at_ms=0, **self._given)
            failpoints.after_send("breaker.step")
        except (RotaError, OSError) as error:
            self._redis.apply_event(BreakerEvent.FAILURE, asked)
            self._fall_back(why=str(error) or "no answer in time")
            return None
        except BaseException:
            self._redis.apply_event(BreakerEvent.CANCEL, asked)
            raise
        self._redis.apply_event(BreakerEvent.SUCCESS, asked)
        self._resume_shared(verdict)
        return verdict

    def _resume_shared(self, verdict: BreakerResult) -> None:
        self._seen, self._seen_ms = verdict, monotonic_ms(self._clock)
        if self._stand_in is not None:
            self._stand_in = None
            log.info("breaker_shared_again", breaker=self._name, phase=verdict.phase)

    def _fall_back(self, why: str = "") -> LocalStateMachine:
        if self._stand_in is None:
            now_ms = monotonic_ms(self._clock)
            state = fallback_state(self._rules, self._seen, now_ms - self._seen_ms, now_ms)
            self._stand_in = LocalStateMachine(self._rules, self._clock, state)
            log.warning("breaker_alone", breaker=self._name, phase=state.phase, why=why)
        return self._stand_in


def monotonic_ms(clock: Clock) -> int:
    return int(clock.monotonic() * 1000)


def _apply_to_fallback(stand_in: LocalStateMachine, event: BreakerEvent) -> BreakerResult:
    """A report on a call that Redis granted counts with the stand-in only as long as that has seen nothing bad."""
    closed = stand_in.state.phase is BreakerPhase.CLOSED
    return stand_in.apply_event(event, stand_in.state.generation if closed else -1)


def _script_args(rules: BreakerConfig) -> dict[str, int]:
    """The rules as the script takes them."""
    numbers = {"limit": rules.counting.failures, "window_ms": 0, "open_ms": rules.open_ms}
    match rules.counting:
        case WindowedFailures(window_ms=window_ms):
            numbers["window_ms"] = window_ms
    match rules.probing:
        case ProbesByCount(probes_max, successes, lost_after_ms):
            return {**numbers, "probes_max": probes_max, "enough": successes, "probe_ms": lost_after_ms}
        case ProbesByDuration(duration_ms):
            return {**numbers, "probes_max": 0, "enough": 0, "probe_ms": duration_ms}

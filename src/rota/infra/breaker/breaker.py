"""A circuit breaker around calls to a service: `async with breaker.call(): …`.

The state machine is `model/circuit_breaker.py`; `machine` stores its state. This module makes the calls, logs and
metrics. The process that makes a transition logs and counts it; the gauge shows the state last seen by this process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import redis.asyncio
import structlog

from rota.infra import failpoints
from rota.infra.breaker.machine import BreakerPermit, BreakerStateMachine, LocalStateMachine, SharedStateMachine
from rota.infra.clock import Clock
from rota.infra.redis import RedisKeys
from rota.infra.telemetry import metrics
from rota.model.circuit_breaker import (
    BreakerConfig,
    BreakerEvent,
    BreakerPhase,
    BreakerResult,
    BreakerSnapshot,
    CallPermitted,
    CallRejected,
    WindowedFailures,
)
from rota.model.errors import BreakerOpen

log = structlog.get_logger(__name__)

STATE: Final = metrics.gauge("rota_breaker_state", "0 closed, 1 half-open, 2 open.", labels=("name",))
TRANSITIONS: Final = metrics.counter("rota_breaker_transitions", "Changes of a breaker's state.", labels=("name", "to"))
REFUSALS: Final = metrics.counter("rota_breaker_refusals", "Calls refused by an open breaker.", labels=("name",))

_LEVEL: Final = {BreakerPhase.CLOSED: 0, BreakerPhase.HALF_OPEN: 1, BreakerPhase.OPEN: 2}


class BreakerStatus(msgspec.Struct, frozen=True):
    """For status pages."""

    name: str
    phase: BreakerPhase
    failures: int
    retry_ms: int
    scope: str
    """`process`, `shared`, or `alone`: shared, but Redis is unavailable."""


def every_exception(_error: Exception) -> bool:
    return True


class Breaker:
    """`counts` selects the exceptions that count as failures of the service; any other is an answer and counts as
    success. A cancelled call counts as neither.
    """

    def __init__(
        self,
        name: str,
        rules: BreakerConfig,
        machine: BreakerStateMachine,
        counts: Callable[[Exception], bool] = every_exception,
    ) -> None:
        self.name = name
        self._rules = rules
        self._machine = machine
        self._counts = counts
        self._last_result: BreakerResult = BreakerSnapshot(BreakerPhase.CLOSED, BreakerPhase.CLOSED, 0, 0)
        STATE.labels(name).set(_LEVEL[BreakerPhase.CLOSED])

    @classmethod
    def in_process(
        cls, name: str, rules: BreakerConfig, clock: Clock, counts: Callable[[Exception], bool] = every_exception
    ) -> Breaker:
        """A breaker for this process alone."""
        return cls(name, rules, LocalStateMachine(rules, clock), counts)

    @classmethod
    def shared(
        cls,
        name: str,
        rules: BreakerConfig,
        clock: Clock,
        client: redis.asyncio.Redis,
        keys: RedisKeys,
        counts: Callable[[Exception], bool] = every_exception,
        patience_s: float = 0.5,
    ) -> Breaker:
        """One breaker for all replicas that use this name in the same Redis."""
        return cls(name, rules, SharedStateMachine(name, rules, clock, client, keys, patience_s), counts)

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Around one call of the service; raises `BreakerOpen` instead of running the body."""
        permit = await self.allow()
        try:
            yield
        except Exception as error:
            await (self.failure(permit) if self._counts(error) else self.success(permit))
            raise
        except BaseException:
            await self.cancel(permit)
            raise
        await self.success(permit)

    async def allow(self) -> BreakerPermit:
        """A permit for one call. Must be followed by exactly one `success`, `failure` or `cancel`."""
        result, machine = await self._machine.step(BreakerEvent.ALLOW)
        self._observe(result)
        if isinstance(result, CallPermitted):
            failpoints.hit("breaker.granted")
            return BreakerPermit(result, machine)
        REFUSALS.labels(self.name).inc()
        assert isinstance(result, CallRejected)
        raise BreakerOpen(
            f"Calls to {self.name} are paused, because the last ones failed: try again in"
            f" {result.retry_ms / 1000:.1f} s.",
            breaker=self.name,
            retry_ms=result.retry_ms,
        )

    async def success(self, permit: BreakerPermit) -> None:
        # Saves a round trip per healthy call: there is no failure count that a success would reset.
        idle = isinstance(self._rules.counting, WindowedFailures) or self._last_result.failures == 0
        await self._report(BreakerEvent.SUCCESS, permit, worth_it=permit.probe or not idle)

    async def failure(self, permit: BreakerPermit) -> None:
        await self._report(BreakerEvent.FAILURE, permit, worth_it=True)

    async def cancel(self, permit: BreakerPermit) -> None:
        """The call ended without information about the service."""
        await self._report(BreakerEvent.CANCEL, permit, worth_it=permit.probe)

    async def status(self) -> BreakerStatus:
        result, _ = await self._machine.step(BreakerEvent.PEEK)
        self._observe(result)
        assert isinstance(result, BreakerSnapshot)
        return BreakerStatus(self.name, result.phase, result.failures, result.retry_ms, self.scope)

    @property
    def phase(self) -> BreakerPhase:
        """As last seen by this process; `status` reads it again."""
        return self._last_result.phase

    @property
    def scope(self) -> str:
        if not isinstance(self._machine, SharedStateMachine):
            return "process"
        return "alone" if self._machine.uses_fallback else "shared"

    async def _report(self, event: BreakerEvent, permit: BreakerPermit, *, worth_it: bool) -> None:
        assert not permit.reported, "a permit is reported on once"
        permit.reported = True
        if worth_it:
            result, _ = await self._machine.step(event, permit)
            self._observe(result)

    def _observe(self, result: BreakerResult) -> None:
        self._last_result = result
        STATE.labels(self.name).set(_LEVEL[result.phase])
        if result.was is result.phase:
            return
        TRANSITIONS.labels(self.name, result.phase).inc()
        log_line = log.info if result.phase is BreakerPhase.CLOSED else log.warning
        log_line(
            "breaker_state_changed", breaker=self.name, was=result.was, phase=result.phase, failures=result.failures
        )

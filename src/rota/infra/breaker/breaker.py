"""A breaker around calls to a service: `async with breaker.call(): …`.

The state machine is `model/circuit_breaker.py`; where its state lives is `machine`. Here are the calls, the log lines and the
metrics. A transition is logged and counted by the one process that made it; the gauge shows what this process saw last.
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
REFUSALS: Final = metrics.counter("rota_breaker_refusals", "Calls a breaker did not let through.", labels=("name",))

_LEVEL: Final = {BreakerPhase.CLOSED: 0, BreakerPhase.HALF_OPEN: 1, BreakerPhase.OPEN: 2}


class BreakerStatus(msgspec.Struct, frozen=True):
    """What a status page shows."""

    name: str
    phase: BreakerPhase
    failures: int
    retry_ms: int
    scope: str
    """`process`, `shared`, or `alone`: shared, but Redis is away."""


def every_exception(_error: Exception) -> bool:
    return True


class Breaker:
    """`counts` says which exceptions mean that the service is ill; any other is an answer, and as good as a success.

    A cancelled call counts as neither.
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
        self._seen: BreakerResult = BreakerSnapshot(BreakerPhase.CLOSED, BreakerPhase.CLOSED, 0, 0)
        STATE.labels(name).set(_LEVEL[BreakerPhase.CLOSED])

    @classmethod
    def in_process(
        cls, name: str, rules: BreakerConfig, clock: Clock, counts: Callable[[Exception], bool] = every_exception
    ) -> Breaker:
        """A breaker of this process alone."""
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
        """Leave for one call. Must be followed by one `success`, `failure` or `cancel`."""
        verdict, machine = await self._machine.step(BreakerEvent.ALLOW)
        self._observe(verdict)
        if isinstance(verdict, CallPermitted):
            failpoints.hit("breaker.granted")
            return BreakerPermit(verdict, machine)
        REFUSALS.labels(self.name).inc()
        assert isinstance(verdict, CallRejected)
        raise BreakerOpen(
            f"Calls to {self.name} are paused, because the last ones failed: try again in"
            f" {verdict.retry_ms / 1000:.1f} s.",
            breaker=self.name,
            retry_ms=verdict.retry_ms,
        )

    async def success(self, permit: BreakerPermit) -> None:
        # Saves a round trip per healthy call: nothing is counted that a success would clear.
        idle = isinstance(self._rules.counting, WindowedFailures) or self._seen.failures == 0
        await self._report(BreakerEvent.SUCCESS, permit, worth_it=permit.probe or not idle)

    async def failure(self, permit: BreakerPermit) -> None:
        await self._report(BreakerEvent.FAILURE, permit, worth_it=True)

    async def cancel(self, permit: BreakerPermit) -> None:
        """The call ended without telling anything about the service."""
        await self._report(BreakerEvent.CANCEL, permit, worth_it=permit.probe)

    async def status(self) -> BreakerStatus:
        verdict, _ = await self._machine.step(BreakerEvent.PEEK)
        self._observe(verdict)
        assert isinstance(verdict, BreakerSnapshot)
        return BreakerStatus(self.name, verdict.phase, verdict.failures, verdict.retry_ms, self.scope)

    @property
    def phase(self) -> BreakerPhase:
        """As this process saw it last; `status` asks anew."""
        return self._seen.phase

    @property
    def scope(self) -> str:
        if not isinstance(self._machine, SharedStateMachine):
            return "process"
        return "alone" if self._machine.uses_fallback else "shared"

    async def _report(self, event: BreakerEvent, permit: BreakerPermit, *, worth_it: bool) -> None:
        assert not permit.reported, "a permit is reported on once"
        permit.reported = True
        if worth_it:
            verdict, _ = await self._machine.step(event, permit)
            self._observe(verdict)

    def _observe(self, verdict: BreakerResult) -> None:
        self._seen = verdict
        STATE.labels(self.name).set(_LEVEL[verdict.phase])
        if verdict.was is verdict.phase:
            return
        TRANSITIONS.labels(self.name, verdict.phase).inc()
        tell = log.info if verdict.phase is BreakerPhase.CLOSED else log.warning
        tell("breaker_changed", breaker=self.name, was=verdict.was, phase=verdict.phase, failures=verdict.failures)

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

from rota.infra import faults
from rota.infra.clock import Clock
from rota.infra.redis import Keys, script
from rota.model.breaker import (
    Consecutive,
    Event,
    Granted,
    Noted,
    Phase,
    ProbesByCount,
    ProbesByDuration,
    Refused,
    Rules,
    State,
    Verdict,
    Windowed,
    resumed,
    step,
)
from rota.model.errors import RotaError

log = structlog.get_logger(__name__)

STEP: Final = script("rota.infra.breaker", "step", replies=Granted | Refused | Noted)

REDIS_AWAY: Final = Rules(
    counting=Consecutive(1), open_ms=1000, probing=ProbesByCount(1, successes=1, lost_after_ms=5000)
)


class Permit:
    """One call that was let through. It is reported on once, to the machine that granted it."""

    __slots__ = ("generation", "granted_by", "probe", "reported")

    def __init__(self, granted: Granted, granted_by: Machine) -> None:
        self.generation = granted.generation
        self.probe = granted.phase is Phase.HALF_OPEN
        self.granted_by = granted_by
        self.reported = False


class Machine(Protocol):
    async def step(self, event: Event, permit: Permit | None = None) -> tuple[Verdict, Machine]:
        """Takes one step; says what came of it and which machine took it."""
        ...


class LocalMachine:
    """State in this process, by its monotonic clock."""

    def __init__(self, rules: Rules, clock: Clock, state: State | None = None) -> None:
        self._rules = rules
        self._clock = clock
        self.state = state or State()

    async def step(self, event: Event, permit: Permit | None = None) -> tuple[Verdict, Machine]:
        return self.turn(event, permit.generation if permit else 0), self

    def turn(self, event: Event, generation: int = 0) -> Verdict:
        self.state, verdict = step(self._rules, self.state, event, generation, monotonic_ms(self._clock))
        return verdict


class SharedMachine:
    """State in Redis, with a stand-in of our own while Redis is away."""

    def __init__(
        self, name: str, rules: Rules, clock: Clock, client: redis.asyncio.Redis, keys: Keys, patience_s: float
    ) -> None:
        self._name = name
        self._rules = rules
        self._clock = clock
        self._client = client
        self._patience_s = patience_s
        self._given = {"counter": keys.breaker_failures(name), "record": keys.breaker_state(name), **_numbers(rules)}
        self._redis = LocalMachine(REDIS_AWAY, clock)
        self._seen: Verdict = Noted(Phase.CLOSED, Phase.CLOSED, 0, 0)
        self._seen_ms = monotonic_ms(clock)
        self._stand_in: LocalMachine | None = None

    @property
    def alone(self) -> bool:
        return self._stand_in is not None

    async def step(self, event: Event, permit: Permit | None = None) -> tuple[Verdict, Machine]:
        if permit is not None and permit.granted_by is not self:
            return await self._stand_in_report(event, permit)
        asked = self._redis.turn(Event.ALLOW)
        if isinstance(asked, Granted):
            verdict = await self._ask_redis(event, permit.generation if permit else 0, asked.generation)
            if verdict is not None:
                return verdict, self
        stand_in = self._alone()
        return _stand_in_turn(stand_in, event), stand_in

    async def _stand_in_report(self, event: Event, permit: Permit) -> tuple[Verdict, Machine]:
        if self._stand_in is not None and permit.granted_by is self._stand_in:
            return await self._stand_in.step(event, permit)
        # Granted while Redis was away; by now the shared state rules again and knows nothing of that call.
        return Noted(self._seen.phase, self._seen.phase, self._seen.failures, 0), self

    async def _ask_redis(self, event: Event, generation: int, asked: int) -> Verdict | None:
        try:
            async with asyncio.timeout(self._patience_s):
                verdict = await STEP(self._client, event=event, generation=generation, at_ms=0, **self._given)
            faults.reply("breaker.step")
        except (RotaError, OSError) as error:
            self._redis.turn(Event.FAILURE, asked)
            self._alone(why=str(error) or "no answer in time")
            return None
        except BaseException:
            self._redis.turn(Event.CANCEL, asked)
            raise
        self._redis.turn(Event.SUCCESS, asked)
        self._together(verdict)
        return verdict

    def _together(self, verdict: Verdict) -> None:
        self._seen, self._seen_ms = verdict, monotonic_ms(self._clock)
        if self._stand_in is not None:
            self._stand_in = None
            log.info("breaker_shared_again", breaker=self._name, phase=verdict.phase)

    def _alone(self, why: str = "") -> LocalMachine:
        if self._stand_in is None:
            now_ms = monotonic_ms(self._clock)
            state = resumed(self._rules, self._seen, now_ms - self._seen_ms, now_ms)
            self._stand_in = LocalMachine(self._rules, self._clock, state)
            log.warning("breaker_alone", breaker=self._name, phase=state.phase, why=why)
        return self._stand_in


def monotonic_ms(clock: Clock) -> int:
    return int(clock.monotonic() * 1000)


def _stand_in_turn(stand_in: LocalMachine, event: Event) -> Verdict:
    """A report on a call that Redis granted counts with the stand-in only as long as that has seen nothing bad."""
    closed = stand_in.state.phase is Phase.CLOSED
    return stand_in.turn(event, stand_in.state.generation if closed else -1)


def _numbers(rules: Rules) -> dict[str, int]:
    """The rules as the script takes them."""
    numbers = {"limit": rules.counting.failures, "window_ms": 0, "open_ms": rules.open_ms}
    match rules.counting:
        case Windowed(window_ms=window_ms):
            numbers["window_ms"] = window_ms
    match rules.probing:
        case ProbesByCount(probes_max, successes, lost_after_ms):
            return {**numbers, "probes_max": probes_max, "enough": successes, "probe_ms": lost_after_ms}
        case ProbesByDuration(duration_ms):
            return {**numbers, "probes_max": 0, "enough": 0, "probe_ms": duration_ms}

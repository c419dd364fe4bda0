"""Health of the agent loop: HEALTHY or DEGRADED, watchdogs, and a periodic summary line. No I/O.

DEGRADED: an agent that may run here is overdue by more than the shortest interval; slots stay empty because agents of
other members hide ours; or a sample found agents in both sets. A watchdog triggers when its condition has held for
`WATCHDOG_CYCLES` cycles in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import structlog

from rota.agents.acquisition import CycleResult
from rota.agents.metrics import set_scheduler_gauges
from rota.infra.telemetry import metrics

log = structlog.get_logger(__name__)

WATCHDOG_CYCLES: Final = 3
FREE_LOW: Final = 0.01
FREE_HIGH: Final = 0.90
FILLED_LOW: Final = 0.10
UNFILLED_MAX: Final = 0.20
DEGRADED_WARN_INTERVAL_S: Final = 600.0
STALL_WARN_INTERVAL_S: Final = 300.0
WATCHDOG_WARN_INTERVAL_S: Final = 60.0
CRON_INTERVAL_MS: Final = 60_000
"""The interval assumed for agents without one."""
STALLS = metrics.counter(
    "rota_agents_acquire_stall_detected", "Times no agent was due for longer than the shortest interval."
)


class CycleSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one cycle, and the state of the process after it."""

    seen: CycleResult
    registered: int
    active: int
    """Runs that hold a permit."""
    stuck: int = 0
    """Runs that ignore cancellation; their permits were released."""
    permits_most: int
    permits_free: int
    permits_held: int = 0
    slots: int
    """Free permits at the start of the cycle."""
    completions: int
    redis_closed: bool
    """Whether the Redis breaker is closed."""
    shortest_ms: int
    """The shortest interval of the agents that may run here; 0: there are none."""
    recurring_ms: int = 0
    """The shortest among agents with an interval; 0: there are none."""

    @property
    def free_ratio(self) -> float:
        return self.permits_free / self.permits_most if self.permits_most > 0 else 1.0


class Watchdogs:
    """Conditions that held for `WATCHDOG_CYCLES` cycles, with the time they last triggered."""

    def __init__(self) -> None:
        self._streaks: dict[str, int] = {}
        self._triggered_at: dict[str, float] = {}

    def update(self, conditions: Mapping[str, bool], now_s: float) -> list[str]:
        """Those that have just reached `WATCHDOG_CYCLES`; their counters restart."""
        triggered = []
        for name, holds in conditions.items():
            self._streaks[name] = self._streaks.get(name, 0) + 1 if holds else 0
            if self._streaks[name] >= WATCHDOG_CYCLES:
                self._streaks[name] = 0
                self._triggered_at[name] = now_s
                triggered.append(name)
        return triggered

    def triggered_since(self, moment_s: float) -> list[str]:
        return sorted(name for name, at in self._triggered_at.items() if at >= moment_s)


def watchdog_conditions(tick: CycleSnapshot) -> dict[str, bool]:
    """The condition of each watchdog."""
    ready = tick.seen.mine > 0
    bounded = tick.permits_most > 0
    idle = bounded and tick.free_ratio > FREE_HIGH
    # Relative to what it could have acquired: a cycle that acquires all due agents counts as full.
    filled = tick.seen.acquired / max(1, min(tick.slots, tick.seen.mine))
    return {
        "permit_leak_suspect": bounded and tick.free_ratio < FREE_LOW and tick.active == 0 and ready,
        "capacity_skew": idle and ready and filled < FILLED_LOW,
        "zero_progress": ready and tick.slots > 0 and not tick.seen.acquired and tick.redis_closed,
        "redis_stall": not tick.redis_closed,
    }


def degraded_reason(tick: CycleSnapshot, overlaps: int = 0) -> str:
    """A reason code; empty if healthy."""
    if tick.shortest_ms and tick.seen.oldest_overdue_ms > tick.shortest_ms:
        return "overdue"
    unfilled = 1 - tick.seen.acquired / tick.slots if 0 < tick.slots <= tick.seen.ready else 0.0
    if tick.seen.passed and unfilled > UNFILLED_MAX:
        return "slots_unfilled"
    return "set_overlap" if overlaps else ""


def is_stalled(tick: CycleSnapshot) -> bool:
    """Nothing is due, running, or due within the shortest interval: agents are paused, run elsewhere, or lost."""
    seen = tick.seen
    if not seen.now_ms or not tick.recurring_ms or seen.ready or seen.acquired or tick.active:
        return False
    return not seen.next_ms or seen.next_ms - seen.now_ms > tick.recurring_ms


class Starvation:
    """Tracks how long no permit has been free while nothing runs and agents wait."""

    def __init__(self) -> None:
        self.ticks = 0
        self._since_s = 0.0

    def update(self, tick: CycleSnapshot, now_s: float, *, degraded: bool) -> None:
        if not (degraded and tick.permits_most > 0 and tick.permits_free == 0 and tick.active == 0):
            self.ticks = 0
            return
        if not self.ticks:
            self._since_s = now_s
        self.ticks += 1

    def summary(self, now_s: float) -> str:
        if self.ticks < WATCHDOG_CYCLES:
            return ""
        return f" starvation=[degraded_for_ms={round((now_s - self._since_s) * 1000)} ticks={self.ticks}]"


class Health:
    """`scripts` is the number of Lua scripts, for the summary."""

    def __init__(self, summary_s: float, scripts: int = 0) -> None:
        self._summary_s = summary_s
        self._scripts = scripts
        self._watchdogs = Watchdogs()
        self._starvation = Starvation()
        self._last: CycleSnapshot | None = None
        self._summarized_at: float | None = None
        self._warned_at = float("-inf")
        self._stalled_at = float("-inf")
        self._triggered_at: dict[str, float] = {}
        self._sampled = 0
        self._overlaps = 0
        self.reason = ""
        self.zombies = 0
        self.orphans = 0

    @property
    def state(self) -> str:
        return "DEGRADED" if self.reason else "HEALTHY"

    def set_overlap_sample(self, count: int, overlaps: int) -> None:
        """`count` waiting agents were sampled; `overlaps` of them are also running."""
        self._sampled, self._overlaps = count, overlaps

    def update(self, tick: CycleSnapshot, now_s: float) -> None:
        self._last = tick
        self.reason = degraded_reason(tick, self._overlaps)
        self._starvation.update(tick, now_s, degraded=bool(self.reason))
        self._warn(tick, now_s)
        for name in self._watchdogs.update(watchdog_conditions(tick), now_s):
            if now_s - self._triggered_at.get(name, float("-inf")) >= WATCHDOG_WARN_INTERVAL_S:
                self._triggered_at[name] = now_s
                log.warning("agents_watchdog", signal=name)
        set_scheduler_gauges(tick, degraded=bool(self.reason))
        if self._summarized_at is None:
            self._summarized_at = now_s
        elif self._summary_s > 0 and now_s - self._summarized_at >= self._summary_s:
            (log.warning if self.reason else log.info)(self.summary(now_s))
            self._summarized_at = now_s

    def _warn(self, tick: CycleSnapshot, now_s: float) -> None:
        if self.reason and now_s - self._warned_at >= DEGRADED_WARN_INTERVAL_S:
            self._warned_at = now_s
            log.warning("agents_degraded", reason=self.reason, oldest_overdue_s=tick.seen.oldest_overdue_ms / 1000)
        if is_stalled(tick) and now_s - self._stalled_at >= STALL_WARN_INTERVAL_S:
            self._stalled_at = now_s
            STALLS.inc()
            log.info(
                "agents_stalled", remedy="check `rota agents list` for paused agents, or agents that run elsewhere"
            )

    def summary(self, now_s: float) -> str:
        """The summary line that operators know; its format is stable."""
        tick = self._last
        if tick is None:
            return f"Scheduler health | health={self.state}"
        most = tick.permits_most
        permits = f"{tick.permits_free}/{most} ({100 * tick.free_ratio:.1f}%)" if most > 0 else "n/a"
        futures = tick.active + tick.stuck
        active = f"active=futures={futures}" if not tick.stuck else f"active={tick.active} futures={futures}"
        watchdogs = self._watchdogs.triggered_since(now_s - max(self._summary_s, 1.0))
        return (
            f"Scheduler health | health={self.state}{f' reason={self.reason}' if self.reason else ''}"
            f" | [agents registered={tick.registered} {active} scripts={self._scripts}]"
            f" [backlog ready={tick.seen.mine} oldest_overdue={tick.seen.oldest_overdue_ms // 1000}s"
            f" capacity_per_cycle={tick.slots}] [permits {permits}]"
            f" [cleanup zombies_cleaned={self.zombies} orphans_cleaned={self.orphans}]"
            f" [consistency violations={self._overlaps} sampled={self._sampled}]"
            f" queue_depth={tick.seen.ready}{f' watchdogs={chr(44).join(watchdogs)}' if watchdogs else ''}"
            f"{self._starvation.summary(now_s)}"
        )

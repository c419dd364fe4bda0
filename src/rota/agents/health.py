"""How the loop of agents is: HEALTHY or DEGRADED, what its watchdogs suspect, and one line now and then. No I/O.

DEGRADED means that an agent which may run here is overdue by more than the shortest interval of all, or that places
stay empty while agents of others hide ours. A watchdog speaks when its condition held for `TICKS` cycles in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import structlog

from rota.agents.acquisition import Seen
from rota.infra.telemetry import metrics

log = structlog.get_logger(__name__)

TICKS: Final = 3
FREE_LOW: Final = 0.01
FREE_HIGH: Final = 0.90
FILLED_LOW: Final = 0.10
UNFILLED_MAX: Final = 0.20
CRON_INTERVAL_MS: Final = 60_000
"""What an agent without an interval counts as."""

_GAUGES: Final = {
    "registered_agents": "Agents that may run in this process.",
    "active_agents": "Agents that run in this process.",
    "ready_count": "Agents that are due and may run here, of those looked at.",
    "oldest_overdue_seconds": "How long the first of them has been due.",
    "degraded": "1 when agents wait longer than they should, else 0.",
    "capacity_per_cycle": "Agents that a cycle could have begun.",
    "semaphore_available": "Agents that could begin now.",
    "queue_depth": "Agents that are due, whoever may run them.",
    "completion_queue_size": "Ends of runs that PostgreSQL or Redis has not heard of.",
}
GAUGES: Final = {name: metrics.gauge(f"rota_agents_scheduler_{name}", told) for name, told in _GAUGES.items()}


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """What one cycle saw, and the state of the process after it."""

    seen: Seen
    registered: int
    active: int
    permits_most: int
    permits_free: int
    slots: int
    """Places that were free when it began."""
    completions: int
    redis_closed: bool
    """Whether the breaker of Redis lets calls through."""
    shortest_ms: int
    """The shortest interval of the agents that may run here; 0: there are none."""

    @property
    def free_ratio(self) -> float:
        return self.permits_free / self.permits_most if self.permits_most > 0 else 1.0


class Watchdogs:
    """Names of conditions that held for `TICKS` cycles, with the time they last did."""

    def __init__(self) -> None:
        self._streaks: dict[str, int] = {}
        self._barked_at: dict[str, float] = {}

    def tick(self, held: Mapping[str, bool], now_s: float) -> list[str]:
        """Those that have just come to `TICKS`; their counts begin anew."""
        barking = []
        for name, holds in held.items():
            self._streaks[name] = self._streaks.get(name, 0) + 1 if holds else 0
            if self._streaks[name] >= TICKS:
                self._streaks[name] = 0
                self._barked_at[name] = now_s
                barking.append(name)
        return barking

    def since(self, moment_s: float) -> list[str]:
        return sorted(name for name, at in self._barked_at.items() if at >= moment_s)


def conditions(tick: Tick) -> dict[str, bool]:
    """The exact conditions of the watchdogs."""
    ready = tick.seen.mine > 0
    bounded = tick.permits_most > 0
    idle = bounded and tick.free_ratio > FREE_HIGH
    # Of what it could have taken: a cycle that takes all there is fills as much as it can.
    filled = tick.seen.acquired / max(1, min(tick.slots, tick.seen.mine))
    return {
        "permit_leak_suspect": bounded and tick.free_ratio < FREE_LOW and tick.active == 0 and ready,
        "capacity_skew": idle and ready and filled < FILLED_LOW,
        "zero_progress": ready and tick.slots > 0 and not tick.seen.acquired and tick.redis_closed,
        "redis_stall": not tick.redis_closed,
    }


def why_degraded(tick: Tick) -> str:
    """A word for what is wrong; empty when nothing is."""
    if tick.shortest_ms and tick.seen.oldest_overdue_ms > tick.shortest_ms:
        return "overdue"
    unfilled = 1 - tick.seen.acquired / tick.slots if 0 < tick.slots <= tick.seen.ready else 0.0
    return "slots_unfilled" if tick.seen.passed and unfilled > UNFILLED_MAX else ""


class Health:
    def __init__(self, summary_s: float) -> None:
        self._summary_s = summary_s
        self._watchdogs = Watchdogs()
        self._last: Tick | None = None
        self._told_at: float | None = None
        self.reason = ""
        self.zombies = 0
        self.orphans = 0

    @property
    def state(self) -> str:
        return "DEGRADED" if self.reason else "HEALTHY"

    def note(self, tick: Tick, now_s: float) -> None:
        self._last = tick
        was, self.reason = self.reason, why_degraded(tick)
        if self.reason and not was:
            log.warning("agents_degraded", reason=self.reason, oldest_overdue_s=tick.seen.oldest_overdue_ms / 1000)
        for name in self._watchdogs.tick(conditions(tick), now_s):
            log.warning("agents_watchdog", signal=name)
        _show(tick, self.reason)
        if self._told_at is None:
            self._told_at = now_s
        elif self._summary_s > 0 and now_s - self._told_at >= self._summary_s:
            (log.warning if self.reason else log.info)(self.summary(now_s))
            self._told_at = now_s

    def summary(self, now_s: float) -> str:
        """The line that operators know, in one piece."""
        tick = self._last
        if tick is None:
            return f"Scheduler health | health={self.state}"
        most = tick.permits_most
        permits = f"{tick.permits_free}/{most} ({100 * tick.free_ratio:.1f}%)" if most > 0 else "n/a"
        watchdogs = self._watchdogs.since(now_s - max(self._summary_s, 1.0))
        return (
            f"Scheduler health | health={self.state}{f' reason={self.reason}' if self.reason else ''}"
            f" | [agents registered={tick.registered} active={tick.active}]"
            f" [backlog ready={tick.seen.mine} oldest_overdue={tick.seen.oldest_overdue_ms // 1000}s"
            f" capacity_per_cycle={tick.slots}] [permits {permits}]"
            f" [cleanup zombies_cleaned={self.zombies} orphans_cleaned={self.orphans}]"
            f" queue_depth={tick.seen.ready}{f' watchdogs={chr(44).join(watchdogs)}' if watchdogs else ''}"
        )


def _show(tick: Tick, reason: str) -> None:
    GAUGES["registered_agents"].set(tick.registered)
    GAUGES["active_agents"].set(tick.active)
    GAUGES["ready_count"].set(tick.seen.mine)
    GAUGES["oldest_overdue_seconds"].set(tick.seen.oldest_overdue_ms / 1000)
    GAUGES["degraded"].set(1 if reason else 0)
    GAUGES["capacity_per_cycle"].set(tick.slots)
    GAUGES["semaphore_available"].set(tick.permits_free)
    GAUGES["queue_depth"].set(tick.seen.ready)
    GAUGES["completion_queue_size"].set(tick.completions)

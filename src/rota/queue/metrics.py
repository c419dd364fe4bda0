"""Prometheus metrics of the queue, set only by the replica that leads its maintenance.

The deepest queues have a series each and the rest share one, so that the number of series stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import nlargest
from typing import Final

from prometheus_client import Gauge

from rota.infra.clock import Clock
from rota.infra.telemetry import metrics
from rota.queue import storage, storage_report
from rota.queue.queue import Queue
from rota.queue.storage_report import LongTransaction

QUEUES_MAX: Final = 100
OTHER_QUEUES: Final = "(other)"
SAMPLED_LANES_MAX: Final = 200
"""Lanes whose next frame is sampled; those of the lowest priority, which wait longest."""

FRAMES = metrics.gauge("rota_queue_frames", "Frames in all queues.", labels=("state",))
DEPTH = metrics.gauge("rota_queue_depth", "Waiting frames, by queue.", labels=("queue",))
OLDEST = metrics.gauge("rota_queue_oldest_age_seconds", "Waiting time of the next frame.", labels=("queue",))
BLOCKED = metrics.gauge(
    "rota_queue_prune_blocked_seconds",
    "Age of a transaction in a sealed slot, by application.",
    labels=("application",),
)
PINNED = metrics.gauge("rota_queue_pinned_seconds", "Age of the oldest transaction that keeps dead rows alive.")
DELTAS = metrics.gauge("rota_queue_pending_deltas", "Count deltas that are not folded yet.")
TRUSTED = metrics.gauge("rota_queue_counters_trusted", "1 while exact counts come from counters.")
FOLDED = metrics.gauge("rota_queue_fold_last_success", "Time of the last fold of pending deltas, Unix time.")

STATES: Final = ("waiting", "running", "deferred", "dead")
_LABELLED: Final = (FRAMES, DEPTH, OLDEST, BLOCKED)
_PLAIN: Final = (PINNED, DELTAS, TRUSTED)


class MetricsCollector:
    """Reads the counts of all queues when they have changed, and then lets ages grow."""

    def __init__(self, queue: Queue, clock: Clock) -> None:
        self._queue = queue
        self._clock = clock
        self._version: int | None = None
        self._oldest_since_s: dict[str, float] = {}

    async def collect(self) -> None:
        version = await self._queue.counts_version()
        if version is None or version != self._version:
            await self._read_counts()
            self._version = version
        now = self._clock.monotonic()
        _set_labels(OLDEST, {name: now - since_s for name, since_s in self._oldest_since_s.items()})
        state = await storage_report.storage_state(self._queue.database)
        sessions = await storage_report.long_transactions(self._queue.database)
        _set_labels(BLOCKED, blocking_ages_s(sessions, open_slot=state.generation % storage.RING_SLOTS))
        PINNED.set(max((session.age_s for session in sessions if session.pins), default=0))
        DELTAS.set(state.pending_deltas)
        TRUSTED.set(state.counters_trusted)

    async def _read_counts(self) -> None:
        counts = await self._queue.counts_exact()
        ages_s = await oldest_ages_s(self._queue, SAMPLED_LANES_MAX)
        now = self._clock.monotonic()
        oldest = nlargest(QUEUES_MAX, ages_s, key=ages_s.__getitem__)
        self._oldest_since_s = {name: now - ages_s[name] for name in oldest}
        for name in STATES:
            FRAMES.labels(name).set(sum(getattr(each, name) for each in counts.values()))
        _set_labels(DEPTH, cap_series({name: each.waiting for name, each in counts.items() if each.waiting}))


def clear_metrics() -> None:
    """Clear all gauges: another replica measures from now on."""
    for gauge in _LABELLED:
        gauge.clear()
    for gauge in _PLAIN:
        gauge.set(float("nan"))


async def oldest_ages_s(queue: Queue, lanes: int | None = None) -> dict[str, float]:
    """Waiting time of the next claimable frame of each queue; of the last `lanes` candidates, or all."""
    candidates = await queue.candidates()
    queues = {candidate.lane: candidate.queue for candidate in candidates[-(lanes or len(candidates)) :]}
    found: dict[str, float] = {}
    for lane, age_s in (await queue.head_ages_s(list(queues))).items():
        found[queues[lane]] = max(age_s, found.get(queues[lane], 0.0))
    return found


def cap_series(depths: Mapping[str, int]) -> dict[str, int]:
    """The deepest queues, and the sum of all others."""
    largest = {name: depths[name] for name in nlargest(QUEUES_MAX, depths, key=depths.__getitem__)}
    rest = sum(depths.values()) - sum(largest.values())
    return largest | {OTHER_QUEUES: rest} if rest else largest


def blocking_ages_s(sessions: Iterable[LongTransaction], open_slot: int) -> dict[str, float]:
    """By application, the age of its oldest transaction in a slot that could otherwise be emptied."""
    found: dict[str, float] = {}
    for session in sessions:
        if any(slot not in (open_slot, storage.CARRIED_SLOT) for slot in session.slots):
            found[session.application] = max(session.age_s, found.get(session.application, 0.0))
    return found


def _set_labels(gauge: Gauge, values: Mapping[str, float]) -> None:
    """Set these labels and remove all others."""
    gauge.clear()
    for label, value in values.items():
        gauge.labels(label).set(value)

"""What Prometheus is told of placement, by each replica of what it knows itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from rota.infra.telemetry import metrics
from rota.model.reasons import Reason
from rota.placement.topic_routes import Routes
from rota.placement.workers import WorkerInfo

UNKNOWN_POOL: Final = "(unknown)"

WORKERS = metrics.gauge("rota_placement_workers", "Workers known, by pool and state.", labels=("pool", "state"))
FRAMES = metrics.counter("rota_placement_frames", "Frames that a place was looked for.", labels=("outcome",))
HEARTBEATS = metrics.counter("rota_placement_heartbeats", "Heartbeats, by what became of them.", labels=("outcome",))

_PLACED = FRAMES.labels("placed")


def count_planned(placed: int, left: int, refusal: Reason | None) -> None:
    if placed:
        _PLACED.inc(placed)
    if refusal is not None:
        FRAMES.labels(refusal.value).inc(left)


def count_workers(workers: Iterable[WorkerInfo], routes: Routes) -> None:
    """A pool is what a worker says it is, so only those that are configured have a series."""
    counts = Counter(
        (worker.pool if worker.pool in routes.pools else UNKNOWN_POOL, worker_state(worker)) for worker in workers
    )
    WORKERS.clear()
    for (pool, state), number in counts.items():
        WORKERS.labels(pool, state).set(number)


def worker_state(worker: WorkerInfo) -> str:
    if not worker.confirmed:
        return "unconfirmed"
    if worker.draining:
        return "draining"
    if worker.unsettled:
        return "unsettled"
    if worker.overloaded is not None:
        return "overloaded"
    return "busy" if worker.frames else "idle"

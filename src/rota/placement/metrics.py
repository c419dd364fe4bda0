"""Prometheus metrics of placement; each replica reports its own view."""

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
FRAMES = metrics.counter(
    "rota_placement_frames", "Frames for which a placement was planned, by outcome.", labels=("outcome",)
)
HEARTBEATS = metrics.counter("rota_placement_heartbeats", "Heartbeats, by outcome.", labels=("outcome",))

_PLACED = FRAMES.labels("placed")


def count_planned(placed: int, unplaced: int, refusal: Reason | None) -> None:
    if placed:
        _PLACED.inc(placed)
    if refusal is not None:
        FRAMES.labels(refusal.value).inc(unplaced)


def count_workers(workers: Iterable[WorkerInfo], routes: Routes) -> None:
    """Workers name their pool themselves, so only configured pools get their own series."""
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

"""How much waits, and why: what Prometheus is told, in the words of `rota.model.reasons` and in no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client import Gauge

from rota.infra.telemetry import metrics
from rota.model.reasons import Reason

FRAMES = metrics.gauge(
    "rota_frames_waiting_by_reason",
    "Frames that this replica may claim, by why they were passed over last; queued: they were not.",
    labels=("reason",),
)
JOBS = metrics.gauge(
    "rota_jobs_waiting_by_reason",
    "Live jobs that wait for something other than their turn, by why; counted by the leader.",
    labels=("reason",),
)
_WAITING: Final = tuple(reason for reason in Reason if reason.tier is not None)


def tell_frames(counts: Mapping[str, int]) -> None:
    _tell(FRAMES, counts, Reason.QUEUED)


def tell_jobs(counts: Mapping[str, int]) -> None:
    _tell(JOBS, counts, Reason.POLICY_PENDING)


def _tell(gauge: Gauge, counts: Mapping[str, int], otherwise: Reason) -> None:
    """A policy may give reasons in words of its own: they are counted as `otherwise`, so that labels stay few."""
    known = {reason.value: counts.get(reason.value, 0) for reason in _WAITING}
    known[otherwise.value] += sum(n for word, n in counts.items() if word not in known)
    for word, n in known.items():
        gauge.labels(word).set(n)

"""Gauges of waiting frames and jobs, labelled with the codes of `rota.model.reasons` only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client import Gauge

from rota.infra.telemetry import metrics
from rota.model.reasons import Reason

WAITING_FRAMES = metrics.gauge(
    "rota_frames_waiting_by_reason",
    "Frames that this replica may claim, by the reason they were skipped last; queued: not skipped.",
    labels=("reason",),
)
WAITING_JOBS = metrics.gauge(
    "rota_jobs_waiting_by_reason",
    "Live jobs that wait for something other than queue order, by reason; counted by the leader.",
    labels=("reason",),
)
_WAITING_REASONS: Final = tuple(reason for reason in Reason if reason.tier is not None)


def set_waiting_frames(counts: Mapping[str, int]) -> None:
    _set_gauge(WAITING_FRAMES, counts, Reason.QUEUED)


def set_waiting_jobs(counts: Mapping[str, int]) -> None:
    _set_gauge(WAITING_JOBS, counts, Reason.POLICY_PENDING)


def _set_gauge(gauge: Gauge, counts: Mapping[str, int], otherwise: Reason) -> None:
    """Reasons outside `Reason` (policies may define their own) count as `otherwise`, which bounds the label set."""
    values = {reason.value: counts.get(reason.value, 0) for reason in _WAITING_REASONS}
    values[otherwise.value] += sum(n for reason, n in counts.items() if reason not in values)
    for reason, n in values.items():
        gauge.labels(reason).set(n)

"""The Prometheus registry of the process.

Metrics are module-level constants of the package they describe:

    LOST = metrics.counter("rota_lease_lost", "Leases that were lost during work.", labels=("kind",))
    LOST.labels("leader").inc()

Invariants, asserted when a metric is declared: names are `rota_` and lower-case words (the client appends `_total` to
counters), a name is declared once, and labels have bounded values, because every value is a series that lives as long
as the process. Durations are in seconds, with the unit in the name: `rota_dispatch_latency_seconds`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

DURATION_BUCKETS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Histogram bounds from half a millisecond (a Lua call) to ten minutes (a rollback)."""

_NAME = re.compile(r"rota(_[a-z]+)+")
# Labels with unbounded values (an attempt, a user), and labels that Prometheus sets itself (job, instance).
_UNBOUNDED_LABEL = re.compile(
    r"(.*_)?(id|ids|ip|token|url|uuid)|fence|frame|job|proc|run|worker|host|instance|email|person|submitter|user(name)?"
)

# Drops the unused second series of each counter and histogram: the time of its first count.
disable_created_metrics()  # type: ignore[no-untyped-call]
REGISTRY: Final = CollectorRegistry(auto_describe=True)
ProcessCollector(registry=REGISTRY)


def counter(name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
    _check(name, labels)
    return Counter(name, documentation, labels, registry=REGISTRY)


def gauge(name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
    _check(name, labels)
    return Gauge(name, documentation, labels, registry=REGISTRY)


def histogram(
    name: str, documentation: str, labels: Sequence[str] = (), buckets: Sequence[float] = DURATION_BUCKETS_S
) -> Histogram:
    _check(name, labels)
    return Histogram(name, documentation, labels, registry=REGISTRY, buckets=buckets)


def render() -> bytes:
    """Every metric in the text format of `CONTENT_TYPE`."""
    return generate_latest(REGISTRY)


def _check(name: str, labels: Sequence[str]) -> None:
    assert _NAME.fullmatch(name), f"{name}: a metric name is rota_ followed by lower-case words."
    assert not name.endswith(("_total", "_created")), f"{name}: the client appends this ending itself."
    for label in labels:
        assert not _UNBOUNDED_LABEL.fullmatch(label), (
            f"{name}: label {label!r} has unbounded values: use a kind, pool or reason instead."
        )

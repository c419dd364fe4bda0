"""The grant of a lease, and the lease metrics."""

from __future__ import annotations

import msgspec

from rota.infra.telemetry import metrics

LEASES_ACQUIRED = metrics.counter("rota_lease_acquired", "Leases granted to this process.", labels=("kind",))
LEASES_LOST = metrics.counter("rota_lease_lost", "Leases that were lost during work.", labels=("kind",))
FENCE_REJECTIONS = metrics.counter(
    "rota_lease_fence_rejected", "Guarded writes refused to a stale holder.", labels=("kind",)
)


class Lease(msgspec.Struct, frozen=True):
    """One grant. `kind` is the metric label, such as `job`; `name` may contain ids, such as `job:42`."""

    name: str
    kind: str
    fence: int
    holder: str
    ttl_s: float


class LeaseAcquireResult(msgspec.Struct, frozen=True):
    """The grants, and for how long others still hold the rest, in seconds."""

    granted: list[Lease]
    left_s: dict[str, float]

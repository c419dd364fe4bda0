"""Which replica feeds which worker: rendezvous hashing. Pure.

Every replica that knows the same replicas comes to the same answer without asking anybody, and when one comes or goes
only its own workers change hands. Replicas that disagree for a moment feed a worker twice or not at all; the worker
refuses what does not fit, and the next look mends the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from uuid import UUID


def owns_worker(replica: str, worker: UUID, replicas: Iterable[str]) -> bool:
    """Whether `replica` is the one of `replicas` that hands frames to `worker`."""
    return owning_replica(worker, replicas) == replica


def owning_replica(worker: UUID, replicas: Iterable[str]) -> str | None:
    """The replica with the greatest weight for this worker; None without any."""
    return max(replicas, key=lambda replica: (_weight(replica, worker), replica), default=None)


def _weight(replica: str, worker: UUID) -> bytes:
    return blake2b(replica.encode(), digest_size=8, key=worker.bytes).digest()

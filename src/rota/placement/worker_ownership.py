"""Which replica dispatches to which worker: rendezvous hashing. Pure.

Replicas with the same membership view agree without communication, and a membership change moves only the workers of
the replica that joined or left. Replicas that briefly disagree dispatch to a worker twice or not at all; the worker
rejects what does not fit, and the next round corrects the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from uuid import UUID


def owns_worker(replica: str, worker: UUID, replicas: Iterable[str]) -> bool:
    """Whether `replica` is the one of `replicas` that dispatches to `worker`."""
    return owning_replica(worker, replicas) == replica


def owning_replica(worker: UUID, replicas: Iterable[str]) -> str | None:
    """The replica with the greatest weight for this worker; None if there are none."""
    return max(replicas, key=lambda replica: (_weight(replica, worker), replica), default=None)


def _weight(replica: str, worker: UUID) -> bytes:
    return blake2b(replica.encode(), digest_size=8, key=worker.bytes).digest()

"""Which pools may run a class, and why a worker gets nothing: asked by plans and by whoever wants to know. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from rota.model.reasons import Reason
from rota.placement.plan import EXPLAINED_WORKERS_MAX, ExcludedWorker, PlacementExplanation
from rota.placement.requirements import PlacementRequirements
from rota.placement.topic_routes import Pool, PoolStatus, Routes
from rota.placement.workers import WorkerInfo


class EligiblePools(msgspec.Struct, frozen=True):
    """Pools that take frames of a class now, in order; without any, the reason and a sentence."""

    pools: tuple[Pool, ...] = ()
    reason: Reason | None = None
    sentence: str = ""


def eligible_pools(wanted: PlacementRequirements, routes: Routes) -> EligiblePools:
    mapped = routes.pools_for(wanted.topic)
    names = ", ".join(pool.name for pool in mapped)
    if not mapped:
        return _unmapped(f"No pool is mapped to the topic {wanted.topic}: map one in pools.yaml.")
    if wanted.preferred_pool is not None:
        mapped = tuple(pool for pool in mapped if pool.name == wanted.preferred_pool)
        if not mapped:
            return _unmapped(
                f"The job prefers the pool {wanted.preferred_pool}, and the topic {wanted.topic} is mapped to {names}."
            )
    providing = tuple(pool for pool in mapped if pool.satisfies(wanted.requires))
    if not providing:
        needs = ", ".join(wanted.requires)
        return _unmapped(f"The job requires {needs}, which no pool of the topic {wanted.topic} ({names}) provides.")
    active = tuple(pool for pool in providing if pool.spec.status is PoolStatus.ACTIVE)
    if not active:
        told = ", ".join(f"{pool.name} is {pool.spec.status}" for pool in providing)
        return EligiblePools((), Reason.NO_WORKERS, f"No pool takes new frames: {told}.")
    return EligiblePools(active)


def explain(
    wanted: PlacementRequirements, routes: Routes, workers: Iterable[WorkerInfo], within: Collection[Pool] | None = None
) -> PlacementExplanation:
    """Of all pools that may run it, or of those `within`."""
    found = eligible_pools(wanted, routes)
    if found.reason is not None:
        return PlacementExplanation(found.reason, found.sentence)
    pools = [pool for pool in found.pools if within is None or pool in within]
    names = {pool.name for pool in pools}
    considered = [worker for worker in workers if worker.pool in names]
    matching = [worker for worker in considered if worker.mismatch_reason(wanted) is None]
    passed = [(worker, why) for worker in considered if (why := exclusion_reason(worker, wanted)) is not None]
    room = sum(worker.fitting_frames(wanted.need) for worker in matching if exclusion_reason(worker, wanted) is None)
    reason, sentence = _summarize(", ".join(pool.name for pool in pools), len(considered), len(matching), room)
    told = tuple(
        ExcludedWorker(worker.id, worker.name, worker.pool, why) for worker, why in passed[:EXPLAINED_WORKERS_MAX]
    )
    return PlacementExplanation(reason, sentence, room, len(considered), told)


def exclusion_reason(worker: WorkerInfo, wanted: PlacementRequirements) -> str | None:
    """Why a worker of the right pool gets no frame of the class now; None when it may."""
    lacks = worker.mismatch_reason(wanted)
    if lacks is not None:
        return lacks
    if worker.unsettled:
        return "it has frames of which the books are being asked"
    if worker.overloaded is not None:
        return worker.overloaded
    return None if worker.fitting_frames(wanted.need) else _shortage(worker, wanted)


def _shortage(worker: WorkerInfo, wanted: PlacementRequirements) -> str:
    need = wanted.need
    booked = worker.booked
    if 0 < worker.slots <= worker.frames:
        return f"its {worker.slots} places are taken"
    for what, asked, free in (
        ("hundredths of a core", need.cores, worker.cores - booked.cores - worker.reserved_cores),
        ("GPUs", need.gpus, worker.gpus - booked.gpus - worker.reserved_gpus),
        ("MB of memory", need.memory_mb, worker.memory_mb - booked.memory_mb - worker.reserved_memory_mb),
    ):
        if free < asked:
            return f"{max(0, free)} {what} are free, a frame needs {asked}"
    return "it is full"


def _summarize(pools: str, considered: int, matching: int, room: int) -> tuple[Reason | None, str]:
    if room:
        return None, f"{room} more such frames fit on the workers of {pools}."
    if matching:
        return Reason.POOL_OVERLOADED, f"{matching} workers of {pools} match, and all are full or busy with other work."
    if considered:
        return Reason.NO_WORKERS, f"None of the {considered} workers of {pools} matches."
    return Reason.NO_WORKERS, f"No worker of {pools} is there: start one with `rota worker`."


def _unmapped(sentence: str) -> EligiblePools:
    return EligiblePools((), Reason.NO_POOL_MAPPING, sentence)

"""Which pools may run given requirements, and why a worker gets nothing; shared by plans and explanations. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from rota.api.explanation import ExcludedWorker
from rota.model.reasons import Reason
from rota.placement.plan import EXPLAINED_WORKERS_MAX, PlacementExplanation
from rota.placement.requirements import PlacementRequirements
from rota.placement.topic_routes import Pool, PoolStatus, Routes
from rota.placement.workers import WorkerInfo


class EligiblePools(msgspec.Struct, frozen=True):
    """Pools that accept such frames now, in order; if there are none, the reason and a sentence."""

    pools: tuple[Pool, ...] = ()
    reason: Reason | None = None
    sentence: str = ""


def eligible_pools(requirements: PlacementRequirements, routes: Routes) -> EligiblePools:
    mapped = routes.pools_for(requirements.topic)
    names = ", ".join(pool.name for pool in mapped)
    if not mapped:
        return _unmapped(f"No pool is mapped to the topic {requirements.topic}: map one in pools.yaml.")
    if requirements.preferred_pool is not None:
        mapped = tuple(pool for pool in mapped if pool.name == requirements.preferred_pool)
        if not mapped:
            return _unmapped(
                f"The job prefers the pool {requirements.preferred_pool}, but the topic {requirements.topic} is mapped"
                f" to {names}."
            )
    providing = tuple(pool for pool in mapped if pool.satisfies(requirements.requires))
    if not providing:
        needs = ", ".join(requirements.requires)
        return _unmapped(
            f"The job requires {needs}, but no pool of the topic {requirements.topic} ({names}) provides it."
        )
    active = tuple(pool for pool in providing if pool.spec.status is PoolStatus.ACTIVE)
    if not active:
        states = ", ".join(f"{pool.name} is {pool.spec.status}" for pool in providing)
        return EligiblePools((), Reason.NO_WORKERS, f"No pool accepts new frames: {states}.")
    return EligiblePools(active)


def explain(
    requirements: PlacementRequirements,
    routes: Routes,
    workers: Iterable[WorkerInfo],
    within: Collection[Pool] | None = None,
) -> PlacementExplanation:
    """Explain for all eligible pools, or only for those `within`."""
    found = eligible_pools(requirements, routes)
    if found.reason is not None:
        return PlacementExplanation(found.reason, found.sentence)
    pools = [pool for pool in found.pools if within is None or pool in within]
    names = {pool.name for pool in pools}
    considered = [worker for worker in workers if worker.pool in names]
    matching = [worker for worker in considered if worker.mismatch_reason(requirements) is None]
    with_reason = [
        (worker, why) for worker in considered if (why := exclusion_reason(worker, requirements)) is not None
    ]
    room = sum(
        worker.fitting_frames(requirements.need)
        for worker in matching
        if exclusion_reason(worker, requirements) is None
    )
    reason, sentence = _summarize(", ".join(pool.name for pool in pools), len(considered), len(matching), room)
    excluded = tuple(
        ExcludedWorker(worker.id, worker.name, worker.pool, why) for worker, why in with_reason[:EXPLAINED_WORKERS_MAX]
    )
    return PlacementExplanation(reason, sentence, room, len(considered), excluded)


def exclusion_reason(worker: WorkerInfo, requirements: PlacementRequirements) -> str | None:
    """Why a worker of an eligible pool gets no such frame now; None when it may."""
    mismatch = worker.mismatch_reason(requirements)
    if mismatch is not None:
        return mismatch
    if worker.unsettled:
        return "its frames are being looked up in PostgreSQL"
    if worker.overloaded is not None:
        return worker.overloaded
    return None if worker.fitting_frames(requirements.need) else _shortage(worker, requirements)


def _shortage(worker: WorkerInfo, requirements: PlacementRequirements) -> str:
    need = requirements.need
    booked = worker.booked
    if 0 < worker.slots <= worker.frames:
        return f"its {worker.slots} slots are in use"
    for what, needed, free in (
        ("hundredths of a core", need.cores, worker.cores - booked.cores - worker.reserved_cores),
        ("GPUs", need.gpus, worker.gpus - booked.gpus - worker.reserved_gpus),
        ("MB of memory", need.memory_mb, worker.memory_mb - booked.memory_mb - worker.reserved_memory_mb),
    ):
        if free < needed:
            return f"{max(0, free)} {what} are free, a frame needs {needed}"
    return "it is full"


def _summarize(pools: str, considered: int, matching: int, room: int) -> tuple[Reason | None, str]:
    if room:
        return None, f"{room} more such frames fit on the workers of {pools}."
    if matching:
        return Reason.POOL_OVERLOADED, f"{matching} workers of {pools} match, but all are full or busy with other work."
    if considered:
        return Reason.NO_WORKERS, f"None of the {considered} workers of {pools} matches."
    return Reason.NO_WORKERS, f"No worker of {pools} is connected: start one with `rota worker`."


def _unmapped(sentence: str) -> EligiblePools:
    return EligiblePools((), Reason.NO_POOL_MAPPING, sentence)

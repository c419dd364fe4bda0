"""Which pools may run a class, and why a worker gets nothing: asked by plans and by whoever wants to know. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from rota.model.reasons import Reason
from rota.placement.classes import PlacementClass
from rota.placement.plans import TOLD_MAX, Explanation, Passed
from rota.placement.routes import Pool, PoolStatus, Routes
from rota.placement.workers import Worker


class Eligible(msgspec.Struct, frozen=True):
    """Pools that take frames of a class now, in order; without any, the reason and a sentence."""

    pools: tuple[Pool, ...] = ()
    reason: Reason | None = None
    sentence: str = ""


def eligible(wanted: PlacementClass, routes: Routes) -> Eligible:
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
    providing = tuple(pool for pool in mapped if pool.takes(wanted.requires))
    if not providing:
        needs = ", ".join(wanted.requires)
        return _unmapped(f"The job requires {needs}, which no pool of the topic {wanted.topic} ({names}) provides.")
    active = tuple(pool for pool in providing if pool.spec.status is PoolStatus.ACTIVE)
    if not active:
        told = ", ".join(f"{pool.name} is {pool.spec.status}" for pool in providing)
        return Eligible((), Reason.NO_WORKERS, f"No pool takes new frames: {told}.")
    return Eligible(active)


def explain(
    wanted: PlacementClass, routes: Routes, workers: Iterable[Worker], within: Collection[Pool] | None = None
) -> Explanation:
    """Of all pools that may run it, or of those `within`."""
    found = eligible(wanted, routes)
    if found.reason is not None:
        return Explanation(found.reason, found.sentence)
    pools = [pool for pool in found.pools if within is None or pool in within]
    names = {pool.name for pool in pools}
    considered = [worker for worker in workers if worker.pool in names]
    matching = [worker for worker in considered if worker.lacks(wanted) is None]
    passed = [(worker, why) for worker in considered if (why := passed_over(worker, wanted)) is not None]
    room = sum(worker.room(wanted.need) for worker in matching if passed_over(worker, wanted) is None)
    reason, sentence = _verdict(", ".join(pool.name for pool in pools), len(considered), len(matching), room)
    told = tuple(Passed(worker.id, worker.name, worker.pool, why) for worker, why in passed[:TOLD_MAX])
    return Explanation(reason, sentence, room, len(considered), told)


def passed_over(worker: Worker, wanted: PlacementClass) -> str | None:
    """Why a worker of the right pool gets no frame of the class now; None when it may."""
    lacks = worker.lacks(wanted)
    if lacks is not None:
        return lacks
    if worker.unsettled:
        return "it has frames of which the books are being asked"
    if worker.overloaded is not None:
        return worker.overloaded
    return None if worker.room(wanted.need) else _full(worker, wanted)


def _full(worker: Worker, wanted: PlacementClass) -> str:
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


def _verdict(pools: str, considered: int, matching: int, room: int) -> tuple[Reason | None, str]:
    if room:
        return None, f"{room} more such frames fit on the workers of {pools}."
    if matching:
        return Reason.POOL_OVERLOADED, f"{matching} workers of {pools} match, and all are full or busy with other work."
    if considered:
        return Reason.NO_WORKERS, f"None of the {considered} workers of {pools} matches."
    return Reason.NO_WORKERS, f"No worker of {pools} is there: start one with `rota worker`."


def _unmapped(sentence: str) -> Eligible:
    return Eligible((), Reason.NO_POOL_MAPPING, sentence)

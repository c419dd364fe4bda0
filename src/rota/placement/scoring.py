"""Scores, overload, and the distribution of a batch over workers. Pure.

The lowest score is best, and each frame raises it by a *step*, so that a burst is divided. By the policy of the pool:

| policy | score | step |
|---|---|---|
| fit | part in use of the scarcest resource, and a hundredth of the load | the part that a frame takes |
| spread | frames + cpu_load / 100 + gpu_utilization / 100 | 1 |
| pack | the negative part in use of the scarcest resource | 0 |

Frames booked or reserved since the last heartbeat are included. With fit, frames without GPUs go to machines with GPUs
only when no others have room.

Only *foreign* load, which Rota did not book there, makes a worker overloaded:

| rule | foreign load | overloaded at |
|---|---|---|
| slots | listed frames without a booking, as a share of its slots | `overload_utilization` |
| CPU | measured load minus the booked share of its cores, in percent | `overload_cpu_load` |
| GPU | measured use minus the booked share of its GPUs, in percent | `overload_gpu_utilization` |

A worker that offers a number of cores may be filled completely, whatever else its machine does: the offer is what
accounting divides, and a machine that also runs the servers would otherwise stop itself by being busy. With
`routing.overload_accounted` the CPU and GPU rules apply to such workers too.

Load is measured over a heartbeat interval and includes frames that ended within it: the booked share is the peak since
the previous heartbeat. A frame that uses more cores than it booked correctly shows as foreign load. Accounted slots,
cores, GPUs and memory may be filled completely.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from itertools import accumulate
from math import ceil

import msgspec

from rota.model.settings.lifecycle import RoutingSettings


class WorkerLoad(msgspec.Struct, frozen=True):
    """Load measured by a heartbeat and the shares booked by Rota meanwhile, all in percent."""

    cpu: float = 0.0
    gpu: float = 0.0
    booked_cpu: float = 0.0
    booked_gpu: float = 0.0
    strange_places: float = 0.0
    """Share of slots taken by unbooked frames, from 0 to 1."""

    @property
    def foreign_cpu(self) -> float:
        return max(0.0, self.cpu - self.booked_cpu)

    @property
    def foreign_gpu(self) -> float:
        return max(0.0, self.gpu - self.booked_gpu)

    @property
    def score(self) -> float:
        """The contribution of the load to the score."""
        return (self.cpu + self.gpu) / 100


def overload_reason(load: WorkerLoad, limits: RoutingSettings, *, accounted: bool) -> str | None:
    """What overloads a worker, as a sentence; None when nothing does. `accounted`: it offers a number of cores."""
    if load.strange_places >= limits.overload_utilization:
        return f"{load.strange_places:.0%} of its slots are taken by frames without a booking"
    if accounted and not limits.overload_accounted:
        return None
    if load.foreign_cpu >= limits.overload_cpu_load:
        return f"other work uses {load.foreign_cpu:.0f} % of its CPU"
    if load.foreign_gpu >= limits.overload_gpu_utilization:
        return f"other work uses {load.foreign_gpu:.0f} % of its GPUs"
    return None


def spread(scores: Sequence[float], capacities: Sequence[int], n: int) -> list[int]:
    """How many of `n` frames each worker gets when each frame goes to the lowest score and raises it by one.

    `scores` ascend. Frames up to a common level are distributed in one step, the few remaining ones one by one.
    """
    assigned = [0] * len(scores)
    remaining = min(n, sum(capacities))
    alive = list(range(len(scores)))
    while remaining > len(alive):
        level = _level([scores[i] + assigned[i] for i in alive], remaining)
        for i in alive:
            more = min(capacities[i] - assigned[i], max(0, ceil(level - scores[i] - assigned[i])))
            assigned[i] += more
            remaining -= more
        unfilled = [i for i in alive if assigned[i] < capacities[i]]
        if len(unfilled) == len(alive):
            break
        alive = sorted(unfilled, key=lambda i: scores[i] + assigned[i])
    _distribute_rest(scores, capacities, assigned, alive, remaining)
    return assigned


def distribute(scores: Sequence[float], steps: Sequence[float], capacities: Sequence[int], n: int) -> list[int]:
    """How many of `n` frames each worker gets when each frame goes to the lowest score and raises it by the worker's
    step. `scores` ascend."""
    step = steps[0]
    if step and all(each == step for each in steps):
        return spread([score / step for score in scores], capacities, n)
    assigned = [0] * len(scores)
    heap = [(score, i) for i, score in enumerate(scores) if capacities[i]]
    remaining = min(n, sum(capacities))
    while remaining:
        score, i = heap[0]
        # Without a step nothing changes the order before the worker is full.
        more = 1 if steps[i] else min(remaining, capacities[i])
        assigned[i] += more
        remaining -= more
        full = assigned[i] == capacities[i]
        heapreplace(heap, (float("inf") if full else score + steps[i], i))
    return assigned


def _level(heights: Sequence[float], n: int) -> float:
    """A level that at most `n` frames reach together, regardless of capacity; `heights` ascend."""
    best = heights[0]
    for count, total in enumerate(accumulate(heights), start=1):
        level = (n + total) / count - 1
        if level < heights[count - 1]:
            # Higher ones are not included, so they get nothing in this step.
            return min(best, heights[count - 1])
        best = level
    return best


def _distribute_rest(
    scores: Sequence[float], capacities: Sequence[int], assigned: list[int], alive: list[int], remaining: int
) -> None:
    heap = sorted((scores[i] + assigned[i], i) for i in alive)
    if (
        0 < remaining <= len(heap)
        and heap[remaining - 1][0] < heap[0][0] + 1
        and all(assigned[i] < capacities[i] for _, i in heap[:remaining])
    ):
        for _, i in heap[:remaining]:
            assigned[i] += 1
        return
    while remaining > 0 and heap:
        height, i = heap[0]
        if assigned[i] == capacities[i]:
            heapreplace(heap, (float("inf"), i))
            continue
        assigned[i] += 1
        remaining -= 1
        heapreplace(heap, (height + 1, i))

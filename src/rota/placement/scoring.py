"""Which worker is the least loaded, which is overloaded, and how a batch spreads. Pure.

The lowest score is best: frames it has + cpu_load / 100 + gpu_utilization / 100. What was booked or reserved since the
last heartbeat counts as had, so that a burst spreads.

Overload is told by *foreign* load alone, that is by what Rota did not book there:

| rule | foreign load | overloaded at |
|---|---|---|
| places | frames it lists that the books do not know, as a share of its places | `overload_utilization` |
| CPU | measured load less the share of its cores that was booked, in percent | `overload_cpu_load` |
| GPU | measured use less the share of its GPUs that was booked, in percent | `overload_gpu_utilization` |

A worker that offers a number of cores may be filled to the last of them, whatever else its machine does: what it offers
is what the books divide, and a machine that runs the servers beside a worker would otherwise stop itself by being busy.
With `routing.overload_accounted` the rules for CPU and GPU hold for such workers, too.

A load is measured over a heartbeat's interval, and frames that ended within it had their part in it: the share is the
most that was booked at any time since the heartbeat before. A frame that uses more cores than it booked shows as
foreign load, and rightly so. Places, cores, GPUs and memory that are accounted for may be filled to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from itertools import accumulate
from math import ceil

import msgspec

from rota.model.settings.lifecycle import RoutingSettings


class WorkerLoad(msgspec.Struct, frozen=True):
    """What a heartbeat measured, in percent, and the shares that Rota had booked meanwhile, in percent."""

    cpu: float = 0.0
    gpu: float = 0.0
    booked_cpu: float = 0.0
    booked_gpu: float = 0.0
    strange_places: float = 0.0
    """Share of places taken by frames nobody booked, from 0 to 1."""

    @property
    def foreign_cpu(self) -> float:
        return max(0.0, self.cpu - self.booked_cpu)

    @property
    def foreign_gpu(self) -> float:
        return max(0.0, self.gpu - self.booked_gpu)

    @property
    def score(self) -> float:
        """Its part in the score."""
        return (self.cpu + self.gpu) / 100


def overload_reason(load: WorkerLoad, limits: RoutingSettings, *, accounted: bool) -> str | None:
    """What overloads a worker, in words; None when nothing does. `accounted`: it offers a number of cores."""
    if load.strange_places >= limits.overload_utilization:
        return f"{load.strange_places:.0%} of its places are taken by frames the books do not know"
    if accounted and not limits.overload_accounted:
        return None
    if load.foreign_cpu >= limits.overload_cpu_load:
        return f"other work uses {load.foreign_cpu:.0f} % of its CPU"
    if load.foreign_gpu >= limits.overload_gpu_utilization:
        return f"other work uses {load.foreign_gpu:.0f} % of its GPUs"
    return None


def spread(scores: Sequence[float], rooms: Sequence[int], n: int) -> list[int]:
    """How many of `n` frames each worker gets when each frame goes to the lowest score, and raises it by one.

    `scores` ascend. Frames that bring all to a common level are dealt at once, and the few that are left one by one.
    """
    given = [0] * len(scores)
    left = min(n, sum(rooms))
    alive = list(range(len(scores)))
    while left > len(alive):
        level = _level([scores[i] + given[i] for i in alive], left)
        for i in alive:
            more = min(rooms[i] - given[i], max(0, ceil(level - scores[i] - given[i])))
            given[i] += more
            left -= more
        unfilled = [i for i in alive if given[i] < rooms[i]]
        if len(unfilled) == len(alive):
            break
        alive = sorted(unfilled, key=lambda i: scores[i] + given[i])
    _distribute_rest(scores, rooms, given, alive, left)
    return given


def _level(heights: Sequence[float], n: int) -> float:
    """A level that at most `n` frames reach together, whatever their rooms; `heights` ascend."""
    best = heights[0]
    for count, total in enumerate(accumulate(heights), start=1):
        level = (n + total) / count - 1
        if level < heights[count - 1]:
            # What is higher was not counted, so nothing is dealt to it here.
            return min(best, heights[count - 1])
        best = level
    return best


def _distribute_rest(
    scores: Sequence[float], rooms: Sequence[int], given: list[int], alive: list[int], left: int
) -> None:
    heap = sorted((scores[i] + given[i], i) for i in alive)
    if (
        0 < left <= len(heap)
        and heap[left - 1][0] < heap[0][0] + 1
        and all(given[i] < rooms[i] for _, i in heap[:left])
    ):
        for _, i in heap[:left]:
            given[i] += 1
        return
    while left > 0 and heap:
        height, i = heap[0]
        if given[i] == rooms[i]:
            heapreplace(heap, (float("inf"), i))
            continue
        given[i] += 1
        left -= 1
        heapreplace(heap, (height + 1, i))

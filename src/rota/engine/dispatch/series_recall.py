"""Series whose frames should run elsewhere: which workers are asked to hand them back (ADR 23). No I/O.

A frame in a series waits for those before it, which were expected to be short. It must not wait while a slot is idle
that could run it, nor while a queue of a higher priority of its show finds no slot. In either case a series that has
been on its worker for `RECALL_AFTER_S` is recalled, once.

This server knows the series that it has assigned itself. Those of other servers, and those whose message is lost, are
handed back by their workers after `rota.worker.series.HAND_BACK_AFTER_S`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple
from uuid import UUID

from rota.engine.dispatch.pending_queues import PendingQueue
from rota.infra.clock import Clock
from rota.model.token_ranges import TokenRange
from rota.placement import WorkerRegistry

RECALL_AFTER_S: Final = 0.02
"""A younger series is nearly done before its frames could run elsewhere, which takes two round trips."""
FORGET_AFTER_S: Final = 0.3
"""Its worker has handed back what had not started by then."""


class AssignedSeries(NamedTuple):
    worker: UUID
    tokens: TokenRange
    since_s: float
    """When it was assigned, by the monotonic clock."""


class SeriesRecall:
    def __init__(self, registry: WorkerRegistry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._assigned: dict[PendingQueue, deque[AssignedSeries]] = defaultdict(deque)
        """By the queue that the frames came from, oldest first."""
        self._refused: set[PendingQueue] = set()
        """Queues that found no room on workers."""

    def add(self, pending: PendingQueue, worker: UUID, series: Iterable[TokenRange]) -> None:
        """These series of frames of one queue were assigned to a worker."""
        now, assigned = self._clock.monotonic(), self._assigned[pending]
        while assigned and now - assigned[0].since_s > FORGET_AFTER_S:
            assigned.popleft()
        assigned += (AssignedSeries(worker, tokens, now) for tokens in series)

    def mark_refused(self, pending: PendingQueue) -> None:
        """A queue found no room on workers."""
        if self._assigned:
            self._refused.add(pending)

    def take_due(self, room_of: Callable[[PendingQueue], int]) -> tuple[dict[UUID, list[TokenRange]], float | None]:
        """Tokens to be handed back, by worker, and after how many seconds to look again. `room_of`: how many frames of
        a queue could start now."""
        self._refused = {pending for pending in self._refused if pending.claimable > 0 and pending.reason is not None}
        due: dict[UUID, list[TokenRange]] = defaultdict(list)
        next_s: float | None = None
        for pending in list(self._assigned):
            preceding = [refused for refused in self._refused if self._precedes(refused, pending)]
            slots = sum(refused.claimable for refused in preceding) or self._idle_slots(pending, room_of)
            if slots <= 0:
                continue
            found, wait_s = self._take(pending, slots, frames_each=1 if preceding else None)
            if found:
                self._refused -= {*preceding}  # until they are refused again
            for series in found:
                due[series.worker].append(series.tokens)
            if wait_s is not None:
                next_s = wait_s if next_s is None else min(next_s, wait_s)
        return due, next_s

    def _idle_slots(self, pending: PendingQueue, room_of: Callable[[PendingQueue], int]) -> int:
        """Slots that could run frames of this queue's series; it has no others for them."""
        has_others = pending.busy or not pending.counted or pending.claimable > 0
        return 0 if has_others else room_of(pending)

    def _precedes(self, refused: PendingQueue, pending: PendingQueue) -> bool:
        """Whether it has a higher priority, and could run on the slots of this queue's series."""
        if refused.key.show != pending.key.show or refused.priority <= pending.priority:
            return False
        pools = self._registry.usable_pools(refused.key.cls)
        return not set(pools).isdisjoint(self._registry.usable_pools(pending.key.cls))

    def _take(
        self, pending: PendingQueue, slots: int, frames_each: int | None
    ) -> tuple[list[AssignedSeries], float | None]:
        """The oldest series that fill so many slots, with so many frames each or with all that have not started, and
        when the next one is old enough."""
        assigned, now, taken = self._assigned[pending], self._clock.monotonic(), list[AssignedSeries]()
        while assigned and slots > 0:
            age_s, unended = now - assigned[0].since_s, self._unended(assigned[0])
            if age_s < RECALL_AFTER_S:
                return taken, RECALL_AFTER_S - age_s
            series = assigned.popleft()
            if unended > 1 and age_s < FORGET_AFTER_S:
                taken.append(series)
                slots -= frames_each or unended - 1
        if not assigned:
            del self._assigned[pending]
        return taken, None

    def _unended(self, series: AssignedSeries) -> int:
        worker = self._registry.workers.get(series.worker)
        return worker.booked.count(*series.tokens) if worker is not None else 0

"""Series whose frames should run elsewhere: which workers are asked to hand them back (ADR 23). No I/O.

A frame in a series waits for those before it, which were expected to be short. It must not wait while a slot is idle
that could run it, nor while a queue of a higher priority of its show finds no slot. In either case a series that has
been on its worker for `RECALL_AFTER_S` is recalled, once. An idle slot is no reason if the job of the series has
reached its own cap: its frames would be refused there.

This server knows the series that it has assigned itself. Those of other servers, and those whose message is lost, are
handed back by their workers after `rota.worker.series.HAND_BACK_AFTER_S`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from rota.engine.dispatch.pending_queues import PendingQueue
from rota.infra.clock import Clock
from rota.model.ids import ShowId
from rota.model.token_ranges import TokenRange
from rota.placement import WorkerRegistry

RECALL_AFTER_S: Final = 0.02
"""A younger series is nearly done before its frames could run elsewhere, which takes two round trips."""
FORGET_AFTER_S: Final = 0.3
"""Its worker has handed back what had not started by then."""


class AssignedSeries(NamedTuple):
    worker: UUID
    tokens: TokenRange
    capped: bool
    """Its job has reached its own cap."""
    since_s: float
    """When it was assigned, by the monotonic clock."""


class SeriesRecall:
    def __init__(self, registry: WorkerRegistry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._assigned: dict[PendingQueue, deque[AssignedSeries]] = defaultdict(deque)
        """By the queue that the frames came from, oldest first."""
        self._additions: deque[tuple[float, PendingQueue]] = deque()
        """When series of a queue were added, oldest first."""
        self._refused: set[PendingQueue] = set()
        """Queues that found no room on workers."""

    def add(self, pending: PendingQueue, worker: UUID, series: Iterable[TokenRange], *, capped: bool = False) -> None:
        """These series of frames of one queue were assigned to a worker."""
        now = self._clock.monotonic()
        self._forget(now)
        self._assigned[pending] += (AssignedSeries(worker, tokens, capped, now) for tokens in series)
        self._additions.append((now, pending))

    def mark_refused(self, pending: PendingQueue) -> None:
        """A queue found no room on workers."""
        if self._assigned:
            self._refused.add(pending)

    def take_due(self, room_of: Callable[[PendingQueue], int]) -> tuple[dict[UUID, list[TokenRange]], float | None]:
        """Tokens to be handed back, by worker, and after how many seconds to look again. `room_of`: how many frames of
        a queue could start now."""
        self._forget(self._clock.monotonic())
        self._refused = {pending for pending in self._refused if pending.claimable > 0 and pending.reason is not None}
        by_show: dict[ShowId, list[PendingQueue]] = defaultdict(list)
        for refused in sorted(self._refused, key=lambda each: -each.priority):
            by_show[refused.key.show].append(refused)
        due: dict[UUID, list[TokenRange]] = defaultdict(list)
        next_s: float | None = None
        for pending in list(self._assigned):
            preceding = self._preceding(by_show.get(pending.key.show, ()), pending)
            slots = sum(refused.claimable for refused in preceding) or self._idle_slots(pending, room_of)
            if slots <= 0:
                continue
            found, wait_s = self._take(pending, slots, for_priority=bool(preceding))
            if found:
                self._refused -= {*preceding}  # until they are refused again
            for series in found:
                due[series.worker].append(series.tokens)
            if wait_s is not None:
                next_s = wait_s if next_s is None else min(next_s, wait_s)
        return due, next_s

    def _forget(self, now_s: float) -> None:
        """Drop series that their workers have handed back."""
        while self._additions and now_s - self._additions[0][0] > FORGET_AFTER_S:
            since_s, pending = self._additions.popleft()
            assigned = self._assigned.get(pending)
            while assigned and assigned[0].since_s <= since_s:
                assigned.popleft()
            if not assigned:
                self._assigned.pop(pending, None)

    def _idle_slots(self, pending: PendingQueue, room_of: Callable[[PendingQueue], int]) -> int:
        """Slots that could run frames of this queue's series; it has no others for them."""
        has_others = pending.busy or not pending.counted or pending.claimable > 0
        return 0 if has_others else room_of(pending)

    def _preceding(self, refused: Sequence[PendingQueue], pending: PendingQueue) -> list[PendingQueue]:
        """Those with a higher priority that could run on the slots of this queue's series, highest first: as many as
        these slots serve."""
        found: list[PendingQueue] = []
        slots = len(self._assigned[pending])
        for each in refused:
            if each.priority <= pending.priority or slots <= 0:
                break
            pools = self._registry.usable_pools(each.key.cls)
            if not set(pools).isdisjoint(self._registry.usable_pools(pending.key.cls)):
                found.append(each)
                slots -= each.claimable
        return found

    def _take(
        self, pending: PendingQueue, slots: int, *, for_priority: bool
    ) -> tuple[list[AssignedSeries], float | None]:
        """The oldest series that fill so many slots, and when the next one is old enough. For a priority each gives one
        slot, for idle slots as many as it has unstarted frames."""
        assigned, now, wait_s = self._assigned[pending], self._clock.monotonic(), None
        taken, kept = list[AssignedSeries](), deque[AssignedSeries]()
        while assigned and slots > 0:
            age_s, unended = now - assigned[0].since_s, self._unended(assigned[0])
            if age_s < RECALL_AFTER_S:
                wait_s = RECALL_AFTER_S - age_s
                break
            series = assigned.popleft()
            if series.capped and not for_priority:
                kept.append(series)
            elif unended > 1:
                taken.append(series)
                slots -= 1 if for_priority else unended - 1
        assigned.extendleft(reversed(kept))
        if not assigned:
            del self._assigned[pending]
        return taken, wait_s

    def _unended(self, series: AssignedSeries) -> int:
        worker = self._registry.workers.get(series.worker)
        return worker.booked.count(*series.tokens) if worker is not None else 0

"""A dispatcher without servers: real turns, with claims and bookings in memory."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple

from rota.accounting.service import AccountingService
from rota.engine.backends import Backends
from rota.engine.completion.canceller import JobCanceller
from rota.engine.completion.finisher import Finisher
from rota.engine.completion.publisher import CompletionPublisher
from rota.engine.dispatch.dispatcher import Dispatcher
from rota.engine.dispatch.pending_queues import QueueKey
from rota.engine.dispatch.rounds import Round, RoundPart
from rota.engine.dispatch.state_writer import JobStateWriter
from rota.engine.events.sink import DiscardedEvents
from rota.infra.blob_store import BlobStore
from rota.infra.lease import Leases
from rota.infra.nats import Bus, NatsTarget
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.redis import RedisTarget, connect
from rota.placement import WorkerRegistry, WorkerShare
from rota.queue import Queue

FRAMES_MAX: Final = 8
"""With which a lane is filled."""
NOWHERE: Final = "127.0.0.1:1"
"""The address of servers that nothing connects to."""


class VirtualClock:
    """Advanced by the benchmark alone."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def now_ms(self) -> int:
        return int(self.now_s * 1000)

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, _seconds: float) -> None:
        await asyncio.sleep(0)


class ConnectedBus(Bus):
    """Without a connection a dispatcher takes no turns, so this one reports a connection that it does not have."""

    @property
    def connected(self) -> bool:
        return True


class Turn(NamedTuple):
    """How long it took. The wall clock also counts other processes that ran meanwhile on the same core."""

    wall_ms: float
    cpu_ms: float


class RunningFrame(NamedTuple):
    key: QueueKey
    share: WorkerShare
    token: int


@dataclass(slots=True)
class Lane:
    """The frames of a queue at one priority; `since_s` is when the first of them came."""

    number: int
    frames: int
    since_s: float


class InMemoryDispatcher(Dispatcher):
    """Only rounds and the reading of shares are replaced. Claims and bookings succeed; a round takes two passes of the
    event loop. A lane that is empty is filled and notified again, so the number of pending queues does not change."""

    def __init__(self, registry: WorkerRegistry, clock: VirtualClock) -> None:
        database = Database(PostgresTarget(url=f"postgresql://{NOWHERE}/none"))
        redis = connect(RedisTarget(url=f"redis://{NOWHERE}/0"))
        bus, queue, events = ConnectedBus(NatsTarget(url=f"nats://{NOWHERE}")), Queue(database), DiscardedEvents()
        accounting = AccountingService(database, None, clock=clock)
        backends = Backends(database, redis, bus, accounting, queue, BlobStore(database), Leases(database))
        completions = CompletionPublisher(database, accounting, events)
        finisher = Finisher(database, queue, completions, JobCanceller(database, bus, queue, completions))
        state_writer = JobStateWriter(database, events, clock)
        super().__init__(backends, registry, finisher, state_writer, lambda: True, clock=clock)
        self.turns: list[Turn] = []
        self.lanes: dict[tuple[str, int], Lane] = {}
        self.running: list[RunningFrame] = []
        self._tokens = count(1)
        self._random = random.Random(1)

    def add_lane(self, queue: str, priority: int, age_s: float) -> None:
        since_s = self.clock.monotonic() - age_s
        self.lanes[queue, priority] = Lane(len(self.lanes), self._random.randint(1, FRAMES_MAX), since_s)

    def _take_turn(self, tasks: asyncio.TaskGroup) -> None:
        began_s, cpu_began_s = time.perf_counter(), time.thread_time()
        super()._take_turn(tasks)
        cpu_s, wall_s = time.thread_time() - cpu_began_s, time.perf_counter() - began_s
        self.turns.append(Turn(wall_s * 1000, cpu_s * 1000))

    async def _refresh_shares(self) -> None:
        """The benchmark sets them."""

    async def _run_round(self, planned: Round) -> None:
        planned.begun = True
        await asyncio.sleep(0)
        claimed = {part: self._claim_frames(part) for part in planned.parts}
        await asyncio.sleep(0)
        for part, frames in claimed.items():
            self._book_frames(part, frames)
        self._release(planned)

    def _claim_frames(self, part: RoundPart) -> int:
        pending, most = part.pending, part.plan.planned
        lane = self.lanes[pending.key.queue, pending.priority]
        frames = min(most, lane.frames)
        lane.frames -= frames
        pending.busy = False
        self.pending_queues.frames_claimed(pending, most, frames, part.arrivals, ended=True)
        part.plan = self.registry.spread_again(pending.key.cls, part.plan, part.reservation, frames)
        self._shrink_share(part, frames)
        if not lane.frames:
            lane.frames, lane.since_s = self._random.randint(1, FRAMES_MAX), self.clock.monotonic()
            self.pending_queues.mark_notified(pending.key.queue)
        return frames

    def _book_frames(self, part: RoundPart, frames: int) -> None:
        pending, left = part.pending, frames
        asked = self.pending_queues.moment(pending)
        self._shrink_share(part, 0)
        for share in part.plan.portions:
            n = min(share.n, left)
            left -= n
            if n:
                tokens = [next(self._tokens) for _ in range(n)]
                self.registry.record_allocations(share.worker, [(tokens[0], n)], pending.key.cls.need)
                self.pending_queues.frames_booked(pending, share.pool_id, n, asked)
                self.running += [RunningFrame(pending.key, share, token) for token in tokens]
        self.registry.unreserve(part.reservation, allocated=frames)

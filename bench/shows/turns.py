"""How long a dispatch turn keeps the event loop while many queues wait, the farm is full and frames end.

A real dispatcher with its order, planner and registry takes the turns, and `Dispatcher._take_turn` alone is timed. Time
is virtual: `ENDS` frames end every `STEP_S`, so polls, back-offs and ageing come as often as on a farm of that rate.

Frames need one, two or four cores. Workers without free cores have free slots then, so the pool is never full by its
slots, and queues are planned one by one. Each show has the queues of several folders, classes and priorities.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from uuid import uuid4

from bench.report import Figure
from bench.shows.in_memory import InMemoryDispatcher, RunningFrame, Turn, VirtualClock
from rota.accounting.ledger import NIL_UUID, BookingGroup, Charge
from rota.engine.dispatch.pending_queues import QueueKey
from rota.engine.dispatch.pending_reader import POLL_INTERVAL_S
from rota.model.ids import DeptId, FolderId, JobId, LayerId, PoolId, ShowId
from rota.model.protocol import Heartbeat
from rota.model.quota import Usage
from rota.model.units import Centicores
from rota.placement import Pool, PoolSpec, Routes, WorkerRegistry, requirements_of
from rota.queue import ClaimableLane

TURNS: Final = 1000
QUICK_TURNS: Final = 300
TURN_MS_MAX: Final = 10.0
SHOWS: Final = 10
FOLDERS: Final = 10
"""In each show."""
CLASSES: Final = 10
PRIORITIES: Final = (1, 3, 5, 7, 9)
CORES: Final = (100, 200, 400)
"""Of a frame, by class, in hundredths."""
WORKERS: Final = 100
SLOTS: Final = 16
"""Of a worker, and as many cores."""
WORKER_MEMORY_MB: Final = 1_000_000
AGE_MAX_S: Final = 600.0
STEP_S: Final = 0.01
ENDS: Final = 4
SETTLE_STEPS: Final = 20
DAY_S: Final = 86_400.0
DAY_STEP_S: Final = 300.0
POOL: Final = Pool(PoolId(uuid4()), PoolSpec(name="farm"))


async def measure(quick: bool) -> list[Figure]:
    with _startup_objects_frozen():
        farm = FullFarm(folders=FOLDERS)
        turns = await farm.take_turns(QUICK_TURNS if quick else TURNS)
        old = await farm.take_turns(QUICK_TURNS, after_s=DAY_S)
    assert farm.pending == farm.queues, "every lane that was emptied has been filled again"
    slowest = Figure(
        f"turn_ms_{farm.queues}_queues_after_a_day",
        [max(turn.wall_ms for turn in old)],
        higher_is_better=False,
        note=f"the longest of {len(old)}, when the server is a day old",
    )
    return [*figures(turns, farm.queues), slowest]


def figures(turns: Sequence[Turn], queues: int) -> list[Figure]:
    wall_ms = sorted(turn.wall_ms for turn in turns)
    p99_ms = wall_ms[int(0.99 * (len(wall_ms) - 1))]
    note = f"longest of {len(turns)} turns; {WORKERS} workers, {SHOWS} shows, {len(PRIORITIES)} priorities"
    name = f"_ms_{queues}_queues"
    return [
        Figure(f"turn{name}", [wall_ms[-1]], bar=TURN_MS_MAX, higher_is_better=False, note=note),
        Figure(f"turn_p99{name}", [p99_ms], note="the same, 99 % of them"),
        Figure(f"turn_p50{name}", wall_ms, note="the same, half of them"),
        Figure(f"turn_cpu{name}", [max(turn.cpu_ms for turn in turns)], note="the most CPU time of a turn"),
    ]


@contextmanager
def _startup_objects_frozen() -> Iterator[None]:
    """As in a server, where the garbage collector ignores objects loaded at startup."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class FullFarm:
    """Workers without room, the frames that run on them, and queues that wait."""

    def __init__(self, folders: int) -> None:
        self._clock = VirtualClock()
        self._registry = _registry(self._clock)
        self._dispatcher = InMemoryDispatcher(self._registry, self._clock)
        self._random = random.Random(2)
        self._shows = [ShowId(uuid4()) for _ in range(SHOWS)]
        self._keys = {key.queue: key for show in self._shows for key in _queue_keys(show, folders)}
        self._polled_at_s = float("-inf")
        for queue in self._keys:
            for priority in PRIORITIES:
                self._dispatcher.add_lane(queue, priority, self._random.uniform(0.0, AGE_MAX_S))

    @property
    def queues(self) -> int:
        """A queue counts once for each priority, as in `PendingQueues`."""
        return len(self._dispatcher.lanes)

    @property
    def pending(self) -> int:
        """Queues with waiting frames."""
        return sum(entry.claimable > 0 for entry in self._dispatcher.pending_queues.entries.values())

    @property
    def cores_used(self) -> int:
        """By running frames, in hundredths."""
        return sum(frame.key.cls.cores for frame in self._dispatcher.running)

    async def take_turns(self, turns: int, *, after_s: float = 0.0) -> list[Turn]:
        """So many turns, after the farm has become full and so much time has passed."""
        async with asyncio.TaskGroup() as tasks:
            await self._fill(tasks)
            for _ in range(int(after_s / DAY_STEP_S)):
                self._clock.now_s += DAY_STEP_S
                await self._step(tasks, ENDS)
            for _ in range(SETTLE_STEPS):
                await self._step(tasks, ENDS)
            self._dispatcher.turns.clear()
            while len(self._dispatcher.turns) < turns:
                await self._step(tasks, ENDS)
        return list(self._dispatcher.turns)

    async def _fill(self, tasks: asyncio.TaskGroup) -> None:
        before = -1
        while before < len(self._dispatcher.running):
            before = len(self._dispatcher.running)
            for _ in range(SETTLE_STEPS):
                await self._step(tasks, ends=0)

    async def _step(self, tasks: asyncio.TaskGroup, ends: int) -> None:
        self._clock.now_s += STEP_S
        self._end_frames(ends)
        if self._clock.now_s - self._polled_at_s >= POLL_INTERVAL_S:
            self._polled_at_s = self._clock.now_s
            self._set_counts()
            self._set_shares()
        await self._dispatcher._start_rounds(tasks)
        await asyncio.sleep(0)

    def _set_counts(self) -> None:
        """As a poll does."""
        queues, lanes = self._dispatcher.pending_queues, self._dispatcher.lanes
        found = [
            ClaimableLane(lane.number, queue, priority, lane.frames, 0) for (queue, priority), lane in lanes.items()
        ]
        ages_s = {lane.number: self._clock.now_s - lane.since_s for lane in lanes.values()}
        queues.set_counts(found, self._keys, ages_s, queues.arrivals(None), None)

    def _set_shares(self) -> None:
        used: Counter[ShowId] = Counter()
        for frame in self._dispatcher.running:
            used[frame.key.show] += frame.key.cls.cores
        size = 100 * WORKERS * SLOTS // SHOWS
        self._dispatcher.pending_queues.set_shares({(show, POOL.id): (size, used[show]) for show in self._shows})

    def _end_frames(self, n: int) -> None:
        running = self._dispatcher.running
        for _ in range(n):
            at = self._random.randrange(len(running))
            running[at], running[-1] = running[-1], running[at]
            self._end_frame(running.pop())

    def _end_frame(self, frame: RunningFrame) -> None:
        """As `Engine.release_capacity` does."""
        key, share = frame.key, frame.share
        cores = Centicores(key.cls.cores)
        charge = Charge(share.pool_id, key.folder, JobId(NIL_UUID), LayerId(NIL_UUID), key.dept, cores)
        booking = BookingGroup(charge, share.worker, [frame.token])
        self._registry.release_allocations(share.worker, [(frame.token, 1)])
        self._dispatcher.frames_released(key.show, {NIL_UUID: 1}, {share.pool_id: Usage(cores)}, [booking])


def _registry(clock: VirtualClock) -> WorkerRegistry:
    registry = WorkerRegistry(clock, ttl_s=float("inf"), seed=1)
    registry.set_routes(Routes({"*": (POOL.name,)}, {POOL.name: POOL}))
    for number in range(WORKERS):
        registry.record_heartbeat(
            Heartbeat(
                worker=uuid4(),
                name=f"worker{number}",
                pool=POOL.name,
                number=1,
                slots=SLOTS,
                cores=100 * SLOTS,
                memory_mb=WORKER_MEMORY_MB,
            )
        )
    return registry


def _queue_keys(show: ShowId, folders: int) -> Iterator[QueueKey]:
    """A queue for each folder and class."""
    classes = [
        requirements_of("render", cores=CORES[number % len(CORES)], memory_mb=number + 1) for number in range(CLASSES)
    ]
    dept = DeptId(uuid4())
    for _ in range(folders):
        folder = FolderId(uuid4())
        for cls in classes:
            yield QueueKey(f"{folder}/{cls.memory_mb}", show, folder, dept, cls)

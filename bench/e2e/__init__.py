"""The whole pipeline, from a submission to its last end, against its peers. See README.md beside this file.

One PostgreSQL, one Valkey and one NATS for everybody, all durable as they come; contenders take turns, so that a noisy
minute hits everybody alike, and nothing of one is running while another is measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from bench import peers
from bench.e2e import deployment, kinds, lonely, pickup, slots
from bench.e2e import depth as e2e_depth
from bench.e2e import memory as e2e_memory
from bench.e2e.deployment import Farm, Lap, farm
from bench.e2e.race import Peers
from bench.e2e.setup import Ground, one_ground
from bench.peer_laps import BY_POSTGRES
from bench.report import Figure, Report

MADE: Final = "made_e2e"
COMMITS_BAR: Final = 0.03
WAL_BAR: Final = 1300.0
CPU_BARS_US: Final = {"frame": 30.0, "job": 110.0}
SETTLE_S: Final = 1.0
"""What is written after the last end, such as the states of jobs, is part of the WAL of a lap."""
PEERS: Final = tuple(BY_POSTGRES)
COMPONENTS: Final = ("postgres", "redis", "nats", "server", "worker", "submitter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    laps: int
    frames: int
    jobs: int
    entries: dict[str, int]
    """Of each peer; slower ones get fewer, and a short backlog is the easier one."""
    pickup_rounds: int
    pickup_s: int
    lonely_rounds: int
    lonely_s: int
    kinds_rounds: int
    kinds_jobs: int
    slots_rounds: int
    depth_rounds: int
    depth_frames: int
    depth: int
    memory_s: float


FULL: Final = Sizes(
    laps=7,
    frames=100_000,
    jobs=30_000,
    entries={"pgqueuer": 20_000, "awa": 20_000, "procrastinate": 1_000},
    pickup_rounds=5,
    pickup_s=10,
    lonely_rounds=3,
    lonely_s=20,
    kinds_rounds=3,
    kinds_jobs=20_000,
    slots_rounds=3,
    depth_rounds=3,
    depth_frames=60_000,
    depth=1_000_000,
    memory_s=0.0,
)
QUICK: Final = Sizes(
    laps=2,
    frames=50_000,
    jobs=10_000,
    entries={"pgqueuer": 8_000, "awa": 6_000, "procrastinate": 300},
    pickup_rounds=2,
    pickup_s=5,
    lonely_rounds=1,
    lonely_s=5,
    kinds_rounds=1,
    kinds_jobs=8_000,
    slots_rounds=1,
    depth_rounds=1,
    depth_frames=30_000,
    depth=50_000,
    memory_s=30.0,
)


@dataclass(slots=True)
class Own:
    """Rota's own laps."""

    frames: list[Lap] = field(default_factory=list)
    jobs: list[Lap] = field(default_factory=list)
    commits_per_frame: list[float] = field(default_factory=list)
    commits_per_job: list[float] = field(default_factory=list)
    wal_per_frame: list[float] = field(default_factory=list)
    wal_per_job: list[float] = field(default_factory=list)

    def figures(self) -> Iterator[Figure]:
        note = f"a layer, five caps; {deployment.SLOTS:,} slots, one server and one worker process"
        yield Figure("rota_frames_per_s", [lap.per_s for lap in self.frames], note=note)
        note = "single jobs, a payload each, 1,000 a commit by 4 producers"
        yield Figure("rota_jobs_per_s", [lap.per_s for lap in self.jobs], note=note)
        note = "with all that a start, a warm-up and a stop commit"
        yield Figure("commits_per_frame", self.commits_per_frame, bar=COMMITS_BAR, note=note)
        yield Figure("commits_per_job", self.commits_per_job, note=note)
        note = "written ahead by PostgreSQL, from the submission to the end and a second more"
        yield Figure("wal_bytes_per_frame", self.wal_per_frame, note=note)
        yield Figure("wal_bytes_per_job", self.wal_per_job, bar=WAL_BAR, note=note)
        yield from _cpu("frame", self.frames)
        yield from _cpu("job", self.jobs)


def setup() -> None:
    peers.install()


def run(quick: bool, memory: bool = False) -> Report:
    """With `memory`: that alone, at its full length."""
    sizes = QUICK if quick else FULL
    return asyncio.run(_memory() if memory else _run(sizes))


async def _run(sizes: Sizes) -> Report:
    own = Own()
    async with one_ground() as ground:
        await deployment.prepare(ground, MADE)
        others = Peers(ground)
        await others.prepare(sizes.entries)
        for _ in range(sizes.laps):
            await _own_laps(ground, sizes, own)
            await others.round(sizes.entries)
        pickups = await pickup.measure(ground, MADE, sizes.pickup_rounds, sizes.pickup_s)
        alone = await lonely.measure(ground, MADE, sizes.lonely_rounds, sizes.lonely_s)
        by_kind = await kinds.measure(ground, MADE, sizes.kinds_rounds, sizes.kinds_jobs)
        by_slots = await slots.measure(ground, MADE, sizes.slots_rounds)
        deep = await e2e_depth.measure(ground, MADE, sizes.depth_rounds, sizes.depth_frames, sizes.depth)
        resident = await e2e_memory.measure(ground, MADE, sizes.memory_s) if sizes.memory_s else ()
    raced = others.figures([lap.per_s for lap in own.frames], [lap.per_s for lap in own.jobs])
    return Report([*raced, *own.figures(), *by_kind, *by_slots, *pickups.figures(), *alone, *deep, *resident])


async def _memory() -> Report:
    async with one_ground() as ground:
        await deployment.prepare(ground, MADE)
        return Report([*await e2e_memory.measure(ground, MADE, e2e_memory.FULL_S)])


async def _own_laps(ground: Ground, sizes: Sizes, own: Own) -> None:
    """Frames and jobs each on a farm that has done nothing else, so that commits can be told apart."""
    lap, commits, wal_bytes = await _own_lap(ground, lambda running: running.frames(sizes.frames))
    own.frames.append(lap)
    own.commits_per_frame.append(commits)
    own.wal_per_frame.append(wal_bytes)
    lap, commits, wal_bytes = await _own_lap(ground, lambda running: running.jobs(sizes.jobs))
    own.jobs.append(lap)
    own.commits_per_job.append(commits)
    own.wal_per_job.append(wal_bytes)


async def _own_lap(ground: Ground, work: Callable[[Farm], Awaitable[Lap]]) -> tuple[Lap, float, float]:
    """And commits and bytes of WAL per frame of it. Sessions count commits when they end, so those of the farm's whole
    life are counted; WAL is that of the lap."""
    await ground.postgres.create("lap", MADE)
    try:
        async with farm(ground, "lap") as running:
            before = await ground.postgres.wal_bytes()
            lap = await work(running)
            await asyncio.sleep(SETTLE_S)
            wal_bytes = (await ground.postgres.wal_bytes() - before) / lap.n
        commits = await ground.commits("lap") - running.polls
    finally:
        await ground.postgres.drop("lap")
    return lap, commits / running.submitted, wal_bytes


def _cpu(what: str, laps: list[Lap]) -> Iterator[Figure]:
    yield Figure(f"cpu_us_per_{what}", [lap.cpu_us() for lap in laps], bar=CPU_BARS_US[what], note="all processes")
    for component in COMPONENTS:
        yield Figure(f"cpu_us_per_{what}_{component}", [lap.cpu_us(component) for lap in laps])

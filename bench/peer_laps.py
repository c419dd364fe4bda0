"""Laps of a peer that runs jobs: whole jobs, enqueued and worked off, each peer in the shape that suits it best.

A lap is *overlapped* (its workers are up and warm, then jobs are enqueued while they are worked off; from the first
enqueue to the last body) or *filled first* (all jobs are enqueued, then worked off; the two times together, without the
idle seconds between them). Which one, and in how many processes, is chosen by short laps. The clock of a peer stops
with its last body; then its own records must say that nothing is left, and its marks that every job ran once.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bench import peers
from bench.contender_process import Contender, Stopped, made, started
from bench.contenders.marks import Marks
from bench.server import Server

BY_POSTGRES: Final = {
    "pgqueuer": "batch_size 1024, pooled asyncpg, uvloop, logged tables",
    "awa": "enqueue_many_copy; claim_batch_size 256, 1 claimer, uvloop",
    "procrastinate": "psycopg binary, uvloop, delete_jobs always",
}
BY_REDIS: Final = {
    "dramatiq": "prefetch 64, enqueued one by one",
    "celery": "prefork, prefetch 64, results ignored; one by one",
}
DATABASES: Final = {"dramatiq": 1, "celery": 2}
"""Each of them has a database of Redis for itself."""
DATABASE: Final = "lap_of_peer"
LAP_TIMEOUT_S: Final = 170.0
SETTLE_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.05
WARM_EACH: Final = 8
"""Jobs for each body that may run at once, before an overlapped lap."""
WARM_LEAST: Final = 100
WARM_MOST: Final = 1_000


@dataclass(frozen=True, slots=True)
class Shape:
    """How a peer's workers run: so many processes, in each so many bodies at once."""

    processes: int
    each: int
    filled_first: bool = False

    @property
    def at_once(self) -> int:
        return self.processes * self.each

    def __str__(self) -> str:
        order = "filled first" if self.filled_first else "enqueued while working"
        return f"{self.processes} x {self.each} at once, {order}"


@dataclass(frozen=True, slots=True)
class Load:
    kind: str
    n: int


@dataclass(frozen=True, slots=True)
class PeerLap:
    n: int
    fill_s: float
    seconds: float
    """Of the whole lap, enqueueing included."""
    drain_s: float | None = None
    """From the first body to the last, of a lap that was filled first."""
    wal_bytes: float = 0.0
    """Per job, from its enqueueing to its end, of a peer by PostgreSQL."""

    @property
    def per_s(self) -> float:
        return self.n / self.seconds

    @property
    def enqueue_per_s(self) -> float:
        return self.n / self.fill_s

    @property
    def drain_per_s(self) -> float | None:
        return self.n / self.drain_s if self.drain_s else None


def shapes(peer: str, at_once: int) -> list[Shape]:
    """Divisions of a concurrency into processes that may be a peer's best."""
    if peer == "celery":
        return [Shape(at_once, 1)]
    most = 4 if peer == "dramatiq" else 2
    return [Shape(processes, at_once // processes) for processes in (1, 2, most) if at_once % processes == 0][
        : most.bit_length()
    ]


class PeerRace:
    """Peers that take turns, each on fresh copies of a database of its own.

    A peer is absent when it is not installed, or cannot make its schema. One that fails in a lap takes no further part
    in laps of that kind of jobs.
    """

    def __init__(self, server: Server, names: Sequence[str], redis_url: Callable[[int], str] | None = None) -> None:
        self.names = names
        self.absent: dict[str, str] = {}
        self.failed: dict[tuple[str, str], str] = {}
        """Why, by name and kind of jobs."""
        self.server = server
        self._redis_url = redis_url

    async def prepare(self) -> None:
        for name in self.names:
            missing = peers.absence(name)
            if missing is None and name in BY_POSTGRES:
                missing = await self._make(name)
            if missing:
                self.absent[name] = missing
                print(f"{name} takes no part: {missing}")

    def runners(self, kind: str) -> list[str]:
        return [name for name in self.names if not self.why_not(name, kind)]

    def why_not(self, name: str, kind: str) -> str:
        """Why there are no figures of a peer for a kind of jobs; empty if there are."""
        return self.absent.get(name) or self.failed.get((name, kind), "")

    async def lap(self, name: str, load: Load, shape: Shape) -> PeerLap | None:
        """None if it fails."""
        try:
            return await self._lap(name, load, shape)
        except Stopped as stopped:
            self._leave_out(name, load.kind, stopped)
            return None

    async def choose(
        self, name: str, load: Load, candidates: Sequence[Shape], *, both_orders: bool
    ) -> tuple[Shape, float] | None:
        """Its best shape by short laps, and the rate in it; None if it fails in one."""
        try:
            return await best_shape(candidates, lambda shape: self._lap(name, load, shape), both_orders=both_orders)
        except Stopped as stopped:
            self._leave_out(name, load.kind, stopped)
            return None

    async def _lap(self, name: str, load: Load, shape: Shape) -> PeerLap:
        async with started(name) as contender:
            if name in DATABASES:
                assert self._redis_url
                url = self._redis_url(DATABASES[name])
                await contender.ask("prepare", url)
                return await run_lap(self.server, contender, url, load, shape)
            url = await self.server.create(DATABASE, template=made(name))
            try:
                before = await self.server.wal_bytes()
                lap = await run_lap(self.server, contender, url, load, shape)
                written = await self.server.wal_bytes() - before
                return replace(lap, wal_bytes=written / (load.n + warm_jobs(shape)))
            finally:
                await self.server.drop(DATABASE)

    async def _make(self, name: str) -> str | None:
        """Why it cannot take part, or None."""
        try:
            async with started(name) as contender:
                await contender.ask("prepare", await self.server.create(made(name)))
        except Stopped as stopped:
            return str(stopped)
        return None

    def _leave_out(self, name: str, kind: str, why: Stopped) -> None:
        self.failed[name, kind] = str(why)
        print(f"{name} takes no further part in {kind} jobs: {why}")


def warm_jobs(shape: Shape) -> int:
    """Jobs that run before the clock of a lap starts."""
    return 0 if shape.filled_first else min(WARM_MOST, max(WARM_LEAST, WARM_EACH * shape.at_once))


async def best_shape(
    candidates: Sequence[Shape], lap: Callable[[Shape], Awaitable[PeerLap]], *, both_orders: bool
) -> tuple[Shape, float]:
    """The fastest of short laps, and its rate; with `both_orders` the winner is also tried filled first."""
    rates = {shape: (await lap(shape)).per_s for shape in dict.fromkeys(candidates)}
    best = max(rates, key=rates.__getitem__)
    if both_orders:
        other = replace(best, filled_first=not best.filled_first)
        rates[other] = (await lap(other)).per_s
        best = max(best, other, key=rates.__getitem__)
    return best, rates[best]


async def run_lap(server: Server, contender: Contender, url: str, load: Load, shape: Shape) -> PeerLap:
    """On an empty backlog."""
    warm = warm_jobs(shape)
    with tempfile.TemporaryDirectory(prefix="rota-bench-marks-") as folder:
        path = Path(folder, "marks")
        lap = _Lap(contender, url, load, shape, path, Marks.make(path, warm + load.n))
        await server.checkpoint()
        return await (lap.filled_first(server) if shape.filled_first else lap.overlapped(warm))


class _Lap:
    def __init__(self, contender: Contender, url: str, load: Load, shape: Shape, path: Path, marks: Marks) -> None:
        self._contender = contender
        self._url = url
        self._load = load
        self._shape = shape
        self._path = path
        self._marks = marks

    async def filled_first(self, server: Server) -> PeerLap:
        n = self._load.n
        fill_s = await self._fill(0, n)
        await server.checkpoint()
        await self._start()
        moments = await self._until_run(n)
        drain_s = (max(moments) - min(moments)) / 1e9
        await self._finish()
        return PeerLap(n, fill_s, fill_s + drain_s, drain_s)

    async def overlapped(self, warm: int) -> PeerLap:
        n = self._load.n
        await self._start()
        await self._fill(0, warm)
        await self._until_run(warm)
        fill_s = await self._fill(warm, n)
        began = time.time() - fill_s
        moments = await self._until_run(warm + n)
        await self._finish()
        return PeerLap(n, fill_s, max(moments) / 1e9 - began)

    async def _start(self) -> None:
        shape, kind = self._shape, self._load.kind
        await self._contender.ask(
            "start", self._url, kind=kind, processes=shape.processes, each=shape.each, marks=str(self._path)
        )

    async def _fill(self, first: int, n: int) -> float:
        return await self._contender.ask("fill", self._url, n, first=first, kind=self._load.kind)

    async def _until_run(self, n: int) -> list[int]:
        deadline = time.monotonic() + LAP_TIMEOUT_S
        watched = 0.0
        while self._marks.first_unmarked() < n:
            now = time.monotonic()
            if now > deadline:
                raise self._contender.stopped(f"ran {self._marks.first_unmarked()} of {n} jobs in {LAP_TIMEOUT_S:g} s")
            if now - watched > 1.0 and await self._contender.ask("ended"):
                raise self._contender.stopped("lost a worker")
            watched = max(watched, now - now % 1.0)
            await asyncio.sleep(POLL_S)
        return self._marks.read()[:n]

    async def _finish(self) -> None:
        """Its ends may be written after its bodies; they are no part of its time."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while left := await self._contender.ask("left", self._url):
            if time.monotonic() > deadline:
                raise self._contender.stopped(f"has {left:.0f} jobs left after all have run")
            await asyncio.sleep(POLL_S)
        await self._contender.ask("stop")
        if self._marks.repeated:
            raise self._contender.stopped(f"ran {self._marks.repeated} jobs again")

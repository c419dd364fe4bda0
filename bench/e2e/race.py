"""Rota's peers in turn: those by PostgreSQL on a fresh copy of their own database, those by Redis in one of their own.

A peer's entries are put in first and worked off then; its rate is all of them over both times. That is the rate of a
whole run, as Rota's is, with the idle seconds between the two left out. The clock of a peer stops with its last body,
whatever it has left to write; Rota's when the last end is committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from bench import peers
from bench.e2e.setup import Ground
from bench.queue.race import SETTINGS as BY_POSTGRES
from bench.queue.race import Contender, Stopped, made, started
from bench.report import Figure

BY_REDIS: Final = {"dramatiq": 1, "celery": 2}
"""Each has a database of Redis for itself."""
SETTINGS: Final = {
    **{name: told for name, told in BY_POSTGRES.items() if name != "rota"},
    "dramatiq": "one process of 8 threads; enqueued one by one",
    "celery": "prefork, 2 processes, prefetch 64, results ignored; enqueued one by one",
}
FRAMES_BARS: Final = {"pgqueuer": 1.3, "awa": 2.0, "dramatiq": 4.0, "celery": 15.0, "procrastinate": 25.0}
JOBS_BARS: Final = {"pgqueuer": 0.8, "awa": 1.5}
DATABASE: Final = "lap_of_peer"


@dataclass(frozen=True, slots=True)
class PeerLap:
    n: int
    fill_s: float
    drain_s: float

    @property
    def per_s(self) -> float:
        return self.n / (self.fill_s + self.drain_s)

    @property
    def drain_per_s(self) -> float:
        return self.n / self.drain_s


@dataclass(slots=True)
class Peers:
    """Laps by peer, one a round; who is absent, and why."""

    ground: Ground
    laps: dict[str, list[PeerLap]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    async def prepare(self) -> None:
        for name in SETTINGS:
            missing = peers.absence(name)
            if missing is None and name not in BY_REDIS:
                missing = await self._make(name)
            if missing:
                self._leave_out(name, missing)

    async def round(self, entries: dict[str, int]) -> None:
        for name in SETTINGS:
            if name not in self.absent:
                try:
                    self.laps.setdefault(name, []).append(await self._lap(name, entries[name]))
                except Stopped as stopped:
                    self._leave_out(name, str(stopped))

    def figures(self, frames: list[float], jobs: list[float]) -> Iterator[Figure]:
        """Against what Rota did in the same rounds."""
        for name, bar in FRAMES_BARS.items():
            yield self._against("frames", frames, name, bar)
        for name, bar in JOBS_BARS.items():
            yield self._against("jobs", jobs, name, bar)
        for name, settings in SETTINGS.items():
            if name in self.absent:
                yield Figure(f"{name}_per_s", [], note=f"not measured: {self.absent[name]}")
                continue
            laps = self.laps[name]
            yield Figure(f"{name}_per_s", [lap.per_s for lap in laps], note=f"{peers.version(name)}: {settings}")
            yield Figure(f"{name}_drain_per_s", [lap.drain_per_s for lap in laps], note="working off alone")
            yield Figure(f"{name}_enqueue_per_s", [lap.n / lap.fill_s for lap in laps])

    def _against(self, what: str, ours: list[float], peer: str, bar: float) -> Figure:
        name = f"{what}_vs_{peer}"
        if peer in self.absent:
            return Figure(name, [], bar=bar, note=f"not measured: {self.absent[peer]}")
        laps = self.laps[peer]
        ratios = [rate / lap.per_s for rate, lap in zip(ours, laps, strict=True)]
        least = sorted(rate / lap.drain_per_s for rate, lap in zip(ours, laps, strict=True))[len(laps) // 2]
        note = f"a second, from the first submit to the last end; {least:.3g} were its enqueueing free"
        return Figure(name, ratios, bar=bar, higher_is_better=True, note=note)

    async def _make(self, name: str) -> str | None:
        """Why it cannot take part, or None."""
        try:
            async with started(name) as contender:
                await contender.ask("prepare", await self.ground.postgres.create(made(name)))
        except Stopped as stopped:
            return str(stopped)
        return None

    async def _lap(self, name: str, n: int) -> PeerLap:
        async with started(name) as contender:
            if name in BY_REDIS:
                url = self.ground.redis_url(BY_REDIS[name])
                await contender.ask("prepare", url)
                return await self._times(contender, url, n)
            url = await self.ground.postgres.create(DATABASE, template=made(name))
            try:
                return await self._times(contender, url, n)
            finally:
                await self.ground.postgres.drop(DATABASE)

    async def _times(self, contender: Contender, url: str, n: int) -> PeerLap:
        await self.ground.postgres.checkpoint()
        fill_s = await contender.ask("fill", url, n)
        await self.ground.postgres.checkpoint()
        return PeerLap(n, fill_s, await contender.ask("drain", url, n))

    def _leave_out(self, name: str, why: str) -> None:
        self.absent[name] = why
        print(f"{name} takes no part: {why}")

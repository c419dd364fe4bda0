"""Rota's peers by PostgreSQL in turn, each in its best shape on a fresh copy of its own database: whole jobs.

Rota's jobs of this bench are coroutine functions, and so are theirs. Peers that run plain functions only, or by Redis,
are compared in `bench defaults`, kind by kind. The clock of a peer stops with its last body, whatever it has left to
write; Rota's when the last end is committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from bench import peers
from bench.e2e.setup import Ground
from bench.peer_laps import BY_POSTGRES, Load, PeerLap, PeerRace, Shape, shapes
from bench.queue.race import AT_ONCE, KIND
from bench.report import Figure

FRAMES_BARS: Final = {"pgqueuer": 3.5, "awa": 2.0, "procrastinate": 25.0}
JOBS_BARS: Final = {"pgqueuer": 1.2, "awa": 1.5}


@dataclass(slots=True)
class Peers:
    """Laps by peer, one a round."""

    ground: Ground
    race: PeerRace = field(init=False)
    laps: dict[str, list[PeerLap]] = field(default_factory=dict)
    chosen: dict[str, Shape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.race = PeerRace(self.ground.postgres, tuple(BY_POSTGRES))

    async def prepare(self, entries: dict[str, int]) -> None:
        await self.race.prepare()
        for name in self.race.runners(KIND):
            load = Load(KIND, entries[name] // 2)
            if chosen := await self.race.choose(name, load, shapes(name, AT_ONCE[name]), both_orders=True):
                self.chosen[name] = chosen[0]

    async def round(self, entries: dict[str, int]) -> None:
        for name in self.race.runners(KIND):
            if lap := await self.race.lap(name, Load(KIND, entries[name]), self.chosen[name]):
                self.laps.setdefault(name, []).append(lap)

    def figures(self, frames: list[float], jobs: list[float]) -> Iterator[Figure]:
        """Against what Rota did in the same rounds."""
        for name, bar in FRAMES_BARS.items():
            yield self._against("frames", frames, name, bar, "frames of a layer / whole jobs of the peer, a second")
        for name, bar in JOBS_BARS.items():
            yield self._against("jobs", jobs, name, bar, "whole jobs a second, from the first submit to the last end")
        for name, settings in BY_POSTGRES.items():
            if why_not := self.race.why_not(name, KIND):
                yield Figure(f"{name}_per_s", [], note=f"not measured: {why_not}")
                continue
            laps, note = self.laps[name], f"{peers.version(name)}: {settings}; {self.chosen[name]}"
            yield Figure(f"{name}_per_s", [lap.per_s for lap in laps], note=note)
            yield Figure(f"{name}_enqueue_per_s", [lap.enqueue_per_s for lap in laps])
            yield Figure(f"{name}_wal_bytes_per_job", [lap.wal_bytes for lap in laps])

    def _against(self, what: str, ours: list[float], peer: str, bar: float, note: str) -> Figure:
        name = f"{what}_vs_{peer}"
        if why_not := self.race.why_not(peer, KIND):
            return Figure(name, [], bar=bar, note=f"not measured: {why_not}")
        ratios = [rate / lap.per_s for rate, lap in zip(ours, self.laps[peer], strict=True)]
        return Figure(name, ratios, bar=bar, higher_is_better=True, note=note)

"""`rota up` and its peers in turn, by kind of jobs and by concurrency: whole jobs against whole jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from bench import peers as installed
from bench.contenders.bodies import KINDS
from bench.defaults import own_laps
from bench.peer_laps import BY_POSTGRES, BY_REDIS, Load, PeerRace, Shape, shapes
from bench.report import Figure

PEERS: Final = ("celery", "dramatiq", *BY_POSTGRES)
SETTINGS: Final = BY_REDIS | BY_POSTGRES
BARS: Final = {"sync_vs_celery": 2.0, "sync_vs_dramatiq": 1.5, "async_vs_dramatiq": 2.0, "async_vs_pgqueuer": 0.5}
"""At `BAR_SLOTS`."""
BAR_SLOTS: Final = 2
EXPECTED_PER_S: Final = {
    "async": {"dramatiq": 1_200, "pgqueuer": 8_000, "awa": 3_000, "procrastinate": 300},
    "sync": {"celery": 500, "dramatiq": 1_500, "pgqueuer": 3_000, "awa": 1_500, "procrastinate": 300},
    "command": {"celery": 500, "dramatiq": 500, "pgqueuer": 800, "awa": 200, "procrastinate": 300},
}
"""Rates that a first short lap is sized by; peers without a rate do not run that kind."""

Entry = tuple[str, int, str]
"""Kind of jobs, slots, and the contender."""
OURS: Final = "rota"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    rounds: Mapping[int, int]
    """By slots."""
    lap_s: float
    choose_s: float


@dataclass(slots=True)
class Race:
    peers: PeerRace
    sizes: Sizes
    per_s: dict[Entry, list[float]] = field(default_factory=dict)
    chosen: dict[Entry, Shape] = field(default_factory=dict)
    _expected: dict[Entry, float] = field(default_factory=dict)
    _orders: dict[tuple[str, str], bool] = field(default_factory=dict)
    """Whether a peer is faster filled first, by kind and peer: found at the first concurrency, kept for the others."""

    async def run(self) -> None:
        await self.peers.prepare()
        for slots, rounds in self.sizes.rounds.items():
            for kind in KINDS:
                await self._choose(kind, slots)
                for _ in range(rounds):
                    await self._round(kind, slots)

    async def _choose(self, kind: str, slots: int) -> None:
        for name in self._runners(kind):
            n = max(50, round(EXPECTED_PER_S[kind][name] * self.sizes.choose_s))
            order = self._orders.get((kind, name))
            candidates = [Shape(each.processes, each.each, order or False) for each in shapes(name, slots)]
            chosen = await self.peers.choose(name, Load(kind, n), candidates, both_orders=order is None)
            if chosen:
                self.chosen[kind, slots, name], self._expected[kind, slots, name] = chosen
                self._orders[kind, name] = chosen[0].filled_first

    async def _round(self, kind: str, slots: int) -> None:
        async with own_laps.warm(kind, slots) as ours:
            lap = await ours.measured(self.sizes.lap_s)
        self._add((kind, slots, OURS), lap.per_s)
        for name in self._runners(kind):
            entry = (kind, slots, name)
            n = max(50, round(self._expected[entry] * self.sizes.lap_s))
            if theirs := await self.peers.lap(name, Load(kind, n), self.chosen[entry]):
                self._add(entry, theirs.per_s)

    def _add(self, entry: Entry, per_s: float) -> None:
        self.per_s.setdefault(entry, []).append(per_s)
        print(f"  {entry[0]} at {entry[1]} slots: {entry[2]} {per_s:,.0f}/s", flush=True)

    def _runners(self, kind: str) -> list[str]:
        return [name for name in self.peers.runners(kind) if name in EXPECTED_PER_S[kind]]

    def figures(self) -> Iterator[Figure]:
        for slots in self.sizes.rounds:
            for kind in KINDS:
                for name in EXPECTED_PER_S[kind]:
                    yield self._against(kind, slots, name)
        for slots in self.sizes.rounds:
            for kind in KINDS:
                yield from self._rates(kind, slots)

    def _against(self, kind: str, slots: int, name: str) -> Figure:
        figure = f"{kind}_vs_{name}"
        bar = BARS.get(figure) if slots == BAR_SLOTS else None
        if why_not := self.peers.why_not(name, kind):
            return Figure(named(figure, slots), [], bar=bar, note=f"not measured: {why_not}")
        ours, theirs = self.per_s[kind, slots, OURS], self.per_s[kind, slots, name]
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        note = f"whole {kind} jobs a second, {slots} at once on both sides"
        return Figure(named(figure, slots), ratios, bar=bar, higher_is_better=True, note=note)

    def _rates(self, kind: str, slots: int) -> Iterator[Figure]:
        note = f"`rota up`, a worker with {slots} slots"
        yield Figure(named(f"rota_{kind}_per_s", slots), self.per_s[kind, slots, OURS], note=note)
        for name in EXPECTED_PER_S[kind]:
            if not self.peers.why_not(name, kind):
                note = f"{installed.version(name)}: {SETTINGS[name]}; {self.chosen[kind, slots, name]}"
                yield Figure(named(f"{name}_{kind}_per_s", slots), self.per_s[kind, slots, name], note=note)


def named(figure: str, slots: int) -> str:
    """Figures at `BAR_SLOTS` have the plain name."""
    return figure if slots == BAR_SLOTS else f"{figure}_at_{slots}_slots"

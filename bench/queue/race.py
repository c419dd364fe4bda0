"""Rota's bare queue and its peers in turn, each in processes of its own on a fresh copy of its own database.

Rota's side claims and completes entries in a loop; a peer runs jobs: a task for each, heartbeats, a log, retries. So
the ratios say how far the queue is from being the bottleneck, and do not compare schedulers: `bench e2e` and `bench
defaults` compare whole jobs. The clock of a peer stops with its last body, whatever it has left to write; Rota's when
all ends are committed. Slower contenders get fewer entries. That is to their advantage: a short backlog is the easier
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from bench import peers
from bench.contender_process import made, started
from bench.peer_laps import BY_POSTGRES, Load, PeerLap, PeerRace, Shape, shapes
from bench.report import Figure
from bench.server import Server

OURS: Final = "batches of 256, 4 in flight; 4 shards; a bare loop, nothing runs"
AT_ONCE: Final = {"pgqueuer": 1024, "awa": 256, "procrastinate": 50}
"""Bodies that a peer may run at once, when nothing else limits it."""
BARS: Final = {"pgqueuer": 4.0, "awa": 8.0, "procrastinate": 50.0}
KIND: Final = "async"
ENQUEUE_BAR: Final = 2.0
WAL_BAR: Final = 600.0

Rate = Callable[[PeerLap], float]


@dataclass(slots=True)
class Race:
    """Laps by contender, a round each."""

    peers: PeerRace
    ours: list[PeerLap] = field(default_factory=list)
    theirs: dict[str, list[PeerLap]] = field(default_factory=dict)
    chosen: dict[str, Shape] = field(default_factory=dict)

    def figures(self) -> Iterator[Figure]:
        for name, bar in BARS.items():
            note = "entries a second, Rota's queue without workers / a complete worker of the peer"
            yield self._against(f"bare_claims_vs_{name}_jobs", name, lambda lap: lap.drain_per_s or 0.0, bar, note)
        note = "4 producers, 1,000 a commit, 75 bytes of payload each; queue entries / whole jobs"
        yield self._against("bare_entries_vs_awa_jobs", "awa", lambda lap: lap.enqueue_per_s, ENQUEUE_BAR, note)
        wal = [lap.wal_bytes for lap in self.ours]
        note = "enqueue, claim and complete; an entry per frame, without jobs and bookings"
        yield Figure("wal_bytes_per_entry", wal, bar=WAL_BAR, note=note)
        yield from _laps("rota_bare", self.ours, OURS)
        for name, settings in BY_POSTGRES.items():
            if why_not := self.peers.why_not(name, KIND):
                yield Figure(f"{name}_drain_per_s", [], note=f"not measured: {why_not}")
            else:
                note = f"{peers.version(name)}: {settings}; {self.chosen[name]}"
                yield from _laps(name, self.theirs[name], note)

    def _against(self, figure: str, peer: str, rate: Rate, bar: float, note: str) -> Figure:
        if why_not := self.peers.why_not(peer, KIND):
            return Figure(figure, [], bar=bar, note=f"not measured: {why_not}")
        ratios = [rate(ours) / rate(theirs) for ours, theirs in zip(self.ours, self.theirs[peer], strict=True)]
        return Figure(figure, ratios, bar=bar, higher_is_better=True, note=note)


def _laps(name: str, laps: list[PeerLap], note: str) -> Iterator[Figure]:
    yield Figure(f"{name}_drain_per_s", [lap.drain_per_s or 0.0 for lap in laps], note=note)
    yield Figure(f"{name}_enqueue_per_s", [lap.enqueue_per_s for lap in laps])
    yield Figure(f"{name}_wal_bytes", [lap.wal_bytes for lap in laps], note="per entry, from enqueue to end")


async def race(server: Server, rounds: int, entries: dict[str, int]) -> Race:
    found = Race(PeerRace(server, tuple(BY_POSTGRES)))
    await found.peers.prepare()
    async with started("rota") as contender:
        await contender.ask("prepare", await server.create(made("rota")))
    for name in found.peers.runners(KIND):
        candidates = [replace(shape, filled_first=True) for shape in shapes(name, AT_ONCE[name])]
        load = Load(KIND, entries[name] // 2)
        if chosen := await found.peers.choose(name, load, candidates, both_orders=False):
            found.chosen[name] = chosen[0]
    for _ in range(rounds):
        found.ours.append(await _bare_lap(server, entries["rota"]))
        for name in found.peers.runners(KIND):
            if lap := await found.peers.lap(name, Load(KIND, entries[name]), found.chosen[name]):
                found.theirs.setdefault(name, []).append(lap)
    return found


async def _bare_lap(server: Server, n: int) -> PeerLap:
    url = await server.create("lap", template=made("rota"))
    try:
        async with started("rota") as contender:
            await server.checkpoint()
            before = await server.wal_bytes()
            fill_s = await contender.ask("fill", url, n)
            await server.checkpoint()
            drain_s = await contender.ask("drain", url, n)
            wal_bytes = (await server.wal_bytes() - before) / n
    finally:
        await server.drop("lap")
    return PeerLap(n, fill_s, fill_s + drain_s, drain_s, wal_bytes)

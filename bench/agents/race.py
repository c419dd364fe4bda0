"""Agents that are all due at once, worked off by Rota and by a peer in turn: runs acquired and completed per second.

The clock of the peer stops with its last body, whatever it has left to write; Rota's when the end of every run is
committed. The peer gets fewer agents, which is to its advantage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from bench import peers
from bench.contender_process import Stopped, made, started
from bench.e2e.setup import Ground
from bench.report import Figure

ROTA: Final = "rota_agents"
PEER: Final = "apscheduler_agents"
PEERS_NAME: Final = "apscheduler"
BAR: Final = 5.0
REDIS: Final = 7
DATABASE: Final = "lap_of_agents"


@dataclass(slots=True)
class AgentsRace:
    per_s: dict[str, list[float]] = field(default_factory=dict)
    absent: str = ""

    def figures(self) -> Iterator[Figure]:
        ours, theirs = self.per_s.get(ROTA, []), self.per_s.get(PEER, [])
        note = f"not measured: {self.absent}" if self.absent else f"APScheduler {peers.version(PEERS_NAME)}"
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=False)]
        yield Figure("runs_vs_peer", ratios, bar=BAR, higher_is_better=True, note=note)
        yield Figure("runs_per_s", ours, note="one replica, no-op bodies, all due at once")
        yield Figure("peer_runs_per_s", theirs, note="its schedules in PostgreSQL, 100 at once")


async def race(ground: Ground, rounds: int, agents: dict[str, int]) -> AgentsRace:
    found = AgentsRace(absent=peers.absence(PEERS_NAME) or "")
    os.environ["ROTA_BENCH_REDIS"] = ground.redis_url(REDIS)
    names = [ROTA] if found.absent else [ROTA, PEER]
    for name in names:
        url = await ground.postgres.create(made(name))
        async with started(name) as contender:
            await contender.ask("prepare", url)
    for _ in range(rounds):
        for name in [ROTA] if found.absent else names:
            try:
                found.per_s.setdefault(name, []).append(await _lap(ground, name, agents[name]))
            except Stopped as stopped:
                if name == ROTA:
                    raise
                found.absent = str(stopped)
    return found


async def _lap(ground: Ground, name: str, n: int) -> float:
    url = await ground.postgres.create(DATABASE, made(name))
    try:
        async with started(name) as contender:
            await contender.ask("fill", url, n)
            await ground.postgres.checkpoint()
            return n / await contender.ask("drain", url, n)
    finally:
        await ground.postgres.drop(DATABASE)

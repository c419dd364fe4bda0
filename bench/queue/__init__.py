"""The queue: beside its peers, what counting costs, and what a million frames cost. See README.md beside this file.

All on one durable PostgreSQL, in one run and in turns, so that a noisy minute hits everybody alike.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from bench import peers
from bench.contender_process import made
from bench.peer_laps import BY_POSTGRES
from bench.queue import counters, depth, race
from bench.report import Report
from bench.server import one_server

PEERS: Final = tuple(BY_POSTGRES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    laps: int
    entries: dict[str, int]
    count_rounds: int
    count_batches: int
    depth_rounds: int
    depth_claims: int
    depth_reads: int


FULL: Final = Sizes(
    laps=7,
    entries={"rota": 60_000, "pgqueuer": 20_000, "awa": 20_000, "procrastinate": 1_500},
    count_rounds=20,
    count_batches=400,
    depth_rounds=7,
    depth_claims=100,
    depth_reads=300,
)
QUICK: Final = Sizes(
    laps=2,
    entries={"rota": 30_000, "pgqueuer": 8_000, "awa": 6_000, "procrastinate": 300},
    count_rounds=6,
    count_batches=200,
    depth_rounds=3,
    depth_claims=40,
    depth_reads=100,
)


def setup() -> None:
    peers.install()


def run(quick: bool) -> Report:
    return asyncio.run(_run(QUICK if quick else FULL))


async def _run(sizes: Sizes) -> Report:
    report = Report()
    async with one_server() as server:
        raced = await race.race(server, sizes.laps, sizes.entries)
        empty = made("rota")
        counted = await counters.compare(server, empty, sizes.count_rounds, sizes.count_batches)
        deep = await depth.dive(server, empty, sizes.depth_rounds, claims=sizes.depth_claims, reads=sizes.depth_reads)
    for figure in (*raced.figures(), *counted, *deep):
        report.add(figure)
    return report

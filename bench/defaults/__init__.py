"""What people get first: `rota up` as it comes, few slots, the SDK, against peers at the same concurrency.

The same kind of task on both sides, whole jobs against whole jobs, each peer in its best shape. See README.md beside
this package.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from bench import peers
from bench.defaults import race, roundtrip, singles
from bench.e2e.setup import one_ground
from bench.peer_laps import PeerRace
from bench.report import Report

PEERS: Final = race.PEERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    race: race.Sizes
    roundtrip_rounds: int
    roundtrips: int
    singles_rounds: int
    singles_s: float


FULL: Final = Sizes(
    race=race.Sizes(rounds={2: 3, 8: 1, 32: 1}, lap_s=20.0, choose_s=2.0),
    roundtrip_rounds=5,
    roundtrips=300,
    singles_rounds=3,
    singles_s=20.0,
)
QUICK: Final = Sizes(
    race=race.Sizes(rounds={2: 1, 8: 1, 32: 1}, lap_s=3.0, choose_s=0.5),
    roundtrip_rounds=2,
    roundtrips=100,
    singles_rounds=2,
    singles_s=3.0,
)


def setup() -> None:
    peers.install()


def run(quick: bool) -> Report:
    return asyncio.run(_run(QUICK if quick else FULL))


async def _run(sizes: Sizes) -> Report:
    trips = await roundtrip.measure(sizes.roundtrip_rounds, sizes.roundtrips)
    single = await singles.measure(sizes.singles_rounds, sizes.singles_s)
    async with one_ground() as ground:
        found = race.Race(PeerRace(ground.postgres, PEERS, ground.redis_url), sizes.race)
        await found.run()
    ratios = list(found.figures())
    return Report([*ratios, *trips, *single])

"""Recurring agents: whether ten thousand run on time, what that asks of Redis, and how fast runs begin and end."""

from __future__ import annotations

import asyncio
from typing import Final

from bench import peers
from bench.agents import fleet as agents_fleet
from bench.agents import race, scripts
from bench.e2e.setup import one_ground
from bench.report import Report

PEERS: Final = (race.PEERS_NAME,)


def setup() -> None:
    peers.install()


def run(quick: bool) -> Report:
    return asyncio.run(_run(quick))


async def _run(quick: bool) -> Report:
    report = Report()
    async with one_ground() as ground:
        sizes = {race.ROTA: 2_000 if quick else 10_000, race.PEER: 200 if quick else 1_000}
        raced = await race.race(ground, 1 if quick else 5, sizes)
        script = await scripts.longest(ground, rounds=1 if quick else 3)
        fleet = await agents_fleet.fleet(ground, load_s=70.0 if quick else 130.0)
    for figure in (*fleet.figures(), *raced.figures(), script):
        report.add(figure)
    return report

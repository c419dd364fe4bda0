"""Workflows: runs against DBOS Transact on one PostgreSQL, and a hundred thousand timers."""

from __future__ import annotations

import asyncio
from typing import Final

from bench import peers
from bench.e2e.setup import one_ground
from bench.report import Report
from bench.workflow import race
from bench.workflow import timers as workflow_timers

PEERS: Final = (race.PEERS_NAME,)


def setup() -> None:
    peers.install()


def run(quick: bool) -> Report:
    return asyncio.run(_run(quick))


async def _run(quick: bool) -> Report:
    report = Report()
    async with one_ground() as ground:
        ours = {"linear": 500, "fan": 100} if quick else {"linear": 2000, "fan": 500}
        theirs = {"linear": 100, "fan": 10} if quick else {"linear": 300, "fan": 20}
        raced = await race.race(ground, 1 if quick else 3, ours, theirs)
        timers = await workflow_timers.timers(ground)
    for figure in (*raced.figures(), *timers.figures()):
        report.add(figure)
    return report

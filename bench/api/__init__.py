"""The faces: how fast jobs come in, how long answers take while much waits, how many can follow events."""

from __future__ import annotations

import asyncio

from bench.api import explain, lists, sse, submits
from bench.e2e.setup import one_ground
from bench.report import Report


def run(quick: bool) -> Report:
    return asyncio.run(_run(quick))


async def _run(quick: bool) -> Report:
    report = Report()
    sizes = submits.QUICK if quick else submits.FULL
    async with one_ground() as ground:
        submitted = await submits.submits(ground, sizes)
        explained = await explain.explaining(ground.postgres, waiting=20_000 if quick else explain.WAITING)
        listed = await lists.lists(ground, jobs=100_000 if quick else lists.JOBS)
        followed = await sse.sse(ground, events=500 if quick else sse.EVENTS)
    for samples in (submitted, explained, listed, followed):
        for figure in samples.figures():
            report.add(figure)
    return report

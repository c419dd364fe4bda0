"""The faces: how fast jobs come in, how long answers take while much waits, how many can follow events."""

from __future__ import annotations

import asyncio

from bench import api_explain, api_lists, api_sse, api_submits
from bench.e2e_ground import one_ground
from bench.report import Report


def run(quick: bool) -> Report:
    return asyncio.run(_run(quick))


async def _run(quick: bool) -> Report:
    report = Report()
    sizes = api_submits.QUICK if quick else api_submits.FULL
    async with one_ground() as ground:
        submitted = await api_submits.submits(ground, sizes)
        explained = await api_explain.explaining(ground.postgres, waiting=20_000 if quick else api_explain.WAITING)
        listed = await api_lists.lists(ground, jobs=100_000 if quick else api_lists.JOBS)
        followed = await api_sse.sse(ground, events=500 if quick else api_sse.EVENTS)
    for samples in (submitted, explained, listed, followed):
        for figure in samples.figures():
            report.add(figure)
    return report

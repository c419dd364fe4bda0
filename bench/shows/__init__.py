"""Several busy shows against one: the same no-op frames, submitted by one show or divided between many.

    python -m bench shows [--quick]

Each show is managed, over its small size, and below its burst, so that the order of shows decides and no limit refuses.
Laps alternate on one server and one worker, so that the ratios are of one run.
"""

from __future__ import annotations

import asyncio
from typing import Final
from uuid import UUID

from bench.e2e import deployment
from bench.e2e.deployment import PLENTY, POOL, Farm, Lap, farm
from bench.e2e.setup import Ground, one_ground
from bench.report import Figure, Report
from rota.accounting.service import AccountingService
from rota.infra.postgres import Database, PostgresTarget
from rota.model.jobs.submission import LayerSpec, Submission

DATABASE: Final = "shows"
SHOWS: Final = (1, 2, 10, 50)
WORDS: Final = {2: "two", 10: "ten", 50: "fifty"}
SIZE: Final = 4
FRAMES: Final = 40_000
SLOTS: Final = 500
RATIO_MIN: Final = 0.7


def run(quick: bool) -> Report:
    return asyncio.run(_measure(1 if quick else 3))


async def _measure(laps: int) -> Report:
    rates: dict[int, list[float]] = {shows: [] for shows in SHOWS}
    async with one_ground() as ground:
        await deployment.prepare(ground, DATABASE)
        await _create_shows(ground)
        async with farm(ground, DATABASE, slots=SLOTS) as running:
            await _lap(running, max(SHOWS))
            for _ in range(laps):
                for shows in SHOWS:
                    rates[shows].append((await _lap(running, shows)).per_s)
    report = Report()
    for shows, word in WORDS.items():
        ratios = [rate / one for rate, one in zip(rates[shows], rates[1], strict=True)]
        bar = RATIO_MIN if shows in (2, 50) else None
        report.add(Figure(f"{word}_shows_vs_one", ratios, bar=bar, higher_is_better=True, note="frames a second"))
    for shows in SHOWS:
        report.add(Figure(f"frames_per_s_{shows}_shows", rates[shows], note=f"{SLOTS} slots, sizes of {SIZE} cores"))
    return report


async def _create_shows(ground: Ground) -> None:
    opened = await Database.open(PostgresTarget(url=ground.postgres.url(DATABASE)))
    admin = AccountingService(opened, None).admin
    for number in range(max(SHOWS)):
        name = _name(number)
        await admin.create_show(name, actor="bench", managed=True)
        await admin.create_folder(name, "default", actor="bench")
        await admin.create_subscription(name, POOL, size=SIZE, burst=PLENTY, gpu_burst=PLENTY, actor="bench")
    await opened.close()


def _name(number: int) -> str:
    return f"show{number}"


async def _lap(running: Farm, shows: int) -> Lap:
    layer = LayerSpec(task="noop", frames=FRAMES // shows)
    submissions = [Submission(show=_name(number), topic=POOL, layers=(layer,)) for number in range(shows)]

    async def put() -> list[UUID]:
        return [each.job for each in await running.submitter.submit(submissions)]

    return await running.lap(FRAMES, put)

"""Several busy shows against one, and many placement classes against one: the same no-op frames, divided.

    python -m bench shows [--quick]

Each show is managed, over its small size, and below its burst, so that the order of shows decides and no limit refuses.
Jobs of a class of their own name a worker that they would prefer, and that is not there. Laps alternate on one server
and one worker, so that the ratios are of one run.
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
CLASSES: Final = (1, 100, 1000)
JOBS: Final = 1000
DRAIN_RATIO_MAX: Final = 3.0


def run(quick: bool) -> Report:
    return asyncio.run(_measure(1 if quick else 3))


async def _measure(laps: int) -> Report:
    rates: dict[int, list[float]] = {shows: [] for shows in SHOWS}
    drains_s: dict[int, list[float]] = {classes: [] for classes in CLASSES}
    async with one_ground() as ground:
        await deployment.prepare(ground, DATABASE)
        await _create_shows(ground)
        async with farm(ground, DATABASE, slots=SLOTS) as running:
            await _lap(running, max(SHOWS))
            for _ in range(laps):
                for shows in SHOWS:
                    rates[shows].append((await _lap(running, shows)).per_s)
            for classes in CLASSES:
                await _drain(running, classes)  # creates its queues
            for _ in range(laps):
                for classes in CLASSES:
                    drains_s[classes].append((await _drain(running, classes)).seconds)
    report = Report()
    for shows, word in WORDS.items():
        ratios = [rate / one for rate, one in zip(rates[shows], rates[1], strict=True)]
        bar = RATIO_MIN if shows in (2, 50) else None
        report.add(Figure(f"{word}_shows_vs_one", ratios, bar=bar, higher_is_better=True, note="frames a second"))
    for classes in CLASSES[1:]:
        slower = [drain_s / one_s for drain_s, one_s in zip(drains_s[classes], drains_s[1], strict=True)]
        bar = DRAIN_RATIO_MAX if classes == JOBS else None
        report.add(Figure(f"drain_{classes}_classes_vs_1", slower, bar=bar, higher_is_better=False, note="seconds"))
    for classes in CLASSES:
        report.add(Figure(f"drain_s_{classes}_classes", drains_s[classes], note=f"{JOBS} jobs of one frame"))
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


async def _drain(running: Farm, classes: int) -> Lap:
    """Jobs of one frame, from their submission to the end of the last."""
    layer = LayerSpec(task="noop")
    submissions = [
        Submission(
            show=_name(0), topic=POOL, layers=(layer,), labels={"preferred_worker_id": f"absent{number % classes}"}
        )
        for number in range(JOBS)
    ]

    async def put() -> list[UUID]:
        return [each.job for each in (await running.submitter.submit(submissions))[-10:]]

    return await running.lap(JOBS, put)

"""Several busy shows against one, many placement classes against one, many workers against one, and three replicas
against one; what a server costs that is idle, how long a dispatch turn takes with thousands of queues, also after a
day, and whether the rate lasts.

    python -m bench shows [--quick]

Each show is managed, over its small size, and below its burst, so that the order of shows decides and no limit refuses.
Jobs of a class of their own name a worker that they would prefer, and that is not there. Laps alternate on one server
and one worker, so that the ratios are of one run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from bench.e2e import deployment
from bench.e2e.deployment import PLENTY, POOL, Farm, Lap, farm
from bench.e2e.setup import Ground, one_ground
from bench.report import Figure, Report
from bench.shows import sustained, turns
from bench.shows.ends import FRAMES as ENDED_FRAMES
from bench.shows.ends import PREFIX, EndsBench, ends_bench
from bench.shows.idle import idle_cores
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
WORKERS: Final = (1, 100, 1000)
ENDS_RATIO_MIN: Final = 0.3
REPLICAS: Final = 3
REPLICA_SHOWS: Final = (1, 10)
IDLE_QUEUES: Final = (0, 3000)
IDLE_CORES_MAX: Final = 0.02


def run(quick: bool) -> Report:
    return asyncio.run(_measure(quick))


async def _measure(quick: bool) -> Report:
    report, laps = Report(), 1 if quick else 3
    turn = await turns.measure(quick)
    async with one_ground() as ground:
        idle = [await _measure_idle(ground, queues) for queues in IDLE_QUEUES]  # first: vacuum follows the others
        await deployment.prepare(ground, DATABASE)
        await _create_shows(ground)
        async with farm(ground, DATABASE, slots=SLOTS, more={"ROTA_NATS_PREFIX": PREFIX}) as running:
            shows = await _measure_shows(running, laps)
            classes = await _measure_classes(running, laps)
            async with ends_bench(ground, running) as bench:
                ends = await _measure_ends(bench, laps)
        replicas = await _measure_replicas(ground, shows, laps)
        await ground.postgres.drop(DATABASE)  # its vacuum would disturb what follows
        rates = await sustained.measure(ground, slots=SLOTS, quick=quick)
    for figure in (*shows, *classes, *ends, *replicas, *idle, *turn, *rates):
        report.add(figure)
    return report


async def _measure_shows(running: Farm, laps: int) -> list[Figure]:
    rates: dict[int, list[float]] = {shows: [] for shows in SHOWS}
    await _lap(running, max(SHOWS))
    for _ in range(laps):
        for shows in SHOWS:
            rates[shows].append((await _lap(running, shows)).per_s)
    figures = [
        Figure(
            f"{word}_shows_vs_one",
            _ratios(rates[shows], rates[1]),
            bar=RATIO_MIN if shows in (2, 50) else None,
            higher_is_better=True,
            note="frames a second",
        )
        for shows, word in WORDS.items()
    ]
    note = f"{SLOTS} slots, sizes of {SIZE} cores"
    return figures + [Figure(f"frames_per_s_{shows}_shows", rates[shows], note=note) for shows in SHOWS]


async def _measure_classes(running: Farm, laps: int) -> list[Figure]:
    drains_s: dict[int, list[float]] = {classes: [] for classes in CLASSES}
    for classes in CLASSES:
        await _drain(running, classes)  # creates its queues
    for _ in range(laps):
        for classes in CLASSES:
            drains_s[classes].append((await _drain(running, classes)).seconds)
    figures = [
        Figure(
            f"drain_{classes}_classes_vs_1",
            _ratios(drains_s[classes], drains_s[1]),
            bar=DRAIN_RATIO_MAX if classes == JOBS else None,
            higher_is_better=False,
            note="seconds",
        )
        for classes in CLASSES[1:]
    ]
    note = f"{JOBS} jobs of one frame"
    return figures + [Figure(f"drain_s_{classes}_classes", drains_s[classes], note=note) for classes in CLASSES]


async def _measure_ends(bench: EndsBench, laps: int) -> list[Figure]:
    ends: dict[int, list[float]] = {workers: [] for workers in WORKERS}
    await bench.lap(max(WORKERS))
    for _ in range(laps):
        for workers in WORKERS:
            ends[workers].append(await bench.lap(workers))
    figures = [
        Figure(
            f"ends_{workers}_workers_vs_1",
            _ratios(ends[workers], ends[1]),
            bar=ENDS_RATIO_MIN if workers == max(WORKERS) else None,
            higher_is_better=True,
            note="ends a second",
        )
        for workers in WORKERS[1:]
    ]
    note = f"{ENDED_FRAMES} frames"
    return figures + [Figure(f"ends_per_s_{workers}_workers", ends[workers], note=note) for workers in WORKERS]


async def _measure_replicas(ground: Ground, alone: Sequence[Figure], laps: int) -> list[Figure]:
    """The same frames with several servers, against the rates of one, which were measured before."""
    rates: dict[int, list[float]] = {shows: [] for shows in REPLICA_SHOWS}
    async with farm(ground, DATABASE, slots=SLOTS, servers=REPLICAS) as running:
        await _lap(running, max(REPLICA_SHOWS))
        for _ in range(laps):
            for shows in REPLICA_SHOWS:
                rates[shows].append((await _lap(running, shows)).per_s)
    one = {figure.name: figure.samples for figure in alone}
    return [
        Figure(
            f"{REPLICAS}_replicas_vs_1_{shows}_shows",
            _ratios(rates[shows], one[f"frames_per_s_{shows}_shows"]),
            higher_is_better=True,
            note="frames a second, one worker",
        )
        for shows in REPLICA_SHOWS
    ]


async def _measure_idle(ground: Ground, queues: int) -> Figure:
    bar = IDLE_CORES_MAX if queues else None
    note = "cores of the server and PostgreSQL"
    return Figure(
        f"idle_cpu_{queues}_queues", [await idle_cores(ground, queues)], bar=bar, higher_is_better=False, note=note
    )


def _ratios(found: Sequence[float], one: Sequence[float]) -> list[float]:
    return [each / alone for each, alone in zip(found, one, strict=True)]


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

"""What a frame costs while a million others wait: CPU of all processes per frame, against the same beside a thousand.

The others wait for a pool that has no worker, half of them in layers of 10,000 and half as single jobs with a payload
each, over several queues and priorities of the same show. They are submitted once, into a database that is used for all
rounds; servers start on it anew each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bench.contenders.serve import body
from bench.e2e.deployment import ELSEWHERE, SHOW, farm, put_all
from bench.e2e.setup import Ground
from bench.report import Figure
from bench.server import opened
from rota.engine.events.sink import DiscardedEvents
from rota.engine.submission.submitter import Submitter
from rota.model.jobs.submission import LayerSpec, Submission
from rota.queue import Queue

SMALL: Final = 1_000
LARGE: Final = 1_000_000
LAYER: Final = 10_000
QUEUES: Final = 10
"""As many asks of cores, and so queues."""
PRIORITIES: Final = 5
PIECE: Final = 20_000
BAR: Final = 1.5


async def measure(ground: Ground, template: str, rounds: int, frames: int, large: int = LARGE) -> Iterator[Figure]:
    ratios: list[float] = []
    costs: dict[int, list[float]] = {SMALL: [], large: []}
    for waiting in costs:
        await _fill(ground, f"beside_{waiting}", template, waiting)
    for _ in range(rounds):
        for waiting, found in costs.items():
            async with farm(ground, f"beside_{waiting}") as running:
                found.append((await running.frames(frames)).cpu_us())
        ratios.append(costs[large][-1] / costs[SMALL][-1])
    for waiting in costs:
        await ground.postgres.drop(f"beside_{waiting}")
    return _figures(ratios, costs[SMALL], costs[large], large)


def _figures(ratios: list[float], small: list[float], large: list[float], waiting: int) -> Iterator[Figure]:
    note = "CPU per frame of all processes, beside 1,000,000 waiting / beside 1,000"
    if waiting == LARGE:
        yield Figure("cost_1m_vs_1k", ratios, bar=BAR, note=note)
    else:
        yield Figure("cost_1m_vs_1k", [], note=f"not measured at its size; {max(ratios):.3g} beside {waiting:,}")
    yield Figure("cpu_us_beside_1k", small)
    yield Figure(f"cpu_us_beside_{waiting}", large)


async def _fill(ground: Ground, database: str, template: str, waiting: int) -> None:
    url = await ground.postgres.create(database, template)
    each = min(LAYER, waiting // 2 // QUEUES)
    layers = waiting // 2 // each
    async with opened(url) as connection:
        submitter = Submitter(connection, DiscardedEvents())
        await put_all(submitter, [_layer(number, each) for number in range(layers)])
        jobs = waiting - layers * each
        for first in range(0, jobs, PIECE):
            await put_all(submitter, [_job(number) for number in range(first, min(first + PIECE, jobs))])
        assert sum(counts.waiting for counts in (await Queue(connection).counts_exact()).values()) == waiting
    await ground.postgres.checkpoint()


def _layer(number: int, frames: int) -> Submission:
    return _waiting(number, LayerSpec(task="noop", frames=frames, cores=1 + number % QUEUES))


def _job(number: int) -> Submission:
    return _waiting(number, LayerSpec(task="noop", input={"kwargs": body(number)}, cores=1 + number % QUEUES))


def _waiting(number: int, layer: LayerSpec) -> Submission:
    return Submission(show=SHOW, topic=ELSEWHERE, priority=1 + number // QUEUES % PRIORITIES, layers=(layer,))

"""How soon a job runs that is submitted to an idle farm: a hundred a second, each in a transaction of its own.

Submissions follow the clock, not each other, so a slow one holds up none behind it. The handler writes the moment it
starts; one host, one clock. Picked up is counted from the moment the submitter knows of its commit, and told beside it
is the whole way from the call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from bench.contenders.marks import Marks
from bench.e2e.deployment import POOL, SHOW, Farm, farm
from bench.e2e.setup import Ground
from bench.queue.depth import quantile
from bench.report import Figure
from rota.model.jobs.submission import LayerSpec, Submission

PER_S: Final = 100
P50_BAR_MS: Final = 4.0
P99_BAR_MS: Final = 10.0
FIRST: Final = 20
"""Left out: connections and plans are made."""


@dataclass(slots=True)
class Pickups:
    """Milliseconds by job, a list for each round."""

    from_commit: list[list[float]] = field(default_factory=list)
    from_call: list[list[float]] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    """Of all processes, per job."""

    def figures(self) -> Iterator[Figure]:
        note = f"{PER_S} jobs/s, a commit each; from the commit to the handler's first line"
        yield Figure("pickup_p50_ms", _quantiles(self.from_commit, 0.5), bar=P50_BAR_MS, note=note)
        yield Figure("pickup_p99_ms", _quantiles(self.from_commit, 0.99), bar=P99_BAR_MS, note="the same")
        yield Figure("pickup_max_ms", _quantiles(self.from_commit, 1.0), note="the same, the slowest of a round")
        yield Figure("pickup_cpu_ms", self.cpu_ms, note="of all processes, per job at that rate")
        yield Figure("submit_to_start_p50_ms", _quantiles(self.from_call, 0.5), note="from the call of submit")
        yield Figure("submit_to_start_p99_ms", _quantiles(self.from_call, 0.99), note="from the call of submit")


async def measure(ground: Ground, template: str, rounds: int, seconds: int) -> Pickups:
    """All rounds on one farm, which is idle but for this."""
    found = Pickups()
    n = FIRST + PER_S * seconds
    path = ground.folder / "marks"
    marks = Marks.make(path, n * rounds)
    await ground.postgres.create("pickup", template)
    async with farm(ground, "pickup", marks=path) as running:
        for at in range(rounds):
            await _round(running, marks, range(n * at, n * (at + 1)), found)
    await ground.postgres.drop("pickup")
    path.unlink()
    return found


async def _round(running: Farm, marks: Marks, numbers: range, found: Pickups) -> None:
    calls: dict[int, int] = {}
    commits: dict[int, int] = {}

    async def submit(number: int) -> None:
        calls[number] = time.time_ns()
        await running.submitter.submit([_stamp(number)])
        commits[number] = time.time_ns()

    running.expect(len(numbers))
    before = sum(running.used_s().values())
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for at, number in enumerate(numbers):
            await asyncio.sleep(began + at / PER_S - time.perf_counter())
            tasks.create_task(submit(number))
    await running.ended()
    found.cpu_ms.append((sum(running.used_s().values()) - before) / len(numbers) * 1e3)
    starts = marks.read()
    measured = numbers[FIRST:]
    found.from_commit.append([(starts[number] - commits[number]) / 1e6 for number in measured])
    found.from_call.append([(starts[number] - calls[number]) / 1e6 for number in measured])


def _stamp(number: int) -> Submission:
    layer = LayerSpec(task="stamp", input={"kwargs": {"number": number}})
    return Submission(show=SHOW, topic=POOL, layers=(layer,))


def _quantiles(rounds: list[list[float]], share: float) -> list[float]:
    return [quantile(each, share) for each in rounds]

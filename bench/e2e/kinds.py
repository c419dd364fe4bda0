"""What a job costs by what its task does: CPU time of all processes per single job, each kind on a farm of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bench.e2e.deployment import farm
from bench.e2e.setup import Ground
from bench.report import Figure

TASKS: Final = {
    "none": ("noop", 1.0, "a coroutine function that returns None at once"),
    "suspending": ("suspends", 1.0, "one that waits for the loop once"),
    "value": ("returns", 1.0, "one that returns a value of 60 bytes"),
    "sync": ("plain", 0.25, "a plain function, in a process of the worker"),
}
"""By kind: the task, its share of the jobs of a lap, and what it is."""


async def measure(ground: Ground, template: str, rounds: int, jobs: int) -> Iterator[Figure]:
    found: dict[str, list[float]] = {kind: [] for kind in TASKS}
    for _ in range(rounds):
        for kind, (task, share, _) in TASKS.items():
            await ground.postgres.create("kinds", template)
            async with farm(ground, "kinds") as running:
                await running.jobs(round(jobs * share / 10), task)
                found[kind].append((await running.jobs(round(jobs * share), task)).cpu_us())
            await ground.postgres.drop("kinds")
    notes = {kind: note for kind, (_, _, note) in TASKS.items()}
    return (Figure(f"cpu_us_per_job_{kind}", costs, note=notes[kind]) for kind, costs in found.items())

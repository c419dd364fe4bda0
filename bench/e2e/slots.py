"""Frames a second by the slots of the worker: with few of them a round trip is measured, and not the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bench.e2e.deployment import farm
from bench.e2e.setup import Ground
from bench.report import Figure

FRAMES: Final = {2: 600, 16: 5_000, 256: 40_000, 2000: 80_000}
"""By slots: so many that a run takes a second or two."""


async def measure(ground: Ground, template: str, rounds: int) -> Iterator[Figure]:
    found: dict[int, list[float]] = {slots: [] for slots in FRAMES}
    for _ in range(rounds):
        for slots, frames in FRAMES.items():
            await ground.postgres.create("slots", template)
            async with farm(ground, "slots", slots=slots, warm=frames // 10) as running:
                found[slots].append((await running.frames(frames)).per_s)
            await ground.postgres.drop("slots")
    note = "a layer of no-op frames, the worker with so many slots and no prefetch"
    return (Figure(f"frames_per_s_at_{slots}_slots", rates, note=note) for slots, rates in found.items())

"""Whether a server keeps its rate: a steady load of layers of no-op frames, its end against its start.

A layer is submitted whenever fewer than `BACKLOG_MIN` frames wait, so that frames always wait. Ended frames are counted
at intervals, by the exact counts. CPU time of all processes per frame tells a slower server from a busier machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bench.e2e import deployment
from bench.e2e.deployment import Broken, Farm, farm, layer_of
from bench.e2e.setup import Ground
from bench.report import Figure

DATABASE: Final = "sustained"
WARM_UP_S: Final = 3.0
SAMPLE_INTERVAL_S: Final = 0.25
LAYER_FRAMES: Final = 50_000
BACKLOG_MIN: Final = 50_000
RATIO_MIN: Final = 0.9


class Sample(NamedTuple):
    """At a time since the load began: frames that have ended, and CPU time of all processes, both from before it on."""

    at_s: float
    ended: int
    cpu_s: float


class Progress(NamedTuple):
    """Of a period of the load."""

    frames_per_s: float
    cpu_us: float
    """For a frame."""


@dataclass(frozen=True, slots=True)
class Load:
    """For how long, and which parts of it are compared."""

    seconds: float
    first_s: float
    last_s: float


FULL: Final = Load(60.0, 5.0, 10.0)
QUICK: Final = Load(20.0, 3.0, 4.0)


async def measure(ground: Ground, *, slots: int, quick: bool) -> list[Figure]:
    load = QUICK if quick else FULL
    await deployment.prepare(ground, DATABASE)
    async with farm(ground, DATABASE, slots=slots) as running:
        await _keep_busy(running, WARM_UP_S)
        samples = await _keep_busy(running, load.seconds)
        await running.ended()
    await ground.postgres.drop(DATABASE)
    return figures(samples, load)


def figures(samples: Sequence[Sample], load: Load) -> list[Figure]:
    first = progress(samples, 0.0, load.first_s)
    last = progress(samples, load.seconds - load.last_s, load.seconds)
    ratio, cpu_ratio = last.frames_per_s / first.frames_per_s, last.cpu_us / first.cpu_us
    note = f"frames a second, last {load.last_s:g} s of {load.seconds:g} / first {load.first_s:g} s"
    return [
        Figure("sustained_vs_first_s", [ratio], bar=RATIO_MIN, higher_is_better=True, note=note),
        Figure("sustained_cpu_vs_first", [cpu_ratio], note="the same, CPU time of all processes per frame"),
        Figure("frames_per_s_first", [first.frames_per_s], note="the same, its start"),
        Figure("frames_per_s_sustained", [last.frames_per_s], note="the same, its end"),
    ]


def progress(samples: Sequence[Sample], from_s: float, to_s: float) -> Progress:
    """Between these times, by the first sample at or after each; by the last one where there is none."""
    began, over = (next((each for each in samples if each.at_s >= at_s), samples[-1]) for at_s in (from_s, to_s))
    frames = over.ended - began.ended
    return Progress(frames / (over.at_s - began.at_s), (over.cpu_s - began.cpu_s) / frames * 1e6)


async def _keep_busy(running: Farm, seconds: float) -> list[Sample]:
    samples: list[Sample] = []
    began_s = time.monotonic()
    while not samples or samples[-1].at_s < seconds:
        counts = (await running.queue.counts_exact()).values()
        ended, cpu_s = sum(each.completed for each in counts), sum(running.used_s().values())
        samples.append(Sample(time.monotonic() - began_s, ended, cpu_s))
        waiting = sum(each.waiting for each in counts)
        if len(samples) > 1 and not waiting:
            raise Broken(f"no frame waited after {samples[-1].at_s:.1f} s of the steady load: raise BACKLOG_MIN")
        while waiting < BACKLOG_MIN:
            running.expect(LAYER_FRAMES)
            await running.submitter.submit([layer_of(LAYER_FRAMES)])
            waiting += LAYER_FRAMES
        await asyncio.sleep(SAMPLE_INTERVAL_S)
    return samples

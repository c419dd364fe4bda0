"""Accounting: what a booking costs on each ledger, and what keeping the books costs beside it.

- `live_vs_transactional`: 8 bookers on one show; the live ledger in batches of 50 against the transactional one with a
  booking per transaction, all on the same five hot rows;
- `layer_vs_bare_script`, `jobs_vs_bare_script`: the live ledger's script call against one that books frame by frame and
  without tokens (`bare_book.lua`);
- `bookings_during_recompute`: bookers and releasers while another replica recomputes, against the same without;
- `bootstrap_100k_s`: from an empty Redis until the show can be booked.

Bookings include the insert of their rows and its commit, on both sides, except where a figure is about the script.
Releases are off the clock but in `bookings_during_recompute`. Variants take turns within one run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from bench.accounting import booking, maintenance
from bench.accounting.cluster import Servers, started
from bench.report import Figure, Report

PROCS = 100_000


@dataclass(frozen=True, slots=True)
class Size:
    rounds: int
    frames: int
    calls: int
    recomputes: int
    recomputes_of_jobs: int
    """None in a quick run: one takes ten seconds and more, at the pace that spares the bookers."""
    bootstraps: int
    quiet_s: float


QUICK = Size(rounds=3, frames=6_000, calls=40, recomputes=2, recomputes_of_jobs=0, bootstraps=2, quiet_s=1.5)
FULL = Size(rounds=9, frames=20_000, calls=100, recomputes=5, recomputes_of_jobs=3, bootstraps=5, quiet_s=3.0)


def run(quick: bool) -> Report:
    return asyncio.run(_run(QUICK if quick else FULL))


async def _run(size: Size) -> Report:
    report = Report()
    async with started() as servers:
        await _ledgers(report, servers, size)
        await _scripts(report, servers, size)
        await _keeping(report, servers, size)
    return report


async def _ledgers(report: Report, servers: Servers, size: Size) -> None:
    taken = await booking.ledgers(servers, size.rounds, size.frames)
    legacy = [live / one for live, one in zip(taken.live, taken.legacy, strict=True)]
    batched = [live / fifty for live, fifty in zip(taken.live, taken.batched, strict=True)]
    report.add(
        Figure("live_vs_transactional", legacy, 10, True, "8 bookers: live by 50 / transactional one by one, with rows")
    )
    report.add(Figure("live_vs_transactional_50", batched, note="the same, both by 50"))
    report.add(Figure("live_k_per_s", _thousands(taken.live), note="thousand frames/s, live by 50"))
    report.add(Figure("transactional_k_per_s", _thousands(taken.legacy), note="transactional one by one"))
    report.add(Figure("transactional_50_k_per_s", _thousands(taken.batched), note="transactional by 50"))


async def _scripts(report: Report, servers: Servers, size: Size) -> None:
    layer, jobs = await booking.scripts(servers, size.rounds * 2 - 1, size.calls)
    report.add(Figure("layer_vs_bare_script", layer.ratios, 2.5, True, "calls of 50 frames of one layer, no rows"))
    report.add(Figure("jobs_vs_bare_script", jobs.ratios, 0.8, True, "calls of 50 single-frame jobs, no rows"))
    report.add(Figure("layer_call_us", layer.ours_us, note="per frame of a layer, as the client sees it"))
    report.add(Figure("jobs_call_us", jobs.ours_us, note="per single-frame job"))


async def _keeping(report: Report, servers: Servers, size: Size) -> None:
    """Every figure for layers with limits, then the same for single-frame jobs without."""
    await _kept(report, servers, size, Kept("", maintenance.frames_of, "100 layers", size.recomputes, 0.8))
    await _kept(
        report, servers, size, Kept("_jobs", maintenance.jobs_of, "as many jobs", size.recomputes_of_jobs, None)
    )


class Kept(NamedTuple):
    suffix: str
    kind: maintenance.Kind
    what: str
    recomputes: int
    bar: float | None


async def _kept(report: Report, servers: Servers, size: Size, kept: Kept) -> None:
    bytes_each = await maintenance.bytes_per_token(servers, kept.kind, PROCS)
    async with maintenance.filled(servers, kept.kind, PROCS) as farm:
        seeded = await maintenance.bootstraps(servers, farm, PROCS, size.bootstraps)
        redone = await maintenance.recomputes(servers, farm, kept.kind, kept.recomputes, size.quiet_s)

    def add(name: str, samples: list[float], bar: float | None = None, more: bool = False, note: str = "") -> None:
        report.add(Figure(name.replace("*", kept.suffix), samples, bar, more, note))

    add("bookings_during_recompute*", redone.ratios, kept.bar, True, f"100,000 procs of {kept.what}, rest 4")
    add("recompute_100k*_s", redone.scan_s, note="its scan, at that load")
    add("recompute_call*_ms", redone.longest_ms, note="its longest script call")
    add("load*_k_per_s", _thousands(redone.quiet_per_s), note="thousand frames/s booked and released, without it")
    add("bootstrap_100k*_s", seeded.took_s, 10, note=f"100,000 procs of {kept.what}, from an empty Redis")
    add("bootstrap_call*_ms", seeded.longest_ms, note="its longest script call")
    add("bytes_per_token*", [bytes_each], note="booked in batches of 50")


def _thousands(numbers: list[float]) -> list[float]:
    return [number / 1000 for number in numbers]

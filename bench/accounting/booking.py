"""What a booking costs: the live ledger against the transactional one, and its script against a bare one.

Variants take turns, round after round, so that a noisy minute hits all alike; a ratio is taken within its round. Frames
ask for a core and a GPU, every level has limits for both, and nothing is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from bench.accounting.cluster import Farm, Servers
from rota.accounting.ledger import BATCH_MAX, BookingGroup, Ledger
from rota.accounting.live.ledger import ExpandRequiredReply
from rota.infra.redis import ShowRedisKeys, script

BOOKERS: Final = 8
BATCH: Final = 50


class Booked(msgspec.Struct, frozen=True):
    frames: int


class Refused(msgspec.Struct, frozen=True):
    frames: int
    level: int
    current: int
    cap: int


BARE = script("bench.accounting", "bare_book", replies=Booked | Refused)
Book = Callable[[list[BookingGroup]], Awaitable[object]]


@dataclass(slots=True)
class Variant:
    """Bookers of one ledger; a round books `frames` of one layer and releases them afterwards, off the clock."""

    ledger: Ledger
    farm: Farm
    batch: int
    frames: int
    per_s: list[float] = field(default_factory=list)

    async def round(self) -> None:
        batches = [self.farm.frames(self.batch) for _ in range(self.frames // self.batch)]
        waiting = iter(batches)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(BOOKERS):
                tasks.create_task(self._book(waiting))
        self.per_s.append(self.frames / (time.perf_counter() - began))
        first, last = batches[0][0].tokens[0], batches[-1][0].tokens[-1]
        for start in range(first, last + 1, BATCH_MAX):
            await self.ledger.release(self.farm.show, range(start, min(start + BATCH_MAX, last + 1)))

    async def _book(self, waiting: Iterator[list[BookingGroup]]) -> None:
        for groups in waiting:
            [outcome] = await self.ledger.book(self.farm.show, groups)
            assert outcome.booked == groups[0].tokens, "nothing is refused here"


@dataclass(slots=True)
class Ledgers:
    """Frames per second, with their rows committed."""

    live: list[float]
    legacy: list[float]
    batched: list[float]


async def ledgers(servers: Servers, rounds: int, frames: int) -> Ledgers:
    """Live in batches, transactional one by one (the legacy shape), transactional in batches."""
    managed = await Farm(servers, managed=True).make()
    unmanaged = await Farm(servers, managed=False).make()
    live = Variant(servers.live, managed, BATCH, frames)
    legacy = Variant(servers.transactional, unmanaged, 1, frames // 20)
    batched = Variant(servers.transactional, unmanaged, BATCH, frames)
    for variant in (live, legacy, batched):
        await variant.round()
        variant.per_s.clear()
    for _ in range(rounds):
        for variant in (live, legacy, batched):
            await variant.round()
    return Ledgers(live.per_s, legacy.per_s, batched.per_s)


@dataclass(slots=True)
class Scripts:
    """Microseconds per frame as the client sees them, of our script and of the bare one."""

    ours_us: list[float] = field(default_factory=list)
    bare_us: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [bare / ours for ours, bare in zip(self.ours_us, self.bare_us, strict=True)]


async def scripts(servers: Servers, rounds: int, calls: int) -> tuple[Scripts, Scripts]:
    """Frames of one layer, and jobs of one frame; no rows."""
    ours = await Farm(servers, managed=True).make()
    bare = await Farm(servers, managed=True).make()
    layer, jobs = Scripts(), Scripts()
    for nth in range(rounds + 1):
        for taken, kind in ((layer, Farm.frames), (jobs, Farm.jobs)):
            ours_us = await _us([kind(ours, BATCH) for _ in range(calls)], _ours(ours))
            await ours.seed()
            bare_us = await _us([kind(bare, BATCH) for _ in range(calls)], _bare(bare))
            await bare.seed()
            if nth:
                taken.ours_us.append(ours_us)
                taken.bare_us.append(bare_us)
    return layer, jobs


async def _us(batches: Sequence[list[BookingGroup]], book: Book) -> float:
    began = time.perf_counter()
    for groups in batches:
        await book(groups)
    return (time.perf_counter() - began) * 1e6 / (len(batches) * BATCH)


def _ours(farm: Farm) -> Book:
    async def book(groups: list[BookingGroup]) -> None:
        booked = await farm.servers.live._book(farm.show, groups, "limits")
        assert booked is not None
        assert not isinstance(booked, ExpandRequiredReply)
        assert sum(told.fit for told in booked.groups) == BATCH

    return book


def _bare(farm: Farm) -> Book:
    keys = farm.servers.live.keys.show_keys(str(farm.show))

    async def book(groups: list[BookingGroup]) -> None:
        places, frames = _wired(keys, groups)
        reply = await BARE(farm.servers.client, seq=keys.seq, places=places, frames=frames)
        assert reply == Booked(BATCH)

    return book


def _wired(keys: ShowRedisKeys, groups: Sequence[BookingGroup]) -> tuple[list[str], list[int]]:
    """As lean as our own: each key is sent once, frames name their places."""
    at: dict[str, int] = {}
    frames: list[int] = []
    for group in groups:
        charge = group.charge
        charged = (str(charge.alloc), str(charge.folder), str(charge.job), str(charge.layer), str(charge.dept))
        places = [at.setdefault(key, len(at) + 1) for key in keys.counter_keys(charged)]
        frames += [*places, charge.cores // 100, charge.gpus] * len(group.tokens)
    return list(at), frames

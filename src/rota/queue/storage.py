"""The steps that keep the queue's storage small, one function each. Who may take them is up to the caller.

Each is safe to repeat and safe to die in, being one statement in the caller's transaction. None waits for a producer, a
dispatcher or a worker for longer than `LOCK_MS` to get into a slot, and none makes them wait for longer than that plus
its own work there, which is short: a fold, a truncation, or `CARRY_MAX` entries.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from rota.infra.postgres import Database, Transaction, query

FOLD = query(__package__, "fold")
PINS = query(__package__, "pins")
ROTATE = query(__package__, "rotate")
PRUNABLE = query(__package__, "prunable")
PRUNE = query(__package__, "prune")
CARRY = query(__package__, "carry")
SHED = query(__package__, "shed")
PROMOTE = query(__package__, "promote")

RING: Final = 7
KEPT: Final = 7
"""The slot beside the ring."""
LOCK_MS: Final = 50
CARRY_MAX: Final = 2000
"""Entries that are carried in one transaction, during which nobody gets into their slot: some 20 ms."""
SLOT_BYTES: Final = 32 * 1024 * 1024
SLOT_AGE_S: Final = 60.0
PROMOTE_MAX: Final = 2000
PINNED_S: Final = 5.0

Rotated = Literal["rotated", "not needed", "full"]
Pruned = Literal["pruned", "not needed", "live", "blocked"]
Carried = Literal["carried", "carrying", "blocked"]


class Folded(msgspec.Struct, frozen=True):
    turn: int
    deltas: int
    done: str


class Pin(msgspec.Struct, frozen=True):
    """A session whose old transaction keeps dead rows from being removed."""

    pid: int
    application: str
    age_s: float
    state: str | None


async def fold(on: Transaction, *, pinned: bool) -> list[Folded]:
    """Make pending deltas part of the counts; while old rows are pinned only make them few, which leaves none dead."""
    return [Folded(*row.values()) for row in await on.rows(FOLD, pinned)]


async def pins(on: Database | Transaction, older_than_s: float = PINNED_S) -> list[Pin]:
    return [Pin(*row.values()) for row in await on.rows(PINS, older_than_s)]


async def rotate(on: Transaction, slot_bytes: int = SLOT_BYTES, slot_age_s: float = SLOT_AGE_S) -> Rotated:
    """Open the next slot when the open one is large or old enough. `full`: the next one still holds something."""
    answer: Rotated = await on.value(ROTATE, slot_bytes, slot_age_s)
    return answer


async def prunable(on: Database | Transaction) -> list[int]:
    """Slots for which `prune` is worth a try."""
    return [row["slot"] for row in await on.rows(PRUNABLE)]


async def prune(on: Transaction, slot: int | None = None) -> Pruned:
    """Empty a sealed slot in which everything has ended. `blocked`: somebody has an open transaction in it.

    None is the oldest slot, and its rows are asked even if the folded counters say that something in it lives.
    """
    answer: Pruned = await on.value(PRUNE, slot, LOCK_MS)
    return answer


async def carry(on: Transaction) -> Carried:
    """Empty the oldest slot although something in it lives on; that is kept outside of the ring until it ends.

    A part of it; `carrying`: there is more.
    """
    answer: Carried = await on.value(CARRY, LOCK_MS, CARRY_MAX)
    return answer


async def shed_kept(on: Transaction) -> None:
    """Forget what has ended of what was carried. Nobody waits for this, nor for the next."""
    await on.value(SHED, True)


async def shed_oldest(on: Transaction) -> None:
    """Forget the ends in the slot that is in the way of a new one, so that carrying the rest is short."""
    await on.value(SHED, False)


async def promote(on: Transaction, most: int = PROMOTE_MAX) -> int:
    """Queue deferred frames whose time has come; returns how many."""
    return int(await on.value(PROMOTE, most))

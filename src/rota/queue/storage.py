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
PINNING_SESSIONS = query(__package__, "pins")
ROTATE = query(__package__, "rotate")
PRUNABLE = query(__package__, "prunable")
PRUNE = query(__package__, "prune")
CARRY_OVER = query(__package__, "carry")
PURGE = query(__package__, "shed")
PROMOTE = query(__package__, "promote")

RING_SLOTS: Final = 7
CARRIED_SLOT: Final = 7
"""The slot beside the ring."""
LOCK_TIMEOUT_MS: Final = 50
CARRY_MAX: Final = 2000
"""Entries that are carried in one transaction, during which nobody gets into their slot: some 20 ms."""
SLOT_BYTES: Final = 32 * 1024 * 1024
SLOT_AGE_S: Final = 60.0
PROMOTE_MAX: Final = 2000
LONG_TRANSACTION_S: Final = 5.0

RotateOutcome = Literal["rotated", "not needed", "full"]
PruneOutcome = Literal["pruned", "not needed", "live", "blocked"]
CarryOutcome = Literal["carried", "carrying", "blocked"]


class FoldResult(msgspec.Struct, frozen=True):
    turn: int
    deltas: int
    done: str


class PinningSession(msgspec.Struct, frozen=True):
    """A session whose old transaction keeps dead rows from being removed."""

    pid: int
    application: str
    age_s: float
    state: str | None


async def fold(on: Transaction, *, pinned: bool) -> list[FoldResult]:
    """Make pending deltas part of the counts; while old rows are pinned only make them few, which leaves none dead."""
    return [FoldResult(*row.values()) for row in await on.rows(FOLD, pinned)]


async def pinning_sessions(
    on: Database | Transaction, older_than_s: float = LONG_TRANSACTION_S
) -> list[PinningSession]:
    return [PinningSession(*row.values()) for row in await on.rows(PINNING_SESSIONS, older_than_s)]


async def rotate(on: Transaction, slot_bytes: int = SLOT_BYTES, slot_age_s: float = SLOT_AGE_S) -> RotateOutcome:
    """Open the next slot when the open one is large or old enough. `full`: the next one still holds something."""
    answer: RotateOutcome = await on.value(ROTATE, slot_bytes, slot_age_s)
    return answer


async def prunable_slots(on: Database | Transaction) -> list[int]:
    """Slots for which `prune` is worth a try."""
    return [row["slot"] for row in await on.rows(PRUNABLE)]


async def prune(on: Transaction, slot: int | None = None) -> PruneOutcome:
    """Empty a sealed slot in which everything has ended. `blocked`: somebody has an open transaction in it.

    None is the oldest slot, and its rows are asked even if the folded counters say that something in it lives.
    """
    answer: PruneOutcome = await on.value(PRUNE, slot, LOCK_TIMEOUT_MS)
    return answer


async def carry_over(on: Transaction) -> CarryOutcome:
    """Empty the oldest slot although something in it lives on; that is kept outside of the ring until it ends.

    A part of it; `carrying`: there is more.
    """
    answer: CarryOutcome = await on.value(CARRY_OVER, LOCK_TIMEOUT_MS, CARRY_MAX)
    return answer


async def purge_carried(on: Transaction) -> None:
    """Forget what has ended of what was carried. Nobody waits for this, nor for the next."""
    await on.value(PURGE, True)


async def purge_oldest(on: Transaction) -> None:
    """Forget the ends in the slot that is in the way of a new one, so that carrying the rest is short."""
    await on.value(PURGE, False)


async def promote(on: Transaction, most: int = PROMOTE_MAX) -> int:
    """Queue deferred frames whose time has come; returns how many."""
    return int(await on.value(PROMOTE, most))

"""The maintenance steps of the queue's storage, one function each. The caller decides who may run them.

Each is one statement in the caller's transaction, so it is safe to repeat and to die in. None waits longer than
`LOCK_TIMEOUT_MS` for a producer, a dispatcher or a worker to enter a slot, and none blocks them for longer than that
plus its own short work there: a fold, a truncation, or `CARRY_MAX` entries.
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
FRAMES_DUE = query(__package__, "frames_due")
STORAGE_DUE = query(__package__, "storage_due")

RING_SLOTS: Final = 7
CARRIED_SLOT: Final = 7
"""The slot outside of the ring."""
LOCK_TIMEOUT_MS: Final = 50
CARRY_MAX: Final = 2000
"""Entries carried over in one transaction, which blocks their slot for about 20 ms."""
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
    """A session whose old transaction prevents the removal of dead rows."""

    pid: int
    application: str
    age_s: float
    state: str | None


class FramesDue(msgspec.Struct, frozen=True):
    """Frames that wait for a step of maintenance."""

    deferred: bool
    """Deferred frames are due."""
    unowned: bool
    """A dispatcher has no lease any more."""


class StorageDue(msgspec.Struct, frozen=True):
    deltas: bool
    """Deltas wait to be folded."""
    rotation: bool
    """The open slot is large or old enough."""
    counted: bool
    """Counters are trusted."""


async def frames_due(on: Database) -> FramesDue:
    return FramesDue(*(await on.rows(FRAMES_DUE))[0].values())


async def storage_due(on: Database, slot_bytes: int, slot_age_s: float) -> StorageDue:
    return StorageDue(*(await on.rows(STORAGE_DUE, slot_bytes, slot_age_s))[0].values())


async def fold(on: Transaction, *, pinned: bool) -> list[FoldResult]:
    """Fold pending deltas into the counts; while old rows are pinned only merge deltas, which leaves no dead rows.

    `in use`: a session holds a lock on pinned deltas, so they stay as they are until the next pass.
    """
    return [FoldResult(*row.values()) for row in await on.rows(FOLD, pinned)]


async def pinning_sessions(
    on: Database | Transaction, older_than_s: float = LONG_TRANSACTION_S
) -> list[PinningSession]:
    return [PinningSession(*row.values()) for row in await on.rows(PINNING_SESSIONS, older_than_s)]


async def rotate(on: Transaction, slot_bytes: int = SLOT_BYTES, slot_age_s: float = SLOT_AGE_S) -> RotateOutcome:
    """Open the next slot when the open one is large or old enough. `full`: the next one is not empty yet."""
    outcome: RotateOutcome = await on.value(ROTATE, slot_bytes, slot_age_s)
    return outcome


async def prunable_slots(on: Database | Transaction) -> list[int]:
    """Slots for which `prune` is likely to succeed."""
    return [row["slot"] for row in await on.rows(PRUNABLE)]


async def prune(on: Transaction, slot: int | None = None) -> PruneOutcome:
    """Truncate a sealed slot in which everything has ended. `blocked`: a session has an open transaction in it.

    None prunes the oldest slot, and checks its rows even if the folded counters say that something in it is live.
    """
    outcome: PruneOutcome = await on.value(PRUNE, slot, LOCK_TIMEOUT_MS)
    return outcome


async def carry_over(on: Transaction) -> CarryOutcome:
    """Empty the oldest slot although it has live entries; these are kept outside of the ring until they end.

    Moves a part of them; `carrying`: there is more.
    """
    outcome: CarryOutcome = await on.value(CARRY_OVER, LOCK_TIMEOUT_MS, CARRY_MAX)
    return outcome


async def purge_carried(on: Transaction) -> None:
    """Delete ended rows of the carried slot. Blocks no one, like `purge_oldest`."""
    await on.value(PURGE, True)


async def purge_oldest(on: Transaction) -> None:
    """Delete ended rows of the oldest slot, so that carrying over the rest is short."""
    await on.value(PURGE, False)


async def promote(on: Transaction, most: int = PROMOTE_MAX) -> int:
    """Queue deferred frames that are due; returns how many."""
    return int(await on.value(PROMOTE, most))

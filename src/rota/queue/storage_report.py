"""Read-only reports on the storage; the queue does not depend on them.

Sessions of other roles are visible only with `GRANT pg_monitor TO ...`; without it they are missing from the report but
still have their effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from rota.infra.postgres import Database, query
from rota.queue.counts import CounterMode
from rota.queue.storage import LONG_TRANSACTION_S

STATE = query(__package__, "report_state")
SLOTS = query(__package__, "report_slots")
SESSIONS = query(__package__, "report_sessions")
TABLES = query(__package__, "report_tables")

MAINTENANCE_LEASE: Final = "queue:upkeep"
SIDE_TABLES: Final = {
    "deferred_jobs": "deferred frames",
    "queue_returned": "returned or parked",
    "ready_tombstones": "cancelled while waiting",
    "done_entries": "failed frames",
    "dlq_entries": "dead letters",
    "queue_terminal_live_counts": "folded counts",
    "queue_terminal_rollups": "counts of pruned frames",
    "queue_lane_bases": "lane positions",
}
"""Small tables outside of the ring, and what they hold."""


class StorageState(msgspec.Struct, frozen=True):
    counter_mode: CounterMode
    counters_trusted: bool
    pending_deltas: int
    generation: int
    open_s: float
    """How long the open slot has been in use, in seconds."""
    keeper: str | None
    """The holder of the maintenance lease; None while there is none."""
    as_of: datetime
    """By the clock of PostgreSQL."""


class SlotState(msgspec.Struct, frozen=True):
    """`number` 7 is outside of the ring: it keeps entries that outlived their slot."""

    number: int
    generation: int | None
    is_open: bool
    bytes: int
    waiting: int
    running: int
    holds: bool
    """Whether it has rows, even if all of them have ended; an emptied slot has none."""


class LongTransaction(msgspec.Struct, frozen=True):
    """A session with a long transaction."""

    pid: int
    application: str
    age_s: float
    state: str | None
    pins: bool
    """Whether it prevents the removal of dead rows."""
    slots: Sequence[int]
    """Slots that cannot be emptied before it ends."""


class TableSize(msgspec.Struct, frozen=True):
    name: str
    bytes: int
    rows: int
    dead_rows: int


async def storage_state(on: Database) -> StorageState:
    row = await on.row(STATE, MAINTENANCE_LEASE)
    assert row is not None, "the migration made the row"
    return StorageState(*row.values())


async def slots(on: Database) -> list[SlotState]:
    return [SlotState(*row.values()) for row in await on.rows(SLOTS)]


async def long_transactions(on: Database, older_than_s: float = LONG_TRANSACTION_S) -> list[LongTransaction]:
    """Oldest first."""
    return [LongTransaction(*row.values()) for row in await on.rows(SESSIONS, older_than_s)]


async def table_sizes(on: Database) -> list[TableSize]:
    return [TableSize(*row.values()) for row in await on.rows(TABLES, list(SIDE_TABLES))]

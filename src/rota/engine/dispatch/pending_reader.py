"""Reads what waits into `PendingQueues`, from PostgreSQL: counts, ages, requirements and shares.

Each second one statement tells whether any count has changed, and if so the next one reads all of them. To read the
age of a lane costs more, so it is read when the counts of the lane have changed, or when its queue was notified: frames
have come, and as many may have been claimed. A lane that just waits costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import msgspec

from rota.engine.dispatch.minimums import MinimumKey
from rota.engine.dispatch.pending_queues import PendingQueues, QueueKey
from rota.infra.clock import Clock
from rota.infra.postgres import Database, Record, query
from rota.model.ids import DeptId, FolderId, ShowId
from rota.model.quota import Usage
from rota.placement import PlacementRequirements
from rota.queue import ClaimableLane, Queue

CLASSES = query(__package__, "queue_classes")
SHARES = query(__package__, "shares")
WAITING_LIMITS = query(__package__, "waiting_limits")
MINIMUMS = query(__package__, "minimums")

POLL_INTERVAL_S: Final = 1.0
POLL_MAX_AGE_S: Final = 60.0
"""Everything is read again after this, whatever has changed."""
HEADS_MAX_AGE_S: Final = 600.0
"""Should a notification be missed, the age is read again after this."""


class WaitingLimits(NamedTuple):
    """What limits or orders waiting frames, other than quota."""

    limited: frozenset[ShowId]
    """Shows with a limit on concurrent jobs."""
    parked: bool
    """Frames are parked."""
    minimums: bool
    """Folders or departments have a minimum."""


class _AllRead(NamedTuple):
    """All queues were read after this."""

    version: int | None
    changes: int
    until_s: float


class _LaneHead(NamedTuple):
    """The next frame of a lane."""

    waiting: int
    parked: int
    """The counts of the lane when its head was read."""
    since_s: float
    read_at_s: float


class PendingReader:
    def __init__(self, pending_queues: PendingQueues, database: Database, queue: Queue, clock: Clock) -> None:
        self.pending_queues = pending_queues
        self.database = database
        self.queue = queue
        self._clock = clock
        self._keys: dict[str, QueueKey] = {}
        self._heads: dict[int, _LaneHead] = {}
        self._shares_at = float("-inf")
        self._all_read: _AllRead | None = None

    def forget(self) -> None:
        """Notifications may have been missed: read everything again, ages too."""
        self._heads.clear()
        self._all_read = None

    async def refresh_all(self, *, always: bool) -> bool:
        """Read what waits in all queues, unless nothing has changed since it was read. Returns whether it did."""
        before = _AllRead(
            await self.queue.counts_version(), self.pending_queues.changes, self._clock.monotonic() + POLL_MAX_AGE_S
        )
        known = self._all_read
        if (
            always
            or known is None
            or before.version is None
            or (known.version, known.changes) != (before.version, before.changes)
            or self._clock.monotonic() >= known.until_s
        ):
            await self.refresh()
            self._all_read = before
            return True
        return False

    async def refresh(self, queues: Collection[str] | None = None) -> None:
        """Read what waits in these queues, or in all."""
        arrivals = self.pending_queues.arrivals(queues)
        found = await self.queue.candidates(None if queues is None else sorted(queues))
        unknown = sorted({candidate.queue for candidate in found} - self._keys.keys())
        if unknown:
            for row in await self.database.rows(CLASSES, unknown):
                self._keys[row["queue"]] = queue_key_from_row(row)
        ages = await self._ages_s(found, notified=queues is not None)
        if queues is None:
            self._heads = {lane: self._heads[lane] for lane in ages}
        self.pending_queues.set_counts(found, self._keys, ages, arrivals, queues)

    async def read_limits(self) -> WaitingLimits:
        """One statement for what most installations do not use."""
        row = await self.database.row(WAITING_LIMITS)
        assert row is not None
        return WaitingLimits(frozenset(map(ShowId, row["limited"])), row["parked"], row["minimums"])

    async def refresh_minimums(self) -> None:
        least: dict[MinimumKey, Usage] = {}
        used: dict[MinimumKey, Usage] = {}
        for row in await self.database.rows(MINIMUMS):
            key = (ShowId(row["pk_show"]), row["key"])
            least[key] = Usage(row["min_cores"], row["min_gpus"])
            used[key] = Usage(row["cores"], row["gpus"])
        self.pending_queues.set_minimums(least, used)

    async def _ages_s(self, found: Sequence[ClaimableLane], *, notified: bool) -> dict[int, float]:
        """Waiting time of the next frame of each lane."""
        now = self._clock.monotonic()
        changed = [each for each in found if notified or not self._is_read(each, now)]
        ages = await self.queue.head_ages_s([each.lane for each in changed]) if changed else {}
        now = self._clock.monotonic()
        for each in changed:
            self._heads.pop(each.lane, None)
            if (age_s := ages.get(each.lane)) is not None:
                self._heads[each.lane] = _LaneHead(each.waiting, each.parked, now - age_s, now)
        return {each.lane: now - head.since_s for each in found if (head := self._heads.get(each.lane)) is not None}

    def _is_read(self, lane: ClaimableLane, now: float) -> bool:
        head = self._heads.get(lane.lane)
        return (
            head is not None
            and (head.waiting, head.parked) == (lane.waiting, lane.parked)
            and now - head.read_at_s < HEADS_MAX_AGE_S
        )

    async def refresh_shares(self) -> None:
        """Read the shares if several shows wait and what was read is old."""
        now = self._clock.monotonic()
        if self.pending_queues.shows_waiting() < 2 or now - self._shares_at < POLL_INTERVAL_S:
            return
        self._shares_at = now
        rows = await self.database.rows(SHARES)
        self.pending_queues.set_shares({(row["pk_show"], row["pk_alloc"]): (row["size"], row["used"]) for row in rows})


def queue_key_from_row(row: Record) -> QueueKey:
    """From a row of `CLASSES`."""
    return QueueKey(
        row["queue"],
        ShowId(row["pk_show"]),
        FolderId(row["pk_folder"]),
        DeptId(row["pk_dept"]),
        requirements_from_row(row),
    )


def requirements_from_row(row: Record) -> PlacementRequirements:
    """From the columns of `rota.placement_class`."""
    return PlacementRequirements.from_row(
        topic=row["topic"],
        requires=row["requires"],
        labels=msgspec.json.decode(row["labels"], type=dict[str, str]),
        preferred_pool=row["preferred_pool"],
        preferred_worker=row["preferred_worker"],
        cores=row["cores"],
        gpus=row["gpus"],
        memory_mb=row["memory_mb"],
    )

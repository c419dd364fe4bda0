"""What a booking would be checked against now: the five levels with their limits, as the deciding ledger counts them.

Read-only. Limits come from PostgreSQL; Redis receives each after its commit, so it may briefly have an older one. Usage
comes from the deciding ledger: Redis for managed shows, the five tables for the others. When Redis decides but cannot
be queried, `undecided` holds the reason and usage is summed from `proc`, which never exceeds the count in Redis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from rota.accounting.ledger import DeclineReason, QuotaKey
from rota.accounting.live import reader as live_reader
from rota.accounting.live import script_args
from rota.accounting.live.ledger import LiveLedger
from rota.infra.postgres import Database, Record, query
from rota.model.errors import RedisUnavailable
from rota.model.ids import DeptId, FolderId, JobId, LayerId, PoolId, ShowId
from rota.model.quota import LEVELS, Ask, Fit, Level, LevelStatus, Limit, Refusal, Resource, Usage, fits

LIMITS = query(__package__, "standings")
USAGE_BY_ROWS = query(__package__, "standings_used")

_LEVELS_BELOW_SUBSCRIPTION: Final = (Level.FOLDER, Level.JOB, Level.LAYER, Level.POINT)


class QuotaTarget(msgspec.Struct, frozen=True):
    """The keys that count frames of a layer, besides the pool they run in."""

    show: ShowId
    folder: FolderId
    job: JobId
    layer: LayerId
    dept: DeptId


class LimitsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All limits of frames of one target. Levels without a limit may be missing."""

    managed: bool
    shares: Mapping[PoolId, LevelStatus]
    """By pool of the subscription; the show has no subscription to a missing pool."""
    others: Mapping[Level, LevelStatus]
    undecided: DeclineReason | None = None

    def usage_at(self, level: Level, pool: PoolId) -> Usage:
        """Booked usage at a level; for subscriptions, in this pool."""
        status = self.shares.get(pool) if level is Level.SUBSCRIPTION else self.others.get(level)
        return status.usage if status is not None else Usage()

    def fits(self, pool: PoolId, ask: Ask, requested: int) -> Fit:
        """How many of `requested` frames the ledger would book in this pool."""
        share = self.shares.get(pool)
        if share is None and requested:
            resource = Resource.CORES if ask.cores else Resource.GPUS
            return Fit(0, Refusal(Level.SUBSCRIPTION, resource, 0, 0, ask.of(resource)))
        return fits({Level.SUBSCRIPTION: share or LevelStatus(), **self.others}, ask, requested)

    def with_booked(self, pool: PoolId, ask: Ask, frames: int) -> LimitsSnapshot:
        """The snapshot after `frames` more frames are booked in this pool."""
        share = {pool: _add_frames(self.shares[pool], ask, frames)} if pool in self.shares else {}
        others = {level: _add_frames(status, ask, frames) for level, status in self.others.items()}
        return msgspec.structs.replace(self, shares={**self.shares, **share}, others=others)


async def read_limits_snapshot(
    database: Database, target: QuotaTarget, live: LiveLedger | None, *, by_rows: bool = False
) -> LimitsSnapshot:
    """`by_rows` sums managed shows from `proc`, for callers without Redis that would not book either."""
    rows = await database.rows(LIMITS, *msgspec.structs.astuple(target))
    limits = {_row_key(row): Limit(row["cores_max"], row["gpus_max"]) for row in rows if row["level"]}
    show = next((row for row in rows if not row["level"]), None)
    if show is None or not show["managed"]:
        used = {_row_key(row): Usage(row["cores"], row["gpus"]) for row in rows if row["level"]}
        reason = DeclineReason.UNKNOWN_SHOW if show is None else None
        return _build_snapshot(limits, used, managed=False, undecided=reason)
    reason, usage = (None, None) if by_rows else await _usage_from_redis(live, target.show, show["fence"], limits)
    if usage is None:
        usage = await read_recorded_usage(database, target)
    return _build_snapshot(limits, usage, managed=True, undecided=reason)


async def _usage_from_redis(
    live: LiveLedger | None, show: ShowId, fence: int, limits: Mapping[QuotaKey, Limit]
) -> tuple[DeclineReason | None, dict[QuotaKey, Usage] | None]:
    """Usage by Redis; or the reason why it cannot be queried, and None."""
    if live is None:
        return DeclineReason.REDIS_OFF, None
    try:
        if not await live.is_seeded(show, fence):
            return DeclineReason.UNSEEDED, None
        names = {script_args.counter_name(*key): key for key in limits}
        found = await live_reader.read_counters(live.client, live.keys.show_keys(str(show)), names)
    except RedisUnavailable:
        return DeclineReason.REDIS_OFF, None
    return None, {names[name]: each.usage or Usage() for name, each in found.items()}


async def read_recorded_usage(database: Database, target: QuotaTarget) -> dict[QuotaKey, Usage]:
    """Usage by the record, the rows of `proc`; the live count in Redis is never below it, and above it while bookings
    and releases are under way."""
    rows = await database.rows(USAGE_BY_ROWS, *msgspec.structs.astuple(target))
    used: dict[QuotaKey, Usage] = {(Level.SUBSCRIPTION, row["alloc"]): Usage(row["cores"], row["gpus"]) for row in rows}
    for level, each in zip(
        _LEVELS_BELOW_SUBSCRIPTION, (target.folder, target.job, target.layer, target.dept), strict=True
    ):
        used[level, each] = Usage(sum(row[f"{level}_cores"] for row in rows), sum(row[f"{level}_gpus"] for row in rows))
    return used


def _build_snapshot(
    limits: Mapping[QuotaKey, Limit], used: Mapping[QuotaKey, Usage], *, managed: bool, undecided: DeclineReason | None
) -> LimitsSnapshot:
    statuses = {key: LevelStatus(limit, used.get(key, Usage())) for key, limit in limits.items()}
    return LimitsSnapshot(
        managed=managed,
        shares={PoolId(of): each for (level, of), each in statuses.items() if level is Level.SUBSCRIPTION},
        others={level: each for (level, _), each in statuses.items() if level is not Level.SUBSCRIPTION},
        undecided=undecided,
    )


def _add_frames(status: LevelStatus, ask: Ask, frames: int) -> LevelStatus:
    return LevelStatus(status.limit, status.usage.plus(ask, frames))


def _row_key(row: Record) -> QuotaKey:
    return LEVELS[row["level"] - 1], row["id"]

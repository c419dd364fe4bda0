"""What a booking would meet now: the five levels with their limits, as the ledger that would decide counts them. Reads.

Limits are what PostgreSQL has; Redis is told of each after its commit, so for a moment it may know an older one. What
is used comes from whoever decides: Redis for managed shows, the five tables for the others. Where Redis decides and
cannot be asked, `undecided` says why, and what rows of `proc` hold is told instead: it never exceeds what Redis counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from rota.accounting.ledger import Key, Why
from rota.accounting.live import state, wire
from rota.accounting.live.ledger import LiveLedger
from rota.infra.postgres import Database, Record, query
from rota.model.errors import RedisUnavailable
from rota.model.ids import DeptId, FolderId, JobId, LayerId, PoolId, ShowId
from rota.model.quota import LEVELS, Ask, Fit, Level, Limit, Refusal, Resource, Standing, Usage, fits

LIMITS = query(__package__, "standings")
USED = query(__package__, "standings_used")

_BELOW: Final = (Level.FOLDER, Level.JOB, Level.LAYER, Level.POINT)


class Place(msgspec.Struct, frozen=True):
    """Where frames of a layer are counted, besides the pool they run in."""

    show: ShowId
    folder: FolderId
    job: JobId
    layer: LayerId
    dept: DeptId


class Standings(msgspec.Struct, frozen=True, kw_only=True):
    """All that limits frames at a place. Levels without a limit may be left out."""

    managed: bool
    shares: Mapping[PoolId, Standing]
    """Of subscriptions; a pool that is missing is one that the show has no share of."""
    others: Mapping[Level, Standing]
    undecided: Why | None = None

    def used(self, level: Level, pool: PoolId) -> Usage:
        """What is booked at a level, or in a pool."""
        standing = self.shares.get(pool) if level is Level.SUBSCRIPTION else self.others.get(level)
        return standing.usage if standing is not None else Usage()

    def fits(self, pool: PoolId, ask: Ask, wanted: int) -> Fit:
        """How many of so many frames the ledger would book in this pool."""
        share = self.shares.get(pool)
        if share is None and wanted:
            resource = Resource.CORES if ask.cores else Resource.GPUS
            return Fit(0, Refusal(Level.SUBSCRIPTION, resource, 0, 0, ask.of(resource)))
        return fits({Level.SUBSCRIPTION: share or Standing(), **self.others}, ask, wanted)

    def with_booked(self, pool: PoolId, ask: Ask, frames: int) -> Standings:
        """As they stand once so many frames more are booked in this pool."""
        share = {pool: _plus(self.shares[pool], ask, frames)} if pool in self.shares else {}
        others = {level: _plus(standing, ask, frames) for level, standing in self.others.items()}
        return msgspec.structs.replace(self, shares={**self.shares, **share}, others=others)


async def standings(database: Database, place: Place, live: LiveLedger | None, *, by_rows: bool = False) -> Standings:
    """`by_rows`: managed shows are counted by their rows, for whoever has no Redis to ask and would not book either."""
    rows = await database.rows(LIMITS, *msgspec.structs.astuple(place))
    limits = {_key(row): Limit(row["cores_max"], row["gpus_max"]) for row in rows if row["level"]}
    show = next((row for row in rows if not row["level"]), None)
    if show is None or not show["managed"]:
        used = {_key(row): Usage(row["cores"], row["gpus"]) for row in rows if row["level"]}
        why = Why.UNKNOWN_SHOW if show is None else None
        return _standings(limits, used, managed=False, undecided=why)
    why, counted = (None, None) if by_rows else await _by_redis(live, place.show, show["fence"], limits)
    if counted is None:
        counted = await _by_rows(database, place)
    return _standings(limits, counted, managed=True, undecided=why)


async def _by_redis(
    live: LiveLedger | None, show: ShowId, fence: int, limits: Mapping[Key, Limit]
) -> tuple[Why | None, dict[Key, Usage] | None]:
    """What Redis counts; or why it cannot be asked, and nothing."""
    if live is None:
        return Why.REDIS_OFF, None
    try:
        if not await live.is_seeded(show, fence):
            return Why.UNSEEDED, None
        names = {wire.name(*key): key for key in limits}
        found = await state.counted(live.client, live.keys.of_show(str(show)), names)
    except RedisUnavailable:
        return Why.REDIS_OFF, None
    return None, {names[name]: each.usage or Usage() for name, each in found.items()}


async def _by_rows(database: Database, place: Place) -> dict[Key, Usage]:
    rows = await database.rows(USED, *msgspec.structs.astuple(place))
    used: dict[Key, Usage] = {(Level.SUBSCRIPTION, row["alloc"]): Usage(row["cores"], row["gpus"]) for row in rows}
    for level, each in zip(_BELOW, (place.folder, place.job, place.layer, place.dept), strict=True):
        used[level, each] = Usage(sum(row[f"{level}_cores"] for row in rows), sum(row[f"{level}_gpus"] for row in rows))
    return used


def _standings(
    limits: Mapping[Key, Limit], used: Mapping[Key, Usage], *, managed: bool, undecided: Why | None
) -> Standings:
    met = {key: Standing(limit, used.get(key, Usage())) for key, limit in limits.items()}
    return Standings(
        managed=managed,
        shares={PoolId(of): each for (level, of), each in met.items() if level is Level.SUBSCRIPTION},
        others={level: each for (level, _), each in met.items() if level is not Level.SUBSCRIPTION},
        undecided=undecided,
    )


def _plus(standing: Standing, ask: Ask, frames: int) -> Standing:
    return Standing(standing.limit, standing.usage.plus(ask, frames))


def _key(row: Record) -> Key:
    return LEVELS[row["level"] - 1], row["id"]

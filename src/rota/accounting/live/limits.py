"""Publishes limits from PostgreSQL to Redis.

Invariants and what enforces them:
- limits and fence are read in one statement, so they are consistent;
- the fence in Redis moves only together with limits: by one, with the change that raised it (`push`), or to any value,
  with all of them (`reseed`). So under a fence Redis never has a limit that was lowered before that fence (A1). A push
  of anything else that finds the fence behind leaves it there: the change that raised it may not have arrived yet;
- among pushes of one fence the higher version wins, so limits never go back;
- limits unknown to Redis are fetched on demand (`push_missing`), so a new folder or a job with caps is usable
  immediately, and a missing limit is never treated as no limit.

A crash or a lost reply between the commit in PostgreSQL and the push leaves an old fence in Redis, so PostgreSQL
refuses its bookings, or a limit lower than necessary; the next booking refused for its fence, or the next reseed,
repairs it. A reseed that is superseded by another finds its marker gone and stops.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Final
from uuid import UUID

import msgspec
import structlog
from redis.asyncio import Redis

from rota.accounting.live import reader as live_reader
from rota.accounting.live import script_args
from rota.accounting.resources import QuotaChange, QuotaItem, QuotaKind
from rota.infra import failpoints
from rota.infra.postgres import Database, query
from rota.infra.redis import RedisKeys, script
from rota.model.ids import ShowId
from rota.model.quota import LEVELS, Level
from rota.model.units import Centicores, format_cores_limit

log = structlog.get_logger(__name__)

READ_LIMITS = query(__package__, "limits_of_show")
ENSURE_POINTS = query(__package__, "point_ensure")

REMOVED_VERSION: Final = 2**53 - 1
"""The version of removed limits in a reseed."""
_LEVEL_OF_KIND: Final[dict[QuotaKind, Level]] = {
    "subscription": Level.SUBSCRIPTION,
    "folder": Level.FOLDER,
    "job": Level.JOB,
    "layer": Level.LAYER,
    "point": Level.POINT,
}


class LimitsWrittenReply(msgspec.Struct, frozen=True, tag="written"):
    seq: int


class UnseededReply(msgspec.Struct, frozen=True, tag="unseeded"):
    pass


class NewerLimitsReply(msgspec.Struct, frozen=True, tag="newer"):
    pass


class MissedChangeReply(msgspec.Struct, frozen=True, tag="missed"):
    pass


class UncountedReply(msgspec.Struct, frozen=True, tag="uncounted"):
    pass


LimitsReply = LimitsWrittenReply | UnseededReply | NewerLimitsReply | MissedChangeReply | UncountedReply
WRITE_LIMITS = script(
    __package__,
    "limits",
    replies=LimitsWrittenReply | UnseededReply | NewerLimitsReply | MissedChangeReply | UncountedReply,
)

LimitsEntry = tuple[str, int, list[str]]


class StoredLimits(msgspec.Struct, frozen=True):
    """Limits of a show from one snapshot."""

    fence: int
    founded: int
    """The lowest fence under which Redis must have been seeded to receive these limits."""
    managed: bool
    entries: Sequence[LimitsEntry]

    @property
    def names(self) -> set[str]:
        return {name for name, _, _ in self.entries}


class LimitsPublisher:
    """Writes the limits of managed shows to Redis."""

    def __init__(self, database: Database, client: Redis, keys: RedisKeys) -> None:
        self.database = database
        self.client = client
        self.keys = keys

    async def read(self, show: ShowId, ids: Sequence[UUID] | None = None) -> StoredLimits | None:
        """Read limits from PostgreSQL; None when the show does not exist."""
        rows = await self.database.rows(READ_LIMITS, show, ids)
        head = next((row for row in rows if row["level"] == 0), None)
        if head is None:
            return None
        entries = [
            (
                script_args.counter_name(LEVELS[row["level"] - 1], row["id"]),
                row["version"],
                _redis_fields(show, row["level"], row["fields"], row["amounts"]),
            )
            for row in rows
            if row["level"]
        ]
        return StoredLimits(head["fence"], head["founded"], head["managed"], entries)

    async def push(self, show: ShowId, change: QuotaChange | None = None, *, raised: int = 0) -> LimitsReply:
        """Push one committed change, or a fence `raised` without a change of limits."""
        ids, removed = _changed_entries(change) if change else ([], [])
        return (await self._push(show, ids, removed, how="push", raised=change.raised if change else raised))[1]

    async def push_missing(self, show: ShowId, names: Iterable[str]) -> tuple[set[str], LimitsReply]:
        """Look up limits that Redis does not know and push them; returns the names that exist."""
        items = [script_args.parse_counter_name(name) for name in names]
        depts = [item for level, item in items if level is Level.POINT]
        if depts:
            await self.database.run(ENSURE_POINTS, show, depts)
        return await self._push(show, [item for _, item in items], [], how="teach")

    async def _push(
        self, show: ShowId, ids: Sequence[UUID], removed: Sequence[LimitsEntry], *, how: str, raised: int = 0
    ) -> tuple[set[str], LimitsReply]:
        read = await self.read(show, ids)
        if read is None or not read.managed:
            return set(), UnseededReply()
        failpoints.hit("limits.before_push")
        entries = [*read.entries, *removed]
        return read.names, await self.write(show, read.fence, entries, how=how, raised=raised, founded=read.founded)

    async def reseed(self, show: ShowId) -> LimitsReply:
        """Write all limits and remove those that no longer exist.

        The names in Redis are listed before PostgreSQL is read, so an item created in between is not removed. Removed
        shares go with the call that raises the fence, so no earlier push can bring them back in between.
        """
        mark = secrets.token_hex(8)
        reply = await self.write(show, 0, [], how="mark", mark=mark)
        if not isinstance(reply, LimitsWrittenReply):
            return reply
        in_redis = [name async for name, _ in live_reader.scan_hash(self.client, self.keys.show_keys(str(show)).limits)]
        failpoints.hit("limits.after_list")
        read = await self.read(show)
        if read is None or not read.managed:
            return UnseededReply()
        existing = read.names
        removed: list[LimitsEntry] = [
            (name, REMOVED_VERSION, [])
            for name in in_redis
            if name not in existing and live_reader.is_counter_name(name)
        ]
        removed_jobs = [entry for entry in removed if entry[0].startswith(("job:", "layer:"))]
        for chunk in live_reader.chunked([*read.entries, *removed_jobs], 128):
            reply = await self.write(show, read.fence, chunk, how="reseed", mark=mark, founded=read.founded)
            failpoints.hit("limits.mid_reseed")
            if not isinstance(reply, LimitsWrittenReply):
                return reply
        shares = [entry for entry in removed if entry not in removed_jobs]
        return await self.write(show, read.fence, shares, how="reseed", mark=mark, last=True, founded=read.founded)

    async def write(
        self,
        show: ShowId,
        fence: int,
        entries: Sequence[LimitsEntry],
        *,
        how: str,
        raised: int = 0,
        founded: int = 0,
        mark: str = "",
        last: bool = False,
    ) -> LimitsReply:
        keys = self.keys.show_keys(str(show))
        return await WRITE_LIMITS(
            self.client,
            seq=keys.seq,
            show=keys.show,
            index=keys.limits,
            places=[keys.counter_key(name) for name, _, _ in entries],
            fence=fence,
            how=how,
            raised=raised,
            founded=founded,
            mark=mark,
            last=last,
            entries=entries,
        )


def _changed_entries(change: QuotaChange) -> tuple[list[UUID], list[LimitsEntry]]:
    level = _LEVEL_OF_KIND.get(change.kind)
    if level is None:
        return [], []
    if isinstance(change.after, QuotaItem):
        return [change.after.id], []
    assert isinstance(change.before, QuotaItem)
    return [], [(script_args.counter_name(level, change.before.id), change.version, [])]


def _redis_fields(show: ShowId, level: int, names: Sequence[str], amounts: Sequence[int]) -> list[str]:
    fields = [
        text for name, amount in zip(names, amounts, strict=True) for text in (name, _format_amount(name, amount))
    ]
    return [*fields, "show_id", str(show)] if LEVELS[level - 1] is Level.FOLDER else fields


def _format_amount(field: str, amount: int) -> str:
    is_count = "gpu" in field or field == "int_priority"
    return str(amount) if is_count else format_cores_limit(Centicores(amount))

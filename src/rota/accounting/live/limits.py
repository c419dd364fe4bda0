"""Limits on their way from PostgreSQL to Redis.

Who sees to what:
- limits and fence are read in one statement, so they belong together;
- the fence in Redis moves only together with limits: by one, with the change that raised it (`push`), or to whatever it
  is, with all of them (`reseed`). So under a fence Redis never has a limit that was lowered before that fence (A1).
  A push of anything else that finds the fence behind leaves it there: the change that raised it may not be told yet;
- among pushes of one fence the higher version wins, so limits never go back;
- what Redis does not know is asked for (`teach`), so a new folder or a job with caps is usable at once, and nobody
  takes a limit that was never told for none.

If we die or the reply is lost between the commit in PostgreSQL and the push, Redis has an old fence and bookings are
refused by PostgreSQL, or a limit is lower than it need be; the next booking that is refused for its fence, or the next
reseed, mends it. A reseed that is overtaken by another finds its mark gone and stops.
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
"""Version of what is no longer in PostgreSQL, in a reseed."""
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
    """Limits of a show as of one snapshot."""

    fence: int
    founded: int
    """Redis must have been seeded under this fence or a higher one to be told."""
    managed: bool
    entries: Sequence[LimitsEntry]

    @property
    def names(self) -> set[str]:
        return {name for name, _, _ in self.entries}


class LimitsPublisher:
    """Tells Redis the limits of managed shows."""

    def __init__(self, database: Database, client: Redis, keys: RedisKeys) -> None:
        self.database = database
        self.client = client
        self.keys = keys

    async def read(self, show: ShowId, ids: Sequence[UUID] | None = None) -> StoredLimits | None:
        """From PostgreSQL; None when there is no such show."""
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
        """Tell Redis of one change, after its commit; or of a fence that was `raised` with no change of limits."""
        ids, removed = _changed_entries(change) if change else ([], [])
        return (await self._push(show, ids, removed, how="push", raised=change.raised if change else raised))[1]

    async def push_missing(self, show: ShowId, names: Iterable[str]) -> tuple[set[str], LimitsReply]:
        """Look up what Redis does not know and tell it; names of what there is."""
        things = [script_args.parse_counter_name(name) for name in names]
        depts = [thing for level, thing in things if level is Level.POINT]
        if depts:
            await self.database.run(ENSURE_POINTS, show, depts)
        return await self._push(show, [thing for _, thing in things], [], how="teach")

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
        """Write all limits, and take away those that are gone.

        What Redis has is listed before PostgreSQL is read, so a thing made in between is not taken for gone. Shares
        that are gone go with the call that lifts the fence, so no push from before can bring them back in between.
        """
        mark = secrets.token_hex(8)
        reply = await self.write(show, 0, [], how="mark", mark=mark)
        if not isinstance(reply, LimitsWrittenReply):
            return reply
        had = [name async for name, _ in live_reader.scan_hash(self.client, self.keys.show_keys(str(show)).limits)]
        failpoints.hit("limits.after_list")
        read = await self.read(show)
        if read is None or not read.managed:
            return UnseededReply()
        there = read.names
        gone: list[LimitsEntry] = [
            (name, REMOVED_VERSION, []) for name in had if name not in there and live_reader.is_counter_name(name)
        ]
        ended = [entry for entry in gone if entry[0].startswith(("job:", "layer:"))]
        for piece in live_reader.chunked([*read.entries, *ended], 128):
            reply = await self.write(show, read.fence, piece, how="reseed", mark=mark, founded=read.founded)
            failpoints.hit("limits.mid_reseed")
            if not isinstance(reply, LimitsWrittenReply):
                return reply
        shares = [entry for entry in gone if entry not in ended]
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
    told = [word for name, amount in zip(names, amounts, strict=True) for word in (name, _format_amount(name, amount))]
    return [*told, "show_id", str(show)] if LEVELS[level - 1] is Level.FOLDER else told


def _format_amount(field: str, amount: int) -> str:
    in_pieces = "gpu" in field or field == "int_priority"
    return str(amount) if in_pieces else format_cores_limit(Centicores(amount))

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

from rota.accounting.items import Change, Item, Kind
from rota.accounting.live import state, wire
from rota.infra import faults
from rota.infra.postgres import Database, query
from rota.infra.redis import Keys, script
from rota.model.ids import ShowId
from rota.model.quota import LEVELS, Level
from rota.model.units import Centicores, format_cores_limit

log = structlog.get_logger(__name__)

READ = query(__package__, "limits_of_show")
ENSURE_POINTS = query(__package__, "point_ensure")

REMOVED: Final = 2**53 - 1
"""Version of what is no longer in PostgreSQL, in a reseed."""
_LEVEL: Final[dict[Kind, Level]] = {
    "subscription": Level.SUBSCRIPTION,
    "folder": Level.FOLDER,
    "job": Level.JOB,
    "layer": Level.LAYER,
    "point": Level.POINT,
}


class Written(msgspec.Struct, frozen=True):
    seq: int


class Unseeded(msgspec.Struct, frozen=True):
    pass


class Newer(msgspec.Struct, frozen=True):
    pass


class Missed(msgspec.Struct, frozen=True):
    pass


class Uncounted(msgspec.Struct, frozen=True):
    pass


Reply = Written | Unseeded | Newer | Missed | Uncounted
WRITE = script(__package__, "limits", replies=Written | Unseeded | Newer | Missed | Uncounted)

Entry = tuple[str, int, list[str]]


class Read(msgspec.Struct, frozen=True):
    """Limits of a show as of one snapshot."""

    fence: int
    managed: bool
    entries: Sequence[Entry]

    @property
    def names(self) -> set[str]:
        return {name for name, _, _ in self.entries}


class Limits:
    """Tells Redis the limits of managed shows."""

    def __init__(self, database: Database, client: Redis, keys: Keys) -> None:
        self.database = database
        self.client = client
        self.keys = keys

    async def read(self, show: ShowId, ids: Sequence[UUID] | None = None) -> Read | None:
        """From PostgreSQL; None when there is no such show."""
        rows = await self.database.rows(READ, show, ids)
        head = next((row for row in rows if row["level"] == 0), None)
        if head is None:
            return None
        entries = [
            (
                wire.name(LEVELS[row["level"] - 1], row["id"]),
                row["version"],
                _fields(show, row["level"], row["fields"], row["amounts"]),
            )
            for row in rows
            if row["level"]
        ]
        return Read(head["fence"], head["managed"], entries)

    async def push(self, show: ShowId, change: Change | None = None, *, raised: int = 0) -> Reply:
        """Tell Redis of one change, after its commit; or of a fence that was `raised` with no change of limits."""
        ids, removed = _changed(change) if change else ([], [])
        return (await self._push(show, ids, removed, how="push", raised=change.raised if change else raised))[1]

    async def teach(self, show: ShowId, names: Iterable[str]) -> tuple[set[str], Reply]:
        """Look up what Redis does not know and tell it; names of what there is."""
        things = [wire.named(name) for name in names]
        depts = [thing for level, thing in things if level is Level.POINT]
        if depts:
            await self.database.run(ENSURE_POINTS, show, depts)
        return await self._push(show, [thing for _, thing in things], [], how="teach")

    async def _push(
        self, show: ShowId, ids: Sequence[UUID], removed: Sequence[Entry], *, how: str, raised: int = 0
    ) -> tuple[set[str], Reply]:
        read = await self.read(show, ids)
        if read is None or not read.managed:
            return set(), Unseeded()
        faults.at("limits.before_push")
        return read.names, await self.write(show, read.fence, [*read.entries, *removed], how=how, raised=raised)

    async def reseed(self, show: ShowId) -> Reply:
        """Write all limits, and take away those that are gone. What Redis has is listed before PostgreSQL is read, so a
        thing made in between is not taken for gone."""
        mark = secrets.token_hex(8)
        reply = await self.write(show, 0, [], how="mark", mark=mark)
        if not isinstance(reply, Written):
            return reply
        had = [name async for name, _ in state.fields_of(self.client, self.keys.of_show(str(show)).limits)]
        faults.at("limits.after_list")
        read = await self.read(show)
        if read is None or not read.managed:
            return Unseeded()
        there = read.names
        gone: list[Entry] = [(name, REMOVED, []) for name in had if name not in there and state.is_name(name)]
        for piece in state.pieces([*read.entries, *gone], 128):
            reply = await self.write(show, read.fence, piece, how="reseed", mark=mark)
            faults.at("limits.mid_reseed")
            if not isinstance(reply, Written):
                return reply
        return await self.write(show, read.fence, [], how="reseed", mark=mark, last=True)

    async def write(
        self,
        show: ShowId,
        fence: int,
        entries: Sequence[Entry],
        *,
        how: str,
        raised: int = 0,
        mark: str = "",
        last: bool = False,
    ) -> Reply:
        keys = self.keys.of_show(str(show))
        return await WRITE(
            self.client,
            seq=keys.seq,
            show=keys.show,
            index=keys.limits,
            places=[keys.counting(name) for name, _, _ in entries],
            fence=fence,
            how=how,
            raised=raised,
            mark=mark,
            last=last,
            entries=entries,
        )


def _changed(change: Change) -> tuple[list[UUID], list[Entry]]:
    level = _LEVEL.get(change.kind)
    if level is None:
        return [], []
    if isinstance(change.after, Item):
        return [change.after.id], []
    assert isinstance(change.before, Item)
    return [], [(wire.name(level, change.before.id), change.version, [])]


def _fields(show: ShowId, level: int, names: Sequence[str], amounts: Sequence[int]) -> list[str]:
    told = [word for name, amount in zip(names, amounts, strict=True) for word in (name, _text(name, amount))]
    return [*told, "show_id", str(show)] if LEVELS[level - 1] is Level.FOLDER else told


def _text(field: str, amount: int) -> str:
    in_pieces = "gpu" in field or field == "int_priority"
    return str(amount) if in_pieces else format_cores_limit(Centicores(amount))

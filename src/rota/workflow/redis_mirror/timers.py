"""Timers of runs in Redis, for people to read: `rota:wf:delay:timers`, by due time.

A member is `workflow:run:step:attempt` (names contain no colon; the step is `-` for a timer of the whole run), its
score the due time in seconds, with milliseconds in the fraction. The rows of PostgreSQL are the timers: this copy may
lag, nothing fires by it, and the reconciler repairs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast
from uuid import UUID

import msgspec
from redis.asyncio import Redis

from rota.infra import failpoints
from rota.infra.postgres import Database, Record, query
from rota.infra.redis import RedisKeys, translate_errors
from rota.model.workflows.state_machine import RUN_TIMER
from rota.workflow.definitions import Definitions

PAGE = query(__package__, "timers_page")
COUNT = query(__package__, "timers_count")
TIMERS_OF_RUNS = query(__package__, "timers_of_runs")

CHUNK: Final = 500
"""Per call, so that Redis is never blocked for long."""
COUNT_MAX: Final = 200_000
START_CURSOR: Final = (UUID(int=0), RUN_TIMER - 1, 0)
"""Before the first timer."""


class MirroredTimer(msgspec.Struct, frozen=True):
    """A timer, and the definition of its run."""

    workflow: int
    run: UUID
    place: int
    attempt: int
    due_ms: int = 0


class TimerMirror:
    def __init__(
        self, database: Database, client: Redis, definitions: Definitions, keys: RedisKeys | None = None
    ) -> None:
        self.database = database
        self.client = client
        self.definitions = definitions
        self.key = (keys or RedisKeys()).workflow_timers()

    async def add(self, timers: Sequence[MirroredTimer]) -> int:
        """Add timers; returns the number of new ones."""
        named = await self._by_member_name(timers)
        if not named:
            return 0
        failpoints.hit("timer.before_add")
        with translate_errors(self.client):
            added = await self.client.zadd(self.key, {name: timer.due_ms / 1000 for name, timer in named.items()})
        failpoints.after_send("timer.add")
        return int(added or 0)

    async def remove(self, timers: Sequence[MirroredTimer]) -> None:
        await self._remove(list(await self._by_member_name(timers)))

    async def is_incomplete(self) -> bool:
        """Whether it has fewer timers than PostgreSQL; not determined beyond `COUNT_MAX`."""
        timers = int(await self.database.value(COUNT, COUNT_MAX))
        with translate_errors(self.client):
            return int(await self.client.zcard(self.key)) < timers

    async def fill(self, after: tuple[UUID, int, int]) -> tuple[int, tuple[UUID, int, int]]:
        """Add the next `CHUNK` timers after a cursor; returns the number added, and the next cursor."""
        rows = await self.database.rows(PAGE, *after, CHUNK)
        added = await self.add([_mirrored_timer(row) for row in rows])
        if len(rows) < CHUNK:
            return added, START_CURSOR
        last = rows[-1]
        return added, (last["pk_run"], last["place"], last["attempt"])

    async def clean(self, cursor: int) -> tuple[int, int]:
        """Remove the next entries that have no row; returns how many, and the next cursor, 0 at the end.

        No race: an entry is written after its row and read before it, so an entry without a row is obsolete.
        """
        with translate_errors(self.client):
            cursor, found = await self.client.zscan(self.key, cursor, count=CHUNK)
        names = [name for name, _ in cast("list[tuple[bytes, float]]", found)]
        runs = {run for name in names if (run := _run_of(name)) is not None}
        rows = await self.database.rows(TIMERS_OF_RUNS, list(runs)) if runs else []
        current = {name.encode() for name in await self._by_member_name([_mirrored_timer(row) for row in rows])}
        obsolete = [name for name in names if name not in current]
        failpoints.hit("timer.before_remove")
        await self._remove(obsolete)
        return len(obsolete), int(cursor)

    async def _remove(self, names: Sequence[str | bytes]) -> None:
        if not names:
            return
        with translate_errors(self.client):
            await self.client.zrem(self.key, *names)
        failpoints.after_send("timer.remove")

    async def _by_member_name(self, timers: Sequence[MirroredTimer]) -> dict[str, MirroredTimer]:
        """Timers by member name; timers of deleted definitions are gone and left out."""
        flows = await self.definitions.many({timer.workflow for timer in timers}, self.database)
        named = {}
        for timer in timers:
            if timer.workflow in flows:
                flow = flows[timer.workflow][1]
                step = "-" if timer.place == RUN_TIMER else flow.steps[timer.place].id
                named[f"{flow.spec.name}:{timer.run}:{step}:{timer.attempt}"] = timer
        return named


def _mirrored_timer(row: Record) -> MirroredTimer:
    return MirroredTimer(row["pk_workflow"], row["pk_run"], row["place"], row["attempt"], row["due_ms"])


def _run_of(name: bytes) -> UUID | None:
    """None: a foreign entry, which has no row."""
    try:
        return UUID(name.split(b":")[1].decode())
    except (IndexError, ValueError):
        return None

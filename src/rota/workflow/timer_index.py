"""The timers of runs in Redis, for people to read: `rota:wf:delay:timers`, by when they are due.

A member is `workflow:run:step:attempt` (names have no colon; the step is `-` for a timer of the run as a whole), its
score the moment in seconds, with milliseconds in the fraction. The rows of PostgreSQL are the timers: this says what
they were a moment ago, nobody fires by it, and whatever is wrong in it `poller` puts right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast
from uuid import UUID

import msgspec
from redis.asyncio import Redis

from rota.infra import faults
from rota.infra.postgres import Database, Record, query
from rota.infra.redis import Keys, guard
from rota.model.workflow_advance import OF_RUN
from rota.workflow.definitions import Definitions

PAGE = query(__package__, "timers_page")
COUNT = query(__package__, "timers_count")
OF_RUNS = query(__package__, "timers_of_runs")

CHUNK: Final = 500
"""Of one call, so that nobody else waits for Redis."""
COUNTED_MAX: Final = 200_000
FIRST: Final = (UUID(int=0), OF_RUN - 1, 0)
"""Before the timer of any run."""


class Timed(msgspec.Struct, frozen=True):
    """A timer, and of which definition its run is."""

    workflow: int
    run: UUID
    place: int
    attempt: int
    due_ms: int = 0


class TimerIndex:
    def __init__(self, database: Database, client: Redis, definitions: Definitions, keys: Keys | None = None) -> None:
        self.database = database
        self.client = client
        self.definitions = definitions
        self.key = (keys or Keys()).workflow_timers()

    async def add(self, timers: Sequence[Timed]) -> int:
        """How many of them it did not have."""
        named = await self._named(timers)
        if not named:
            return 0
        faults.at("timer.before_add")
        with guard(self.client):
            added = await self.client.zadd(self.key, {name: timer.due_ms / 1000 for name, timer in named.items()})
        faults.reply("timer.add")
        return int(added or 0)

    async def remove(self, timers: Sequence[Timed]) -> None:
        await self._remove(list(await self._named(timers)))

    async def is_short(self) -> bool:
        """Whether it has fewer than there are; beyond `COUNTED_MAX` nobody counts."""
        timers = int(await self.database.value(COUNT, COUNTED_MAX))
        with guard(self.client):
            return int(await self.client.zcard(self.key)) < timers

    async def fill(self, after: tuple[UUID, int, int]) -> tuple[int, tuple[UUID, int, int]]:
        """Have it hold the next `CHUNK` timers after one of them; how many were missing, and the last, or `FIRST`."""
        rows = await self.database.rows(PAGE, *after, CHUNK)
        added = await self.add([_timed(row) for row in rows])
        if len(rows) < CHUNK:
            return added, FIRST
        last = rows[-1]
        return added, (last["pk_run"], last["place"], last["attempt"])

    async def clean(self, cursor: int) -> tuple[int, int]:
        """Remove what has no row, of the next entries; how many, and where to go on, 0 being the end.

        An entry is read before its row is looked for, and was written after its row: what has none now had it before.
        """
        with guard(self.client):
            cursor, found = await self.client.zscan(self.key, cursor, count=CHUNK)
        names = [name for name, _ in cast("list[tuple[bytes, float]]", found)]
        runs = {run for name in names if (run := _run_of(name)) is not None}
        rows = await self.database.rows(OF_RUNS, list(runs)) if runs else []
        kept = {name.encode() for name in await self._named([_timed(row) for row in rows])}
        gone = [name for name in names if name not in kept]
        faults.at("timer.before_remove")
        await self._remove(gone)
        return len(gone), int(cursor)

    async def _remove(self, names: Sequence[str | bytes]) -> None:
        if not names:
            return
        with guard(self.client):
            await self.client.zrem(self.key, *names)
        faults.reply("timer.remove")

    async def _named(self, timers: Sequence[Timed]) -> dict[str, Timed]:
        """By their names in the index; definitions that are gone took their timers with them."""
        flows = await self.definitions.many({timer.workflow for timer in timers}, self.database)
        named = {}
        for timer in timers:
            if timer.workflow in flows:
                flow = flows[timer.workflow][1]
                step = "-" if timer.place == OF_RUN else flow.steps[timer.place].id
                named[f"{flow.spec.name}:{timer.run}:{step}:{timer.attempt}"] = timer
        return named


def _timed(row: Record) -> Timed:
    return Timed(row["pk_workflow"], row["pk_run"], row["place"], row["attempt"], row["due_ms"])


def _run_of(name: bytes) -> UUID | None:
    """None: somebody else's entry, which has no row."""
    try:
        return UUID(name.split(b":")[1].decode())
    except (IndexError, ValueError):
        return None

"""The history of runs, for those who watch one: `rota.engine.events_history` looks, this reads what is new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from rota.infra.postgres import Database, query
from rota.model.errors import NotFound
from rota.model.events import Group
from rota.model.workflow_run import Happened, RunState

READ = query(__package__, "timelines")

_ENDS = frozenset(state.lower() for state in RunState if state.ended)


class RunMoment(msgspec.Struct, frozen=True):
    """Something that happened to a run, in its advance number `fence`."""

    fence: int
    at: datetime
    happened: Happened


class OfRuns:
    """For `Histories`."""

    kind = "run"

    def __init__(self, database: Database) -> None:
        self.database = database

    async def read(self, known: Mapping[UUID, Sequence[RunMoment]]) -> Mapping[UUID, Sequence[RunMoment]]:
        after = [moments[-1].fence if moments else -1 for moments in known.values()]
        found: dict[UUID, list[RunMoment]] = {}
        for row in await self.database.rows(READ, list(known), after):
            moments = found.setdefault(row["pk_run"], list(known[row["pk_run"]]))
            if row["fence"] is not None:
                told = msgspec.json.decode(row["told"], type=list[Happened])
                moments += [RunMoment(row["fence"], row["at"], each) for each in told]
        return found

    def named(self, group: Group) -> bytes:
        return group.runs

    def is_last(self, moment: RunMoment) -> bool:
        return not moment.happened.step and moment.happened.what in _ENDS

    def unknown(self, which: UUID) -> NotFound:
        return NotFound(f"There is no run {which}, or it is not kept any more.", run=str(which))

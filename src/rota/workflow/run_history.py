"""The history of runs, for those who watch one: `rota.engine.events.history` looks, this reads what is new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from rota.infra.postgres import Database, query
from rota.model.errors import NotFound
from rota.model.events import EventGroup
from rota.model.workflows.run_state import HistoryEvent, RunState

READ = query(__package__, "timelines")

_END_STATES = frozenset(state.lower() for state in RunState if state.ended)


class RunHistoryEntry(msgspec.Struct, frozen=True):
    """Something that happened to a run, in its advance number `fence`."""

    fence: int
    at: datetime
    happened: HistoryEvent


class RunHistorySource:
    """For `Histories`."""

    kind = "run"

    def __init__(self, database: Database) -> None:
        self.database = database

    async def read(self, known: Mapping[UUID, Sequence[RunHistoryEntry]]) -> Mapping[UUID, Sequence[RunHistoryEntry]]:
        after = [moments[-1].fence if moments else -1 for moments in known.values()]
        found: dict[UUID, list[RunHistoryEntry]] = {}
        for row in await self.database.rows(READ, list(known), after):
            moments = found.setdefault(row["pk_run"], list(known[row["pk_run"]]))
            if row["fence"] is not None:
                told = msgspec.json.decode(row["told"], type=list[HistoryEvent])
                moments += [RunHistoryEntry(row["fence"], row["at"], each) for each in told]
        return found

    def event_ids(self, group: EventGroup) -> bytes:
        return group.runs

    def is_last(self, moment: RunHistoryEntry) -> bool:
        return not moment.happened.step and moment.happened.what in _END_STATES

    def not_found(self, which: UUID) -> NotFound:
        return NotFound(f"There is no run {which}, or it is not kept any more.", run=str(which))

"""Histories of runs for `rota.engine.events.history`: reads the entries that are new."""

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
    """One history event of a run, written by its advance number `fence`."""

    fence: int
    at: datetime
    happened: HistoryEvent


class RunHistorySource:
    """A source for `HistoryWatcher`."""

    kind = "run"

    def __init__(self, database: Database) -> None:
        self.database = database

    async def read(self, known: Mapping[UUID, Sequence[RunHistoryEntry]]) -> Mapping[UUID, Sequence[RunHistoryEntry]]:
        after = [entries[-1].fence if entries else -1 for entries in known.values()]
        found: dict[UUID, list[RunHistoryEntry]] = {}
        for row in await self.database.rows(READ, list(known), after):
            entries = found.setdefault(row["pk_run"], list(known[row["pk_run"]]))
            if row["fence"] is not None:
                events = msgspec.json.decode(row["told"], type=list[HistoryEvent])
                entries += [RunHistoryEntry(row["fence"], row["at"], each) for each in events]
        return found

    def event_ids(self, group: EventGroup) -> bytes:
        return group.runs

    def is_last(self, entry: RunHistoryEntry) -> bool:
        return not entry.happened.step and entry.happened.what in _END_STATES

    def not_found(self, which: UUID) -> NotFound:
        return NotFound(f"There is no run {which}, or it is not kept any more.", run=str(which))

"""Read models of runs: one with its steps, a page of many, and the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import msgspec

from rota.api.workflows import (
    RunTimelineEntry,
    SagaEntryView,
    SagaView,
    WorkflowRunSummary,
    WorkflowRunView,
    WorkflowStepView,
)
from rota.infra.postgres import Database, query
from rota.model.errors import NotFound
from rota.model.ids import RunId, ShowId
from rota.model.workflows.run_state import HistoryEvent, RunState, RunStatus
from rota.model.workflows.spec import decode_workflow

GET = query(__package__, "get")
LIST = query(__package__, "list")
TIMELINE = query(__package__, "timeline")
VALUES = query(__package__, "values")
TIMERS = query(__package__, "timers")
STATES = query(__package__, "states")
SAGA = query(__package__, "saga_show")

PAGE_MAX: Final = 1000


class RunQueries:
    def __init__(self, database: Database) -> None:
        self.database = database

    async def get(self, run: RunId) -> WorkflowRunView:
        row = await self.database.row(GET, run)
        if row is None:
            raise NotFound(f"There is no run {run}, or it is not kept any more.", run=str(run))
        now = msgspec.msgpack.decode(row["steps"], type=RunStatus)
        spec = decode_workflow(row["spec"])
        values = {v["place"]: msgspec.msgpack.decode(v["value"]) for v in await self.database.rows(VALUES, [run])}
        dues = {t["place"]: t["ts_due"] for t in await self.database.rows(TIMERS, run)}
        steps = [
            WorkflowStepView(
                id=step.id,
                type=step.type,
                state=each.state,
                attempt=each.attempt,
                job=each.job,
                reason=each.reason,
                due_at=dues.get(place),
                output=values.get(place),
            )
            for place, (step, each) in enumerate(zip(spec.steps, now.steps, strict=True))
        ]
        output = None if row["output"] is None else msgspec.msgpack.decode(row["output"])
        return WorkflowRunView(
            **_line_fields(row),
            input=msgspec.msgpack.decode(row["input"]),
            output=output,
            parent=row["pk_parent"],
            show_id=ShowId(row["pk_show"]),
            steps=steps,
        )

    async def saga(self, show: ShowId, name: str) -> SagaView | None:
        """None: nothing was recorded, or nothing recorded is needed any more."""
        rows = await self.database.rows(SAGA, show, name)
        if not rows:
            return None
        entries = [
            SagaEntryView(
                job=row["pk_job"],
                step=row["step"],
                state=row["state"],
                attempt=row["attempt"],
                undo=row["pk_undo"],
                error=row["error"],
            )
            for row in rows
            if row["number"] is not None
        ]
        return SagaView(rows[0]["saga"], rows[0]["reason"], entries)

    async def ended_or_gone(self, runs: Sequence[UUID]) -> list[UUID]:
        """Runs that have ended or are no longer retained."""
        rows = await self.database.rows(STATES, list(runs))
        states = {row["pk_run"]: RunState(row["state"]) for row in rows}
        return [run for run in runs if run not in states or states[run].ended]

    async def page(
        self,
        *,
        shows: Sequence[str] | None = None,
        ids: Sequence[str] | None = None,
        workflow: str | None = None,
        state: RunState | None = None,
        before: RunId | None = None,
        most: int = 50,
    ) -> list[WorkflowRunSummary]:
        """Newest first; `shows` by name, or `ids` of the shows that may be read."""
        limit = min(most, PAGE_MAX + 1)
        rows = await self.database.rows(LIST, shows, workflow, state, before, limit, ids)
        return [WorkflowRunSummary(**_line_fields(row)) for row in rows]

    async def timeline(self, run: RunId, after: int = -1) -> list[RunTimelineEntry]:
        """History events in order."""
        rows = await self.database.rows(TIMELINE, run, after)
        timeline = [(row["at"], msgspec.json.decode(row["told"], type=list[HistoryEvent])) for row in rows]
        return [RunTimelineEntry(at, each) for at, many in timeline for each in many]


def _line_fields(row: Any) -> dict[str, Any]:
    return {
        "id": RunId(row["pk_run"]),
        "show": row["show"],
        "workflow": row["name"],
        "version": row["version"],
        "state": RunState(row["state"]),
        "error": row["error"],
        "started_at": row["ts_started"],
        "ended_at": row["ts_ended"],
    }

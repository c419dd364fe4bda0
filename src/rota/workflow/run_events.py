"""What happens to runs and sagas, told as events: handed over after the commit, grouped by what runs have in common.

Runs that are advanced together do much the same, so what a batch has to tell is a few groups, however many runs are in
it. As everywhere, the record is PostgreSQL: `rota.workflow_event` has all of it, with reasons; events have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec

from rota.engine.events.publisher import MESSAGE_EVENTS_MAX, EventPublisher
from rota.model.ids import ShowId
from rota.model.workflows.approval_steps import parse_subject
from rota.model.workflows.run_state import HistoryEvent, RunState
from rota.workflow.advance_transaction import AdvanceResult
from rota.workflow.run_context import RunContext
from rota.workflow.sagas import SagaEvent, SagaPassResult

TEXT_CHARS_MAX: Final = 1000
_END_STATES: Final = frozenset(state.lower() for state in RunState if state.ended)


class _RunEventGroup(msgspec.Struct, frozen=True):
    """What events of one group have in common."""

    kind: str
    show: ShowId
    workflow: str
    step: str
    has_job: bool


class RunEventPublisher:
    def __init__(self, teller: EventPublisher) -> None:
        self.teller = teller

    def publish_advances(self, done: AdvanceResult) -> None:
        """What came of a batch."""
        for alike, ids in _group_events(done.turns):
            for first in range(0, len(ids), MESSAGE_EVENTS_MAX):
                self._publish(alike, ids[first : first + MESSAGE_EVENTS_MAX])
        for turn in done.turns:
            for place, text in turn.moves.notes:
                assert turn.flow is not None, "nobody tells anything without a definition"
                facts = {
                    "workflow": _workflow_name(turn),
                    "step": turn.flow.steps[place].id,
                    "text": text[:TEXT_CHARS_MAX],
                }
                self.teller.emit("run.notify", show=turn.show, jobs=(), runs=[turn.run], **facts)

    def _publish(self, alike: _RunEventGroup, ids: Sequence[tuple[UUID, UUID | None]]) -> None:
        jobs = [job for _, job in ids if job is not None]
        facts = {"workflow": alike.workflow} | ({"step": alike.step} if alike.step else {})
        self.teller.emit(alike.kind, show=alike.show, jobs=jobs, runs=[run for run, _ in ids], **facts)

    def publish_sagas(self, told: SagaPassResult) -> None:
        for each in told.happened:
            self._publish_saga(each)

    def _publish_saga(self, each: SagaEvent) -> None:
        run = parse_subject(each.saga)
        jobs = [each.job] if each.job is not None else []
        facts = {"saga": each.saga} | ({"step": each.step} if each.step else {})
        self.teller.emit(f"saga.{each.what}", show=each.show, jobs=jobs, runs=[run[0]] if run else (), **facts)


def _group_events(turns: Sequence[RunContext]) -> list[tuple[_RunEventGroup, list[tuple[UUID, UUID | None]]]]:
    """What happened, with the runs and jobs of each; for every run in the order in which it did."""
    groups: list[tuple[_RunEventGroup, list[tuple[UUID, UUID | None]]]] = []
    latest: dict[_RunEventGroup, int] = {}
    for turn in turns:
        before = -1
        for each in turn.moves.happened:
            alike = _RunEventGroup(event_kind(each), turn.show, _workflow_name(turn), each.step, each.job is not None)
            if latest.get(alike, -1) <= before:
                latest[alike] = len(groups)
                groups.append((alike, []))
            before = latest[alike]
            groups[before][1].append((turn.run, each.job))
    return groups


def _workflow_name(turn: RunContext) -> str:
    return turn.flow.spec.name if turn.flow is not None else ""


def event_kind(each: HistoryEvent) -> str:
    """As which event it is told."""
    if each.step:
        return f"run.step.{each.what}"
    return f"run.ended.{each.what}" if each.what in _END_STATES else f"run.{each.what}"

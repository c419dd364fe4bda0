"""Publishes changes of runs and sagas as events after the commit, grouped by what the runs have in common.

Runs of a batch advance alike, so a batch makes few groups, however many runs it has. PostgreSQL is the record:
`rota.workflow_event` has every change, with reasons; events carry none.
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
    """Fields that the events of a group share."""

    kind: str
    show: ShowId
    workflow: str
    step: str
    has_job: bool


class RunEventPublisher:
    def __init__(self, publisher: EventPublisher) -> None:
        self.publisher = publisher

    def publish_advances(self, done: AdvanceResult) -> None:
        """Publish the changes of a batch."""
        for group, ids in _group_events(done.turns):
            for first in range(0, len(ids), MESSAGE_EVENTS_MAX):
                self._publish(group, ids[first : first + MESSAGE_EVENTS_MAX])
        for context in done.turns:
            for place, text in context.transition.notes:
                assert context.flow is not None, "only a decided run has notes"
                facts = {
                    "workflow": _workflow_name(context),
                    "step": context.flow.steps[place].id,
                    "text": text[:TEXT_CHARS_MAX],
                }
                self.publisher.emit("run.notify", show=context.show, jobs=(), runs=[context.run], **facts)

    def _publish(self, group: _RunEventGroup, ids: Sequence[tuple[UUID, UUID | None]]) -> None:
        jobs = [job for _, job in ids if job is not None]
        facts = {"workflow": group.workflow} | ({"step": group.step} if group.step else {})
        self.publisher.emit(group.kind, show=group.show, jobs=jobs, runs=[run for run, _ in ids], **facts)

    def publish_sagas(self, result: SagaPassResult) -> None:
        for each in result.happened:
            self._publish_saga(each)

    def _publish_saga(self, each: SagaEvent) -> None:
        run = parse_subject(each.saga)
        jobs = [each.job] if each.job is not None else []
        facts = {"saga": each.saga} | ({"step": each.step} if each.step else {})
        self.publisher.emit(f"saga.{each.what}", show=each.show, jobs=jobs, runs=[run[0]] if run else (), **facts)


def _group_events(contexts: Sequence[RunContext]) -> list[tuple[_RunEventGroup, list[tuple[UUID, UUID | None]]]]:
    """Changes with their runs and jobs; in order for every run."""
    groups: list[tuple[_RunEventGroup, list[tuple[UUID, UUID | None]]]] = []
    latest: dict[_RunEventGroup, int] = {}
    for context in contexts:
        before = -1
        for each in context.transition.happened:
            group = _RunEventGroup(
                event_kind(each), context.show, _workflow_name(context), each.step, each.job is not None
            )
            if latest.get(group, -1) <= before:
                latest[group] = len(groups)
                groups.append((group, []))
            before = latest[group]
            groups[before][1].append((context.run, each.job))
    return groups


def _workflow_name(context: RunContext) -> str:
    return context.flow.spec.name if context.flow is not None else ""


def event_kind(each: HistoryEvent) -> str:
    """The kind of event for a history event."""
    if each.step:
        return f"run.step.{each.what}"
    return f"run.ended.{each.what}" if each.what in _END_STATES else f"run.{each.what}"

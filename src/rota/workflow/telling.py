"""What happens to runs and sagas, told as events: handed over after the commit, grouped by what runs have in common.

Runs that are advanced together do much the same, so what a batch has to tell is a few groups, however many runs are in
it. As everywhere, the record is PostgreSQL: `rota.workflow_event` has all of it, with reasons; events have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec

from rota.engine.events import MESSAGE_MAX, Teller
from rota.model.ids import ShowId
from rota.model.workflow_approval import named_by
from rota.model.workflow_run import Happened, RunState
from rota.workflow.advancing import Done
from rota.workflow.sagas import GoneOn, SagaTold
from rota.workflow.turns import Turn

TEXT_CHARS: Final = 1000
_ENDS: Final = frozenset(state.lower() for state in RunState if state.ended)


class _Alike(msgspec.Struct, frozen=True):
    """What events of one group have in common."""

    kind: str
    show: ShowId
    workflow: str
    step: str
    has_job: bool


class RunTeller:
    def __init__(self, teller: Teller) -> None:
        self.teller = teller

    def advanced(self, done: Done) -> None:
        """What came of a batch."""
        for alike, ids in _groups(done.turns):
            for first in range(0, len(ids), MESSAGE_MAX):
                self._tell(alike, ids[first : first + MESSAGE_MAX])
        for turn in done.turns:
            for place, text in turn.moves.notes:
                assert turn.flow is not None, "nobody tells anything without a definition"
                facts = {"workflow": _name(turn), "step": turn.flow.steps[place].id, "text": text[:TEXT_CHARS]}
                self.teller.tell("run.notify", show=turn.show, jobs=(), runs=[turn.run], **facts)

    def _tell(self, alike: _Alike, ids: Sequence[tuple[UUID, UUID | None]]) -> None:
        jobs = [job for _, job in ids if job is not None]
        facts = {"workflow": alike.workflow} | ({"step": alike.step} if alike.step else {})
        self.teller.tell(alike.kind, show=alike.show, jobs=jobs, runs=[run for run, _ in ids], **facts)

    def undone(self, told: GoneOn) -> None:
        for each in told.happened:
            self._saga(each)

    def _saga(self, each: SagaTold) -> None:
        run = named_by(each.saga)
        jobs = [each.job] if each.job is not None else []
        facts = {"saga": each.saga} | ({"step": each.step} if each.step else {})
        self.teller.tell(f"saga.{each.what}", show=each.show, jobs=jobs, runs=[run[0]] if run else (), **facts)


def _groups(turns: Sequence[Turn]) -> list[tuple[_Alike, list[tuple[UUID, UUID | None]]]]:
    """What happened, with the runs and jobs of each; for every run in the order in which it did."""
    groups: list[tuple[_Alike, list[tuple[UUID, UUID | None]]]] = []
    latest: dict[_Alike, int] = {}
    for turn in turns:
        before = -1
        for each in turn.moves.happened:
            alike = _Alike(kind_of(each), turn.show, _name(turn), each.step, each.job is not None)
            if latest.get(alike, -1) <= before:
                latest[alike] = len(groups)
                groups.append((alike, []))
            before = latest[alike]
            groups[before][1].append((turn.run, each.job))
    return groups


def _name(turn: Turn) -> str:
    return turn.flow.spec.name if turn.flow is not None else ""


def kind_of(each: Happened) -> str:
    """As which event it is told."""
    if each.step:
        return f"run.step.{each.what}"
    return f"run.ended.{each.what}" if each.what in _ENDS else f"run.{each.what}"

"""Steps that wait for people: asked for by the transaction that begins them, heard of by the one that decides.

What holds, and who sees to it:
- a step waits if and only if its approval is pending: it is asked for, and withdrawn, in the transaction that writes
  the state of the run; a decision and the news of it are one transaction (`rota.engine.admission.approvals`);
- only the approval that a step asked for speaks for it: its id is part of the run's state;
- what people agreed to is what goes on: the hash of it is computed again, from what is stored, by whoever votes;
- a vote on a run that is being stopped changes nothing, and says so: the run is locked first, then the approval.

If we die before a commit nothing was asked or said. After it the request is there, or the news, which whoever looks
next takes up. A decision that comes too late finds its approval closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final
from uuid import UUID

import msgspec

from rota.engine.admission.approvals import AfterCommit
from rota.infra import failpoints
from rota.infra.postgres import Record, Transaction, query
from rota.model.approvals import Approval, ApprovalRequest, ApprovalState
from rota.model.ids import RunId, ShowId
from rota.model.workflows.approval_steps import (
    StepApprovalView,
    approval_hash,
    approval_output,
    denial_reason,
    parse_subject,
    subject_of,
)
from rota.model.workflows.compiler import CompiledStep, CompiledWorkflow
from rota.model.workflows.expressions import ExpressionError
from rota.model.workflows.run_state import RunInfo, RunStatus, StepState, StepStatus
from rota.model.workflows.state_machine import rerender_approval
from rota.policy.approvals import ApprovalStore
from rota.workflow.definitions import Definitions
from rota.workflow.run_context import RunContext

LOCK = query(__package__, "lock")
RUNS = query(__package__, "approval_runs")
VALUES = query(__package__, "values")
HAS_PENDING_CANCEL = query(__package__, "approval_stopped")
INSERT_DECISION = query(__package__, "approval_decided")
WITHDRAW = query(__package__, "approval_withdraw")

TITLE_CHARS_MAX: Final = 300
_RUN_STATUS_DECODER = msgspec.msgpack.Decoder(RunStatus)
_unpack = msgspec.msgpack.Decoder().decode
_pack = msgspec.msgpack.Encoder().encode


class StoredRun(msgspec.Struct, frozen=True):
    """A run as it is stored, as far as approvals of its steps are about it."""

    row: Record
    version: int
    flow: CompiledWorkflow
    now: RunStatus
    values: dict[int, bytes]

    def step(self, name: str) -> tuple[CompiledStep, StepStatus] | None:
        """None: it has no such step, or one that asks nobody."""
        for step, now in zip(self.flow.steps, self.now.steps, strict=True):
            if step.id == name:
                return (step, now) if step.spec.type == "approval" else None
        return None

    def hash(self, step: CompiledStep) -> bytes:
        read = {place: self.values[place] for place in step.reads if place in self.values}
        row = self.row
        return approval_hash(row["pk_show"], row["pk_run"], step.id, row["digest"], row["input"], read)

    def step_approval_view(self, step: CompiledStep) -> StepApprovalView | None:
        """None: what is stored is nothing that anybody could be asked."""
        given: dict[str, Any] = _unpack(self.row["input"])
        facts = RunInfo(self.row["pk_run"], self.flow.spec.name, self.version, given)
        values = {place: _unpack(value) for place, value in self.values.items()}
        try:
            text, shown = rerender_approval(self.flow, self.now, facts, values, step.place)
        except ExpressionError:
            return None
        return StepApprovalView(
            run=facts.id,
            workflow=facts.workflow,
            version=self.version,
            step=step.id,
            text=text,
            input=shown,
            run_input=given,
            started_by=self.row["actor"],
        )


class StepApprovals:
    """For `Approver.subjects`, and for whoever advances runs."""

    def __init__(self, definitions: Definitions) -> None:
        self.definitions = definitions
        self.approvals = ApprovalStore(definitions.database)
        self.wake: Callable[[], None] = _ignore_wake
        """Called when a run has something to hear."""

    async def request_and_withdraw(self, tx: Transaction, turns: Sequence[RunContext]) -> list[Approval]:
        """Ask for what runs have begun to wait for, and withdraw what they do not; their states are written."""
        asking = [turn for turn in turns if turn.moves.asks]
        withdrawn = [turn for turn in turns if turn.moves.withdrawn]
        if not asking and not withdrawn:
            return []
        stored = await self._load_runs(tx, [turn.run for turn in (*asking, *withdrawn)])
        gone = [_subject(stored[turn.run], place) for turn in withdrawn for place in turn.moves.withdrawn]
        if gone:
            await tx.rows(WITHDRAW, sorted(gone))
        wanted = [
            _approval_request(stored[turn.run], ask.place, ask.text) for turn in asking for ask in turn.moves.asks
        ]
        made = await self.approvals.request(tx, wanted)
        assert len(made) == len(wanted), "a step of a run asks once"
        failpoints.hit("workflow.after_ask")
        return made

    async def lock(self, on: Transaction, subject: str) -> bytes | None:
        named = parse_subject(subject)
        if named is None or await on.row(LOCK, named[0]) is None:
            return None
        run, name = named
        material = (await self._load_runs(on, [run]))[run]
        found = material.step(name)
        if found is None or found[1].state is not StepState.RUNNING or await on.value(HAS_PENDING_CANCEL, str(run)):
            return None
        return material.hash(found[0])

    async def apply_decision(
        self, on: Transaction, approval: Approval, state: ApprovalState, why: str
    ) -> AfterCommit | None:
        named = parse_subject(approval.subject)
        assert named is not None, "only steps of runs are asked about here"
        output = _pack(msgspec.to_builtins(approval_output(approval))) if state is ApprovalState.GRANTED else None
        error = None if output is not None else denial_reason(approval, state) or why
        await on.run(INSERT_DECISION, str(named[0]), approval.show_id, approval.id, state.value, error, output)
        return self._after_decision

    async def step_approval_view(self, approval: Approval) -> StepApprovalView | None:
        """Exactly what people agree to, as it is stored; None when that is not kept any more, or not about a step."""
        named = parse_subject(approval.subject) if approval.kind == "step" else None
        if named is None:
            return None
        async with self.definitions.database.transaction() as tx:
            material = (await self._load_runs(tx, [named[0]])).get(RunId(named[0]))
        found = material.step(named[1]) if material is not None else None
        return material.step_approval_view(found[0]) if material is not None and found is not None else None

    async def _after_decision(self) -> None:
        self.wake()

    async def _load_runs(self, tx: Transaction, runs: Sequence[UUID]) -> dict[UUID, StoredRun]:
        rows = await tx.rows(RUNS, list(runs))
        flows = await self.definitions.many({row["pk_workflow"] for row in rows}, tx)
        values: dict[UUID, dict[int, bytes]] = {row["pk_run"]: {} for row in rows}
        for row in await tx.rows(VALUES, list(values)):
            values[row["pk_run"]][row["place"]] = row["value"]
        return {
            row["pk_run"]: StoredRun(
                row, *flows[row["pk_workflow"]], _RUN_STATUS_DECODER.decode(row["steps"]), values[row["pk_run"]]
            )
            for row in rows
        }


def _subject(stored: StoredRun, place: int) -> str:
    return subject_of(stored.row["pk_run"], stored.flow.steps[place].id)


def _approval_request(stored: StoredRun, place: int, text: str) -> ApprovalRequest:
    step = stored.flow.steps[place]
    assert step.spec.approval is not None
    return ApprovalRequest(
        id=stored.now.steps[place].job,
        kind="step",
        subject=_subject(stored, place),
        show=ShowId(stored.row["pk_show"]),
        hash=stored.hash(step),
        title=" ".join(text[:TITLE_CHARS_MAX].split()),
        terms=step.spec.approval,
        principal=stored.row["actor"],
    )


def _ignore_wake() -> None:
    return None

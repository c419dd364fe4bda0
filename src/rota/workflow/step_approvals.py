"""Approval steps: the transaction that starts a step requests its approval, and the decision enters the run's inbox.

Invariants and who enforces them:
- a step waits if and only if its approval is pending: request and withdrawal are in the transaction that writes the
  run's state; a decision and its inbox message are one transaction (`rota.engine.admission.approvals`);
- only the approval that a step requested decides about it: its id is part of the run's state;
- people approve what will run: each vote recomputes the hash from the stored state;
- a vote on a run that is being stopped has no effect, and says so: lock order is run, then approval.

A crash before a commit leaves nothing requested or decided. After it the request, or the inbox message, is there, and
the next poll of any server processes it. A late decision finds its approval closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
    """A run as stored, with what the approvals of its steps cover."""

    row: Record
    version: int
    flow: CompiledWorkflow
    now: RunStatus
    values: dict[int, bytes]

    def step(self, name: str) -> tuple[CompiledStep, StepStatus] | None:
        """None: there is no such step, or it is not an approval step."""
        for step, now in zip(self.flow.steps, self.now.steps, strict=True):
            if step.id == name:
                return (step, now) if step.spec.type == "approval" else None
        return None

    def hash(self, step: CompiledStep) -> bytes:
        read = {place: self.values[place] for place in step.reads if place in self.values}
        row = self.row
        return approval_hash(row["pk_show"], row["pk_run"], step.id, row["digest"], row["input"], read)

    def step_approval_view(self, step: CompiledStep) -> StepApprovalView | None:
        """None: the stored state cannot be rendered."""
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
    """For `Approver.subjects` and `AdvanceTransaction`."""

    def __init__(self, definitions: Definitions, has_news: asyncio.Event) -> None:
        self.definitions = definitions
        self.approvals = ApprovalStore(definitions.database)
        self._has_news = has_news
        """Set when a run has a new inbox message."""

    async def request_and_withdraw(self, tx: Transaction, contexts: Sequence[RunContext]) -> list[Approval]:
        """Request approvals for steps that start, and withdraw those of steps that ended; states are written before."""
        asking = [context for context in contexts if context.transition.asks]
        withdrawn = [context for context in contexts if context.transition.withdrawn]
        if not asking and not withdrawn:
            return []
        stored = await self._load_runs(tx, [context.run for context in (*asking, *withdrawn)])
        withdrawn_subjects = [
            _subject(stored[context.run], place) for context in withdrawn for place in context.transition.withdrawn
        ]
        if withdrawn_subjects:
            await tx.rows(WITHDRAW, sorted(withdrawn_subjects))
        requests = [
            _approval_request(stored[context.run], ask.place, ask.text)
            for context in asking
            for ask in context.transition.asks
        ]
        requested = await self.approvals.request(tx, requests)
        assert len(requested) == len(requests), "a step of a run asks once"
        failpoints.hit("workflow.after_ask")
        return requested

    async def lock(self, on: Transaction, subject: str) -> bytes | None:
        named = parse_subject(subject)
        if named is None or await on.row(LOCK, named[0]) is None:
            return None
        run, name = named
        stored_run = (await self._load_runs(on, [run]))[run]
        found = stored_run.step(name)
        if found is None or found[1].state is not StepState.RUNNING or await on.value(HAS_PENDING_CANCEL, str(run)):
            return None
        return stored_run.hash(found[0])

    async def apply_decision(
        self, on: Transaction, approval: Approval, state: ApprovalState, why: str
    ) -> AfterCommit | None:
        named = parse_subject(approval.subject)
        assert named is not None, "only approvals of steps belong here"
        output = _pack(msgspec.to_builtins(approval_output(approval))) if state is ApprovalState.GRANTED else None
        error = None if output is not None else denial_reason(approval, state) or why
        await on.run(INSERT_DECISION, str(named[0]), approval.show_id, approval.id, state.value, error, output)
        return self._after_decision

    async def step_approval_view(self, approval: Approval) -> StepApprovalView | None:
        """What people approve, as stored; None when it is no longer retained, or not about a step."""
        named = parse_subject(approval.subject) if approval.kind == "step" else None
        if named is None:
            return None
        async with self.definitions.database.transaction() as tx:
            stored_run = (await self._load_runs(tx, [named[0]])).get(RunId(named[0]))
        found = stored_run.step(named[1]) if stored_run is not None else None
        return stored_run.step_approval_view(found[0]) if stored_run is not None and found is not None else None

    async def _after_decision(self) -> None:
        self._has_news.set()

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

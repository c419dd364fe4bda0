"""One run in an advance transaction: the state read, its inbox, and the transition to write. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final
from uuid import UUID, uuid4

import msgspec

from rota.infra.postgres import Record
from rota.model.approvals import ApprovalState
from rota.model.ids import RunId, ShowId
from rota.model.job_states import JobState
from rota.model.protocol import FATAL_CODES
from rota.model.workflows.compiler import CompiledWorkflow
from rota.model.workflows.run_state import (
    ApprovalDecided,
    CancelRun,
    ChildRunEnded,
    HistoryEvent,
    InboxMessage,
    JobEnded,
    RunInfo,
    RunState,
    RunStatus,
    SagaEnded,
    StepState,
    TimerFired,
    Transition,
)
from rota.model.workflows.spec import WorkflowSpec
from rota.model.workflows.state_machine import abort, advance

ERROR_MAX: Final = 2000
_RUN_STATUS_DECODER = msgspec.msgpack.Decoder(RunStatus)
_unpack = msgspec.msgpack.Decoder().decode
_pack = msgspec.msgpack.Encoder(uuid_format="bytes").encode
_encode_json = msgspec.json.Encoder().encode


class ForEachResult(msgspec.Struct, frozen=True):
    """Results of the frames of a for_each."""

    values: dict[int, Any] = {}
    error: str = ""
    fatal: bool = False


class RunRow(msgspec.Struct, frozen=True):
    """A run as it was read, or inserted, by the transaction that advances it."""

    run: RunId
    show: ShowId
    workflow: int
    steps: bytes
    """Its encoded `RunStatus`."""
    input: bytes
    now_ms: int
    """The time in PostgreSQL."""
    fence: int = 0
    """0: inserted by this transaction."""
    depth: int = 0
    root: RunId | None = None
    """None: itself."""
    state: RunState = RunState.RUNNING
    actor: str = ""
    """The principal of its jobs: who started the run or, for a child run, its root run."""

    @classmethod
    def from_row(cls, row: Record) -> RunRow:
        return cls(
            run=row["pk_run"],
            show=row["pk_show"],
            workflow=row["pk_workflow"],
            steps=row["steps"],
            input=row["input"],
            now_ms=row["now_ms"],
            fence=row["fence"],
            depth=row["depth"],
            root=row["pk_root"],
            state=RunState(row["state"]),
            actor=row["actor"],
        )


class RunContext:
    """One advance of one run."""

    __slots__ = (
        *("run", "show", "workflow", "fence", "now_ms", "depth", "root", "previous_state", "actor", "input", "values"),
        *("inbox", "show_name", "refused", "state", "transition", "flow", "now", "_steps"),
    )

    def __init__(self, stored: RunRow) -> None:
        self.run = stored.run
        self.show = stored.show
        self.workflow = stored.workflow
        self.fence = stored.fence
        self.now_ms = stored.now_ms
        self.depth = stored.depth
        self.root = stored.root or stored.run
        self.previous_state = stored.state
        self.actor = stored.actor
        self.show_name = ""
        """The current name of its show: the show may have been renamed since the workflow was declared."""
        self.input: dict[str, Any] = _unpack(stored.input)
        self.values: dict[int, Any] = {}
        self.inbox: list[InboxMessage] = []
        self.refused: dict[int, str] = {}
        self.state = RunState.RUNNING
        self.transition: Transition
        self.flow: CompiledWorkflow | None = None
        """Its definition, once `decide` has set `transition`."""
        self._steps = stored.steps
        self.now: RunStatus = _RUN_STATUS_DECODER.decode(stored.steps)

    @classmethod
    def from_row(cls, row: Record) -> RunContext:
        return cls(RunRow.from_row(row))

    def decide(self, flow: CompiledWorkflow, version: int) -> None:
        """Decide from the state that was read; may be repeated."""
        if self.flow is not None:
            self.now = _RUN_STATUS_DECODER.decode(self._steps)
        self.flow = flow
        values = dict(self.values)
        facts = self._info(flow, version)
        self.state, self.transition = advance(flow, self.now, facts, values, self.inbox, self.now_ms, self.refused)
        self._continue_compensating()

    def abort(self, flow: CompiledWorkflow, version: int, error: str) -> None:
        """End a run that cannot be advanced: it stops what it runs, and ends when that has ended."""
        self.now = _RUN_STATUS_DECODER.decode(self._steps)
        self.flow = flow
        self.state, self.transition = abort(flow, self.now, self._info(flow, version), self.inbox, self.now_ms, error)
        self._continue_compensating()

    def _info(self, flow: CompiledWorkflow, version: int) -> RunInfo:
        return RunInfo(self.run, flow.spec.name, version, self.input, self.actor, self.show_name)

    def _continue_compensating(self) -> None:
        if self.previous_state is RunState.COMPENSATING and not any(isinstance(news, SagaEnded) for news in self.inbox):
            self.start_compensating()

    def wants_rollback(self, spec: WorkflowSpec) -> bool:
        """Whether it ends in a way that triggers a rollback; a child run is rolled back by its root run."""
        if not self.state.ended or self.depth > 0 or self.previous_state is RunState.COMPENSATING:
            return False
        return spec.rolls_back_on(self.now.trigger)

    def start_compensating(self) -> None:
        """Keep the run alive until its compensations have ended."""
        event = HistoryEvent("compensating") if self.previous_state is not RunState.COMPENSATING else None
        self.transition.happened = [*self.transition.happened[:-1], *([event] if event is not None else [])]
        self.transition.output = None
        self.state = RunState.COMPENSATING

    def replace_status(self, now: RunStatus) -> None:
        """Start from this status instead of that of a new run."""
        self._steps = _pack(now)
        self.now = _RUN_STATUS_DECODER.decode(self._steps)

    def is_step_job(self, job: UUID) -> bool:
        """Whether a job belongs to a step; usually one that has not ended, so check those first."""
        live = any(step.job == job for step in self.now.steps if not step.state.ended)
        return live or any(step.job == job for step in self.now.steps)

    def step_started(self, flow: CompiledWorkflow, place: int, job: UUID) -> None:
        """Record the job, run or approval that a step has started."""
        step = self.now.steps[place]
        step.job = job
        self.transition.happened.append(HistoryEvent("began", flow.steps[place].id, step.attempt, job))

    def assign_approval_ids(self, flow: CompiledWorkflow) -> None:
        """Give each requested approval its id, by which its decision is matched."""
        for ask in self.transition.asks:
            self.step_started(flow, ask.place, uuid4())

    def fail(self, error: str) -> None:
        """End a run that cannot even be aborted: without its definition, it stops what it runs and does not wait."""
        self.now = _RUN_STATUS_DECODER.decode(self._steps)
        live = [step for step in self.now.steps if not step.state.ended]
        works = [step.job for step in live if step.job is not None]
        for step in live:
            step.state, step.reason = StepState.CANCELLED, error
        self.transition = Transition(stops=works, stop_runs=works, happened=[HistoryEvent("failed", why=error)])
        self.now.error, self.state = error, RunState.FAILED


def contexts_from_inbox(
    rows: Sequence[Record],
    mapped: Mapping[UUID, ForEachResult],
    outputs: Mapping[UUID, bytes | None],
    partly: Collection[UUID] = (),
) -> list[RunContext]:
    """Runs with their inboxes, in order; due timers come last, since ended steps ignore theirs.

    `partly` are failed jobs of which some frames succeeded.
    """
    contexts: list[RunContext] = []
    for row in rows:
        if row["steps"] is not None:
            contexts.append(RunContext.from_row(row))
        contexts[-1].inbox.append(_inbox_message(row, mapped, outputs, partly))
    return contexts


def inbox_without_results(rows: Sequence[Record], partly: Collection[UUID]) -> list[InboxMessage]:
    """The inbox of one run whose results cannot be read: only what has ended, and how."""
    messages: list[InboxMessage] = []
    for row in rows:
        match row["kind"]:
            case "job":
                job, state = row["pk_job"], JobState(row["ended_as"])
                messages.append(JobEnded(job, state, partly=job in partly))
            case "run":
                messages.append(ChildRunEnded(row["pk_job"], RunState(row["ended_as"])))
            case "approval":
                messages.append(ApprovalDecided(row["pk_job"], ApprovalState(row["ended_as"])))
            case "saga":
                messages.append(SagaEnded())
    return messages


def _inbox_message(
    row: Record, mapped: Mapping[UUID, ForEachResult], outputs: Mapping[UUID, bytes | None], partly: Collection[UUID]
) -> InboxMessage:
    match row["kind"]:
        case "job":
            return _job_ended(row, mapped, partly)
        case "run":
            output, trigger = outputs.get(row["pk_job"]), row["request"]
            value = None if output is None else _unpack(output)
            state, why = RunState(row["ended_as"]), row["reason"] or ""
            return ChildRunEnded(row["pk_job"], state, value, why, trigger.decode() if trigger is not None else None)
        case "approval":
            value = None if row["request"] is None else _unpack(row["request"])
            return ApprovalDecided(row["pk_job"], ApprovalState(row["ended_as"]), value, row["reason"] or "")
        case "timer":
            return TimerFired(row["place"], row["attempt"])
        case "saga":
            return SagaEnded()
        case "cancel":
            return CancelRun(row["reason"] or "cancelled")
        case other:
            raise AssertionError(f"unknown inbox message kind {other}")


def _job_ended(row: Record, mapped: Mapping[UUID, ForEachResult], partly: Collection[UUID]) -> JobEnded:
    job, state, data = row["pk_job"], JobState(row["ended_as"]), row["value"]
    if (row["frames"] or 1) > 1:
        found = mapped.get(row["pk_layer"]) or ForEachResult()
        value: Any = [found.values.get(frame) for frame in range(row["frames"])]
        error = found.error or row["reason"] or ""
        return JobEnded(job, state, value, error, found.fatal, mapped=True, partly=job in partly)
    value = None if data is None else _unpack(data)
    if data is None and row["value_at"] is not None:
        value = {"pointer": row["value_at"]}
    return JobEnded(job, state, value, row["error"] or row["reason"] or row["code"] or "", row["code"] in FATAL_CODES)


def for_each_results(rows: Sequence[Record]) -> dict[UUID, ForEachResult]:
    found: dict[UUID, ForEachResult] = {}
    for row in rows:
        before = found.get(row["pk_layer"]) or ForEachResult()
        values = before.values
        if row["state"] == "SUCCEEDED" and row["value"] is not None:
            values[row["frame"]] = _unpack(row["value"])
        elif row["value_at"] is not None:
            values[row["frame"]] = {"pointer": row["value_at"]}
        error = before.error
        if not error and row["state"] != "SUCCEEDED":
            error = f"Item {row['frame']}: {row['error'] or row['code'] or row['state'].lower()}"
        found[row["pk_layer"]] = ForEachResult(values, error, before.fatal or row["code"] in FATAL_CODES)
    return found


def write_arguments(contexts: Sequence[RunContext]) -> tuple[object, ...]:
    """Arguments of the statement `write`."""
    timers = [(context.run, timer) for context in contexts for timer in context.transition.timers]
    untimed = [(context.run, *each) for context in contexts for each in context.transition.untimed]
    values = [(context.run, place, _pack(value)) for context in contexts for place, value in context.transition.values]
    return (
        [context.run for context in contexts],
        [context.fence for context in contexts],
        [context.state.value for context in contexts],
        [_pack(context.now) for context in contexts],
        _none_if_empty(
            [
                _pack(context.transition.output) if context.transition.output is not None else None
                for context in contexts
            ]
        ),
        _none_if_empty([storable_text(context.now.error) or None for context in contexts]),
        [context.state.ended for context in contexts],
        [_encode_history(context.transition.happened) for context in contexts],
        [run for run, _ in timers],
        [timer.place for _, timer in timers],
        [timer.attempt for _, timer in timers],
        [timer.due_ms for _, timer in timers],
        [run for run, _, _ in untimed],
        [place for _, place, _ in untimed],
        [attempt for _, _, attempt in untimed],
        [run for run, _, _ in values],
        [place for _, place, _ in values],
        [value for _, _, value in values],
        _none_if_empty([context.now.trigger for context in contexts]),
    )


def _none_if_empty(column: list[Any]) -> list[Any] | None:
    """Null for a column without values."""
    return column if any(each is not None for each in column) else None


def _encode_history(happened: Sequence[HistoryEvent]) -> str:
    data = _encode_json(happened)
    if b"\\u0000" in data:  # an escaped NUL, or the literal text
        data = _encode_json([msgspec.structs.replace(each, why=each.why.replace("\0", "")) for each in happened])
    return data.decode()


def storable_text(text: str) -> str:
    """The text without NUL, cut to the stored length."""
    return text.replace("\0", "")[:ERROR_MAX]

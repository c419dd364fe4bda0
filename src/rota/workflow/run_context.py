"""A run that is being advanced: what was read of it, what it has heard, and what is to be written. No I/O."""

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
    TimerFired,
    Transition,
)
from rota.model.workflows.spec import WorkflowSpec
from rota.model.workflows.state_machine import advance

ERROR_MAX: Final = 2000
_RUN_STATUS_DECODER = msgspec.msgpack.Decoder(RunStatus)
_unpack = msgspec.msgpack.Decoder().decode
_pack = msgspec.msgpack.Encoder(uuid_format="bytes").encode
_encode_json = msgspec.json.Encoder().encode


class ForEachResult(msgspec.Struct, frozen=True):
    """What the frames of a for_each have left."""

    values: dict[int, Any] = {}
    error: str = ""
    fatal: bool = False


class RunContext:
    """One advance of one run."""

    __slots__ = (
        *("run", "show", "workflow", "fence", "now_ms", "depth", "root", "was", "actor", "input", "values", "news"),
        *("called", "refused", "state", "moves", "flow", "now", "_steps"),
    )

    def __init__(
        self,
        run: UUID,
        show: UUID,
        workflow: int,
        steps: bytes,
        fence: int,
        given: bytes,
        now_ms: int,
        depth: int = 0,
        root: UUID | None = None,
        was: RunState = RunState.RUNNING,
        actor: str = "",
    ) -> None:
        self.run = RunId(run)
        self.show = ShowId(show)
        self.workflow = workflow
        self.fence = fence
        self.now_ms = now_ms
        self.depth = depth
        self.root = RunId(root or run)
        self.was = was
        """Its state when it was read."""
        self.actor = actor
        """Who started it, or the run it is inside of: the principal of its jobs."""
        self.called = ""
        """The name of its show. Shows are renamed, and another may have the name by which it was declared."""
        self.input: dict[str, Any] = _unpack(given)
        self.values: dict[int, Any] = {}
        self.news: list[InboxMessage] = []
        self.refused: dict[int, str] = {}
        self.state = RunState.RUNNING
        self.moves: Transition
        self.flow: CompiledWorkflow | None = None
        """Its definition, once something was decided about it; `moves` is what."""
        self._steps = steps
        self.now: RunStatus = _RUN_STATUS_DECODER.decode(steps)

    @classmethod
    def from_row(cls, row: Record) -> RunContext:
        return cls(
            row["pk_run"],
            row["pk_show"],
            row["pk_workflow"],
            row["steps"],
            row["fence"],
            row["input"],
            row["now_ms"],
            row["depth"],
            row["pk_root"],
            RunState(row["state"]),
            row["actor"],
        )

    def decide(self, flow: CompiledWorkflow, version: int) -> None:
        """From the state that was read, whatever was decided before."""
        if self.flow is not None:
            self.now = _RUN_STATUS_DECODER.decode(self._steps)
        self.flow = flow
        facts = RunInfo(self.run, flow.spec.name, version, self.input, self.actor, self.called)
        values = dict(self.values)
        self.state, self.moves = advance(flow, self.now, facts, values, self.news, self.now_ms, self.refused)
        if self.was is RunState.COMPENSATING and not any(isinstance(news, SagaEnded) for news in self.news):
            self.start_compensating()

    def wants_rollback(self, spec: WorkflowSpec) -> bool:
        """Whether it ends in a way that has it undo what it did; what a run inside another did that one undoes."""
        if not self.state.ended or self.depth > 0 or self.was is RunState.COMPENSATING:
            return False
        return spec.rolls_back_on(self.now.trigger)

    def start_compensating(self) -> None:
        """It goes on until what it did is undone."""
        told = HistoryEvent("compensating") if self.was is not RunState.COMPENSATING else None
        self.moves.happened = [*self.moves.happened[:-1], *([told] if told is not None else [])]
        self.moves.output = None
        self.state = RunState.COMPENSATING

    def replace_status(self, now: RunStatus) -> None:
        """Another state than that of a new run."""
        self._steps = _pack(now)
        self.now = _RUN_STATUS_DECODER.decode(self._steps)

    def is_step_job(self, job: UUID) -> bool:
        """Whether a job is that of a step; mostly of one that has not ended."""
        live = any(step.job == job for step in self.now.steps if not step.state.ended)
        return live or any(step.job == job for step in self.now.steps)

    def step_started(self, flow: CompiledWorkflow, place: int, job: UUID) -> None:
        """What a step runs now has an id."""
        step = self.now.steps[place]
        step.job = job
        self.moves.happened.append(HistoryEvent("began", flow.steps[place].id, step.attempt, job))

    def assign_approval_ids(self, flow: CompiledWorkflow) -> None:
        """What people are asked about has an id, by which it is heard of."""
        for ask in self.moves.asks:
            self.step_started(flow, ask.place, uuid4())

    def fail(self, error: str) -> None:
        """A run that cannot be advanced ends visibly."""
        self.now = _RUN_STATUS_DECODER.decode(self._steps)
        self.moves = Transition(happened=[HistoryEvent("failed", why=error)])
        self.now.error, self.state = error, RunState.FAILED


def contexts_from_inbox(
    rows: Sequence[Record],
    mapped: Mapping[UUID, ForEachResult],
    outputs: Mapping[UUID, bytes | None],
    partly: Collection[UUID] = (),
) -> list[RunContext]:
    """Runs with what each has to hear, in order; timers that are due come last, since what has ended needs none.

    `partly` are jobs that did not succeed, and some frames of which have.
    """
    turns: list[RunContext] = []
    for row in rows:
        if row["steps"] is not None:
            turns.append(RunContext.from_row(row))
        turns[-1].news.append(_inbox_message(row, mapped, outputs, partly))
    return turns


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
            raise AssertionError(f"nobody tells runs of {other}")


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


def write_arguments(turns: Sequence[RunContext]) -> tuple[object, ...]:
    """Arguments of write.sql."""
    timers = [(turn.run, timer) for turn in turns for timer in turn.moves.timers]
    untimed = [(turn.run, *each) for turn in turns for each in turn.moves.untimed]
    values = [(turn.run, place, _pack(value)) for turn in turns for place, value in turn.moves.values]
    return (
        [turn.run for turn in turns],
        [turn.fence for turn in turns],
        [turn.state.value for turn in turns],
        [_pack(turn.now) for turn in turns],
        _none_if_empty([_pack(turn.moves.output) if turn.moves.output is not None else None for turn in turns]),
        _none_if_empty([storable_text(turn.now.error) or None for turn in turns]),
        [turn.state.ended for turn in turns],
        [_encode_history(turn.moves.happened) for turn in turns],
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
        _none_if_empty([turn.now.trigger for turn in turns]),
    )


def _none_if_empty(column: list[Any]) -> list[Any] | None:
    """A column that holds nothing need not be sent."""
    return column if any(each is not None for each in column) else None


def _encode_history(happened: Sequence[HistoryEvent]) -> str:
    data = _encode_json(happened)
    if b"\\u0000" in data:  # one, or these very letters
        data = _encode_json([msgspec.structs.replace(each, why=each.why.replace("\0", "")) for each in happened])
    return data.decode()


def storable_text(text: str) -> str:
    """As much of a text as PostgreSQL takes."""
    return text.replace("\0", "")[:ERROR_MAX]

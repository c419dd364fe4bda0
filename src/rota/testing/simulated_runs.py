"""In-memory workflow runs: transitions are decided by the state machine the servers use; jobs are simulated.

Not simulated: commands, jobs that join a saga by themselves, and the policy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

import msgspec

from rota.api.workflows import (
    RunStartResult,
    RunTimelineEntry,
    SagaEntryView,
    SagaView,
    WorkflowDeclareResult,
    WorkflowRunView,
    WorkflowStepView,
)
from rota.model.approvals import ApprovalState
from rota.model.errors import IdempotencyConflict, InvalidInput, NotFound, Refused
from rota.model.ids import ENTROPY_BYTES, JobId, RunId, ShowId, uuid7
from rota.model.job_states import FrameState, JobState
from rota.model.protocol import FATAL_CODES
from rota.model.workflows import compensation
from rota.model.workflows.approval_steps import ApprovalOutput, ApprovingVote
from rota.model.workflows.compiler import CompiledWorkflow, compile_workflow
from rota.model.workflows.run_state import (
    RUN_DEPTH_MAX,
    ApprovalDecided,
    CancelRun,
    ChildRunEnded,
    HistoryEvent,
    InboxMessage,
    JobEnded,
    RecordCompensation,
    RunBegan,
    RunInfo,
    RunState,
    StepState,
    TimerFired,
    Transition,
)
from rota.model.workflows.spec import WorkflowSpec, decode_workflow, encode_workflow
from rota.model.workflows.state_machine import advance, new_run_status
from rota.testing.simulated_jobs import SimulatedJob, to_datetime
from rota.workflow.sagas import origin_of

if TYPE_CHECKING:
    from rota.client.connections import TasksByName
    from rota.testing.in_memory import Rehearsal

SIMULATED_SHOW: Final = ShowId(UUID(int=0))
_unpack = msgspec.msgpack.Decoder().decode


class SimulatedCompensation(msgspec.Struct):
    """The compensation of a step that succeeded."""

    job: UUID
    step: str
    submission: Any
    state: str = "pending"
    attempt: int = 1
    undo: JobId | None = None
    error: str | None = None

    def to_view(self) -> SagaEntryView:
        return msgspec.convert(self, SagaEntryView, from_attributes=True)


class SimulatedRun:
    def __init__(
        self,
        tasks: TasksByName,
        flow: CompiledWorkflow,
        version: int,
        inputs: dict[str, Any],
        now_ms: int,
        parent: SimulatedRun | None,
    ) -> None:
        self.id = RunId(uuid7(now_ms, os.urandom(ENTROPY_BYTES)))
        self.tasks = tasks
        self.flow = flow
        self.version = version
        self.facts = RunInfo(self.id, flow.spec.name, version, inputs)
        self.parent = parent
        self.root: SimulatedRun = self if parent is None else parent.root
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.now = new_run_status(flow)
        self.values: dict[int, Any] = {}
        self.state = RunState.RUNNING
        self.ends_as: RunState | None = None
        """Final state after the rollback."""
        self.output: Any = None
        self.timers: dict[tuple[int, int], int] = {}
        self.undos: list[SimulatedCompensation] = []
        self.history: list[RunTimelineEntry] = []
        self.started_ms = now_ms
        self.ended_ms: int | None = None

    def record(self, happened: HistoryEvent, now_ms: int) -> None:
        self.history.append(RunTimelineEntry(to_datetime(now_ms), happened))

    def step_started(self, place: int, job: UUID, now_ms: int) -> None:
        """Records the id of the job or run a step started."""
        step = self.now.steps[place]
        step.job = job
        self.record(HistoryEvent("began", self.flow.steps[place].id, step.attempt, job), now_ms)

    def end(self, state: RunState, now_ms: int) -> None:
        self.state, self.ended_ms = state, now_ms

    def to_view(self) -> WorkflowRunView:
        """The view a server would return."""
        spec = self.flow.spec
        return WorkflowRunView(
            id=self.id,
            show=spec.show,
            workflow=spec.name,
            version=self.version,
            state=self.state,
            error=self.now.error or None,
            started_at=to_datetime(self.started_ms),
            ended_at=None if self.ended_ms is None else to_datetime(self.ended_ms),
            input=self.facts.input,
            output=self.output,
            parent=None if self.parent is None else self.parent.id,
            show_id=SIMULATED_SHOW,
            steps=[self._step_view(place) for place in range(len(self.now.steps))],
        )

    def _step_view(self, place: int) -> WorkflowStepView:
        spec, now = self.flow.steps[place].spec, self.now.steps[place]
        due = next((due for (of, _), due in self.timers.items() if of == place), None)
        return WorkflowStepView(
            id=spec.id,
            type=spec.type,
            state=now.state,
            attempt=now.attempt,
            job=now.job,
            reason=now.reason,
            due_at=None if due is None else to_datetime(due),
            output=self.values.get(place),
        )

    def saga(self) -> SagaView:
        remaining = [each.state for each in self.undos if each.state != "done"]
        ended = "incomplete" if remaining else "rolled_back"
        state = "rolling_back" if self.state is RunState.COMPENSATING else ended if self.ends_as is not None else "open"
        return SagaView(state, self.now.error or None, [each.to_view() for each in reversed(self.undos)])


class SimulatedRuns:
    """All runs of one rehearsal."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._rehearsal = rehearsal
        self._versions: dict[tuple[str, str], list[tuple[bytes, CompiledWorkflow]]] = {}
        self._runs: dict[UUID, SimulatedRun] = {}
        self._keys: dict[tuple[str, str], SimulatedRun] = {}

    @property
    def _now_ms(self) -> int:
        return self._rehearsal.clock.now_ms()

    def declare(self, spec: WorkflowSpec) -> WorkflowDeclareResult:
        versions = self._versions.setdefault((spec.show, spec.name), [])
        data = encode_workflow(spec)
        changed = not versions or versions[-1][0] != data
        if changed:
            versions.append((data, compile_workflow(decode_workflow(data))))
        return WorkflowDeclareResult(spec.name, len(versions), changed)

    def definition(self, show: str, name: str, version: int = 0) -> tuple[int, CompiledWorkflow]:
        versions = self._versions.get((show, name), [])
        if not 0 < (version or len(versions)) <= len(versions):
            raise NotFound(f"There is no workflow {name!r} in show {show!r} of this test: declare it first.")
        return version or len(versions), versions[(version or len(versions)) - 1][1]

    def start(
        self, tasks: TasksByName, show: str, name: str, inputs: dict[str, Any], version: int, key: str
    ) -> RunStartResult:
        number, flow = self.definition(show, name, version)
        existing = self._keys.get((show, key)) if key else None
        if existing is not None:
            if (existing.flow.spec.name, existing.facts.input) != (name, flow.inputs(inputs)):
                raise IdempotencyConflict(
                    f"The key {key!r} was used for another run, {existing.id}.", run=str(existing.id)
                )
            return RunStartResult(existing.id, existing.version, already=True)
        run = self._start_run(tasks, flow, number, flow.inputs(inputs), None)
        if key:
            self._keys[show, key] = run
        return RunStartResult(run.id, number)

    def latest_definitions(self) -> list[tuple[tuple[str, str], int, CompiledWorkflow]]:
        """Latest definitions: (show, name), version, workflow."""
        return [(key, len(versions), versions[-1][1]) for key, versions in sorted(self._versions.items())]

    def find(self, run: UUID) -> SimulatedRun:
        if run not in self._runs:
            raise NotFound(f"There is no run {run} in this test.", run=str(run))
        return self._runs[run]

    def all(self) -> list[SimulatedRun]:
        """Newest first."""
        return list(reversed(self._runs.values()))

    def deliver(self, run: UUID, message: InboxMessage) -> bool:
        """Delivers a command; returns False if the run had ended."""
        found = self.find(run)
        if not found.state.ended and found.state is not RunState.COMPENSATING:
            self._advance(found, [message])
            return True
        return not found.state.ended

    def rerun(self, run: UUID, step: str) -> RunStartResult:
        from rota.workflow.rerun import rerun_from

        old = self.find(run)
        if not old.state.ended:
            raise NotFound(f"There is no ended run {run}: cancel a live run first.")
        undone = {each.step.partition("/")[0] for each in old.undos if each.state == "done"}
        places = [at for at, each in enumerate(old.flow.steps) if undone & {each.id, str(old.now.steps[at].job)}]
        now, reused = rerun_from(old.flow, deepcopy(old.now), step, places)
        new = SimulatedRun(old.tasks, old.flow, old.version, old.facts.input, self._now_ms, None)
        new.now, new.values = now, {place: value for place, value in old.values.items() if place in reused}
        names = {name for at in reused for name in (old.flow.steps[at].id, str(old.now.steps[at].job))}
        new.undos = [each for each in old.undos if each.state == "pending" and each.step.partition("/")[0] in names]
        old.undos = [each for each in old.undos if each not in new.undos]
        self._runs[new.id] = new
        self._advance(new, [RunBegan()])
        return RunStartResult(new.id, new.version)

    def roll_back(self, run: UUID) -> int:
        found = self.find(run)
        if not found.state.ended:
            raise NotFound(f"There is no ended run {run}: cancel a live run first.")
        if not found.undos:
            raise Refused(
                f"The run {run} has nothing to undo: it succeeded, or no job that succeeded has a compensation."
            )
        remaining = [each for each in found.undos if each.state != "done"]
        for each in remaining:
            each.attempt += each.state != "pending"
            each.state = "pending"
        if remaining:
            found.ends_as, found.state = found.state, RunState.COMPENSATING
        return len(remaining)

    def decide(self, run: UUID, step: str, *, by: str, agrees: bool, reason: str) -> None:
        """Applies a vote to a waiting approval step."""
        found = self.find(run)
        place = found.flow.index_of(step)
        now = found.now.steps[place]
        if now.state is not StepState.RUNNING or now.job is None or found.flow.steps[place].spec.type != "approval":
            raise InvalidInput(f"Step {step} of run {run} does not wait for an approval: it is {now.state}.")
        at = to_datetime(self._now_ms)
        if agrees:
            value = _unpack(msgspec.msgpack.encode(ApprovalOutput([by], at, [ApprovingVote(by, at, reason)])))
            self._advance(found, [ApprovalDecided(now.job, ApprovalState.GRANTED, value)])
        else:
            error = f"Rejected by {by}{f': {reason}' if reason else ''}."
            self._advance(found, [ApprovalDecided(now.job, ApprovalState.REJECTED, error=error)])

    def advance_all(self) -> bool:
        """Delivers pending messages to all runs; returns whether there were any."""
        changed = False
        for run in list(self._runs.values()):
            if messages := self._pending_inbox(run):
                self._advance(run, messages)
                changed = True
            if run.state is RunState.COMPENSATING:
                changed |= self._continue_rollback(run)
        return changed

    def _start_run(
        self,
        tasks: TasksByName,
        flow: CompiledWorkflow,
        version: int,
        inputs: dict[str, Any],
        parent: SimulatedRun | None,
    ) -> SimulatedRun:
        run = SimulatedRun(tasks, flow, version, inputs, self._now_ms, parent)
        self._runs[run.id] = run
        self._advance(run, [RunBegan()])
        return run

    def _pending_inbox(self, run: SimulatedRun) -> list[InboxMessage]:
        if run.state.ended:
            return []
        messages: list[InboxMessage] = []
        for place, step in enumerate(run.now.steps):
            if step.job is None or step.state not in (StepState.RUNNING, StepState.STOPPING):
                continue
            job, child = self._rehearsal.known(JobId(step.job)), self._runs.get(step.job)
            if job is not None and job.state.terminal:
                messages.append(_job_ended_message(job, is_each=run.flow.steps[place].spec.for_each is not None))
            elif child is not None and child.state.ended:
                messages.append(ChildRunEnded(child.id, child.state, child.output, child.now.error, child.now.trigger))
        for key in [key for key, due in run.timers.items() if due <= self._now_ms]:
            del run.timers[key]
            messages.append(TimerFired(*key))
        return messages

    def _advance(self, run: SimulatedRun, messages: Sequence[InboxMessage]) -> None:
        saved = deepcopy((run.now, run.values))
        refused: dict[int, str] = {}
        while True:  # bounded: each round refuses at least one more step
            state, transition = advance(run.flow, run.now, run.facts, run.values, messages, self._now_ms, refused)
            if not (wrong := self._unstartable_children(run, transition)):
                break
            refused |= wrong
            run.now, run.values = deepcopy(saved)
        run.state = state
        self._apply_transition(run, transition)
        if state.ended:
            self._end(run, state, transition)

    def _unstartable_children(self, run: SimulatedRun, transition: Transition) -> dict[int, str]:
        """Steps whose child workflow cannot be started, and why."""
        wrong: dict[int, str] = {}
        for child in transition.children:
            try:
                if run.depth >= RUN_DEPTH_MAX:
                    raise NotFound(
                        f"Child runs are nested {RUN_DEPTH_MAX} deep: check whether {child.workflow} starts itself."
                    )
                self.definition(run.flow.spec.show, child.workflow)[1].inputs(child.input)
            except InvalidInput as error:
                wrong[child.place] = error.sentence
        return wrong

    def _apply_transition(self, run: SimulatedRun, transition: Transition) -> None:
        now_ms = self._now_ms
        for happened in transition.happened:
            run.record(happened, now_ms)
        run.timers |= {(timer.place, timer.attempt): timer.due_ms for timer in transition.timers}
        for key in transition.untimed:
            run.timers.pop(key, None)
        for undo in transition.undos:
            run.root.undos.append(self._compensation_for(run, undo))
        for start in transition.starts:
            run.step_started(start.place, self._rehearsal.play(run.tasks, start.plan), now_ms)
        for ask in transition.asks:
            run.step_started(ask.place, uuid4(), now_ms)
        for child in transition.children:
            version, flow = self.definition(run.flow.spec.show, child.workflow)
            started = self._start_run(run.tasks, flow, version, flow.inputs(child.input), run)
            run.step_started(child.place, started.id, now_ms)
        for job in transition.stops:
            self._rehearsal.cancel(JobId(job))
        for inner in transition.stop_runs:
            self.deliver(inner, CancelRun())

    def _end(self, run: SimulatedRun, state: RunState, transition: Transition) -> None:
        run.output = transition.output
        if run.depth == 0 and state is RunState.SUCCEEDED:
            run.undos.clear()
        if run.depth == 0 and run.flow.spec.rolls_back_on(run.now.trigger) and run.undos:
            run.ends_as, run.state = state, RunState.COMPENSATING
        else:
            run.end(state, self._now_ms)

    def _compensation_for(self, run: SimulatedRun, undo: RecordCompensation) -> SimulatedCompensation:
        step, job = run.flow.steps[undo.place], self._rehearsal.find(JobId(undo.job)).to_view()
        name = step.id if run.depth == 0 else f"{run.id}/{step.id}"
        spec = compensation.step_compensation(step, undo)
        return SimulatedCompensation(
            undo.job, name, compensation.compensation_submission(origin_of(job), spec, str(run.root.id))
        )

    def _continue_rollback(self, run: SimulatedRun) -> bool:
        """Starts the next compensation once the previous one ended; returns whether anything changed."""
        running = next((each for each in run.undos if each.state == "running"), None)
        if running is not None:
            assert running.undo is not None
            job = self._rehearsal.find(running.undo)
            if not job.state.terminal:
                return False
            succeeded = job.state is JobState.SUCCEEDED
            running.state, running.error = ("done", None) if succeeded else ("failed", _error(job))
        next_undo = next((each for each in reversed(run.undos) if each.state == "pending"), None)
        if next_undo is None:
            assert run.ends_as is not None, "it was ended before anything was undone"
            run.end(run.ends_as, self._now_ms)
            return True
        is_retry = next_undo.attempt > 1
        submission = (
            compensation.with_retry_key(next_undo.submission, next_undo.attempt) if is_retry else next_undo.submission
        )
        next_undo.state, next_undo.undo = (
            "running",
            self._rehearsal.play(run.tasks, compensation.validate_compensation(submission)),
        )
        return True


def _job_ended_message(job: SimulatedJob, *, is_each: bool) -> JobEnded:
    values: list[Any] = [None] * job.plan.layers[0].frames.count
    for each in job.results:
        if each.state is FrameState.SUCCEEDED and each.value is not None:
            values[each.place] = _unpack(each.value)
    fatal = any(each.code in FATAL_CODES for each in job.results)
    if not is_each:
        return JobEnded(job.id, job.state, values[0], _error(job), fatal)
    failed = next((each.place for each in job.results if each.state is not FrameState.SUCCEEDED), None)
    error = _error(job) if failed is None else f"Item {failed}: {_error(job)}"
    partly = job.state is not JobState.SUCCEEDED and FrameState.SUCCEEDED in job.ended[0]
    return JobEnded(job.id, job.state, values, error, fatal, mapped=True, partly=partly)


def _error(job: SimulatedJob) -> str:
    failed = (each for each in job.results if each.state is not FrameState.SUCCEEDED)
    return next((each.error or each.code for each in failed), job.reason or "")

"""State machine of a workflow run: `advance`. Pure: time is an argument, the only result is a `Transition`.

Invariants, for any messages in any order:
- a step begins once all its dependencies ended well, and never after the run started to end;
- every step ends: a step that ends triggers the evaluation of its followers, and steps that can no longer begin become
  CANCELLED or PASSED;
- a message about a job that a step does not (or no longer) run changes nothing;
- a run ends when no step is running, so that everything it did is known before compensation starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, assert_never
from uuid import UUID

from rota.model.approvals import ApprovalState
from rota.model.cel_guard import CostMeter
from rota.model.job_states import JobState
from rota.model.workflows.approval_steps import render_approval
from rota.model.workflows.cel import METER_KEY
from rota.model.workflows.compiler import CompiledStep, CompiledWorkflow, due_ms, require_bool
from rota.model.workflows.expressions import ExpressionError, validate_value
from rota.model.workflows.failures import (
    DEADLINE_MESSAGE,
    RUN_STATE_BY_STEP_STATE,
    STEP_STATE_BY_JOB_STATE,
    STEP_STATE_BY_RUN_STATE,
    STOPPED_MESSAGE,
    TRIGGER_BY_STEP_STATE,
    as_single_item,
    worst_trigger,
)
from rota.model.workflows.run_state import (
    ApprovalDecided,
    CancelRun,
    ChildRunEnded,
    HistoryEvent,
    InboxMessage,
    JobEnded,
    PauseRun,
    RecordCompensation,
    RequestApproval,
    ResumeRun,
    RunBegan,
    RunInfo,
    RunState,
    RunStatus,
    SagaEnded,
    StartChildRun,
    StepState,
    StepStatus,
    SubmitJob,
    Timer,
    TimerFired,
    Transition,
)
from rota.model.workflows.spec import Trigger

_NONE_REFUSED: Final[Mapping[int, str]] = {}
RUN_TIMER: Final = -1
"""Step index of the timer of the whole run."""
DependencyOutcome = Literal["ok", "bad", "passed", "wait"]
_WAITING_TYPES: Final = frozenset({"delay", "approval"})
_IDLE_TYPES: Final = _WAITING_TYPES | {"parallel"}
"""Steps during which no job runs."""


def new_run_status(flow: CompiledWorkflow) -> RunStatus:
    return RunStatus([StepStatus() for _ in flow.steps])


def advance(
    flow: CompiledWorkflow,
    status: RunStatus,
    info: RunInfo,
    values: dict[int, Any],
    messages: Sequence[InboxMessage],
    now_ms: int,
    refused: Mapping[int, str] = _NONE_REFUSED,
) -> tuple[RunState, Transition]:
    """Process inbox messages in order. Updates `status` and adds to `values`, the outputs of steps so far.

    `refused` maps steps whose jobs cannot be submitted to the reason.
    """
    machine = _RunMachine(flow, status, info, values, now_ms, refused)
    for message in messages:
        machine.handle(message)
        machine.evaluate()
    return machine.state(), machine.transition


def abort(
    flow: CompiledWorkflow,
    status: RunStatus,
    info: RunInfo,
    messages: Sequence[InboxMessage],
    now_ms: int,
    error: str,
) -> tuple[RunState, Transition]:
    """End a run whose messages cannot be processed: it stops its steps, and ends when none is running.

    Reads no result and evaluates no expression. A step whose work `messages` report as ended has failed with `error`;
    so has the input of its compensation.
    """
    machine = _RunMachine(flow, status, info, {}, now_ms, _NONE_REFUSED)
    machine.end_run(RunState.FAILED, "failed", error)
    for message in messages:
        machine.discard(message, error)
    machine.evaluate()
    return machine.state(), machine.transition


def rerender_approval(
    flow: CompiledWorkflow, status: RunStatus, info: RunInfo, values: dict[int, Any], place: int
) -> tuple[str, dict[str, Any]]:
    """Text and input of a waiting approval step, rendered again: nothing it reads has changed since it began."""
    return _RunMachine(flow, status, info, values, 0, _NONE_REFUSED).render_approval(flow.steps[place])


def recompute_due_ms(
    flow: CompiledWorkflow, status: RunStatus, info: RunInfo, values: dict[int, Any], place: int, now_ms: int
) -> int:
    """When a timer whose row was lost is due: a delay restarts from now, so the timer never fires early."""
    return _RunMachine(flow, status, info, values, now_ms, _NONE_REFUSED).due(place)


class _RunMachine:
    def __init__(
        self,
        flow: CompiledWorkflow,
        status: RunStatus,
        info: RunInfo,
        values: dict[int, Any],
        now_ms: int,
        refused: Mapping[int, str],
    ) -> None:
        self.flow = flow
        self.status = status
        self.info = info
        self.values = values
        self.now_ms = now_ms
        self.refused = refused
        self.transition = Transition()
        self._pending_steps: deque[int] = deque()
        self._final_state: RunState | None = None
        self._scope: dict[str, Any] | None = None
        self._meter = CostMeter()

    def handle(self, message: InboxMessage) -> None:
        match message:
            case RunBegan():
                self._on_began()
            case JobEnded():
                self._on_job_ended(message)
            case ChildRunEnded():
                self._on_child_run_ended(message)
            case ApprovalDecided():
                self._on_approval_decided(message)
            case SagaEnded():
                pass
            case TimerFired():
                self._on_timer_fired(message)
            case CancelRun(reason):
                self.end_run(RunState.CANCELLED, "cancelled", reason)
            case PauseRun(by):
                self._set_paused(paused=True, by=by)
            case ResumeRun():
                self._set_paused(paused=False)
            case _:
                assert_never(message)

    def evaluate(self) -> None:
        """Evaluate all steps that the last message may have affected."""
        while self._pending_steps:
            self._evaluate_step(self._pending_steps.popleft())
        # In reverse: the last steps usually end last, so this stops early.
        if self._final_state is None and all(step.state.ended for step in reversed(self.status.steps)):
            self._finish_run()

    def state(self) -> RunState:
        if self._final_state is not None:
            return self._final_state
        if self.status.paused:
            return RunState.PAUSED
        steps = zip(self.flow.steps, self.status.steps, strict=True)
        running = {step.spec.type for step, now in steps if now.state is StepState.RUNNING}
        return RunState.WAITING if running <= _IDLE_TYPES and running & _WAITING_TYPES else RunState.RUNNING

    def render_approval(self, step: CompiledStep) -> tuple[str, dict[str, Any]]:
        return render_approval(step, self._scope_for(step))

    def end_run(self, state: RunState, trigger: Trigger, error: str) -> None:
        """Start to end the run: nothing begins any more, and running steps are stopped."""
        if self.status.ends_as is not None:
            return
        self.status.ends_as, self.status.trigger, self.status.error = state, trigger, error
        self.status.paused = False  # nothing begins any more, so there is nothing to resume
        self._add_history("ending", why=error)
        self._stop_steps(range(len(self.status.steps)))

    def discard(self, message: InboxMessage, error: str) -> None:
        """Process the end of a step's work without its result."""
        match message:
            case JobEnded(job=work) | ChildRunEnded(run=work) | ApprovalDecided(approval=work):
                place = self._step_running(work)
            case _:
                return
        if place is None:
            return
        if isinstance(message, JobEnded) and message.has_effects and self.flow.steps[place].spec.compensate is not None:
            self.transition.undos.append(RecordCompensation(place, message.job, error=error))
        self._end_step(place, StepState.FAILED, error)

    def _on_began(self) -> None:
        self._add_history("began")
        if self.flow.spec.timeout_s:
            self.transition.timers.append(Timer(RUN_TIMER, 0, self.due(RUN_TIMER)))
        self._pending_steps.extend(range(len(self.flow.steps)))

    def _on_job_ended(self, ended: JobEnded) -> None:
        place = self._step_running(ended.job)
        if place is None:
            return
        if self.flow.steps[place].spec.for_each is not None and not ended.mapped:
            ended = as_single_item(ended)
        if ended.has_effects and self.flow.steps[place].spec.compensate is not None:
            self._record_compensation(place, ended)
        if ended.state is JobState.SUCCEEDED:
            self._complete(place, ended.value)
        else:
            quarantined = ended.state is JobState.OUTPUT_QUARANTINED
            trigger: Trigger | None = "fatal" if ended.fatal else "quarantined" if quarantined else None
            self._end_step(
                place, STEP_STATE_BY_JOB_STATE[ended.state], ended.error or ended.state.lower(), trigger=trigger
            )

    def _record_compensation(self, place: int, ended: JobEnded) -> None:
        """Record the compensation as soon as the job is done, with the job's output."""
        self.values[place], self._scope = ended.value, None
        context, error, step = None, "", self.flow.steps[place]
        try:
            context = step.undo(self._full_scope()) if step.undo is not None else None
        except ExpressionError as failed:
            error = str(failed)
        self.transition.undos.append(RecordCompensation(place, ended.job, context, error))

    def _on_child_run_ended(self, ended: ChildRunEnded) -> None:
        place = self._step_running(ended.run)
        if place is None:
            return
        step = self.status.steps[place]
        if step.state is StepState.STOPPING and step.trigger == "timeout":
            self._end_step(place, StepState.TIMEOUT, DEADLINE_MESSAGE)
        elif ended.state is RunState.SUCCEEDED:
            self._complete(place, ended.output)
        else:
            self._end_step(
                place, STEP_STATE_BY_RUN_STATE[ended.state], ended.error or ended.state.lower(), trigger=ended.trigger
            )

    def _on_approval_decided(self, decided: ApprovalDecided) -> None:
        place = self._step_running(decided.approval)
        if place is None:
            return
        if decided.state is ApprovalState.GRANTED:
            self._complete(place, decided.value)
        else:
            self._end_step(place, StepState.DENIED, decided.error or f"Its approval is {decided.state}.")

    def _step_running(self, job: UUID) -> int | None:
        for place, step in enumerate(self.status.steps):
            if (step.state is StepState.RUNNING or step.state is StepState.STOPPING) and step.job == job:
                return place
        return None

    def _on_timer_fired(self, timer: TimerFired) -> None:
        if timer.place == RUN_TIMER:
            self.end_run(RunState.TIMEOUT, "timeout", "The run took longer than its timeout_s.")
            return
        step = self.status.steps[timer.place]
        if step.attempt != timer.attempt or not step.timed:
            return
        step.timed = False
        if step.state is not StepState.RUNNING:
            return
        if self.flow.steps[timer.place].spec.type == "delay":
            self._complete(timer.place, None)
        else:
            self._time_out(timer.place)

    def _time_out(self, place: int) -> None:
        step, spec = self.status.steps[place], self.flow.steps[place]
        if spec.spec.type == "workflow":  # the child run continues until it has been stopped
            assert step.job is not None
            step.state, step.trigger = StepState.STOPPING, "timeout"
            self._add_history("stopping", place, DEADLINE_MESSAGE)
            self.transition.stop_runs.append(step.job)
            return
        if spec.spec.type == "approval":
            self.transition.withdrawn.append(place)
        self._stop_steps(spec.members)
        self._end_step(place, StepState.TIMEOUT, DEADLINE_MESSAGE)

    def _set_paused(self, *, paused: bool, by: str = "") -> None:
        if self.status.paused is paused or self.status.ends_as is not None:
            return
        self.status.paused = paused
        self._add_history("paused" if paused else "resumed", why=by)
        if not paused:
            self._pending_steps.extend(range(len(self.flow.steps)))

    def _evaluate_step(self, place: int) -> None:
        """Begin or end a step after something before it has changed."""
        step, state = self.flow.steps[place], self.status.steps[place].state
        if state is StepState.RUNNING and step.members:
            self._evaluate_parallel(step)
        if state is not StepState.WAITING or self.status.ends_as is not None:
            return
        match self._readiness(step):
            case "ok":
                if not self.status.paused:
                    self._begin(step)
            case "passed":
                self._end_step(place, StepState.PASSED)
            case "bad":
                self._end_step(place, StepState.CANCELLED, "A step that it depends on did not succeed.")
            case "wait":
                pass

    def _readiness(self, step: CompiledStep) -> DependencyOutcome:
        owned = self._owner_readiness(step) if step.owner >= 0 else "ok"
        if owned != "ok":
            return owned
        outcomes = [self._outcome(before) for before in step.depends_on]
        if "wait" in outcomes:
            return "wait"
        if "bad" in outcomes:
            return "bad"
        return "passed" if outcomes and all(outcome == "passed" for outcome in outcomes) else "ok"

    def _owner_readiness(self, step: CompiledStep) -> DependencyOutcome:
        """Whether the step's owner lets it begin."""
        owner = self.flow.steps[step.owner]
        state = self.status.steps[step.owner].state
        match step.role:
            case "member":
                if state is StepState.RUNNING:
                    return "ok"
            case "case":
                if state is StepState.SUCCEEDED:
                    chosen = self._selected_case(owner, self.status.steps[step.owner].reason)
                    return "ok" if chosen is not None and step.place in chosen else "passed"
            case "handler":
                if self._has_failed(step.owner):
                    return "ok"
                return "passed" if state.ended else "wait"
            case _:
                return "ok"
        if not state.ended:
            return "wait"
        return "passed" if state in (StepState.SKIPPED, StepState.PASSED) else "bad"

    def _has_failed(self, place: int) -> bool:
        """Whether a step failed by itself; false if it never began or was stopped."""
        step = self.status.steps[place]
        if step.stopped:
            return False
        return step.state in (StepState.FAILED, StepState.TIMEOUT) or (
            step.state in RUN_STATE_BY_STEP_STATE and step.attempt > 0
        )

    def _selected_case(self, switch: CompiledStep, value: str) -> tuple[int, ...] | None:
        return switch.cases.get(value, switch.default)

    def _outcome(self, place: int) -> DependencyOutcome:
        """The outcome of a step for its dependents."""
        step, state = self.flow.steps[place], self.status.steps[place].state
        match state:
            case StepState.SUCCEEDED | StepState.SKIPPED:
                return "ok"
            case StepState.PASSED:
                return "passed"
            case StepState.WAITING | StepState.RUNNING | StepState.STOPPING:
                return "wait"
            case StepState.FAILED | StepState.TIMEOUT | StepState.CANCELLED | StepState.DENIED:
                if step.handler < 0:
                    return "bad"
                handled = self._outcome(step.handler)
                handler_idle = self.status.steps[step.handler].state in (StepState.SKIPPED, StepState.PASSED)
                return "bad" if handler_idle else handled
            case _ as never:
                assert_never(never)

    def _evaluate_parallel(self, step: CompiledStep) -> None:
        """End a parallel that has enough successful members, or can no longer get them."""
        outcomes = [self._outcome(member) for member in step.members]
        good = sum(outcome in ("ok", "passed") for outcome in outcomes)
        assert step.spec.parallel is not None
        need = {"all": len(outcomes), "any": 1}.get(str(step.spec.parallel.need), step.spec.parallel.need)
        assert isinstance(need, int)
        if good >= need:
            self._stop_steps(step.members)
            self._complete(step.place, None)
        elif good + outcomes.count("wait") < need:
            trigger = self._worst_trigger(step.members)
            self._stop_steps(step.members)
            self._end_step(
                step.place, StepState.FAILED, f"{good} of its steps succeeded, but it needs {need}.", trigger=trigger
            )

    def _worst_trigger(self, places: Iterable[int]) -> Trigger | None:
        """The trigger of a failed parallel: the worst among its failed members."""
        failed = [
            self.status.steps[place] for place in places if self._outcome(place) == "bad" and self._has_failed(place)
        ]
        return worst_trigger(
            (step.trigger or TRIGGER_BY_STEP_STATE[step.state] for step in failed), self.flow.spec.rollback_on
        )

    def _begin(self, step: CompiledStep) -> None:
        try:
            if step.when is not None and not require_bool(step.when(self._scope_for(step)), step.id):
                return self._end_step(step.place, StepState.SKIPPED)
            if step.place in self.refused:
                return self._end_step(step.place, StepState.FAILED, self.refused[step.place])
            self._start_by_type(step)
        except ExpressionError as failed:
            self._end_step(step.place, StepState.FAILED, str(failed))
        return None

    def _start_by_type(self, step: CompiledStep) -> None:
        spec, place, now = step.spec, step.place, self.status.steps[step.place]
        if spec.loop is not None and spec.loop.while_ and now.attempt == 0 and not self._continues_loop(step, None):
            return self._complete(place, None)
        match spec.type:
            case "job":
                self._submit_job(step)
            case "workflow":
                child_input = step.call_input(self._scope_for(step))
                self._mark_running(step)
                self.transition.children.append(StartChildRun(place, spec.workflow, child_input))
            case "delay":
                self._start_delay(step)
            case "condition":
                assert step.value is not None
                self._mark_running(step)
                self._complete(place, require_bool(step.value(self._scope_for(step)), step.id))
            case "switch":
                self._evaluate_switch(step)
            case "parallel":
                self._mark_running(step)
                self._pending_steps.extend(step.members)
            case "notify":
                text = step.value(self._scope_for(step)) if step.value is not None else spec.notify
                self._mark_running(step)
                self.transition.notes.append((place, str(text)))
                self._complete(place, None)
            case "approval":
                request = RequestApproval(place, self.render_approval(step)[0])
                self._mark_running(step)
                self.transition.asks.append(request)
        return None

    def _submit_job(self, step: CompiledStep) -> None:
        if step.spec.for_each is not None and not step.items(self._scope_for(step)):
            return self._complete(step.place, [])
        submission = step.submission(self._scope_for(step), str(self.info.id), self.info.actor, self.info.show)
        self._mark_running(step)
        return self.transition.starts.append(SubmitJob(step.place, submission))

    def _mark_running(self, step: CompiledStep) -> None:
        now = self.status.steps[step.place]
        now.state, now.job = StepState.RUNNING, None
        now.attempt += 1
        if step.spec.type not in ("job", "workflow", "approval"):
            self._add_history("began", step.place)
        if step.spec.deadline_s and step.spec.type in ("parallel", "workflow", "approval"):
            self._set_timer(step.place, self.due(step.place))

    def due(self, place: int) -> int:
        """When the timer of a step or of the run is due if it begins now."""
        if place == RUN_TIMER:
            return self.now_ms + round(self.flow.spec.timeout_s * 1000)
        step, spec = self.flow.steps[place], self.flow.steps[place].spec
        if spec.type != "delay":
            return self.now_ms + round(spec.deadline_s * 1000)
        delay = step.value(self._scope_for(step)) if step.value is not None else spec.delay_sec or spec.delay_until
        return due_ms(spec, delay, self.now_ms)

    def _start_delay(self, step: CompiledStep) -> None:
        due = self.due(step.place)
        self._mark_running(step)
        if due <= self.now_ms:
            self._complete(step.place, None)
        else:
            self._set_timer(step.place, due)

    def _set_timer(self, place: int, due: int) -> None:
        step = self.status.steps[place]
        step.timed = True
        self.transition.timers.append(Timer(place, step.attempt, due))

    def _evaluate_switch(self, step: CompiledStep) -> None:
        assert step.value is not None
        value = step.value(self._scope_for(step))
        case = str(value).lower() if isinstance(value, bool) else str(value)
        self._mark_running(step)
        if self._selected_case(step, case) is None:
            self._end_step(step.place, StepState.FAILED, f"It has no case {case[:64]!r}, and no default.")
        else:
            self.status.steps[step.place].reason = case
            self._complete(step.place, value)

    def _complete(self, place: int, value: Any) -> None:
        """A step has succeeded, or finished one round of its loop."""
        step, now = self.flow.steps[place], self.status.steps[place]
        loops = step.spec.loop is not None and now.attempt > 0 and now.state is StepState.RUNNING
        try:
            if value is not None and place in self.flow.reads:
                validate_value(value, f"output of step {step.id}")
            if loops and self.status.ends_as is None and self._continues_loop(step, value):
                now.state = StepState.WAITING
                self._cancel_timer(place)
                self._add_history("round", place)
                # Only the next round may read the output so far.
                self.values[place], self._scope = value, None
                return self._pending_steps.append(place)
        except ExpressionError as failed:
            return self._end_step(place, StepState.FAILED, str(failed))
        if value is not None:
            self.values[place] = value
            self.transition.values.append((place, value))
        return self._end_step(place, StepState.SUCCEEDED, now.reason)

    def _continues_loop(self, step: CompiledStep, value: Any) -> bool:
        loop, rounds = step.spec.loop, self.status.steps[step.place].attempt
        assert loop is not None
        scope = {**self._full_scope(), "round": {"index": rounds, "output": value}}
        more = require_bool(step.again(scope), step.id) if step.again is not None else rounds < loop.most
        if more and rounds >= loop.most:
            raise ExpressionError(f"Step {step.id} ran {rounds} rounds, the maximum that its loop allows.")
        return more

    def _end_step(self, place: int, state: StepState, reason: str = "", *, trigger: Trigger | None = None) -> None:
        step, now = self.flow.steps[place], self.status.steps[place]
        now.state, now.reason, now.trigger = state, reason, trigger
        self._cancel_timer(place)
        self._scope = None
        self._add_history(state.lower(), place, reason if state is not StepState.SUCCEEDED else "")
        self._pending_steps.extend(step.followers)
        if self.status.ends_as is None and (fault := self._failing_step(step)) is not None:
            at, failed = self.flow.steps[fault], self.status.steps[fault]
            ways = [failed.trigger or TRIGGER_BY_STEP_STATE[failed.state], *([trigger] if trigger is not None else [])]
            self.end_run(
                RUN_STATE_BY_STEP_STATE[failed.state],
                worst_trigger(ways, self.flow.spec.rollback_on) or "failed",
                f"Step {at.id}: {failed.reason}",
            )

    def _failing_step(self, step: CompiledStep) -> int | None:
        """The step whose failure ends the run now that `step` has ended; None: the run continues."""
        if step.handler >= 0 and self._has_failed(step.place):
            return None
        if self.status.steps[step.place].state is not StepState.SUCCEEDED:
            while step.role == "handler" and self._has_failed(step.owner):
                step = self.flow.steps[step.owner]
        return step.place if self._has_failed(step.place) and step.role != "member" else None

    def _stop_steps(self, places: Iterable[int]) -> None:
        """Stop the steps that have not ended."""
        for place in places:
            step, spec = self.status.steps[place], self.flow.steps[place].spec
            if step.state is StepState.WAITING:
                self._end_step(place, StepState.CANCELLED, STOPPED_MESSAGE)
            elif step.state is StepState.RUNNING and step.job is not None and spec.type != "approval":
                step.state, step.stopped = StepState.STOPPING, True
                self._add_history("stopping", place)
                (self.transition.stops if spec.type == "job" else self.transition.stop_runs).append(step.job)
            elif step.state is StepState.STOPPING:
                step.stopped = True
            elif step.state is StepState.RUNNING:
                step.stopped = True
                self._discard_starts(place)
                self.transition.withdrawn += [place] if step.job is not None else []
                self._end_step(place, StepState.CANCELLED, STOPPED_MESSAGE)
                self._stop_steps(self.flow.steps[place].members)

    def _discard_starts(self, place: int) -> None:
        """Drop what this very advance was going to start."""
        self.transition.starts = [start for start in self.transition.starts if start.place != place]
        self.transition.children = [child for child in self.transition.children if child.place != place]
        self.transition.asks = [ask for ask in self.transition.asks if ask.place != place]

    def _cancel_timer(self, place: int) -> None:
        step = self.status.steps[place]
        if step.timed:
            step.timed = False
            self.transition.untimed.append((place, step.attempt))
            self.transition.timers = [timer for timer in self.transition.timers if timer.place != place]

    def _finish_run(self) -> None:
        state = self.status.ends_as or RunState.SUCCEEDED
        if state is RunState.SUCCEEDED:
            try:
                output = self.flow.output(self._full_scope()) if self.flow.output is not None else self.flow.spec.output
                validate_value(output, "output of the run")
                self.transition.output = None if output == {} else output
            except ExpressionError as failed:
                # Store the failure: the output is evaluated again after compensation and might be cheap enough then.
                self.status.ends_as = state = RunState.FAILED
                self.status.error, self.status.trigger = str(failed), "failed"
        if self.flow.spec.timeout_s:
            self.transition.untimed.append((RUN_TIMER, 0))
            self.transition.timers = [timer for timer in self.transition.timers if timer.place != RUN_TIMER]
        self._final_state = state
        self._add_history(state.lower(), why=self.status.error)

    def _scope_for(self, step: CompiledStep) -> dict[str, Any]:
        scope = self._full_scope() if step.reads else self._base_scope()
        if step.spec.loop is None:
            return scope
        return {
            **scope,
            "round": {"index": self.status.steps[step.place].attempt, "output": self.values.get(step.place)},
        }

    def _base_scope(self) -> dict[str, Any]:
        run = {"id": str(self.info.id), "workflow": self.info.workflow, "version": self.info.version}
        return {"input": self.info.input, "run": run, "steps": {}, METER_KEY: self._meter}

    def _full_scope(self) -> dict[str, Any]:
        if self._scope is None:
            steps = {
                step.id: {
                    "state": now.state.value,
                    "output": self.values.get(place),
                    "error": now.reason if now.state in RUN_STATE_BY_STEP_STATE else "",
                }
                for place, (step, now) in enumerate(zip(self.flow.steps, self.status.steps, strict=True))
            }
            self._scope = {**self._base_scope(), "steps": steps}
        return self._scope

    def _add_history(self, what: str, place: int = RUN_TIMER, why: str = "") -> None:
        if place == RUN_TIMER:
            self.transition.happened.append(HistoryEvent(what, why=why))
            return
        step = self.status.steps[place]
        self.transition.happened.append(HistoryEvent(what, self.flow.steps[place].id, step.attempt, step.job, why))

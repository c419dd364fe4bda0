"""What comes next in a run: `advance`. Pure: the moment comes in, and nothing goes out but `Moves`.

What holds, whatever the news and their order:
- a step begins once everything it depends on has come to a good end, and never after the run is being ended;
- every step ends: whoever ends looks at those that follow, and what can no longer begin is CANCELLED or PASSED;
- news of a job that is not, or no longer, the one a step runs changes nothing;
- a run ends when no step runs any more, so that what it has done is known before any of it is undone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, assert_never
from uuid import UUID

from rota.model.approval import ApprovalState
from rota.model.lifecycle import JobState
from rota.model.workflow import Trigger
from rota.model.workflow_approval import asked
from rota.model.workflow_cel import METER, Meter
from rota.model.workflow_check import Flow, FlowStep, due_ms, truth
from rota.model.workflow_failing import OF_JOBS, OF_RUNS, RUN_ENDS, STOPPED, TOO_LONG, TRIGGERS, gravest, of_one_item
from rota.model.workflow_run import (
    Ask,
    Began,
    Cancel,
    Child,
    Decided,
    Facts,
    Fired,
    Happened,
    JobEnded,
    Moves,
    News,
    Pause,
    Resume,
    RunEnded,
    RunNow,
    RunState,
    SagaEnded,
    Start,
    StepNow,
    StepState,
    Timer,
    Undo,
)
from rota.model.workflow_words import Failed, checked_value

_NOTHING: Final[Mapping[int, str]] = {}
OF_RUN: Final = -1
"""The place of a timer that is of the run as a whole."""
Outcome = Literal["ok", "bad", "passed", "wait"]
_WAITS: Final = frozenset({"delay", "approval"})
_IDLES: Final = _WAITS | {"parallel"}
"""Steps during which nothing is done."""


def new(flow: Flow) -> RunNow:
    return RunNow([StepNow() for _ in flow.steps])


def advance(
    flow: Flow,
    now: RunNow,
    facts: Facts,
    values: dict[int, Any],
    news: Sequence[News],
    now_ms: int,
    refused: Mapping[int, str] = _NOTHING,
) -> tuple[RunState, Moves]:
    """Take up news in their order. Changes `now` and adds to `values`, the outputs of steps so far.

    `refused` are steps that cannot be submitted, and why.
    """
    machine = _Machine(flow, now, facts, values, now_ms, refused)
    for each in news:
        machine.hear(each)
        machine.settle()
    return machine.state(), machine.moves


def asked_again(
    flow: Flow, now: RunNow, facts: Facts, values: dict[int, Any], place: int
) -> tuple[str, dict[str, Any]]:
    """The same, of a step that waits: nothing that it names has changed since it began."""
    return _Machine(flow, now, facts, values, 0, _NOTHING).asks(flow.steps[place])


def due_again(flow: Flow, now: RunNow, facts: Facts, values: dict[int, Any], place: int, now_ms: int) -> int:
    """When a timer is due whose row is gone: a time that was to pass passes anew, so it is never early."""
    return _Machine(flow, now, facts, values, now_ms, _NOTHING).due(place)


class _Machine:
    def __init__(
        self,
        flow: Flow,
        now: RunNow,
        facts: Facts,
        values: dict[int, Any],
        now_ms: int,
        refused: Mapping[int, str],
    ) -> None:
        self.flow = flow
        self.now = now
        self.facts = facts
        self.values = values
        self.now_ms = now_ms
        self.refused = refused
        self.moves = Moves()
        self._looks: deque[int] = deque()
        self._over: RunState | None = None
        self._scope: dict[str, Any] | None = None
        self._meter = Meter()

    def hear(self, news: News) -> None:
        match news:
            case Began():
                self._began()
            case JobEnded():
                self._job_ended(news)
            case RunEnded():
                self._run_ended(news)
            case Decided():
                self._decided(news)
            case SagaEnded():
                pass
            case Fired():
                self._fired(news)
            case Cancel(reason):
                self.end_run(RunState.CANCELLED, "cancelled", reason)
            case Pause(by):
                self._pause(paused=True, by=by)
            case Resume():
                self._pause(paused=False)
            case _:
                assert_never(news)

    def settle(self) -> None:
        """Look at all that may have changed by what was heard."""
        while self._looks:
            self._look(self._looks.popleft())
        # The last steps are mostly those that end last.
        if self._over is None and all(step.state.ended for step in reversed(self.now.steps)):
            self._finish()

    def state(self) -> RunState:
        if self._over is not None:
            return self._over
        if self.now.paused:
            return RunState.PAUSED
        steps = zip(self.flow.steps, self.now.steps, strict=True)
        running = {step.spec.type for step, now in steps if now.state is StepState.RUNNING}
        return RunState.WAITING if running <= _IDLES and running & _WAITS else RunState.RUNNING

    def asks(self, step: FlowStep) -> tuple[str, dict[str, Any]]:
        return asked(step, self._scope_for(step))

    def end_run(self, state: RunState, trigger: Trigger, error: str) -> None:
        """From here on nothing begins; what runs is told to stop."""
        if self.now.ends_as is not None:
            return
        self.now.ends_as, self.now.trigger, self.now.error = state, trigger, error
        self.now.paused = False  # nothing begins any more, so nothing is left to be resumed
        self._tell("ending", why=error)
        self._stop(range(len(self.now.steps)))

    def _began(self) -> None:
        self._tell("began")
        if self.flow.spec.timeout_s:
            self.moves.timers.append(Timer(OF_RUN, 0, self.due(OF_RUN)))
        self._looks.extend(range(len(self.flow.steps)))

    def _job_ended(self, news: JobEnded) -> None:
        place = self._running(news.job)
        if place is None:
            return
        if self.flow.steps[place].spec.for_each is not None and not news.mapped:
            news = of_one_item(news)
        done = news.partly or news.state in (JobState.SUCCEEDED, JobState.OUTPUT_QUARANTINED)
        if done and self.flow.steps[place].spec.compensate is not None:
            self._record(place, news)
        if news.state is JobState.SUCCEEDED:
            self._done(place, news.value)
        else:
            quarantined = news.state is JobState.OUTPUT_QUARANTINED
            trigger: Trigger | None = "fatal" if news.fatal else "quarantined" if quarantined else None
            self._end(place, OF_JOBS[news.state], news.error or news.state.lower(), trigger=trigger)

    def _record(self, place: int, news: JobEnded) -> None:
        """What undoes a job is recorded as soon as it is done, with what it has returned."""
        self.values[place], self._scope = news.value, None
        context, error, step = None, "", self.flow.steps[place]
        try:
            context = step.undo(self._whole_scope()) if step.undo is not None else None
        except Failed as failed:
            error = str(failed)
        self.moves.undos.append(Undo(place, news.job, context, error))

    def _run_ended(self, news: RunEnded) -> None:
        place = self._running(news.run)
        if place is None:
            return
        step = self.now.steps[place]
        if step.state is StepState.STOPPING and step.trigger == "timeout":
            self._end(place, StepState.TIMEOUT, TOO_LONG)
        elif news.state is RunState.SUCCEEDED:
            self._done(place, news.output)
        else:
            self._end(place, OF_RUNS[news.state], news.error or news.state.lower(), trigger=news.trigger)

    def _decided(self, news: Decided) -> None:
        place = self._running(news.approval)
        if place is None:
            return
        if news.state is ApprovalState.GRANTED:
            self._done(place, news.value)
        else:
            self._end(place, StepState.DENIED, news.error or f"Its approval is {news.state}.")

    def _running(self, job: UUID) -> int | None:
        for place, step in enumerate(self.now.steps):
            if (step.state is StepState.RUNNING or step.state is StepState.STOPPING) and step.job == job:
                return place
        return None

    def _fired(self, news: Fired) -> None:
        if news.place == OF_RUN:
            self.end_run(RunState.TIMEOUT, "timeout", "The run took longer than its timeout_s.")
            return
        step = self.now.steps[news.place]
        if step.attempt != news.attempt or not step.timed:
            return
        step.timed = False
        if step.state is not StepState.RUNNING:
            return
        if self.flow.steps[news.place].spec.type == "delay":
            self._done(news.place, None)
        else:
            self._timeout(news.place)

    def _timeout(self, place: int) -> None:
        step, spec = self.now.steps[place], self.flow.steps[place]
        if spec.spec.type == "workflow":  # what it does goes on until it was stopped
            assert step.job is not None
            step.state, step.trigger = StepState.STOPPING, "timeout"
            self._tell("stopping", place, TOO_LONG)
            self.moves.stop_runs.append(step.job)
            return
        if spec.spec.type == "approval":
            self.moves.withdrawn.append(place)
        self._stop(spec.members)
        self._end(place, StepState.TIMEOUT, TOO_LONG)

    def _pause(self, *, paused: bool, by: str = "") -> None:
        if self.now.paused is paused or self.now.ends_as is not None:
            return
        self.now.paused = paused
        self._tell("paused" if paused else "resumed", why=by)
        if not paused:
            self._looks.extend(range(len(self.flow.steps)))

    def _look(self, place: int) -> None:
        """What becomes of a step, now that something before it has changed."""
        step, state = self.flow.steps[place], self.now.steps[place].state
        if state is StepState.RUNNING and step.members:
            self._join(step)
        if state is not StepState.WAITING or self.now.ends_as is not None:
            return
        match self._may_begin(step):
            case "ok":
                if not self.now.paused:
                    self._begin(step)
            case "passed":
                self._end(place, StepState.PASSED)
            case "bad":
                self._end(place, StepState.CANCELLED, "Something that it depends on did not succeed.")
            case "wait":
                pass

    def _may_begin(self, step: FlowStep) -> Outcome:
        owned = self._owned(step) if step.owner >= 0 else "ok"
        if owned != "ok":
            return owned
        outcomes = [self._outcome(before) for before in step.depends_on]
        if "wait" in outcomes:
            return "wait"
        if "bad" in outcomes:
            return "bad"
        return "passed" if outcomes and all(outcome == "passed" for outcome in outcomes) else "ok"

    def _owned(self, step: FlowStep) -> Outcome:
        """Whether the step that has this one begin says so."""
        owner = self.flow.steps[step.owner]
        state = self.now.steps[step.owner].state
        match step.role:
            case "member":
                if state is StepState.RUNNING:
                    return "ok"
            case "case":
                if state is StepState.SUCCEEDED:
                    chosen = self._chosen(owner, self.now.steps[step.owner].reason)
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
        """Whether a step did not do what it was to do; not one that never began, or was told to stop."""
        step = self.now.steps[place]
        if step.stopped:
            return False
        return step.state in (StepState.FAILED, StepState.TIMEOUT) or (step.state in RUN_ENDS and step.attempt > 0)

    def _chosen(self, switch: FlowStep, value: str) -> tuple[int, ...] | None:
        return switch.cases.get(value, switch.default)

    def _outcome(self, place: int) -> Outcome:
        """Of a step, as those that depend on it see it."""
        step, state = self.flow.steps[place], self.now.steps[place].state
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
                never = self.now.steps[step.handler].state in (StepState.SKIPPED, StepState.PASSED)
                return "bad" if never else handled
            case _ as never:
                assert_never(never)

    def _join(self, step: FlowStep) -> None:
        """Whether a parallel has what it needs, or can no longer have it."""
        outcomes = [self._outcome(member) for member in step.members]
        good = sum(outcome in ("ok", "passed") for outcome in outcomes)
        assert step.spec.parallel is not None
        need = {"all": len(outcomes), "any": 1}.get(str(step.spec.parallel.need), step.spec.parallel.need)
        assert isinstance(need, int)
        if good >= need:
            self._stop(step.members)
            self._done(step.place, None)
        elif good + outcomes.count("wait") < need:
            trigger = self._worst(step.members)
            self._stop(step.members)
            self._end(
                step.place, StepState.FAILED, f"{good} of its steps succeeded, and it needs {need}.", trigger=trigger
            )

    def _worst(self, places: Iterable[int]) -> Trigger | None:
        """How steps of a parallel have failed that this one fails by: the most that any of them asks for."""
        failed = [
            self.now.steps[place] for place in places if self._outcome(place) == "bad" and self._has_failed(place)
        ]
        return gravest((step.trigger or TRIGGERS[step.state] for step in failed), self.flow.spec.rollback_on)

    def _begin(self, step: FlowStep) -> None:
        try:
            if step.when is not None and not truth(step.when(self._scope_for(step)), step.id):
                return self._end(step.place, StepState.SKIPPED)
            if step.place in self.refused:
                return self._end(step.place, StepState.FAILED, self.refused[step.place])
            self._start(step)
        except Failed as failed:
            self._end(step.place, StepState.FAILED, str(failed))
        return None

    def _start(self, step: FlowStep) -> None:
        spec, place, now = step.spec, step.place, self.now.steps[step.place]
        if spec.loop is not None and spec.loop.while_ and now.attempt == 0 and not self._again(step, None):
            return self._done(place, None)
        match spec.type:
            case "job":
                self._submit(step)
            case "workflow":
                given = step.given(self._scope_for(step))
                self._run(step)
                self.moves.children.append(Child(place, spec.workflow, given))
            case "delay":
                self._delay(step)
            case "condition":
                assert step.value is not None
                self._run(step)
                self._done(place, truth(step.value(self._scope_for(step)), step.id))
            case "switch":
                self._choose(step)
            case "parallel":
                self._run(step)
                self._looks.extend(step.members)
            case "notify":
                text = step.value(self._scope_for(step)) if step.value is not None else spec.notify
                self._run(step)
                self.moves.notes.append((place, str(text)))
                self._done(place, None)
            case "approval":
                ask = Ask(place, self.asks(step)[0])
                self._run(step)
                self.moves.asks.append(ask)
        return None

    def _submit(self, step: FlowStep) -> None:
        if step.spec.for_each is not None and not step.items(self._scope_for(step)):
            return self._done(step.place, [])
        planned = step.planned(self._scope_for(step), str(self.facts.id), self.facts.actor, self.facts.show)
        self._run(step)
        return self.moves.starts.append(Start(step.place, planned))

    def _run(self, step: FlowStep) -> None:
        now = self.now.steps[step.place]
        now.state, now.job = StepState.RUNNING, None
        now.attempt += 1
        if step.spec.type not in ("job", "workflow", "approval"):
            self._tell("began", step.place)
        if step.spec.deadline_s and step.spec.type in ("parallel", "workflow", "approval"):
            self._time(step.place, self.due(step.place))

    def due(self, place: int) -> int:
        """When the timer of a step, or of the run, is due, if it begins now."""
        if place == OF_RUN:
            return self.now_ms + round(self.flow.spec.timeout_s * 1000)
        step, spec = self.flow.steps[place], self.flow.steps[place].spec
        if spec.type != "delay":
            return self.now_ms + round(spec.deadline_s * 1000)
        given = step.value(self._scope_for(step)) if step.value is not None else spec.delay_sec or spec.delay_until
        return due_ms(spec, given, self.now_ms)

    def _delay(self, step: FlowStep) -> None:
        due = self.due(step.place)
        self._run(step)
        if due <= self.now_ms:
            self._done(step.place, None)
        else:
            self._time(step.place, due)

    def _time(self, place: int, due: int) -> None:
        step = self.now.steps[place]
        step.timed = True
        self.moves.timers.append(Timer(place, step.attempt, due))

    def _choose(self, step: FlowStep) -> None:
        assert step.value is not None
        value = step.value(self._scope_for(step))
        word = str(value).lower() if isinstance(value, bool) else str(value)
        self._run(step)
        if self._chosen(step, word) is None:
            self._end(step.place, StepState.FAILED, f"It has no case {word[:64]!r}, and no default.")
        else:
            self.now.steps[step.place].reason = word
            self._done(step.place, value)

    def _done(self, place: int, value: Any) -> None:
        """A step has done what it was to do, once."""
        step, now = self.flow.steps[place], self.now.steps[place]
        loops = step.spec.loop is not None and now.attempt > 0 and now.state is StepState.RUNNING
        try:
            if value is not None and place in self.flow.reads:
                checked_value(value, f"output of step {step.id}")
            if loops and self.now.ends_as is None and self._again(step, value):
                now.state = StepState.WAITING
                self._end_timer(place)
                self._tell("round", place)
                # Its output so far is known to the next round alone.
                self.values[place], self._scope = value, None
                return self._looks.append(place)
        except Failed as failed:
            return self._end(place, StepState.FAILED, str(failed))
        if value is not None:
            self.values[place] = value
            self.moves.values.append((place, value))
        return self._end(place, StepState.SUCCEEDED, now.reason)

    def _again(self, step: FlowStep, value: Any) -> bool:
        loop, rounds = step.spec.loop, self.now.steps[step.place].attempt
        assert loop is not None
        scope = {**self._whole_scope(), "round": {"index": rounds, "output": value}}
        more = truth(step.again(scope), step.id) if step.again is not None else rounds < loop.most
        if more and rounds >= loop.most:
            raise Failed(f"Step {step.id} went round {rounds} times, which is the most that its loop allows.")
        return more

    def _end(self, place: int, state: StepState, reason: str = "", *, trigger: Trigger | None = None) -> None:
        step, now = self.flow.steps[place], self.now.steps[place]
        now.state, now.reason, now.trigger = state, reason, trigger
        self._end_timer(place)
        self._scope = None
        self._tell(state.lower(), place, reason if state is not StepState.SUCCEEDED else "")
        self._looks.extend(step.followers)
        if self.now.ends_as is None and (fault := self._fault(step)) is not None:
            at, failed = self.flow.steps[fault], self.now.steps[fault]
            ways = [failed.trigger or TRIGGERS[failed.state], *([trigger] if trigger is not None else [])]
            self.end_run(
                RUN_ENDS[failed.state],
                gravest(ways, self.flow.spec.rollback_on) or "failed",
                f"Step {at.id}: {failed.reason}",
            )

    def _fault(self, step: FlowStep) -> int | None:
        """The step whose failure ends the run, now that this one has ended; None: it goes on."""
        if step.handler >= 0 and self._has_failed(step.place):
            return None
        if self.now.steps[step.place].state is not StepState.SUCCEEDED:
            while step.role == "handler" and self._has_failed(step.owner):
                step = self.flow.steps[step.owner]
        return step.place if self._has_failed(step.place) and step.role != "member" else None

    def _stop(self, places: Iterable[int]) -> None:
        """Have steps end that have not."""
        for place in places:
            step, spec = self.now.steps[place], self.flow.steps[place].spec
            if step.state is StepState.WAITING:
                self._end(place, StepState.CANCELLED, STOPPED)
            elif step.state is StepState.RUNNING and step.job is not None and spec.type != "approval":
                step.state, step.stopped = StepState.STOPPING, True
                self._tell("stopping", place)
                (self.moves.stops if spec.type == "job" else self.moves.stop_runs).append(step.job)
            elif step.state is StepState.STOPPING:
                step.stopped = True
            elif step.state is StepState.RUNNING:
                step.stopped = True
                self._forget(place)
                self.moves.withdrawn += [place] if step.job is not None else []
                self._end(place, StepState.CANCELLED, STOPPED)
                self._stop(self.flow.steps[place].members)

    def _forget(self, place: int) -> None:
        """What was to be started in this very advance is not."""
        self.moves.starts = [start for start in self.moves.starts if start.place != place]
        self.moves.children = [child for child in self.moves.children if child.place != place]
        self.moves.asks = [ask for ask in self.moves.asks if ask.place != place]

    def _end_timer(self, place: int) -> None:
        step = self.now.steps[place]
        if step.timed:
            step.timed = False
            self.moves.untimed.append((place, step.attempt))
            self.moves.timers = [timer for timer in self.moves.timers if timer.place != place]

    def _finish(self) -> None:
        state = self.now.ends_as or RunState.SUCCEEDED
        if state is RunState.SUCCEEDED:
            try:
                output = (
                    self.flow.output(self._whole_scope()) if self.flow.output is not None else self.flow.spec.output
                )
                checked_value(output, "output of the run")
                self.moves.output = None if output == {} else output
            except Failed as failed:
                # Kept, since it is asked for again once all is undone, and may cost less by then.
                self.now.ends_as = state = RunState.FAILED
                self.now.error, self.now.trigger = str(failed), "failed"
        if self.flow.spec.timeout_s:
            self.moves.untimed.append((OF_RUN, 0))
            self.moves.timers = [timer for timer in self.moves.timers if timer.place != OF_RUN]
        self._over = state
        self._tell(state.lower(), why=self.now.error)

    def _scope_for(self, step: FlowStep) -> dict[str, Any]:
        scope = self._whole_scope() if step.reads else self._bare_scope()
        if step.spec.loop is None:
            return scope
        return {**scope, "round": {"index": self.now.steps[step.place].attempt, "output": self.values.get(step.place)}}

    def _bare_scope(self) -> dict[str, Any]:
        run = {"id": str(self.facts.id), "workflow": self.facts.workflow, "version": self.facts.version}
        return {"input": self.facts.input, "run": run, "steps": {}, METER: self._meter}

    def _whole_scope(self) -> dict[str, Any]:
        if self._scope is None:
            steps = {
                step.id: {
                    "state": now.state.value,
                    "output": self.values.get(place),
                    "error": now.reason if now.state in RUN_ENDS else "",
                }
                for place, (step, now) in enumerate(zip(self.flow.steps, self.now.steps, strict=True))
            }
            self._scope = {**self._bare_scope(), "steps": steps}
        return self._scope

    def _tell(self, what: str, place: int = OF_RUN, why: str = "") -> None:
        if place == OF_RUN:
            self.moves.happened.append(Happened(what, why=why))
            return
        step = self.now.steps[place]
        self.moves.happened.append(Happened(what, self.flow.steps[place].id, step.attempt, step.job, why))

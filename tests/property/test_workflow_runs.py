"""Random workflows with random outcomes and any order of events: every step ends, steps start after their dependencies,
and the recorded compensations are exactly those of the steps that succeeded.

`RunModel` keeps its own record of requests and outcomes and checks each answer of `advance` against it: which steps may
start, which must have been stopped, what a failure counts as, and what a rerun reuses.
"""

import random
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.model.approvals import ApprovalState
from rota.model.job_states import JobState
from rota.model.jobs.submission import Compensation
from rota.model.workflows.approval_steps import ApprovalSpec
from rota.model.workflows.compiler import compile_workflow
from rota.model.workflows.run_state import (
    ApprovalDecided,
    CancelRun,
    ChildRunEnded,
    JobEnded,
    PauseRun,
    ResumeRun,
    RunBegan,
    RunInfo,
    RunState,
    StepState,
    TimerFired,
)
from rota.model.workflows.spec import LoopSpec, ParallelSpec, StepSpec, SwitchSpec, WorkflowSpec
from rota.model.workflows.state_machine import advance, new_run_status
from rota.workflow.rerun import rerun_from
from tests.support.harness.effort import effort

UNDO = Compensation(topic="undo", task="undo")
GOOD = (StepState.SUCCEEDED, StepState.SKIPPED, StepState.PASSED)
Ends = (JobEnded, ChildRunEnded)
BAD = (StepState.FAILED, StepState.TIMEOUT, StepState.DENIED, StepState.CANCELLED)
KINDS = {
    "job": {"task": "work", "compensate": UNDO},
    "each": {"task": "work", "for_each": [1, 2, 3], "max_parallel": 2, "compensate": UNDO},
    "none": {"task": "work", "for_each": []},
    "rounds": {"task": "work", "loop": LoopSpec(most=3), "compensate": UNDO},
    "until": {"task": "work", "loop": LoopSpec(until="round.index >= 2", most=3), "compensate": UNDO},
    "never": {"task": "work", "loop": LoopSpec(while_="false"), "compensate": UNDO},
    "bound": {"type": "workflow", "workflow": "other", "loop": LoopSpec(until="false", most=2), "deadline_s": 9},
    "skipped": {"task": "work", "when": "false"},
    "wrong": {"task": "work", "when": "input.missing == 1"},
    "delay": {"type": "delay", "delay_sec": 60},
    "past": {"type": "delay", "delay_until": "1969-01-01T00:00:00Z"},
    "workflow": {"type": "workflow", "workflow": "other"},
    "hurried": {"type": "workflow", "workflow": "other", "deadline_s": 5},
    "notify": {"type": "notify", "notify": "hello"},
    "approval": {"type": "approval", "approval": ApprovalSpec(text="Go on?")},
    "urgent": {"type": "approval", "approval": ApprovalSpec(text="Go on?"), "deadline_s": 60},
    "condition": {"type": "condition", "condition": "1 == 1"},
}


@st.composite
def workflows(draw):
    """Steps that depend on some of those before them; some belong to a parallel or a switch, some handle errors."""
    steps = {}
    for at in range(draw(st.integers(1, 10))):
        before = draw(st.lists(st.sampled_from(list(steps)), max_size=3, unique=True)) if steps else []
        kind = draw(st.sampled_from([*["job"] * 12, *["each", "rounds", "until", "delay", "approval"] * 3, *KINDS]))
        steps[f"s{at}"] = StepSpec(id=f"s{at}", depends_on=tuple(before), **KINDS[kind])
    free = list(steps)
    for at in range(draw(st.integers(0, 3))):
        if len(free) < 2:
            break
        members = tuple(draw(st.lists(st.sampled_from(free), min_size=1, max_size=3, unique=True)))
        group = _group(draw, at, members)
        free = [name for name in free if name not in members] + [group.id]
        steps[group.id] = group
        if draw(st.booleans()):
            steps[f"after{at}"] = StepSpec(id=f"after{at}", task="work", compensate=UNDO, depends_on=(group.id,))
    members = [name for step in steps.values() if step.parallel for name in step.parallel.steps]
    waited = [name for step in steps.values() for name in step.depends_on if steps[name].task]
    for name in draw(
        st.lists(st.sampled_from([*members, *members, *waited, *waited, *steps]), max_size=3, unique=True)
    ):
        steps[name] = _with(steps[name], on_error=f"mend_{name}")
        deeper = {"on_error": f"mend2_{name}"} if draw(st.booleans()) else {}
        steps[f"mend_{name}"] = StepSpec(id=f"mend_{name}", task="work", compensate=UNDO, **deeper)
        if deeper:
            steps[f"mend2_{name}"] = StepSpec(id=f"mend2_{name}", task="work", compensate=UNDO)
    output = draw(st.sampled_from([*[{}] * 9, {"x": "${input.missing}"}]))
    return WorkflowSpec(
        name="any", steps=tuple(steps.values()), timeout_s=draw(st.sampled_from([0, 0, 0, 0, 90])), output=output
    )


def _group(draw, at, members):
    if draw(st.booleans()):
        need = draw(st.sampled_from(["all", "any", *range(1, len(members) + 1)]))
        more = {"deadline_s": 3} if draw(st.booleans()) else {}
        return StepSpec(id=f"p{at}", type="parallel", parallel=ParallelSpec(steps=members, need=need), **more)
    cases = {"1": members[:1], "2": members[1:]}
    chosen = SwitchSpec(
        on=draw(st.sampled_from(["1", "1", "2", "2", "3"])), cases=cases, default=draw(st.sampled_from([None, ()]))
    )
    return StepSpec(id=f"c{at}", type="switch", switch=chosen)


def _with(spec, **more):
    fields = {name: getattr(spec, name) for name in StepSpec.__struct_fields__}
    return StepSpec(**{**fields, **more})


class RunModel:
    """Jobs, child runs, approvals and timers that a run requested, and their outcomes."""

    def __init__(self, flow, chance, now=None):
        self.flow, self.now, self.chance = flow, now or new_run_status(flow), chance
        self.facts = RunInfo(UUID(int=1), "any", 1, {})
        self.values = {}
        self.pending = []
        self.approvals = {}
        """Pending approvals by step."""
        self.stale_approvals = []
        """Withdrawn or already decided approvals."""
        self.timers = {}
        self.ids = iter(range(1, 10**6))
        self.began, self.ended = [], []
        self.done, self.undone = [], []
        self.fatal = set()
        self.state = RunState.RUNNING
        self.at_ms = 0

    def deliver(self, *events):
        before = [step.state for step in self.now.steps]
        paused, ending = self.now.paused, self.now.ends_as is not None
        self.state, transition = advance(self.flow, self.now, self.facts, self.values, events, self.at_ms)
        starts = [*transition.starts, *transition.children]
        assert not starts or not (paused and self.now.paused), "no step starts while the run is paused"
        assert not starts or not ending, "no step starts while the run is ending"
        for start in starts:
            self.begin(start, before[start.place])
        self.request_approvals(transition)
        for timer in transition.timers:
            assert (timer.place, timer.attempt) not in self.timers
            self.timers[timer.place, timer.attempt] = timer.due_ms
        for cancelled in transition.untimed:
            self.timers.pop(cancelled, None)
        ended_now = {each.job if isinstance(each, JobEnded) else each.run for each in events if isinstance(each, Ends)}
        running = {job for _, job, _ in self.pending}
        assert (running | ended_now).issuperset([*transition.stops, *transition.stop_runs]), (
            "only running jobs and runs are stopped"
        )
        self.undone += [undo.job for undo in transition.undos]
        for place, (old, step) in enumerate(zip(before, self.now.steps, strict=True)):
            assert not old.ended or old is step.state, "an ended step never changes"
            if step.state.ended and not old.ended:
                self.ended.append(place)
        self.check_owners()

    def request_approvals(self, transition):
        for place in transition.withdrawn:
            self.stale_approvals.append(self.approvals.pop(place))
        for request in transition.asks:
            assert request.place not in self.approvals, "a step requests one approval"
            self.approvals[request.place] = self.now.steps[request.place].job = UUID(int=next(self.ids))
            self.began.append(request.place)
            self.check_order(self.flow.steps[request.place])

    def deliver_stale_events(self):
        """Events that change nothing: the end of an unknown job, timers of past rounds, late decisions."""
        rounds = [(at, step.attempt - 1) for at, step in enumerate(self.now.steps) if step.attempt > 1]
        then = [(step.state, step.attempt) for step in self.now.steps]
        decided = [ApprovalDecided(each, ApprovalState.GRANTED) for each in self.stale_approvals]
        self.deliver(JobEnded(UUID(int=10**9), JobState.FAILED), *(TimerFired(*each) for each in rounds), *decided)
        assert then == [(step.state, step.attempt) for step in self.now.steps]

    def begin(self, start, old):
        step = self.now.steps[start.place]
        assert step.state is StepState.RUNNING
        assert old is not StepState.STOPPING, "a stopping step does not start again"
        assert step.job is None or step.attempt > 1
        step.job = UUID(int=next(self.ids))
        self.pending.append((start.place, step.job, hasattr(start, "plan")))
        self.began.append(start.place)
        self.check_order(self.flow.steps[start.place])

    def check_order(self, step):
        for before in step.depends_on:
            state = self.now.steps[before].state
            good = state in GOOD or (state in BAD and self.is_handled(before))
            assert good, f"{step.id} started although a dependency is {state}"
        owner = self.now.steps[step.owner] if step.owner >= 0 else None
        if step.role == "handler":
            assert owner.state in BAD
            assert not owner.stopped, "a stopped step has not failed"
        if step.role == "case":
            chosen = self.flow.steps[step.owner].cases.get(owner.reason, ())
            assert owner.state is StepState.SUCCEEDED
            assert step.place in chosen

    def check_owners(self):
        waiting = {place for place, step in enumerate(self.now.steps) if step.state is StepState.RUNNING}
        approval_steps = {step.place for step in self.flow.steps if step.spec.type == "approval"}
        assert set(self.approvals) == waiting & approval_steps, "pending approvals are those of waiting approval steps"
        for step in self.flow.steps:
            if step.members and self.now.steps[step.place].state.ended:
                left = {self.now.steps[member].state for member in step.members}
                assert not left & {StepState.WAITING, StepState.RUNNING}, (
                    "members that are no longer needed are stopped"
                )

    def advance_once(self):
        """Ends one pending thing at random; sometimes two at once, or one twice."""
        kinds = ["job"] * 8 * bool(self.pending) + ["people"] * 3 * bool(self.approvals) + ["timer"] * bool(self.timers)
        kind = self.chance.choice(kinds)
        if kind == "people":
            return self.decide(self.chance.choice(list(self.approvals)))
        if kind == "timer":
            first = min(self.timers, key=self.timers.get)
            self.at_ms = max(self.at_ms, self.timers.pop(first))
            return self.deliver(TimerFired(*first), *([TimerFired(*first)] if self.chance.random() < 0.2 else []))
        events = [self.end(self.pending.pop(self.chance.randrange(len(self.pending))))]
        if self.pending and self.chance.random() < 0.3:
            events.append(self.end(self.pending.pop(self.chance.randrange(len(self.pending)))))
        if self.chance.random() < 0.2:
            events.append(events[0])
        return self.deliver(*events)

    def decide(self, place):
        """Grants, rejects or expires an approval."""
        approval = self.approvals.pop(place)
        self.stale_approvals.append(approval)
        ends = [ApprovalState.GRANTED] * 12 + [ApprovalState.REJECTED, ApprovalState.EXPIRED]
        return self.deliver(ApprovalDecided(approval, self.chance.choice(ends), {"by": ["bob"]}))

    def end(self, what):
        place, job, is_job = what
        if not is_job:
            ends = [RunState.SUCCEEDED] * 12 + [RunState.FAILED, RunState.DENIED]
            return ChildRunEnded(job, self.chance.choice(ends), trigger=self.chance.choice([None, "fatal"]))
        step = self.flow.steps[place]
        good = 30 if step.handler < 0 and step.role != "handler" else 2
        ends = [JobState.SUCCEEDED] * good + [JobState.FAILED, JobState.TIMEOUT, JobState.DENIED]
        if self.now.steps[place].state is StepState.STOPPING:
            ends = [JobState.CANCELLED] * 3 + [JobState.SUCCEEDED, JobState.FAILED]
        state = self.chance.choice([*ends, JobState.OUTPUT_QUARANTINED])
        spec = self.flow.steps[place].spec
        partly = state is not JobState.SUCCEEDED and spec.for_each is not None and self.chance.random() < 0.5
        if (partly or state in (JobState.SUCCEEDED, JobState.OUTPUT_QUARANTINED)) and spec.compensate:
            self.done.append(job)
        fatal = state is JobState.FAILED and self.chance.random() < 0.5
        if fatal:
            self.fatal.add(place)
        return JobEnded(job, state, fatal=fatal, partly=partly)

    def run(self, *, cancels):
        self.deliver(RunBegan())
        for _ in range(500):
            if self.state.ended:
                break
            assert self.pending or self.timers or self.approvals or self.now.paused, "the run waits for nothing"
            if self.chance.random() < 0.03:
                self.deliver(PauseRun())
            if cancels and self.chance.random() < 0.03:
                self.deliver(CancelRun())
            if self.chance.random() < 0.2:
                self.deliver_stale_events()
            if not self.state.ended and (self.pending or self.timers or self.approvals):
                self.advance_once()
            if self.state is RunState.PAUSED and (
                self.chance.random() < 0.5 or not (self.pending or self.timers or self.approvals)
            ):
                self.deliver(ResumeRun())
        assert self.state.ended, [step.state for step in self.now.steps]
        assert all(step.state.ended for step in self.now.steps)
        assert not self.pending, "no job is left running"
        assert not self.timers, "no timer is left"
        assert self.undone == self.done, "compensations are those of the completed jobs, in order"
        self.check_end()

    def check_end(self):
        """A succeeded run has no unhandled failure; a fatal failure is recorded as the trigger."""
        failed = [step for step in self.flow.steps if self.now.steps[step.place].state in BAD[:3]]
        if self.state is RunState.SUCCEEDED:
            for step in failed:
                handled = self.is_handled(step.place)
                assert handled or self.is_in_parallel(step) or self.now.steps[step.place].stopped, step.id
            for step in self.flow.steps:
                self.check_not_started(step)
            return
        assert self.now.trigger is not None, "the trigger decides about compensation"
        blamed = next((s for s in failed if self.now.error.startswith(f"Step {s.id}: ")), None)
        assert blamed is None or not self.is_in_parallel(blamed), "a failed member is decided by its parallel"
        if blamed is not None and blamed.place in self.fatal:
            assert self.now.trigger == "fatal"
        while blamed is not None and blamed.handler >= 0:
            blamed = self.flow.steps[blamed.handler]
            assert self.now.steps[blamed.place].attempt > 0, "every error handler was started"

    def check_not_started(self, step):
        """In a succeeded run every step that could start has started."""
        now = self.now.steps[step.place]
        if now.state is StepState.CANCELLED and now.attempt == 0 and step.owner < 0:
            before = [place for place in step.depends_on if self.now.steps[place].state in BAD]
            assert not all(self.is_handled(place) for place in before), f"{step.id} was not blocked"

    def is_handled(self, place):
        """Whether its error handler succeeded, or the handler of that one."""
        handler = self.flow.steps[place].handler
        state = self.now.steps[handler].state if handler >= 0 else None
        return state is StepState.SUCCEEDED or (state in BAD and self.is_handled(handler))

    def is_in_parallel(self, step):
        """Whether its failure is decided by a parallel."""
        return step.role == "member" or (step.role == "handler" and self.is_in_parallel(self.flow.steps[step.owner]))


@settings(max_examples=effort(100, 300), deadline=None)
@given(workflows(), st.integers(0, 2**32))
def test_random_run_ends_every_step_in_order_and_records_compensations_of_what_succeeded(spec, seed):
    model = RunModel(compile_workflow(spec), random.Random(seed))
    model.run(cancels=seed % 2 == 0)
    assert sorted(model.ended) == list(range(len(spec.steps))), "each step ended once"


@settings(max_examples=effort(60, 150), deadline=None)
@given(workflows(), st.integers(0, 2**32))
def test_rerun_does_not_restart_reused_steps_and_ends_like_any_run(spec, seed):
    chance = random.Random(seed)
    flow = compile_workflow(spec)
    first = RunModel(flow, chance)
    first.run(cancels=True)
    step = chance.choice([step for step in flow.steps if step.owner < 0])
    now, kept = rerun_from(flow, first.now, step.id)
    assert step.place not in kept
    second = RunModel(flow, chance, now)
    second.run(cancels=False)
    assert not kept & set(second.began), "reused steps do not run again"
    assert sorted(second.ended) == sorted(set(range(len(spec.steps))) - kept)

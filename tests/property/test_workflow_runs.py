"""Random workflows through random ends, in any order of news: every step ends, order respects what a step depends on,
and what is recorded to be undone is exactly what succeeded.

The world below keeps its own account of what was asked for and what came of it, and holds each answer of `advance`
against it: who may begin, who must have been stopped, what a failure counts as, and what a rerun takes over.
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


class World:
    """Jobs, runs and timers that a run has asked for, and what came of them."""

    def __init__(self, flow, chance, now=None):
        self.flow, self.now, self.chance = flow, now or new_run_status(flow), chance
        self.facts = RunInfo(UUID(int=1), "any", 1, {})
        self.values = {}
        self.pending = []
        self.asked = {}
        """Approvals that people may decide about, by their steps."""
        self.late = []
        """Those that were withdrawn, or decided before."""
        self.timers = {}
        self.ids = iter(range(1, 10**6))
        self.began, self.ended = [], []
        self.done, self.undone = [], []
        self.fatal = set()
        self.state = RunState.RUNNING
        self.at_ms = 0

    def hear(self, *news):
        before = [step.state for step in self.now.steps]
        paused, ending = self.now.paused, self.now.ends_as is not None
        self.state, moves = advance(self.flow, self.now, self.facts, self.values, news, self.at_ms)
        starts = [*moves.starts, *moves.children]
        assert not starts or not (paused and self.now.paused), "nothing begins while it is paused"
        assert not starts or not ending, "nothing begins once it is being ended"
        for start in starts:
            self.begin(start, before[start.place])
        self.ask(moves)
        for timer in moves.timers:
            assert (timer.place, timer.attempt) not in self.timers
            self.timers[timer.place, timer.attempt] = timer.due_ms
        for gone in moves.untimed:
            self.timers.pop(gone, None)
        told = {each.job if isinstance(each, JobEnded) else each.run for each in news if isinstance(each, Ends)}
        running = {job for _, job, _ in self.pending}
        assert (running | told).issuperset([*moves.stops, *moves.stop_runs]), "what ended long ago is not stopped"
        self.undone += [undo.job for undo in moves.undos]
        for place, (old, step) in enumerate(zip(before, self.now.steps, strict=True)):
            assert not old.ended or old is step.state, "a step that has ended stays as it is"
            if step.state.ended and not old.ended:
                self.ended.append(place)
        self.check_owners()

    def ask(self, moves):
        for place in moves.withdrawn:
            self.late.append(self.asked.pop(place))
        for ask in moves.asks:
            assert ask.place not in self.asked, "a step asks once"
            self.asked[ask.place] = self.now.steps[ask.place].job = UUID(int=next(self.ids))
            self.began.append(ask.place)
            self.check_order(self.flow.steps[ask.place])

    def hear_of_nobody(self):
        """News that change nothing: of a job of no step, timers of rounds that are over, decisions that are late."""
        rounds = [(at, step.attempt - 1) for at, step in enumerate(self.now.steps) if step.attempt > 1]
        then = [(step.state, step.attempt) for step in self.now.steps]
        decided = [ApprovalDecided(each, ApprovalState.GRANTED) for each in self.late]
        self.hear(JobEnded(UUID(int=10**9), JobState.FAILED), *(TimerFired(*each) for each in rounds), *decided)
        assert then == [(step.state, step.attempt) for step in self.now.steps]

    def begin(self, start, old):
        step = self.now.steps[start.place]
        assert step.state is StepState.RUNNING
        assert old is not StepState.STOPPING, "what was told to stop does not begin again"
        assert step.job is None or step.attempt > 1
        step.job = UUID(int=next(self.ids))
        self.pending.append((start.place, step.job, hasattr(start, "plan")))
        self.began.append(start.place)
        self.check_order(self.flow.steps[start.place])

    def check_order(self, step):
        for before in step.depends_on:
            state = self.now.steps[before].state
            good = state in GOOD or (state in BAD and self.is_mended(before))
            assert good, f"{step.id} began, and what it depends on is {state}"
        owner = self.now.steps[step.owner] if step.owner >= 0 else None
        if step.role == "handler":
            assert owner.state in BAD
            assert not owner.stopped, "who was told to stop has not failed"
        if step.role == "case":
            chosen = self.flow.steps[step.owner].cases.get(owner.reason, ())
            assert owner.state is StepState.SUCCEEDED
            assert step.place in chosen

    def check_owners(self):
        waiting = {place for place, step in enumerate(self.now.steps) if step.state is StepState.RUNNING}
        of_people = {step.place for step in self.flow.steps if step.spec.type == "approval"}
        assert set(self.asked) == waiting & of_people, "people are asked about what waits for them, and nothing else"
        for step in self.flow.steps:
            if step.members and self.now.steps[step.place].state.ended:
                left = {self.now.steps[member].state for member in step.members}
                assert not left & {StepState.WAITING, StepState.RUNNING}, "who is not needed any more is stopped"

    def go_on(self):
        """Something that is under way ends, in some way; at times two things at once, or one of them twice."""
        kinds = ["job"] * 8 * bool(self.pending) + ["people"] * 3 * bool(self.asked) + ["timer"] * bool(self.timers)
        kind = self.chance.choice(kinds)
        if kind == "people":
            return self.decide(self.chance.choice(list(self.asked)))
        if kind == "timer":
            first = min(self.timers, key=self.timers.get)
            self.at_ms = max(self.at_ms, self.timers.pop(first))
            return self.hear(TimerFired(*first), *([TimerFired(*first)] if self.chance.random() < 0.2 else []))
        news = [self.end(self.pending.pop(self.chance.randrange(len(self.pending))))]
        if self.pending and self.chance.random() < 0.3:
            news.append(self.end(self.pending.pop(self.chance.randrange(len(self.pending)))))
        if self.chance.random() < 0.2:
            news.append(news[0])
        return self.hear(*news)

    def decide(self, place):
        """People agree, refuse, or let time pass."""
        approval = self.asked.pop(place)
        self.late.append(approval)
        ends = [ApprovalState.GRANTED] * 12 + [ApprovalState.REJECTED, ApprovalState.EXPIRED]
        return self.hear(ApprovalDecided(approval, self.chance.choice(ends), {"by": ["bob"]}))

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
        self.hear(RunBegan())
        for _ in range(500):
            if self.state.ended:
                break
            assert self.pending or self.timers or self.asked or self.now.paused, "it waits for nothing"
            if self.chance.random() < 0.03:
                self.hear(PauseRun())
            if cancels and self.chance.random() < 0.03:
                self.hear(CancelRun())
            if self.chance.random() < 0.2:
                self.hear_of_nobody()
            if not self.state.ended and (self.pending or self.timers or self.asked):
                self.go_on()
            if self.state is RunState.PAUSED and (
                self.chance.random() < 0.5 or not (self.pending or self.timers or self.asked)
            ):
                self.hear(ResumeRun())
        assert self.state.ended, [step.state for step in self.now.steps]
        assert all(step.state.ended for step in self.now.steps)
        assert not self.pending, "nothing of it runs on"
        assert not self.timers, "no timer is left behind"
        assert self.undone == self.done, "what is to be undone is what was done, in its order"
        self.check_end()

    def check_end(self):
        """A run that ended well has nothing that failed and was not mended; what failed for good counts as that."""
        failed = [step for step in self.flow.steps if self.now.steps[step.place].state in BAD[:3]]
        if self.state is RunState.SUCCEEDED:
            for step in failed:
                mended = self.is_mended(step.place)
                assert mended or self.is_of_parallel(step) or self.now.steps[step.place].stopped, step.id
            for step in self.flow.steps:
                self.check_not_begun(step)
            return
        assert self.now.trigger is not None, "how it ended is known to whoever decides about undoing"
        blamed = next((s for s in failed if self.now.error.startswith(f"Step {s.id}: ")), None)
        assert blamed is None or not self.is_of_parallel(blamed), "a parallel decides what that means"
        if blamed is not None and blamed.place in self.fatal:
            assert self.now.trigger == "fatal"
        while blamed is not None and blamed.handler >= 0:
            blamed = self.flow.steps[blamed.handler]
            assert self.now.steps[blamed.place].attempt > 0, "whoever could have mended it was asked"

    def check_not_begun(self, step):
        """Of a run that ended well, whoever could have begun has."""
        now = self.now.steps[step.place]
        if now.state is StepState.CANCELLED and now.attempt == 0 and step.owner < 0:
            before = [place for place in step.depends_on if self.now.steps[place].state in BAD]
            assert not all(self.is_mended(place) for place in before), f"{step.id} was in nobody's way"

    def is_mended(self, place):
        """By who handles its error, or by who handles that one's."""
        handler = self.flow.steps[place].handler
        state = self.now.steps[handler].state if handler >= 0 else None
        return state is StepState.SUCCEEDED or (state in BAD and self.is_mended(handler))

    def is_of_parallel(self, step):
        """Whether a parallel decides what its failure means."""
        return step.role == "member" or (step.role == "handler" and self.is_of_parallel(self.flow.steps[step.owner]))


@settings(max_examples=effort(100, 300), deadline=None)
@given(workflows(), st.integers(0, 2**32))
def test_whatever_happens_every_step_ends_in_order_and_what_succeeded_can_be_undone(spec, seed):
    world = World(compile_workflow(spec), random.Random(seed))
    world.run(cancels=seed % 2 == 0)
    assert sorted(world.ended) == list(range(len(spec.steps))), "each step ended once"


@settings(max_examples=effort(60, 150), deadline=None)
@given(workflows(), st.integers(0, 2**32))
def test_a_rerun_begins_nothing_that_it_takes_over_and_ends_as_any_run(spec, seed):
    chance = random.Random(seed)
    flow = compile_workflow(spec)
    first = World(flow, chance)
    first.run(cancels=True)
    step = chance.choice([step for step in flow.steps if step.owner < 0])
    now, kept = rerun_from(flow, first.now, step.id)
    assert step.place not in kept
    second = World(flow, chance, now)
    second.run(cancels=False)
    assert not kept & set(second.began), "what was taken over does not run again"
    assert sorted(second.ended) == sorted(set(range(len(spec.steps))) - kept)

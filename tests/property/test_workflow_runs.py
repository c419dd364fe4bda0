"""Random workflows through random ends, in any order of news: every step ends, order respects what a step depends on,
and what is recorded to be undone is exactly what succeeded."""

import random
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.model.approval import ApprovalState
from rota.model.job import Compensation
from rota.model.lifecycle import JobState
from rota.model.workflow import LoopSpec, ParallelSpec, StepSpec, SwitchSpec, WorkflowSpec
from rota.model.workflow_advance import advance, new
from rota.model.workflow_approval import ApprovalSpec
from rota.model.workflow_check import compiled
from rota.model.workflow_run import (
    Began,
    Cancel,
    Decided,
    Facts,
    Fired,
    JobEnded,
    Pause,
    Resume,
    RunEnded,
    RunState,
    StepState,
)

UNDO = Compensation(topic="undo", task="undo")
ASK = ApprovalSpec(text="Go on?")


@st.composite
def workflows(draw):
    """Steps that depend on some of those before them; some belong to a parallel or a switch, some handle errors."""
    count = draw(st.integers(1, 12))
    steps = []
    owned = set()
    for at in range(count):
        before = [f"s{each}" for each in range(at)]
        depends_on = tuple(draw(st.lists(st.sampled_from(before), max_size=3, unique=True))) if before else ()
        kind = draw(st.sampled_from(["job", "job", "job", "delay", "workflow", "notify", "loop", "when", "approval"]))
        given = {
            "job": {"task": "work", "compensate": UNDO},
            "loop": {"task": "work", "loop": LoopSpec(most=3), "compensate": UNDO},
            "when": {"task": "work", "when": draw(st.sampled_from(["true", "false", "1 == 1"]))},
            "delay": {"type": "delay", "delay_sec": draw(st.sampled_from([1, 60]))},
            "workflow": {"type": "workflow", "workflow": "other"},
            "notify": {"type": "notify", "notify": "hello"},
            "approval": {"type": "approval", "approval": ASK, "deadline_s": draw(st.sampled_from([0, 60]))},
        }[kind]
        steps.append(StepSpec(id=f"s{at}", depends_on=depends_on, **given))
    later = draw(st.integers(0, 2))
    for extra in range(later):
        free = [step for step in steps if step.id not in owned and not step.depends_on and step.type != "notify"]
        if len(free) < 2:
            break
        members = tuple(step.id for step in free[:3])
        owned.update(members)
        if draw(st.booleans()):
            need = draw(st.sampled_from(["all", "any", 1]))
            steps.append(StepSpec(id=f"p{extra}", type="parallel", parallel=ParallelSpec(steps=members, need=need)))
        else:
            cases = {"1": members[:1], "2": members[1:]}
            on = draw(st.sampled_from(["1", "2", "3"]))
            steps.append(StepSpec(id=f"c{extra}", type="switch", switch=SwitchSpec(on=on, cases=cases, default=())))
        owned.add(steps[-1].id)
    if draw(st.booleans()):
        failing = next((step for step in steps if step.task and step.id not in owned), None)
        if failing is not None:
            at = steps.index(failing)
            steps[at] = StepSpec(id=failing.id, depends_on=failing.depends_on, task="work", on_error="mend")
            steps.append(StepSpec(id="mend", task="work"))
    return WorkflowSpec(name="any", steps=tuple(steps))


class World:
    """Jobs, runs and timers that a run has asked for, and what came of them."""

    def __init__(self, flow, chance):
        self.flow, self.now, self.chance = flow, new(flow), chance
        self.facts = Facts(UUID(int=1), "any", 1, {})
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
        self.state = RunState.RUNNING
        self.at_ms = 0

    def hear(self, *news):
        before = [step.state for step in self.now.steps]
        self.state, moves = advance(self.flow, self.now, self.facts, self.values, news, self.at_ms)
        for start in [*moves.starts, *moves.children]:
            step = self.now.steps[start.place]
            assert step.state is StepState.RUNNING
            assert before[start.place] is not StepState.STOPPING, "what was told to stop does not begin again"
            step.job = UUID(int=next(self.ids))
            self.pending.append((start.place, step.job, hasattr(start, "plan")))
            self.began.append(start.place)
        for place in moves.withdrawn:
            self.late.append(self.asked.pop(place))
        for ask in moves.asks:
            assert ask.place not in self.asked, "a step asks once"
            self.asked[ask.place] = self.now.steps[ask.place].job = UUID(int=next(self.ids))
            self.began.append(ask.place)
        for timer in moves.timers:
            assert (timer.place, timer.attempt) not in self.timers
            self.timers[timer.place, timer.attempt] = timer.due_ms
        for gone in moves.untimed:
            self.timers.pop(gone, None)
        self.undone += [undo.job for undo in moves.undos]
        for place, (old, step) in enumerate(zip(before, self.now.steps, strict=True)):
            assert not old.ended or old is step.state, "a step that has ended stays as it is"
            if step.state.ended and not old.ended:
                self.ended.append(place)
        self.check_order()
        waiting = {place for place, step in enumerate(self.now.steps) if step.state is StepState.RUNNING}
        of_people = {step.place for step in self.flow.steps if step.spec.type == "approval"}
        assert set(self.asked) == waiting & of_people, "people are asked about what waits for them, and nothing else"
        for step in self.flow.steps:
            if step.members and self.now.steps[step.place].state.ended:
                left = {self.now.steps[member].state for member in step.members}
                assert not left & {StepState.WAITING, StepState.RUNNING}, "who is not needed any more is stopped"

    def check_order(self):
        for place in self.began:
            for before in self.flow.steps[place].depends_on:
                assert self.now.steps[before].state.ended, "it began before what it depends on had ended"

    def go_on(self):
        """One thing that is under way ends, in some way."""
        if self.late and self.chance.random() < 0.3:
            return self.hear(Decided(self.chance.choice(self.late), ApprovalState.GRANTED))
        choices = [*self.pending, *self.timers, *self.asked]
        chosen = self.chance.choice(choices)
        if isinstance(chosen, int):
            return self.decide(chosen)
        if len(chosen) == 2:
            self.at_ms = max(self.at_ms, self.timers.pop(chosen))
            return self.hear(Fired(*chosen))
        self.pending.remove(chosen)
        place, job, is_job = chosen
        if not is_job:
            return self.hear(RunEnded(job, self.chance.choice([RunState.SUCCEEDED] * 3 + [RunState.FAILED])))
        ends = [JobState.SUCCEEDED] * 5 + [JobState.FAILED, JobState.TIMEOUT, JobState.OUTPUT_QUARANTINED]
        state = self.chance.choice(ends)
        if state in (JobState.SUCCEEDED, JobState.OUTPUT_QUARANTINED) and self.flow.steps[place].spec.compensate:
            self.done.append(job)
        return self.hear(JobEnded(job, state))

    def decide(self, place):
        """People agree, refuse, or let time pass."""
        approval = self.asked.pop(place)
        self.late.append(approval)
        ends = [ApprovalState.GRANTED] * 4 + [ApprovalState.REJECTED, ApprovalState.EXPIRED]
        return self.hear(Decided(approval, self.chance.choice(ends), {"by": ["bob"]}))


@settings(max_examples=300, deadline=None)
@given(workflows(), st.integers(0, 2**32))
def test_whatever_happens_every_step_ends_in_order_and_what_succeeded_can_be_undone(spec, seed):
    chance = random.Random(seed)
    world = World(compiled(spec), chance)
    world.hear(Began())
    for _ in range(500):
        if not (world.pending or world.timers or world.asked):
            break
        if chance.random() < 0.02:
            world.hear(Pause())
        if chance.random() < 0.01:
            world.hear(Cancel())
        if chance.random() < 0.1:
            world.hear(JobEnded(UUID(int=10**9), JobState.FAILED))  # of no step of this run
        world.go_on()
        if world.state is RunState.PAUSED:
            world.hear(Resume())
    assert world.state.ended, [step.state for step in world.now.steps]
    assert all(step.state.ended for step in world.now.steps)
    assert sorted(world.ended) == list(range(len(spec.steps))), "each step ended once"
    assert world.undone == world.done, "what is to be undone is what was done, in its order"

"""Random workflows through random ends, in any order of news: every step ends, order respects what a step depends on,
and what is recorded to be undone is exactly what succeeded."""

import random
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from rota.model.job import Compensation
from rota.model.lifecycle import JobState
from rota.model.workflow import LoopSpec, ParallelSpec, StepSpec, SwitchSpec, WorkflowSpec
from rota.model.workflow_advance import advance, new
from rota.model.workflow_check import compiled
from rota.model.workflow_run import (
    Began,
    Cancel,
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


@st.composite
def workflows(draw):
    """Steps that depend on some of those before them; some belong to a parallel or a switch, some handle errors."""
    count = draw(st.integers(1, 12))
    steps = []
    owned = set()
    for at in range(count):
        before = [f"s{each}" for each in range(at)]
        depends_on = tuple(draw(st.lists(st.sampled_from(before), max_size=3, unique=True))) if before else ()
        kind = draw(st.sampled_from(["job", "job", "job", "delay", "workflow", "notify", "loop", "when"]))
        given = {
            "job": {"task": "work", "compensate": UNDO},
            "loop": {"task": "work", "loop": LoopSpec(most=3), "compensate": UNDO},
            "when": {"task": "work", "when": draw(st.sampled_from(["true", "false", "1 == 1"]))},
            "delay": {"type": "delay", "delay_sec": draw(st.sampled_from([1, 60]))},
            "workflow": {"type": "workflow", "workflow": "other"},
            "notify": {"type": "notify", "notify": "hello"},
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
        choices = [*self.pending, *self.timers]
        chosen = self.chance.choice(choices)
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


@settings(max_examples=300, deadline=None)
@given(workflows(), st.integers(0, 2**32))
def test_whatever_happens_every_step_ends_in_order_and_what_succeeded_can_be_undone(spec, seed):
    chance = random.Random(seed)
    world = World(compiled(spec), chance)
    world.hear(Began())
    for _ in range(500):
        if not world.pending and not world.timers:
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

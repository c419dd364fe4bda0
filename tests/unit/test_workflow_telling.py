"""Events of runs that were advanced together: few groups, and for each run in its own order."""

from types import SimpleNamespace
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from rota.model.events import Group, joined
from rota.model.workflow_run import Happened, Moves
from rota.workflow.advancing import Done
from rota.workflow.telling import RunTeller


class Heard:
    """What was handed over."""

    def __init__(self):
        self.groups = []

    def tell(self, kind, *, show, jobs, runs, **facts):
        self.groups.append(Group(kind, 0, show, "film", joined(jobs), facts, joined(runs)))


def turn(number, happened):
    flow = SimpleNamespace(spec=SimpleNamespace(name="flow"))
    return SimpleNamespace(run=UUID(int=number), show=UUID(int=99), flow=flow, moves=Moves(happened=happened))


words = st.sampled_from(["began", "succeeded", "failed", "round"])
happenings = st.lists(st.builds(Happened, words, st.sampled_from(["", "a", "b"])), max_size=6)


@given(st.lists(happenings, max_size=6))
def test_every_run_is_told_in_its_own_order(runs):
    heard = Heard()
    RunTeller(heard).advanced(Done(turns=[turn(number, happened) for number, happened in enumerate(runs)]))
    for number, happened in enumerate(runs):
        told = [
            (group.kind.rpartition(".")[2], group.facts.get("step", ""))
            for group in heard.groups
            for _ in group.places_of_run(UUID(int=number))
        ]
        assert told == [(each.what, each.step) for each in happened]


def test_runs_that_do_the_same_are_one_group_for_each_thing():
    heard = Heard()
    happened = [Happened("began"), Happened("began", "a", 1, UUID(int=7))]
    RunTeller(heard).advanced(Done(turns=[turn(number, happened) for number in range(100)]))
    assert [(group.kind, group.count, len(group.jobs)) for group in heard.groups] == [
        ("run.began", 100, 0),
        ("run.step.began", 100, 1600),
    ]

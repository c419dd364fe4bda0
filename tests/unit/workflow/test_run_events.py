"""Events of runs that were advanced together: few groups, and for each run in its own order."""

from types import SimpleNamespace
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from rota.model.events import EventGroup, join_ids
from rota.model.workflows.run_state import HistoryEvent, Transition
from rota.workflow.advance_transaction import AdvanceResult
from rota.workflow.run_events import RunEventPublisher


class Heard:
    """What was handed over."""

    def __init__(self):
        self.groups = []

    def emit(self, kind, *, show, jobs, runs, **facts):
        self.groups.append(EventGroup(kind, 0, show, "film", join_ids(jobs), facts, join_ids(runs)))


def turn(number, happened):
    flow = SimpleNamespace(spec=SimpleNamespace(name="flow"))
    return SimpleNamespace(run=UUID(int=number), show=UUID(int=99), flow=flow, transition=Transition(happened=happened))


words = st.sampled_from(["began", "succeeded", "failed", "round"])
happenings = st.lists(st.builds(HistoryEvent, words, st.sampled_from(["", "a", "b"])), max_size=6)


@given(st.lists(happenings, max_size=6))
def test_every_run_is_told_in_its_own_order(runs):
    heard = Heard()
    RunEventPublisher(heard).publish_advances(
        AdvanceResult(turns=[turn(number, happened) for number, happened in enumerate(runs)])
    )
    for number, happened in enumerate(runs):
        told = [
            (group.kind.rpartition(".")[2], group.facts.get("step", ""))
            for group in heard.groups
            for _ in group.indexes_of_run(UUID(int=number))
        ]
        assert told == [(each.what, each.step) for each in happened]


def test_runs_that_do_the_same_are_one_group_for_each_thing():
    heard = Heard()
    happened = [HistoryEvent("began"), HistoryEvent("began", "a", 1, UUID(int=7))]
    RunEventPublisher(heard).publish_advances(AdvanceResult(turns=[turn(number, happened) for number in range(100)]))
    assert [(group.kind, group.count, len(group.jobs)) for group in heard.groups] == [
        ("run.began", 100, 0),
        ("run.step.began", 100, 1600),
    ]

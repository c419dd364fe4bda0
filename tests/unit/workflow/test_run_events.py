"""Events of runs advanced together: few groups, and in order for each run."""

from types import SimpleNamespace
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from rota.model.events import EventGroup, join_ids
from rota.model.workflows.run_state import HistoryEvent, Transition
from rota.workflow.advance_transaction import AdvanceResult
from rota.workflow.run_events import RunEventPublisher


class RecordingPublisher:
    """Records the emitted groups."""

    def __init__(self):
        self.groups = []

    def emit(self, kind, *, show, jobs, runs, **facts):
        self.groups.append(EventGroup(kind, 0, show, "film", join_ids(jobs), facts, join_ids(runs)))


def advanced_run(number, happened):
    flow = SimpleNamespace(spec=SimpleNamespace(name="flow"))
    return SimpleNamespace(run=UUID(int=number), show=UUID(int=99), flow=flow, transition=Transition(happened=happened))


kinds = st.sampled_from(["began", "succeeded", "failed", "round"])
histories = st.lists(st.builds(HistoryEvent, kinds, st.sampled_from(["", "a", "b"])), max_size=6)


@given(st.lists(histories, max_size=6))
def test_events_of_every_run_keep_their_order(runs):
    recorder = RecordingPublisher()
    RunEventPublisher(recorder).publish_advances(
        AdvanceResult(turns=[advanced_run(number, happened) for number, happened in enumerate(runs)])
    )
    for number, happened in enumerate(runs):
        published = [
            (group.kind.rpartition(".")[2], group.facts.get("step", ""))
            for group in recorder.groups
            for _ in group.indexes_of_run(UUID(int=number))
        ]
        assert published == [(each.what, each.step) for each in happened]


def test_equal_events_of_many_runs_share_one_group():
    recorder = RecordingPublisher()
    happened = [HistoryEvent("began"), HistoryEvent("began", "a", 1, UUID(int=7))]
    RunEventPublisher(recorder).publish_advances(
        AdvanceResult(turns=[advanced_run(number, happened) for number in range(100)])
    )
    assert [(group.kind, group.count, len(group.jobs)) for group in recorder.groups] == [
        ("run.began", 100, 0),
        ("run.step.began", 100, 1600),
    ]

"""Groups that are kept while queues change have the order that ranking all of them anew would give."""

from itertools import pairwise
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from rota.engine.dispatch.ordering import AGEING_S, queue_rank
from rota.engine.dispatch.queue_groups import RERANK_S, QueueGroups

TOLERANCE = 2 * RERANK_S / AGEING_S
"""In priority levels: what waiting changes before a group is ranked again."""
SHOWS = [UUID(int=number) for number in (1, 2)]


class Waiting:
    busy = False

    def __init__(self, number):
        self.key = (SHOWS[number % 2], ())
        self.priority = 1 + number // 2
        self.since_s = 0.0
        self.waits = False

    def rank_at(self, now_s):
        return queue_rank(self.priority, now_s - self.since_s)


def groups_of():
    return QueueGroups(lambda each: each.key, Waiting.rank_at, lambda _key: (0, 0.0), lambda each: each.waits)


def in_order(groups, queues, now_s, version=0):
    found = groups.current(queues, now_s, version)
    return {group.queues[0].key: [each for each in group.queues if each.waits] for group in found if group.queues}


@given(st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["comes", "goes", "nothing"]), st.floats(0, 400))))
def test_order_equals_that_of_ranking_all_anew(steps):
    queues, groups, now_s = [Waiting(number) for number in range(12)], groups_of(), 0.0
    for number, what, passes_s in steps:
        now_s += passes_s
        queue = queues[number]
        if what == "comes" and not queue.waits:
            queue.waits, queue.since_s = True, now_s
            groups.changed(queue)
        elif what == "goes":
            queue.waits = False
        for key, each in in_order(groups, queues, now_s).items():
            assert set(each) == {queue for queue in queues if queue.waits and queue.key == key}
            levels = [queue.rank_at(now_s)[1] for queue in each]
            assert all(before <= after + TOLERANCE for before, after in pairwise(levels))


def test_changed_pools_group_all_queues_anew():
    queues, groups = [Waiting(0), Waiting(2)], groups_of()
    for queue in queues:
        queue.waits = True
    assert in_order(groups, queues, 1.0, version=1) == {(SHOWS[0], ()): [queues[1], queues[0]]}
    queues[0].key = (SHOWS[1], ())
    assert in_order(groups, queues, 1.0, version=2) == {(SHOWS[0], ()): [queues[1]], (SHOWS[1], ()): [queues[0]]}

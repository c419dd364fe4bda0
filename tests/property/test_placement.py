"""Plans hold whatever happens: any order of heartbeats, plans, reservations, assignments and ends."""

from heapq import heapify, heapreplace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from rota.placement import Resources, requirements_of
from rota.placement.scoring import spread
from rota.placement.topic_routes import matches, specificity
from rota.placement.worker_allocations import WorkerAllocations, intersect_ranges, merge_ranges, subtract_ranges
from tests.support.placement import Fleet, id_of, pool, routes

RUNS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), max_size=8).map(merge_ranges)
LABELS = st.dictionaries(st.sampled_from(["node.disk", "placement.zone"]), st.sampled_from(["x", "y"]))
NAMES = st.sampled_from("abcdef")


def tokens(runs):
    return {token for first, n in runs for token in range(first, first + n)}


def greedy(scores, rooms, n):
    """One frame after the other to the lowest score: what `spread` must come to."""
    given = [0] * len(scores)
    heap = [(score, i) for i, score in enumerate(scores) if rooms[i]]
    heapify(heap)
    for _ in range(min(n, sum(rooms))):
        score, i = heap[0]
        given[i] += 1
        heapreplace(heap, (score + 1 if given[i] < rooms[i] else float("inf"), i))
    return given


@given(
    st.lists(st.tuples(st.integers(0, 400).map(lambda x: x / 8), st.integers(1, 60)), min_size=1, max_size=12),
    st.integers(1, 300),
)
def test_a_batch_spreads_as_one_frame_after_the_other_would(workers, n):
    scores, rooms = zip(*sorted(workers), strict=True)
    found, wanted = spread(scores, rooms, n), greedy(scores, rooms, n)
    assert sum(found) == min(n, sum(rooms))
    assert all(0 <= share <= room for share, room in zip(found, rooms, strict=True))

    # Which of two equal scores gets the last frame does not matter; the heights that were filled do.
    def heights(given):
        return sorted(score + k for score, share in zip(scores, given, strict=True) for k in range(share))

    assert heights(found) == heights(wanted)


@given(RUNS, RUNS)
def test_runs_are_sets_of_tokens(some, others):
    assert tokens(subtract_ranges(some, others)) == tokens(some) - tokens(others)
    assert tokens(intersect_ranges(some, others)) == tokens(some) & tokens(others)
    assert subtract_ranges(some, others) == sorted(subtract_ranges(some, others))


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 30), st.integers(1, 9), st.integers(0, 3)), max_size=30
)


@given(STEPS)
def test_holdings_count_what_a_set_of_tokens_would(steps):
    holdings, model = WorkerAllocations(), {}
    for what, first, n, cores in steps:
        run = range(first, first + n)
        if what == "add":
            holdings.add(first, n, Resources(cores, 1, 2 * cores), since=0)
            model.update(dict.fromkeys(run, cores))
        else:
            assert holdings.remove(first, n) == sum(model.pop(token, None) is not None for token in run)
        assert tokens(holdings.token_ranges()) == set(model)
        assert holdings.tokens == holdings.gpus == len(model)
        assert holdings.cores == sum(model.values())
        assert holdings.memory_mb == 2 * sum(model.values())


@given(STEPS, RUNS)
def test_a_heartbeat_drops_no_frame_that_it_lists_and_every_one_that_two_do_not(steps, held):
    holdings = WorkerAllocations()
    for what, first, n, cores in steps:
        if what == "add":
            holdings.add(first, n, Resources(cores), since=0)
    before = tokens(holdings.token_ranges())
    assert tokens(holdings.reconcile(held, 1)) == tokens(held) - before
    assert tokens(holdings.token_ranges()) == before
    holdings.reconcile(held, 2)
    assert tokens(holdings.token_ranges()) == before
    holdings.reconcile(held, 3)
    assert tokens(holdings.token_ranges()) == before & tokens(held)
    assert holdings.tokens == len(before & tokens(held))


TEXT = st.text("ab.", max_size=5)


@given(st.text("ab.*", min_size=1, max_size=6), TEXT)
def test_a_glob_matches_what_its_pieces_appear_in_in_order(pattern, topic):
    first, *rest = pattern.split("*")

    def in_turn(text, pieces):
        if not pieces:
            return not text
        *_, last = pieces
        if len(pieces) == 1:
            return text.endswith(last)
        at = text.find(pieces[0])
        return at >= 0 and in_turn(text[at + len(pieces[0]) :], pieces[1:])

    expected = topic == pattern if not rest else topic.startswith(first) and in_turn(topic[len(first) :], rest)
    assert matches(pattern, topic) == expected
    assert specificity(pattern) <= specificity(pattern.replace("*", "a"))


class Placing(RuleBasedStateMachine):
    """A fleet of up to six workers in two pools. The model knows what each offers and which tokens it has."""

    reservations = Bundle("reservations")

    @initialize(fallback=st.booleans())
    def begin(self, fallback):
        pools = ("farm", "cloud") if fallback else ("farm",)
        self.fleet = Fleet(routes({"*": pools}, pool("farm", provides=("gpu",)), pool("cloud")))
        self.offers = {}
        self.taken = {}
        self.open = []
        self.token = 0

    @rule(
        name=NAMES,
        slots=st.integers(1, 9),
        cores=st.integers(0, 900),
        gpus=st.integers(0, 2),
        memory_mb=st.integers(0, 500),
        labels=LABELS,
        where=st.sampled_from(["farm", "cloud"]),
        draining=st.booleans(),
        cpu_load=st.sampled_from([0, 50, 100]),
    )
    def speaks(self, name, where, **offer):
        held = merge_ranges((token, 1) for token in self.taken.get(name, {}))
        self.fleet.beat(name, pool=where, held=held, **offer)
        self.offers[name] = {**offer, "pool": where}

    @rule(name=NAMES)
    def goes(self, name):
        self.fleet.registry.remove(id_of(name))
        self.offers.pop(name, None)
        self.taken.pop(name, None)
        self.open = [(held, [each for each in shares if each[0] != name], need) for held, shares, need in self.open]

    @rule(
        target=reservations,
        n=st.integers(1, 30),
        cores=st.integers(0, 300),
        gpus=st.integers(0, 1),
        memory_mb=st.integers(0, 200),
        labels=LABELS,
        requires=st.lists(st.just("gpu"), max_size=1),
        only=st.none() | st.sets(NAMES),
    )
    def plans(self, n, labels, requires, only, **need):
        wanted = requirements_of("a", requires, labels, **need)
        given = None if only is None else [id_of(name) for name in only]
        plan = self.fleet.registry.plan(wanted, n, given)
        shares = self.fleet.named(plan)
        assert plan.planned <= n
        assert plan.planned == min(n, plan.room)
        assert (plan.refusal is None) == (plan.planned == n)
        for name in shares:
            offer = self.offers[name]
            assert labels.items() <= offer["labels"].items()
            assert not offer["draining"]
            assert offer["pool"] == "farm" or not requires
            assert only is None or name in only
        held = self.fleet.registry.reserve(plan)
        self.open.append((held, list(shares.items()), plan.need))
        return held

    @rule(held=consumes(reservations), booked=st.floats(0, 1))
    def books(self, held, booked):
        """Of what was reserved a part is assigned, and all is given back."""
        at = next(i for i, each in enumerate(self.open) if each[0] is held)
        _, shares, need = self.open.pop(at)
        for name, n in shares:
            n = int(n * booked)
            if n:
                self.fleet.registry.record_allocations(id_of(name), [(self.token, n)], need)
                self.taken.setdefault(name, {}).update(dict.fromkeys(range(self.token, self.token + n), need))
                self.token += n
        self.fleet.registry.unreserve(held)
        self.fleet.registry.unreserve(held)

    @rule(name=NAMES, first=st.integers(0, 200), n=st.integers(1, 40))
    def ends(self, name, first, n):
        mine = self.taken.get(name, {})
        gone = [token for token in range(first, first + n) if mine.pop(token, None)]
        assert self.fleet.registry.release_allocations(id_of(name), [(first, n)]) == len(gone)

    @invariant()
    def nothing_is_beyond_what_a_worker_offered_at_its_last_plan(self):
        for name in getattr(self, "offers", ()):
            worker = self.fleet.worker(name)
            mine = self.taken.get(name, {}).values()
            reserved = [(n, need) for _, shares, need in self.open for each, n in shares if each == name]
            assert worker.frames == len(mine) + sum(n for n, _ in reserved)
            for what in ("cores", "gpus", "memory_mb"):
                used = sum(getattr(need, what) for need in mine)
                later = sum(n * getattr(need, what) for n, need in reserved)
                assert getattr(worker.booked, what) == used
                assert getattr(worker, f"reserved_{what}") == later

    @invariant()
    def room_is_what_a_look_at_every_worker_counts(self):
        if getattr(self, "offers", None):
            wanted = requirements_of("a", cores=100)
            assert self.fleet.registry.fitting_frames(wanted) == self.fleet.registry.explain(wanted).room


class Fitting(Placing):
    """Workers do not change what they offer, so what they have never passes it."""

    @rule(name=NAMES)
    def speaks(self, name):
        steady = {"slots": 5, "cores": 700, "gpus": 1, "memory_mb": 400, "labels": {}, "draining": False, "cpu_load": 0}
        super().speaks(name=name, where="farm", **steady)

    @invariant()
    def no_worker_has_more_than_it_offers(self):
        for name, offer in getattr(self, "offers", {}).items():
            worker = self.fleet.worker(name)
            assert worker.frames <= offer["slots"]
            for what in ("cores", "gpus", "memory_mb"):
                assert getattr(worker.booked, what) + getattr(worker, f"reserved_{what}") <= offer[what]


TestPlacing = Placing.TestCase
TestPlacing.settings = settings(max_examples=40, deadline=None, stateful_step_count=25)
TestFitting = Fitting.TestCase
TestFitting.settings = settings(max_examples=25, deadline=None, stateful_step_count=25)

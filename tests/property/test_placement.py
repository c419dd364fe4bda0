"""Placement invariants for any order of heartbeats, plans, reservations, assignments and releases."""

from heapq import heapify, heapreplace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from rota.model.token_ranges import iterate_tokens, merge_ranges
from rota.placement import Resources, requirements_of
from rota.placement.scoring import spread
from rota.placement.topic_routes import matches, specificity
from rota.placement.worker_allocations import WorkerAllocations
from tests.support.placement import Fleet, id_of, pool, routes

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), max_size=8).map(merge_ranges)
LABELS = st.dictionaries(st.sampled_from(["node.disk", "placement.zone"]), st.sampled_from(["x", "y"]))
NAMES = st.sampled_from("abcdef")


def tokens(ranges):
    return set(iterate_tokens(ranges))


def greedy(scores, capacities, n):
    """Assigns frames one by one to the lowest score: what `spread` must equal."""
    assigned = [0] * len(scores)
    heap = [(score, i) for i, score in enumerate(scores) if capacities[i]]
    heapify(heap)
    for _ in range(min(n, sum(capacities))):
        score, i = heap[0]
        assigned[i] += 1
        heapreplace(heap, (score + 1 if assigned[i] < capacities[i] else float("inf"), i))
    return assigned


@given(
    st.lists(st.tuples(st.integers(0, 400).map(lambda x: x / 8), st.integers(1, 60)), min_size=1, max_size=12),
    st.integers(1, 300),
)
def test_spread_equals_assigning_frames_one_by_one(workers, n):
    scores, capacities = zip(*sorted(workers), strict=True)
    found, expected = spread(scores, capacities, n), greedy(scores, capacities, n)
    assert sum(found) == min(n, sum(capacities))
    assert all(0 <= share <= capacity for share, capacity in zip(found, capacities, strict=True))

    # Which of two equal scores gets the last frame does not matter; the filled heights do.
    def heights(shares):
        return sorted(score + k for score, share in zip(scores, shares, strict=True) for k in range(share))

    assert heights(found) == heights(expected)


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "series", "remove"]), st.integers(0, 30), st.integers(1, 9), st.integers(0, 3)),
    max_size=30,
)


@given(STEPS)
def test_worker_allocations_count_like_a_set_of_tokens(steps):
    """The model has, by token, what takes a slot (the token itself, or its series) and its cores."""
    allocations, model = WorkerAllocations(), {}
    for number, (what, first, n, cores) in enumerate(steps):
        token_range, need = range(first, first + n), Resources(cores, 1, 2 * cores)
        if what == "add":
            allocations.add(first, n, need, since=0)
            model.update({token: (("token", token), cores) for token in token_range})
        elif what == "series":
            allocations.add_series([(first, n)], need, since=0)
            model.update(dict.fromkeys(token_range, (("series", number), cores)))
        else:
            assert allocations.remove(first, n) == sum(model.pop(token, None) is not None for token in token_range)
        assert tokens(allocations.token_ranges()) == set(model)
        slots = dict(model.values())
        assert allocations.slots == allocations.gpus == len(slots)
        assert allocations.cores == sum(slots.values())
        assert allocations.memory_mb == 2 * sum(slots.values())


@given(STEPS, RANGES)
def test_reconcile_keeps_listed_frames_and_drops_frames_missing_from_repeated_heartbeats(steps, held):
    allocations = WorkerAllocations()
    for what, first, n, cores in steps:
        if what == "add":
            allocations.add(first, n, Resources(cores), since=0)
    before = tokens(allocations.token_ranges())
    assert tokens(allocations.reconcile(held, 1)) == tokens(held) - before
    assert tokens(allocations.token_ranges()) == before
    allocations.reconcile(held, 2)
    assert tokens(allocations.token_ranges()) == before
    allocations.reconcile(held, 3)
    assert tokens(allocations.token_ranges()) == before & tokens(held)
    assert allocations.slots == len(before & tokens(held))


TEXT = st.text("ab.", max_size=5)


@given(st.text("ab.*", min_size=1, max_size=6), TEXT)
def test_glob_matches_topics_that_contain_its_pieces_in_order(pattern, topic):
    first, *rest = pattern.split("*")

    def in_order(text, pieces):
        if not pieces:
            return not text
        *_, last = pieces
        if len(pieces) == 1:
            return text.endswith(last)
        at = text.find(pieces[0])
        return at >= 0 and in_order(text[at + len(pieces[0]) :], pieces[1:])

    expected = topic == pattern if not rest else topic.startswith(first) and in_order(topic[len(first) :], rest)
    assert matches(pattern, topic) == expected
    assert specificity(pattern) <= specificity(pattern.replace("*", "a"))


class PlacementMachine(RuleBasedStateMachine):
    """Up to six workers in two pools. The model knows the offer and the tokens of each."""

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
    def heartbeat(self, name, where, **offer):
        held = merge_ranges((token, 1) for token in self.taken.get(name, {}))
        self.fleet.beat(name, pool=where, held=held, **offer)
        self.offers[name] = {**offer, "pool": where}

    @rule(name=NAMES)
    def remove_worker(self, name):
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
    def plan_and_reserve(self, n, labels, requires, only, **need):
        requirements = requirements_of("a", requires, labels, **need)
        workers = None if only is None else [id_of(name) for name in only]
        plan = self.fleet.registry.plan(requirements, n, workers)
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
    def assign_and_unreserve(self, held, booked):
        """Assigns a part of the reservation and unreserves all of it."""
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
    def release(self, name, first, n):
        mine = self.taken.get(name, {})
        gone = [token for token in range(first, first + n) if mine.pop(token, None)]
        assert self.fleet.registry.release_allocations(id_of(name), [(first, n)]) == len(gone)

    @invariant()
    def registry_counts_match_the_model(self):
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
    def fitting_frames_equal_the_explained_capacity(self):
        if getattr(self, "offers", None):
            requirements = requirements_of("a", cores=100)
            assert self.fleet.registry.fitting_frames(requirements) == self.fleet.registry.explain(requirements).room


class FixedCapacityMachine(PlacementMachine):
    """Workers with fixed offers, so their allocations never exceed them."""

    @rule(name=NAMES)
    def heartbeat(self, name):
        steady = {"slots": 5, "cores": 700, "gpus": 1, "memory_mb": 400, "labels": {}, "draining": False, "cpu_load": 0}
        super().heartbeat(name=name, where="farm", **steady)

    @invariant()
    def allocations_never_exceed_the_offer(self):
        for name, offer in getattr(self, "offers", {}).items():
            worker = self.fleet.worker(name)
            assert worker.frames <= offer["slots"]
            for what in ("cores", "gpus", "memory_mb"):
                assert getattr(worker.booked, what) + getattr(worker, f"reserved_{what}") <= offer[what]


TestPlacement = PlacementMachine.TestCase
TestPlacement.settings = settings(max_examples=40, deadline=None, stateful_step_count=25)
TestFixedCapacity = FixedCapacityMachine.TestCase
TestFixedCapacity.settings = settings(max_examples=25, deadline=None, stateful_step_count=25)

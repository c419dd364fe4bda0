"""The worker registry and placement plans: which workers get frames and why. In memory, with a manual clock."""

import pytest

from rota.model.errors import InvalidInput
from rota.model.protocol import Heartbeat
from rota.model.reasons import Reason
from rota.model.settings.lifecycle import RoutingSettings
from rota.placement import HeartbeatOutcome, Resources, requirements_of
from rota.placement.registry import COUNT_RANKED_EVERY, WorkerRegistry
from rota.placement.workers import BookedRange
from tests.support.placement import Fleet, id_of, pool, routes

FRAME = requirements_of("a", cores=100)


def test_frame_is_placed_on_a_worker_of_the_mapped_pool():
    fleet = Fleet(routes({"a": ("farm",), "b": ("cloud",)}, pool("farm"), pool("cloud")))
    fleet.beat("f", pool="farm")
    fleet.beat("c", pool="cloud")
    assert fleet.place(FRAME) == {"f": 1}
    plan = fleet.registry.plan(requirements_of("b"), 1)
    assert fleet.named(plan) == {"c": 1}
    assert (plan.portions[0].pool, plan.portions[0].pool_id) == ("cloud", pool("cloud").id)


def test_topic_without_a_pool_is_refused_as_no_pool_mapping():
    fleet = Fleet(routes({"b": ("farm",)}, pool("farm")))
    fleet.beat()
    plan = fleet.registry.plan(FRAME, 1)
    assert (plan.portions, plan.refusal) == ([], Reason.NO_POOL_MAPPING)


def test_unmapped_preferred_pool_is_refused_as_no_pool_mapping():
    fleet = Fleet()
    fleet.beat()
    assert (
        fleet.registry.plan(requirements_of("a", labels={"preferred_pool": "x"}), 1).refusal is Reason.NO_POOL_MAPPING
    )


def test_pool_without_workers_is_refused_as_no_workers():
    fleet = Fleet()
    assert fleet.registry.plan(FRAME, 1).refusal is Reason.NO_WORKERS
    fleet.beat(pool="elsewhere")
    assert fleet.registry.plan(FRAME, 1).refusal is Reason.NO_WORKERS


def test_worker_with_the_lowest_score_is_chosen():
    fleet = Fleet()
    fleet.beat("busy", cpu_load=10)
    fleet.beat("idle", cpu_load=5)
    fleet.beat("gpu", cpu_load=0, gpu_utilization=20)
    assert fleet.place(FRAME) == {"idle": 1}
    assert fleet.place(FRAME) == {"busy": 1}
    assert fleet.place(FRAME) == {"gpu": 1}


def test_unchanged_heartbeat_leaves_the_rankings_as_they_are():
    """Ten thousand idle workers send one every two seconds: each would be sorted again into every ranking."""
    fleet = Fleet()
    for name in "ab":
        fleet.beat(name, cpu_load=10)
    fleet.registry.plan(FRAME, 1)
    rankings = [ranking for each in fleet.registry._rankings.values() for ranking in each]
    before = [ranking.entry(worker) for ranking in rankings for worker in fleet.registry.workers.values()]
    fleet.beat("a", cpu_load=11)
    fleet.beat("b", cpu_load=10)
    fleet.registry.plan(FRAME, 1)
    assert [ranking.entry(worker) for ranking in rankings for worker in fleet.registry.workers.values()] == before
    fleet.beat("a", cpu_load=80)
    assert fleet.place(FRAME) == {"b": 1}


def test_fewer_frames_than_planned_are_spread_anew():
    fleet = Fleet()
    for name in "abcd":
        fleet.beat(name, slots=8)
    plan = fleet.registry.plan(FRAME, 32)
    reservation = fleet.registry.reserve(plan)
    plan = fleet.registry.spread_again(FRAME, plan, reservation, 8)
    assert fleet.named(plan) == dict.fromkeys("abcd", 2)
    assert sorted((worker.name, n) for worker, n in reservation.shares) == [(name, 2) for name in "abcd"]
    assert fleet.registry.fitting_frames(FRAME) == 24
    fleet.registry.unreserve(reservation)
    assert fleet.registry.fitting_frames(FRAME) == 32


def test_frames_stay_on_their_workers_if_they_cannot_be_spread_anew():
    fleet = Fleet()
    for name in "ab":
        fleet.beat(name, slots=8)
    plan = fleet.registry.plan(FRAME, 16)
    reservation = fleet.registry.reserve(plan)
    for name in "ab":
        fleet.registry.remove(id_of(name))
    assert fleet.registry.spread_again(FRAME, plan, reservation, 3) is plan
    assert sum(n for _, n in reservation.shares) == 3


def test_burst_is_spread_over_equal_workers_without_heartbeats_in_between():
    fleet = Fleet()
    for name in "abcd":
        fleet.beat(name)
    assert fleet.place(FRAME, 8) == dict.fromkeys("abcd", 2)
    one_by_one = [fleet.place(FRAME) for _ in range(4)]
    assert sorted(next(iter(each)) for each in one_by_one) == list("abcd")


def test_ties_go_to_the_least_recently_used_worker():
    fleet = Fleet()
    for name in "abc":
        fleet.beat(name)
    first = []
    for _ in range(3):
        plan = fleet.registry.plan(FRAME, 1)
        fleet.registry.unreserve(fleet.registry.reserve(plan))
        first += fleet.named(plan)
    assert sorted(first) == list("abc")


def test_equal_seeds_break_ties_equally():
    def order():
        fleet = Fleet()
        for number in range(20):
            fleet.beat(f"w{number}")
        return fleet.named(fleet.registry.plan(FRAME, 5))

    assert order() == order()


def test_preferred_worker_by_name_or_id_comes_first_and_the_rest_overflows():
    fleet = Fleet()
    fleet.beat("far", cpu_load=50)
    fleet.beat("near")
    for preferred in ("far", str(id_of("far"))):
        requirements = requirements_of("a", labels={"preferred_worker_id": preferred})
        assert fleet.named(fleet.registry.plan(requirements, 1)) == {"far": 1}
        assert fleet.named(fleet.registry.plan(requirements, 12)) == {"far": 10, "near": 2}


@pytest.mark.parametrize("heartbeat", [{"draining": True}, {"cpu_load": 95}, {"slots": 1, "held": [(5, 1)]}])
def test_unavailable_preferred_worker_is_skipped(heartbeat):
    fleet = Fleet()
    fleet.beat("far", **heartbeat)
    fleet.beat("near", cpu_load=50)
    requirements = requirements_of("a", labels={"preferred_worker_id": "far"})
    assert fleet.named(fleet.registry.plan(requirements, 1)) == {"near": 1}
    assert fleet.named(fleet.registry.plan(requirements_of("a", labels={"preferred_worker_id": "nobody"}), 1)) == {
        "near": 1
    }


@pytest.mark.parametrize(
    ("heartbeat", "overloaded"),
    [
        ({"cpu_load": 90}, True),
        ({"cpu_load": 89.9}, False),
        ({"gpu_utilization": 90}, True),
        ({"gpu_utilization": 89}, False),
        ({}, False),
        ({"cpu_load": float("nan")}, False),
    ],
)
def test_worker_is_overloaded_by_foreign_cpu_or_gpu_load_from_90_percent(heartbeat, overloaded):
    fleet = Fleet()
    fleet.beat(**heartbeat)
    plan = fleet.registry.plan(FRAME, 1)
    assert plan.refusal is (Reason.POOL_OVERLOADED if overloaded else None)


def test_worker_with_declared_cores_ignores_host_load_by_default():
    fleet = Fleet(limits=RoutingSettings())
    fleet.beat(cpu_load=100, gpu_utilization=100)
    assert fleet.registry.plan(FRAME, 20).planned == 10
    fleet.beat(cpu_load=100, cores=0)
    assert fleet.registry.plan(requirements_of("a", cores=0), 1).refusal is Reason.POOL_OVERLOADED


def test_unbooked_frames_overload_a_worker_at_90_percent_of_its_slots():
    fleet = Fleet()
    fleet.beat(held=[(1, 8)])
    fleet.registry.resolve_unknown_frames(id_of("w"), [(1, 8)], [])
    fleet.beat()
    assert fleet.registry.plan(FRAME, 9).planned == 2
    fleet.beat(held=[(1, 9)])
    fleet.beat(held=[(1, 9)])
    fleet.registry.resolve_unknown_frames(id_of("w"), [(1, 9)], [])
    fleet.beat()
    assert fleet.registry.plan(FRAME, 1).refusal is Reason.POOL_OVERLOADED


def test_load_of_own_frames_is_not_overload_and_a_worker_fills_to_the_last_slot():
    fleet = Fleet()
    fleet.beat()
    fleet.place(FRAME, 9)
    fleet.beat(cpu_load=95, held=[(100, 9)])
    assert fleet.place(FRAME, 5) == {"w": 1}
    assert fleet.worker().fitting_frames(FRAME.need) == 0


def test_load_beyond_booked_cores_is_foreign():
    fleet = Fleet()
    fleet.beat()
    fleet.place(FRAME, 1)
    fleet.beat(cpu_load=99, held=[(100, 1)])
    assert fleet.worker().load.foreign_cpu == pytest.approx(89)
    assert fleet.registry.plan(FRAME, 1).refusal is None
    fleet.beat(cpu_load=100, held=[(100, 1)])
    assert fleet.registry.plan(FRAME, 1).refusal is Reason.POOL_OVERLOADED


def test_load_of_frames_that_ended_since_the_last_heartbeat_is_not_foreign():
    fleet = Fleet()
    fleet.beat()
    fleet.place(FRAME, 10)
    fleet.registry.release_allocations(id_of("w"), [(100, 10)])
    fleet.beat(cpu_load=100, held=[])
    assert fleet.registry.plan(FRAME, 10).planned == 10
    fleet.beat(cpu_load=100)
    assert fleet.registry.plan(FRAME, 10).refusal is Reason.POOL_OVERLOADED


@pytest.mark.parametrize(
    ("heartbeat", "requirements", "fits"),
    [
        ({"cores": 450}, requirements_of("a", cores=100), 4),
        ({"cores": 100}, requirements_of("a", cores=50), 2),
        ({"slots": 3}, requirements_of("a", cores=0), 3),
        ({"gpus": 2}, requirements_of("a", cores=100, gpus=1), 2),
        ({"gpus": 3}, requirements_of("a", cores=100, gpus=2), 1),
        ({}, requirements_of("a", gpus=1), 0),
        ({"memory_mb": 1000}, requirements_of("a", memory_mb=300), 3),
        ({}, requirements_of("a", memory_mb=1), 0),
        ({"slots": 0, "cores": 700}, requirements_of("a", cores=100), 7),
    ],
)
def test_slots_cores_gpus_and_memory_limit_a_worker(heartbeat, requirements, fits):
    fleet = Fleet()
    fleet.beat(**heartbeat)
    plan = fleet.registry.plan(requirements, 100)
    assert (plan.planned, plan.room) == (fits, fits)
    assert fleet.place(requirements, 100) == ({"w": fits} if fits else {})
    assert fleet.registry.plan(requirements, 1).portions == []


def test_placement_labels_must_equal_those_of_the_worker_and_others_are_ignored():
    fleet = Fleet()
    fleet.beat("a", labels={"placement.zone": "x"})
    fleet.beat("b", labels={"placement.zone": "y", "node.disk": "ssd"}, cpu_load=50)
    assert fleet.place(requirements_of("a", labels={"placement.zone": "y"})) == {"b": 1}
    assert fleet.place(requirements_of("a", labels={"node.disk": "ssd", "ticket": "7"})) == {"b": 1}
    assert fleet.registry.plan(requirements_of("a", labels={"node.disk": "tape"}), 1).refusal is Reason.NO_WORKERS


def test_constraint_label_is_also_met_by_a_capability():
    fleet = Fleet()
    fleet.beat("plain")
    fleet.beat("able", capabilities=("Docker",), cpu_load=50)
    assert fleet.place(requirements_of("a", labels={"constraint.docker": "true"})) == {"able": 1}
    assert not fleet.place(requirements_of("a", labels={"constraint.docker": "false"}))
    assert not fleet.place(requirements_of("a", labels={"node.docker": "true"}))


def test_later_pools_are_used_only_when_earlier_ones_are_full():
    fleet = Fleet(routes({"a": ("farm", "cloud")}, pool("farm"), pool("cloud")))
    fleet.beat("near", cpu_load=80, slots=3)
    fleet.beat("far", pool="cloud")
    assert fleet.place(FRAME, 2) == {"near": 2}
    assert fleet.place(FRAME, 2) == {"near": 1, "far": 1}
    assert fleet.place(FRAME, 1) == {"far": 1}


def test_second_pool_is_used_when_the_first_has_no_workers():
    fleet = Fleet(routes({"a": ("farm", "cloud")}, pool("farm"), pool("cloud")))
    fleet.beat("far", pool="cloud")
    assert fleet.place(FRAME) == {"far": 1}


def test_changed_routes_apply_from_the_next_plan():
    fleet = Fleet()
    fleet.beat()
    assert fleet.registry.plan(FRAME, 1).planned == 1
    fleet.registry.set_routes(routes({"*": ("farm",)}, pool("farm", status="inactive")))
    assert fleet.registry.plan(FRAME, 1).planned == 0


def test_reserved_capacity_is_excluded_from_plans_until_unreserved_once():
    fleet = Fleet()
    fleet.beat()
    held = fleet.registry.reserve(fleet.registry.plan(FRAME, 6))
    assert fleet.registry.plan(FRAME, 10).planned == 4
    fleet.registry.unreserve(held)
    fleet.registry.unreserve(held)
    assert fleet.registry.plan(FRAME, 20).planned == 10


def test_shrunk_reservation_keeps_the_first_frames_and_announces_the_rest():
    fleet = Fleet()
    for name in "ab":
        fleet.beat(name, slots=4)
    notified = []
    plan = fleet.registry.plan(FRAME, 8)
    held = fleet.registry.reserve(plan)
    fleet.registry.capacity_listeners.append(lambda: notified.append(1))
    assert not fleet.registry.plan(FRAME, 1).planned
    fleet.registry.shrink(held, 8)
    assert (fleet.registry.fitting_frames(FRAME), notified) == (0, [])
    fleet.registry.shrink(held, 5)
    assert (fleet.registry.fitting_frames(FRAME), notified) == (3, [1])
    assert [(worker.id, n) for worker, n in held.shares] == [(plan.portions[0].worker, 4), (plan.portions[1].worker, 1)]
    fleet.registry.unreserve(held, allocated=5)
    assert notified == [1], "what was reserved is allocated now"
    fleet.registry.shrink(held, 1)
    assert fleet.registry.fitting_frames(FRAME) == 8


def test_unreserved_capacity_that_was_not_allocated_is_announced():
    fleet = Fleet()
    fleet.beat(slots=4)
    notified = []
    fleet.registry.capacity_listeners.append(lambda: notified.append(1))
    held = fleet.registry.reserve(fleet.registry.plan(FRAME, 4))
    assert not fleet.registry.plan(FRAME, 1).planned
    fleet.registry.unreserve(held, allocated=3)
    assert notified == [1]
    held = fleet.registry.reserve(fleet.registry.plan(FRAME, 4))
    fleet.registry.unreserve(held)
    assert notified == [1], "no plan has missed it"


def test_release_is_announced_to_queues_that_were_refused_without_a_plan():
    fleet = Fleet()
    fleet.beat(slots=4)
    [pool_id] = [each.id for each in fleet.registry.routes.pools.values()]
    reservation = fleet.registry.reserve(fleet.registry.plan(FRAME, 4))
    notified = []
    fleet.registry.capacity_listeners.append(lambda: notified.append(1))
    assert fleet.registry.refuses_all([pool_id])
    fleet.registry.unreserve(reservation)
    assert notified == [1]
    assert not fleet.registry.refuses_all([pool_id])


def test_reservation_of_a_removed_worker_is_unreserved_safely():
    fleet = Fleet()
    fleet.beat()
    held = fleet.registry.reserve(fleet.registry.plan(FRAME, 6))
    fleet.registry.remove(id_of("w"))
    fleet.beat()
    fleet.registry.unreserve(held)
    assert fleet.registry.plan(FRAME, 20).planned == 10


def test_plan_is_limited_to_the_given_workers():
    fleet = Fleet()
    for name in "abc":
        fleet.beat(name, cpu_load=ord(name) % 50)
    assert fleet.named(fleet.registry.plan(FRAME, 25, [id_of("b"), id_of("c"), id_of("x")])) == {"b": 10, "c": 10}


def test_replica_plans_only_for_workers_it_owns_and_counts_the_others_as_present():
    fleet = Fleet()
    fleet.beat("a")
    fleet.beat("b")
    fleet.registry.set_ownership(lambda worker: worker == id_of("b"))
    assert fleet.place(FRAME, 20) == {"b": 10}
    fleet.registry.set_ownership(lambda _: False)
    fleet.beat("c")
    assert fleet.registry.plan(FRAME, 1).refusal is Reason.POOL_OVERLOADED
    fleet.registry.set_ownership(None)
    assert fleet.place(FRAME, 20) == {"a": 10, "c": 10}


def test_worker_silent_for_its_ttl_is_not_planned_and_forgotten():
    fleet = Fleet()
    fleet.beat("old")
    fleet.clock.now_s += 29
    fleet.beat("new", cpu_load=80)
    fleet.clock.now_s += 1.5
    assert fleet.named(fleet.registry.plan(FRAME, 20)) == {"new": 10}
    assert id_of("old") not in fleet.registry.workers


def test_worker_with_a_heartbeat_interval_above_the_ttl_is_planned_until_it_is_silent():
    fleet = Fleet(ttl_s=30.0)
    fleet.beat("slow", interval_s=60.0)
    fleet.beat("quick")
    fleet.clock.now_s += 104
    assert (fleet.registry.sweep(), fleet.place(FRAME)) == (1, {"slow": 1})
    fleet.clock.now_s += 2
    assert fleet.registry.plan(FRAME, 1).refusal is Reason.NO_WORKERS


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("inf"), float("nan")])
def test_heartbeat_without_a_valid_interval_is_refused(interval_s):
    with pytest.raises(InvalidInput, match="has no valid interval: update the worker"):
        Fleet().beat(interval_s=interval_s)


def test_worker_that_expires_between_two_sweeps_is_not_planned():
    fleet = Fleet()
    fleet.beat("old")
    fleet.clock.now_s += 29.9
    fleet.beat("new", cpu_load=80)
    assert fleet.registry.plan(FRAME, 20).planned == 20
    fleet.clock.now_s += 0.2
    assert fleet.named(fleet.registry.plan(FRAME, 20)) == {"new": 10}


def test_late_older_heartbeat_is_ignored():
    fleet = Fleet()
    assert fleet.beat(number=5) is HeartbeatOutcome.NEW
    assert fleet.beat(number=6, slots=20) is HeartbeatOutcome.KNOWN
    assert fleet.beat(number=5, slots=3) is HeartbeatOutcome.LATE
    assert fleet.beat(number=6, slots=3) is HeartbeatOutcome.LATE
    assert fleet.worker().slots == 20


def test_worker_declared_lost_is_not_registered_again():
    fleet = Fleet()
    fleet.beat()
    fleet.registry.remove(id_of("w"), lost=True)
    assert fleet.beat() is HeartbeatOutcome.LOST
    assert fleet.registry.plan(FRAME, 1).refusal is Reason.NO_WORKERS


def test_draining_worker_gets_no_new_frames():
    fleet = Fleet()
    fleet.beat()
    fleet.beat(draining=True)
    assert fleet.registry.plan(FRAME, 1).refusal is Reason.NO_WORKERS
    fleet.beat(draining=False)
    assert fleet.registry.plan(FRAME, 1).refusal is None


def test_frame_assigned_or_released_twice_is_counted_once():
    fleet = Fleet()
    fleet.beat()
    for _ in range(2):
        fleet.registry.record_allocations(id_of("w"), [(1, 4)], FRAME.need)
    assert fleet.worker().fitting_frames(FRAME.need) == 6
    assert fleet.registry.release_allocations(id_of("w"), [(3, 1), (9, 5)]) == 1
    assert fleet.registry.release_allocations(id_of("w"), [(3, 1)]) == 0
    assert fleet.worker().fitting_frames(FRAME.need) == 7
    assert fleet.registry.release_allocations(id_of("w"), [(0, 100)]) == 3
    assert fleet.worker().booked.cores == 0


def test_frame_missing_from_two_certain_heartbeats_is_no_longer_counted():
    fleet = Fleet()
    fleet.beat()
    fleet.registry.record_allocations(id_of("w"), [(1, 4)], FRAME.need)
    for held, fitting in (([], 6), ([(1, 2)], 6), ([(1, 2)], 8), ([(1, 2)], 8)):
        fleet.beat(held=held)
        assert fleet.worker().fitting_frames(FRAME.need) == fitting


def test_frame_in_flight_while_heartbeats_are_sent_stays_counted():
    fleet = Fleet()
    fleet.beat()
    fleet.registry.record_allocations(id_of("w"), [(1, 4)], FRAME.need)
    fleet.beat(held=[])
    fleet.beat(held=[])
    fleet.beat(held=[(1, 4)])
    assert fleet.worker().fitting_frames(FRAME.need) == 6
    assert not fleet.registry.unknown_frames()


def test_new_worker_with_unknown_frames_gets_nothing_until_they_are_resolved():
    fleet = Fleet()
    fleet.beat(held=[(5, 3)])
    plan = fleet.registry.plan(FRAME, 1)
    assert plan.refusal is Reason.POOL_OVERLOADED
    assert plan.explain().passed[0].why == "its frames are being looked up in PostgreSQL"
    assert fleet.registry.unknown_frames() == {id_of("w"): [(5, 3)]}
    fleet.registry.resolve_unknown_frames(id_of("w"), [(5, 3)], [BookedRange((5, 2), Resources(300))])
    assert fleet.worker().fitting_frames(Resources(100)) == 4
    assert fleet.worker().fitting_frames(Resources(0)) == 7
    fleet.registry.release_allocations(id_of("w"), [(5, 3)])
    assert fleet.worker().fitting_frames(Resources(100)) == 10


def test_frame_that_ended_during_the_lookup_stays_ended():
    fleet = Fleet()
    fleet.beat(held=[(5, 3)])
    looked_up = fleet.registry.unknown_frames()[id_of("w")]
    fleet.registry.release_allocations(id_of("w"), [(5, 1)])
    fleet.registry.resolve_unknown_frames(id_of("w"), looked_up, [BookedRange((5, 3), FRAME.need)])
    assert fleet.worker().fitting_frames(FRAME.need) == 8


def test_released_frame_in_one_later_heartbeat_is_not_unknown():
    fleet = Fleet()
    fleet.beat()
    fleet.place(FRAME, 5)
    fleet.registry.release_allocations(id_of("w"), [(100, 5)])
    fleet.beat(held=[(100, 5)])
    assert not fleet.registry.unknown_frames()
    assert fleet.registry.plan(FRAME, 10).planned == 5
    fleet.beat(held=[(100, 5)])
    assert fleet.registry.unknown_frames()


def test_load_while_frames_are_unknown_is_not_foreign():
    fleet = Fleet()
    fleet.beat(held=[(5, 3)], cpu_load=100)
    fleet.registry.resolve_unknown_frames(id_of("w"), [(5, 3)], [BookedRange((5, 3), FRAME.need)])
    assert fleet.registry.plan(FRAME, 1).planned == 1


@pytest.mark.parametrize(
    "heartbeat", [{"slots": -1}, {"held": [(1, 0)]}, {"held": [(2**53, 1)]}, {"held": [(0, 2**50)]}, {"number": -3}]
)
def test_invalid_heartbeat_is_refused(heartbeat):
    fleet = Fleet()
    with pytest.raises(InvalidInput, match="update the worker"):
        fleet.beat(**heartbeat)
    assert not fleet.registry.workers


def test_lost_worker_that_is_heard_again_is_told_once_per_heartbeat():
    fleet = Fleet()
    fleet.beat()
    fleet.registry.remove(id_of("w"), lost=True)
    assert fleet.registry.take_lost_heard() == set()
    fleet.beat()
    assert (fleet.registry.take_lost_heard(), fleet.registry.take_lost_heard()) == ({id_of("w")}, set())


def test_capacity_callback_fires_when_more_frames_may_fit():
    fleet = Fleet()
    notified = []
    fleet.registry.capacity_listeners.append(lambda: notified.append(1))
    fleet.beat()
    assert notified
    notified.clear()
    fleet.beat()
    assert not notified
    fleet.place(FRAME, 10)
    fleet.registry.release_allocations(id_of("w"), [(100, 1)])
    assert notified


def test_explanation_names_each_worker_and_what_it_lacks():
    fleet = Fleet()
    fleet.beat("full", slots=1)
    fleet.place(FRAME)
    fleet.beat("small", cores=50)
    fleet.beat("loaded", cpu_load=97)
    fleet.beat("ending", draining=True)
    fleet.beat("tight", cores=150)
    fleet.registry.record_allocations(id_of("tight"), [(900, 1)], FRAME.need)
    explanation = fleet.registry.plan(FRAME, 1).explain()
    assert explanation.reason is Reason.POOL_OVERLOADED
    assert explanation.considered == 5
    assert {each.name: each.why for each in explanation.passed} == {
        "full": "its 1 slots are in use",
        "small": "a frame needs more than its total capacity",
        "loaded": "other work uses 97 % of its CPU",
        "ending": "it is draining and accepts no new frames",
        "tight": "50 hundredths of a core are free, a frame needs 100",
    }
    labelled = fleet.registry.explain(requirements_of("a", labels={"node.disk": "ssd"}))
    assert labelled.reason is Reason.NO_WORKERS
    assert "its label node.disk must be ssd, but it is not set" in {each.why for each in labelled.passed}


def test_explanation_agrees_with_the_plan_when_capacity_is_left():
    fleet = Fleet()
    fleet.beat()
    plan = fleet.registry.plan(FRAME, 20)
    assert plan.refusal is Reason.POOL_OVERLOADED
    assert plan.planned == plan.room == plan.explain().room == 10
    assert plan.explain().reason is None


def test_rankings_cache_is_bounded_with_many_requirements(monkeypatch):
    monkeypatch.setattr("rota.placement.registry.RANKINGS_MAX", 5)
    fleet = Fleet()
    fleet.beat()
    for number in range(20):
        fleet.registry.plan(requirements_of(f"t{number}"), 1)
    assert len(fleet.registry._rankings) == 5


def test_ranked_workers_are_bounded_with_many_requirements(monkeypatch):
    monkeypatch.setattr("rota.placement.registry.RANKED_WORKERS_MAX", 40)
    fleet = Fleet()
    fleet.beat()
    for number in range(200):
        fleet.registry.plan(requirements_of(f"t{number}"), 1)
    ranked = [len(ranking) for rankings in fleet.registry._rankings.values() for ranking in rankings]
    assert sum(ranked) <= 40 + COUNT_RANKED_EVERY * max(ranked)


def test_ranking_does_not_accumulate_stale_entries():
    fleet = Fleet()
    fleet.beat()
    fleet.registry.plan(FRAME, 1)
    for _ in range(1000):
        fleet.registry.unreserve(fleet.registry.reserve(fleet.registry.plan(FRAME, 1)))
    (ranking,) = fleet.registry._rankings[FRAME]
    assert len(ranking._order) < 200


def test_registry_uses_the_system_clock_by_default():
    registry = WorkerRegistry()
    registry.set_routes(routes({"*": ("farm",)}, pool("farm")))
    registry.record_heartbeat(Heartbeat(worker=id_of("w"), name="w", pool="farm", number=0, slots=1, cores=100))
    assert registry.fitting_frames(FRAME) == 1


def test_frames_in_series_take_one_slot_until_the_last_of_them_has_ended():
    fleet = Fleet()
    fleet.beat()
    free = fleet.worker().fitting_frames(FRAME.need)
    fleet.registry.record_allocations(id_of("w"), [(50, 1)], FRAME.need, series=[[(100, 5)], [(105, 5)]])
    assert fleet.worker().fitting_frames(FRAME.need) == free - 3
    fleet.registry.release_allocations(id_of("w"), [(101, 4), (105, 4)])
    assert fleet.worker().fitting_frames(FRAME.need) == free - 3
    fleet.registry.release_allocations(id_of("w"), [(100, 1)])
    assert fleet.worker().fitting_frames(FRAME.need) == free - 2
    fleet.registry.release_allocations(id_of("w"), [(100, 10), (50, 1)])
    assert fleet.worker().fitting_frames(FRAME.need) == free


def test_series_that_heartbeats_do_not_list_any_more_is_released_as_a_whole():
    fleet = Fleet()
    fleet.beat()
    free = fleet.worker().fitting_frames(FRAME.need)
    fleet.registry.record_allocations(id_of("w"), [], FRAME.need, series=[[(100, 5)]])
    for _ in range(4):
        fleet.beat(held=[(102, 1)])
    assert fleet.worker().fitting_frames(FRAME.need) == free - 1
    for _ in range(4):
        fleet.beat(held=[])
    assert fleet.worker().fitting_frames(FRAME.need) == free


def test_looked_up_series_with_gaps_takes_one_slot():
    fleet = Fleet()
    fleet.beat(held=[(5, 2), (9, 2)])
    fleet.registry.resolve_unknown_frames(id_of("w"), [(5, 2), (9, 2)], [BookedRange((4, 8), FRAME.need, series=True)])
    assert fleet.worker().frames == 1
    fleet.registry.release_allocations(id_of("w"), [(5, 2), (9, 1)])
    assert fleet.worker().frames == 1
    fleet.registry.release_allocations(id_of("w"), [(10, 1)])
    assert fleet.worker().frames == 0

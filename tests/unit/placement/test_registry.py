"""Workers and plans: who gets frames, who does not, and why. All in memory, with a clock that the test moves."""

import pytest

from rota.model.errors import InvalidInput
from rota.model.protocol import Heartbeat
from rota.model.reasons import Reason
from rota.model.settings.lifecycle import RoutingSettings
from rota.placement import HeartbeatOutcome, Resources, requirements_of
from rota.placement.registry import WorkerRegistry
from tests.support.placement import Fleet, id_of, pool, routes

FRAME = requirements_of("a", cores=100)


def test_a_frame_goes_to_the_worker_of_the_mapped_pool():
    fleet = Fleet(routes({"a": ("farm",), "b": ("cloud",)}, pool("farm"), pool("cloud")))
    fleet.beat("f", pool="farm")
    fleet.beat("c", pool="cloud")
    assert fleet.place(FRAME) == {"f": 1}
    plan = fleet.registry.plan(requirements_of("b"), 1)
    assert fleet.named(plan) == {"c": 1}
    assert (plan.portions[0].pool, plan.portions[0].pool_id) == ("cloud", pool("cloud").id)


def test_a_topic_without_a_pool_is_told_as_no_pool_mapping():
    fleet = Fleet(routes({"b": ("farm",)}, pool("farm")))
    fleet.beat()
    plan = fleet.registry.plan(FRAME, 1)
    assert (plan.portions, plan.refusal) == ([], Reason.NO_POOL_MAPPING)


def test_a_preferred_pool_that_is_not_mapped_is_told_as_no_pool_mapping():
    fleet = Fleet()
    fleet.beat()
    assert (
        fleet.registry.plan(requirements_of("a", labels={"preferred_pool": "x"}), 1).refusal is Reason.NO_POOL_MAPPING
    )


def test_a_pool_without_workers_is_told_as_no_workers():
    fleet = Fleet()
    assert fleet.registry.plan(FRAME, 1).refusal is Reason.NO_WORKERS
    fleet.beat(pool="elsewhere")
    assert fleet.registry.plan(FRAME, 1).refusal is Reason.NO_WORKERS


def test_the_lowest_score_wins():
    fleet = Fleet()
    fleet.beat("busy", cpu_load=10)
    fleet.beat("idle", cpu_load=5)
    fleet.beat("gpu", cpu_load=0, gpu_utilization=20)
    assert fleet.place(FRAME) == {"idle": 1}
    assert fleet.place(FRAME) == {"busy": 1}
    assert fleet.place(FRAME) == {"gpu": 1}


def test_a_burst_spreads_over_equal_workers_without_any_heartbeat_in_between():
    fleet = Fleet()
    for name in "abcd":
        fleet.beat(name)
    assert fleet.place(FRAME, 8) == dict.fromkeys("abcd", 2)
    one_by_one = [fleet.place(FRAME) for _ in range(4)]
    assert sorted(next(iter(each)) for each in one_by_one) == list("abcd")


def test_ties_go_to_the_least_recently_used():
    fleet = Fleet()
    for name in "abc":
        fleet.beat(name)
    first = []
    for _ in range(3):
        plan = fleet.registry.plan(FRAME, 1)
        fleet.registry.unreserve(fleet.registry.reserve(plan))
        first += fleet.named(plan)
    assert sorted(first) == list("abc")


def test_the_same_seed_breaks_ties_alike():
    def order():
        fleet = Fleet()
        for number in range(20):
            fleet.beat(f"w{number}")
        return fleet.named(fleet.registry.plan(FRAME, 5))

    assert order() == order()


def test_the_preferred_worker_is_first_by_name_or_id_and_the_rest_goes_elsewhere():
    fleet = Fleet()
    fleet.beat("far", cpu_load=50)
    fleet.beat("near")
    for preferred in ("far", str(id_of("far"))):
        wanted = requirements_of("a", labels={"preferred_worker_id": preferred})
        assert fleet.named(fleet.registry.plan(wanted, 1)) == {"far": 1}
        assert fleet.named(fleet.registry.plan(wanted, 12)) == {"far": 10, "near": 2}


@pytest.mark.parametrize("said", [{"draining": True}, {"cpu_load": 95}, {"slots": 1, "held": [(5, 1)]}])
def test_a_preferred_worker_that_cannot_is_passed_over_silently(said):
    fleet = Fleet()
    fleet.beat("far", **said)
    fleet.beat("near", cpu_load=50)
    wanted = requirements_of("a", labels={"preferred_worker_id": "far"})
    assert fleet.named(fleet.registry.plan(wanted, 1)) == {"near": 1}
    assert fleet.named(fleet.registry.plan(requirements_of("a", labels={"preferred_worker_id": "nobody"}), 1)) == {
        "near": 1
    }


@pytest.mark.parametrize(
    ("said", "overloaded"),
    [
        ({"cpu_load": 90}, True),
        ({"cpu_load": 89.9}, False),
        ({"gpu_utilization": 90}, True),
        ({"gpu_utilization": 89}, False),
        ({}, False),
        ({"cpu_load": float("nan")}, False),
    ],
)
def test_a_worker_is_overloaded_by_foreign_cpu_or_gpu_from_90_percent_on(said, overloaded):
    fleet = Fleet()
    fleet.beat(**said)
    plan = fleet.registry.plan(FRAME, 1)
    assert plan.refusal is (Reason.POOL_OVERLOADED if overloaded else None)


def test_a_worker_that_offers_cores_is_filled_whatever_else_its_machine_does_unless_asked_otherwise():
    fleet = Fleet(limits=RoutingSettings())
    fleet.beat(cpu_load=100, gpu_utilization=100)
    assert fleet.registry.plan(FRAME, 20).planned == 10
    fleet.beat(cpu_load=100, cores=0)
    assert fleet.registry.plan(requirements_of("a", cores=0), 1).refusal is Reason.POOL_OVERLOADED


def test_frames_that_the_books_do_not_know_overload_a_worker_at_90_percent_of_its_places():
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


def test_load_of_our_own_frames_is_no_overload_and_a_worker_fills_to_the_last_place():
    fleet = Fleet()
    fleet.beat()
    fleet.place(FRAME, 9)
    fleet.beat(cpu_load=95, held=[(100, 9)])
    assert fleet.place(FRAME, 5) == {"w": 1}
    assert fleet.worker().fitting_frames(FRAME.need) == 0


def test_load_beyond_what_is_booked_is_foreign():
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
    ("said", "wanted", "fits"),
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
def test_places_cores_gpus_and_memory_must_fit(said, wanted, fits):
    fleet = Fleet()
    fleet.beat(**said)
    plan = fleet.registry.plan(wanted, 100)
    assert (plan.planned, plan.room) == (fits, fits)
    assert fleet.place(wanted, 100) == ({"w": fits} if fits else {})
    assert fleet.registry.plan(wanted, 1).portions == []


def test_labels_of_placement_must_be_equal_on_the_worker_and_others_are_ignored():
    fleet = Fleet()
    fleet.beat("a", labels={"placement.zone": "x"})
    fleet.beat("b", labels={"placement.zone": "y", "node.disk": "ssd"}, cpu_load=50)
    assert fleet.place(requirements_of("a", labels={"placement.zone": "y"})) == {"b": 1}
    assert fleet.place(requirements_of("a", labels={"node.disk": "ssd", "ticket": "7"})) == {"b": 1}
    assert fleet.registry.plan(requirements_of("a", labels={"node.disk": "tape"}), 1).refusal is Reason.NO_WORKERS


def test_a_constraint_is_met_by_a_capability_too():
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


def test_without_workers_in_the_first_pool_the_second_is_used():
    fleet = Fleet(routes({"a": ("farm", "cloud")}, pool("farm"), pool("cloud")))
    fleet.beat("far", pool="cloud")
    assert fleet.place(FRAME) == {"far": 1}


def test_changed_routes_hold_from_the_next_plan_on():
    fleet = Fleet()
    fleet.beat()
    assert fleet.registry.plan(FRAME, 1).planned == 1
    fleet.registry.set_routes(routes({"*": ("farm",)}, pool("farm", status="inactive")))
    assert fleet.registry.plan(FRAME, 1).planned == 0


def test_reserved_room_is_in_no_other_plan_until_it_is_given_back_once():
    fleet = Fleet()
    fleet.beat()
    held = fleet.registry.reserve(fleet.registry.plan(FRAME, 6))
    assert fleet.registry.plan(FRAME, 10).planned == 4
    fleet.registry.unreserve(held)
    fleet.registry.unreserve(held)
    assert fleet.registry.plan(FRAME, 20).planned == 10


def test_a_reservation_outlives_its_worker_without_harm():
    fleet = Fleet()
    fleet.beat()
    held = fleet.registry.reserve(fleet.registry.plan(FRAME, 6))
    fleet.registry.remove(id_of("w"))
    fleet.beat()
    fleet.registry.unreserve(held)
    assert fleet.registry.plan(FRAME, 20).planned == 10


def test_named_workers_alone_are_planned_for():
    fleet = Fleet()
    for name in "abc":
        fleet.beat(name, cpu_load=ord(name) % 50)
    assert fleet.named(fleet.registry.plan(FRAME, 25, [id_of("b"), id_of("c"), id_of("x")])) == {"b": 10, "c": 10}


def test_a_replica_plans_for_the_workers_it_feeds_and_sees_that_others_are_there():
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


def test_a_worker_that_was_silent_for_its_ttl_is_in_no_plan_and_forgotten():
    fleet = Fleet()
    fleet.beat("old")
    fleet.clock.now_s += 29
    fleet.beat("new", cpu_load=80)
    fleet.clock.now_s += 1.5
    assert fleet.named(fleet.registry.plan(FRAME, 20)) == {"new": 10}
    assert id_of("old") not in fleet.registry.workers


def test_a_worker_that_falls_silent_between_two_sweeps_is_in_no_plan():
    fleet = Fleet()
    fleet.beat("old")
    fleet.clock.now_s += 29.9
    fleet.beat("new", cpu_load=80)
    assert fleet.registry.plan(FRAME, 20).planned == 20
    fleet.clock.now_s += 0.2
    assert fleet.named(fleet.registry.plan(FRAME, 20)) == {"new": 10}


def test_an_older_heartbeat_that_comes_late_changes_nothing():
    fleet = Fleet()
    assert fleet.beat(number=5) is HeartbeatOutcome.NEW
    assert fleet.beat(number=6, slots=20) is HeartbeatOutcome.KNOWN
    assert fleet.beat(number=5, slots=3) is HeartbeatOutcome.LATE
    assert fleet.beat(number=6, slots=3) is HeartbeatOutcome.LATE
    assert fleet.worker().slots == 20


def test_a_worker_that_was_declared_lost_is_not_taken_up_again():
    fleet = Fleet()
    fleet.beat()
    fleet.registry.remove(id_of("w"), lost=True)
    assert fleet.beat() is HeartbeatOutcome.LOST
    assert fleet.registry.plan(FRAME, 1).refusal is Reason.NO_WORKERS


def test_a_worker_that_drains_gets_nothing_new():
    fleet = Fleet()
    fleet.beat()
    fleet.beat(draining=True)
    assert fleet.registry.plan(FRAME, 1).refusal is Reason.NO_WORKERS
    fleet.beat(draining=False)
    assert fleet.registry.plan(FRAME, 1).refusal is None


def test_a_frame_is_counted_once_however_often_it_is_assigned_and_freed():
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


def test_a_frame_that_two_sure_heartbeats_do_not_list_is_no_longer_counted():
    fleet = Fleet()
    fleet.beat()
    fleet.registry.record_allocations(id_of("w"), [(1, 4)], FRAME.need)
    for held, room in (([], 6), ([(1, 2)], 6), ([(1, 2)], 8), ([(1, 2)], 8)):
        fleet.beat(held=held)
        assert fleet.worker().fitting_frames(FRAME.need) == room


def test_a_frame_that_is_on_its_way_when_heartbeats_are_sent_stays_counted():
    fleet = Fleet()
    fleet.beat()
    fleet.registry.record_allocations(id_of("w"), [(1, 4)], FRAME.need)
    fleet.beat(held=[])
    fleet.beat(held=[])
    fleet.beat(held=[(1, 4)])
    assert fleet.worker().fitting_frames(FRAME.need) == 6
    assert not fleet.registry.unknown_frames()


def test_a_new_worker_with_frames_gets_nothing_until_the_books_were_asked():
    fleet = Fleet()
    fleet.beat(held=[(5, 3)])
    plan = fleet.registry.plan(FRAME, 1)
    assert plan.refusal is Reason.POOL_OVERLOADED
    assert plan.explain().passed[0].why == "its frames are being looked up in PostgreSQL"
    assert fleet.registry.unknown_frames() == {id_of("w"): [(5, 3)]}
    fleet.registry.resolve_unknown_frames(id_of("w"), [(5, 3)], [((5, 2), Resources(300))])
    assert fleet.worker().fitting_frames(Resources(100)) == 4
    assert fleet.worker().fitting_frames(Resources(0)) == 7
    fleet.registry.release_allocations(id_of("w"), [(5, 3)])
    assert fleet.worker().fitting_frames(Resources(100)) == 10


def test_a_frame_that_ended_while_the_books_were_asked_stays_ended():
    fleet = Fleet()
    fleet.beat(held=[(5, 3)])
    asked = fleet.registry.unknown_frames()[id_of("w")]
    fleet.registry.release_allocations(id_of("w"), [(5, 1)])
    fleet.registry.resolve_unknown_frames(id_of("w"), asked, [((5, 3), FRAME.need)])
    assert fleet.worker().fitting_frames(FRAME.need) == 8


def test_a_freed_frame_that_one_heartbeat_still_lists_raises_no_doubt():
    fleet = Fleet()
    fleet.beat()
    fleet.place(FRAME, 5)
    fleet.registry.release_allocations(id_of("w"), [(100, 5)])
    fleet.beat(held=[(100, 5)])
    assert not fleet.registry.unknown_frames()
    assert fleet.registry.plan(FRAME, 10).planned == 5
    fleet.beat(held=[(100, 5)])
    assert fleet.registry.unknown_frames()


def test_load_while_frames_are_not_known_is_not_foreign():
    fleet = Fleet()
    fleet.beat(held=[(5, 3)], cpu_load=100)
    fleet.registry.resolve_unknown_frames(id_of("w"), [(5, 3)], [((5, 3), FRAME.need)])
    assert fleet.registry.plan(FRAME, 1).planned == 1


@pytest.mark.parametrize(
    "said", [{"slots": -1}, {"held": [(1, 0)]}, {"held": [(2**53, 1)]}, {"held": [(0, 2**50)]}, {"number": -3}]
)
def test_a_heartbeat_that_cannot_be_is_refused(said):
    fleet = Fleet()
    with pytest.raises(InvalidInput, match="update the worker"):
        fleet.beat(**said)
    assert not fleet.registry.workers


def test_room_is_told_when_frames_may_fit_that_did_not_before():
    fleet = Fleet()
    told = []
    fleet.registry.on_capacity = lambda: told.append(1)
    fleet.beat()
    assert told
    told.clear()
    fleet.beat()
    assert not told
    fleet.place(FRAME, 10)
    fleet.registry.release_allocations(id_of("w"), [(100, 1)])
    assert told


def test_an_explanation_names_each_worker_and_what_it_lacks():
    fleet = Fleet()
    fleet.beat("full", slots=1)
    fleet.place(FRAME)
    fleet.beat("small", cores=50)
    fleet.beat("loaded", cpu_load=97)
    fleet.beat("ending", draining=True)
    fleet.beat("tight", cores=150)
    fleet.registry.record_allocations(id_of("tight"), [(900, 1)], FRAME.need)
    told = fleet.registry.plan(FRAME, 1).explain()
    assert told.reason is Reason.POOL_OVERLOADED
    assert told.considered == 5
    assert {each.name: each.why for each in told.passed} == {
        "full": "its 1 slots are in use",
        "small": "a frame needs more than its total capacity",
        "loaded": "other work uses 97 % of its CPU",
        "ending": "it is draining and accepts no new frames",
        "tight": "50 hundredths of a core are free, a frame needs 100",
    }
    labelled = fleet.registry.explain(requirements_of("a", labels={"node.disk": "ssd"}))
    assert labelled.reason is Reason.NO_WORKERS
    assert "its label node.disk must be ssd, but it is not set" in {each.why for each in labelled.passed}


def test_an_explanation_agrees_with_the_plan_when_there_is_room():
    fleet = Fleet()
    fleet.beat()
    plan = fleet.registry.plan(FRAME, 20)
    assert plan.refusal is Reason.POOL_OVERLOADED
    assert plan.planned == plan.room == plan.explain().room == 10
    assert plan.explain().reason is None


def test_many_classes_and_few_workers_keep_the_views_bounded(monkeypatch):
    monkeypatch.setattr("rota.placement.registry.RANKINGS_MAX", 5)
    fleet = Fleet()
    fleet.beat()
    for number in range(20):
        fleet.registry.plan(requirements_of(f"t{number}"), 1)
    assert len(fleet.registry._rankings) == 5


def test_a_thousand_changes_of_one_worker_leave_no_pile_of_stale_entries():
    fleet = Fleet()
    fleet.beat()
    fleet.registry.plan(FRAME, 1)
    for _ in range(1000):
        fleet.registry.unreserve(fleet.registry.reserve(fleet.registry.plan(FRAME, 1)))
    (view,) = fleet.registry._rankings[FRAME]
    assert len(view._order) < 200


def test_the_system_clock_is_the_default():
    registry = WorkerRegistry()
    registry.set_routes(routes({"*": ("farm",)}, pool("farm")))
    registry.record_heartbeat(Heartbeat(worker=id_of("w"), name="w", pool="farm", number=0, slots=1, cores=100))
    assert registry.fitting_frames(FRAME) == 1

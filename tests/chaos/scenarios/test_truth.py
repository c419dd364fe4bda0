"""The truth checker accepts true answers and detects each kind of planted lie; the same for L1, L2, L3 and O1."""

import copy
from types import SimpleNamespace
from uuid import UUID

import msgspec
import pytest

from rota.api.explanation import Cause, JobExplanation, LimitAmounts, Refuser, WaitingLayerView
from rota.model.job_states import JobState
from rota.model.reasons import Reason
from tests.chaos.pipeline.history import Run
from tests.chaos.scenarios.facts import (
    Counts,
    Facts,
    Job,
    Layer,
    Proc,
    Queue,
    ReturnedClaim,
    Share,
    Show,
    UnbookedClaim,
    Worker,
)
from tests.chaos.scenarios.liveness import (
    CALM_LIMIT_S,
    DEATH_LIMIT_S,
    ORDER_LIMIT_S,
    ClaimWatch,
    DispatchWatch,
    Disturbances,
    OrderWatch,
    Persistent,
    ended_processes,
    stopped_runs,
)
from tests.chaos.scenarios.truth import Gauges, Look, gauge_lies, lies, state_lies

CAPPED, LOW, OTHER = (str(UUID(int=number)) for number in (1, 2, 3))
LAYERS = {job: str(UUID(int=UUID(job).int + 10)) for job in (CAPPED, LOW, OTHER)}
PLACE = {"folder": "f", "dept": "d"}


def job(id_, state, show="film", **more):
    return Job(id=id_, show=show, state=state, priority=5, version="1", name=f"job {id_[-1]}", **PLACE, **more)


def proc(id_, token, host="w1", show="film", **more):
    place = {"pool": "pool", "job": id_, "layer": LAYERS[id_], "host": host, "cores": 100}
    return Proc(show=show, token=token, **PLACE, **place, **more)


def true_facts(at=0.0):
    """The capped job runs two of four frames, as its cap allows; the low one waits for the burst of three."""
    return Facts(
        now=1000.0 + at,
        at=at,
        jobs=[job(CAPPED, "RUNNING"), job(LOW, "SCHEDULED"), job(OTHER, "RUNNING", "short")],
        layers=[
            Layer(LAYERS[CAPPED], CAPPED, "q", 5, ended=1),
            Layer(LAYERS[LOW], LOW, "q", 3, deferred=1),
            Layer(LAYERS[OTHER], OTHER, "r", 1),
        ],
        procs=[proc(CAPPED, 10), proc(CAPPED, 11), proc(OTHER, 12, show="short")],
        queues=[Queue("q", 100, "film", **PLACE), Queue("r", 100, "short", **PLACE)],
        scanned={"q": Counts(4, 2, 1), "r": Counts(0, 1, 0)},
        counted={"q": Counts(4, 2, 1), "r": Counts(0, 1, 0)},
        shows=[Show("film", "film"), Show("short", "short")],
        shares=[Share("film", "pool", "local", 300), Share("short", "pool", "local", 100)],
        caps={f"job {CAPPED}": 200},
        workers=[Worker("w1", "worker1", "pool", 900.0)],
    )


def cause(code, *, layer="layer", amounts=None, **more):
    refuser = {"refuser": Refuser("subscription", "film in local")} if code is Reason.QUOTA_SUBSCRIPTION else {}
    return Cause(tier=code.tier, code=code, sentence=code.meaning, remedy="", layer=layer, amounts=amounts, **refuser)


def explained(id_, state, waiting, on_workers, *causes, **more):
    view = WaitingLayerView(
        id=UUID(LAYERS[id_]),
        name="layer",
        queue="q",
        counts={},
        waiting=waiting,
        reasons=tuple(each for each in causes if each.layer),
    )
    return JobExplanation(
        job=UUID(id_), name="", show="film", state=JobState(state), reason=None, sentence="", waiting=waiting,
        on_workers=on_workers, reasons=causes, layers=(view,), **more,
    )  # fmt: skip


def true_look():
    """One of the two due frames of the low job fits the burst, which refuses the other."""
    facts = true_facts()
    at_cap = cause(Reason.QUOTA_JOB, amounts=LimitAmounts("cores", 2, 1, 2))
    at_burst = cause(Reason.QUOTA_SUBSCRIPTION, amounts=LimitAmounts("cores", 2, 1, 3))
    return Look(
        facts,
        copy.deepcopy(facts),
        room={"w1": 2},
        listed=[("server0", "RUNNING", {CAPPED, OTHER}), ("server0", "SCHEDULED", {LOW})],
        explained=[
            ("server0", explained(CAPPED, "RUNNING", 2, 2, at_cap)),
            ("server0", explained(LOW, "SCHEDULED", 3, 0, at_burst, cause(Reason.DEFERRED), cause(Reason.BEHIND))),
        ],
        queues=[("server0", {"q": Counts(4, 2, 1)})],
    )


def test_true_answers_are_no_lies():
    assert [*lies(true_look())] == []


def test_bookings_of_a_job_that_is_being_ended_outlast_its_frames_in_the_queue():
    look = Look(true_facts(), true_facts())
    for facts in (look.before, look.after):
        facts.jobs[2].ends_as = "CANCELLED"
        facts.layers[2].ended = 1
        facts.scanned["r"] = facts.counted["r"] = Counts()
    assert [*lies(look)] == []
    look.after.jobs[2].ends_as = None
    assert {lie.kind for lie in lies(look)} == {"counts"}


def _both(change):
    """Plant a lie in the tables, before and after the answers."""

    def plant(look):
        for facts in (look.before, look.after):
            change(facts)

    return plant


def _says(id_, *causes, state="SCHEDULED", waiting=3, on_workers=0):
    def plant(look):
        look.explained = [("server1", explained(id_, state, waiting, on_workers, *causes))]

    return plant


def _says_of_low(code, **more):
    return _says(LOW, cause(code, **more))


def _job(at, **fields):
    return _both(lambda facts: [setattr(facts.jobs[at], name, value) for name, value in fields.items()])


def _only_bookings(look):
    """Nothing waits any more."""
    for facts in (look.before, look.after):
        facts.layers[0].ended = 3
        facts.layers[1].ended, facts.layers[1].deferred = 3, 0
        facts.scanned["q"] = facts.counted["q"] = Counts(0, 2, 0)
    _says(LOW, cause(Reason.BEHIND), waiting=0)(look)


def _booking_not_counted(facts):
    facts.scanned["r"] = facts.counted["r"] = Counts(1, 0, 0)


WRONG_LIMIT = LimitAmounts("cores", 2, 1, 2)
WRONG_USE = LimitAmounts("cores", 3, 1, 3)
RUNS_TWO = {"state": "RUNNING", "waiting": 2, "on_workers": 2}
OF_LAYER = (
    *(Reason.QUOTA_FOLDER, Reason.QUOTA_JOB, Reason.QUOTA_LAYER, Reason.QUOTA_POINT, Reason.NO_WORKERS),
    *(Reason.UNKNOWN_TASK, Reason.NO_POOL_MAPPING, Reason.PAUSED, Reason.BOOKS_UNAVAILABLE, Reason.FAIR_SHARE),
    Reason.POOL_OVERLOADED,
)
OF_JOB = (
    *(Reason.TENANT_LIMIT, Reason.WAITING_ON_JOB, Reason.ENDING, Reason.NO_SERVER, Reason.DISPATCH_FAILED),
    *(Reason.BUS_UNAVAILABLE, Reason.POLICY_UNAVAILABLE),
)
CERTAIN = {
    "counter differs from the rows": ("counts", _both(lambda facts: facts.counted.update(q=Counts(5, 2, 1)))),
    "frame missing in the queue": ("counts", _both(lambda facts: setattr(facts.layers[0], "ended", 0))),
    "more bookings than open frames": ("counts", _both(lambda facts: setattr(facts.layers[0], "ended", 4))),
    "booking before admission": ("counts", _job(2, state="PENDING")),
    "booking that the queue does not count": ("counts", _both(_booking_not_counted)),
    "reason outside the taxonomy": ("state", _job(0, reason="publish_failed")),
    "list has a job in another state": ("list", lambda look: look.listed[0][2].add(LOW)),
    "list lacks a job": ("list", lambda look: look.listed[1][2].clear()),
    "explain names another state": ("explain", _says(LOW, cause(Reason.BEHIND), state="RUNNING")),
    "explain counts frames wrongly": ("explain", _says(LOW, cause(Reason.BEHIND), waiting=2, on_workers=1)),
}
LASTING = {
    "server counts a queue wrongly": ("counts", lambda look: look.queues[0][1].update(q=Counts(3, 2, 1))),
    "RUNNING with nothing on a worker": ("state", _job(1, state="RUNNING")),
    "SCHEDULED with frames on workers": ("state", _job(2, state="SCHEDULED")),
    "tenant_limit of a show without a limit": ("state", _job(1, reason="tenant_limit")),
    "explain names a wrong limit": ("explain", _says_of_low(Reason.QUOTA_SUBSCRIPTION, amounts=WRONG_LIMIT)),
    "explain names a wrong usage": ("explain", _says_of_low(Reason.QUOTA_SUBSCRIPTION, amounts=WRONG_USE)),
    "explain says that nothing blocks it": ("explain", _says(LOW)),
    "explain says behind with nothing ahead": ("explain", _only_bookings),
    "explain says deferred of a due layer": ("explain", _says(CAPPED, cause(Reason.DEFERRED), **RUNS_TWO)),
    **{f"explain says {code} of a layer": ("explain", _says_of_low(code)) for code in OF_LAYER},
    **{f"explain says {code} of a job": ("explain", _says_of_low(code, layer=None)) for code in OF_JOB},
}


@pytest.mark.parametrize("planted", [*CERTAIN, *LASTING])
def test_planted_lie_is_detected(planted):
    kind, plant = (CERTAIN | LASTING)[planted]
    look = true_look()
    plant(look)
    found = [lie for lie in lies(look) if lie.kind == kind]
    assert found
    assert any(lie.certain for lie in found) is (planted in CERTAIN), found


def test_answer_about_a_job_that_changed_meanwhile_is_not_compared():
    look = true_look()
    look.listed[0][2].add(LOW)
    _says(LOW, state="RUNNING")(look)
    look.after.jobs[1].version = "2"
    assert [*lies(look)] == []


def test_gauge_that_the_tables_never_had_is_detected():
    history = [Gauges.of(msgspec.structs.replace(true_facts(), at=float(at))) for at in range(80)]
    shown = {'rota_jobs{state="RUNNING"}': 2.0, 'rota_queue_frames{state="waiting"}': 4.0}
    assert [*gauge_lies(history, {"server0": shown, "server1": {}}, 79.0)] == []
    [lie] = gauge_lies(history, {"server0": shown | {'rota_jobs{state="RUNNING"}': 5.0}}, 79.0)
    assert "2 to 2" in lie.sentence
    assert len([*gauge_lies(history, {"server0": shown, "server1": shown}, 79.0)]) == 2, "two leaders"


def test_lie_counts_only_if_it_lasts_and_longer_after_a_death():
    disturbances = Disturbances()
    lasting = Persistent(disturbances)
    assert [*lasting.update({"a": "lie"}, 0.0), *lasting.update({"a": "lie"}, CALM_LIMIT_S)] == []
    assert [*lasting.update({}, 2.5), *lasting.update({"a": "lie"}, 3.0)] == []
    assert [wait.limit_s for wait in lasting.update({"a": "lie"}, 5.5)] == [CALM_LIMIT_S]
    assert [*lasting.update({"a": "lie"}, 6.0)] == [], "reported once"
    disturbances.begin("kill", "server0", 10.0).ended = 10.5
    assert [*lasting.update({"b": "lie"}, 11.0), *lasting.update({"b": "lie"}, 15.0)] == []
    assert [wait.limit_s for wait in lasting.update({"b": "lie"}, 16.5)] == [DEATH_LIMIT_S]
    disturbances.begin("storm", "servers", 16.0).ended = 18.0
    assert disturbances.limit_s(15.0, 17.5) == DEATH_LIMIT_S + 2.5, "counted from the last death"
    assert disturbances.limit_s(15.0, 22.0) == DEATH_LIMIT_S + 3.0
    disturbances.begin("lock", "job", 20.0).ended = 40.0
    assert [*lasting.update({"c": "lie"}, 19.0), *lasting.update({"c": "lie"}, 41.0)] == [], "nothing was expected"


def test_job_whose_frames_end_between_two_looks_is_another_case_at_each():
    def idle(ended):
        facts = true_facts()
        facts.procs = [each for each in facts.procs if each.job != CAPPED]
        facts.layers[0].ended = ended
        return [lie.key for lie in state_lies(facts)]

    assert idle(1) == idle(1) == [(CAPPED, 1)]
    assert idle(2) == [(CAPPED, 2)]


def looks_over(watch, seconds, change=lambda facts, at: None, room=None):
    """All that `watch` reports over looks every quarter of a second."""
    found = []
    for number in range(int(seconds * 4) + 1):
        facts = true_facts(number / 4)
        change(facts, number / 4)
        found += watch(facts, {"w1": 2} if room is None else room)
    return found


def test_l1_fitting_work_that_waits_is_detected():
    [wait, *_] = looks_over(DispatchWatch(Disturbances()).update, 3.0)
    assert wait.seconds > CALM_LIMIT_S
    assert "job 2" in wait.sentence


@pytest.mark.parametrize(
    "change",
    [
        lambda facts, at: setattr(facts.shares[0], "burst", 200),
        lambda facts, at: setattr(facts.queues[0], "paused", True),
        lambda facts, at: facts.caps.update({"folder f": 200}),
        lambda facts, at: setattr(facts.shows[0], "jobs_max", 0),
        lambda facts, at: setattr(facts.jobs[1], "ends_as", "CANCELLED"),
        lambda facts, at: setattr(facts.procs[0], "token", 100 + int(at)),
    ],
    ids=["at the burst", "paused", "at the cap of the folder", "at the limit of jobs", "being ended", "dispatched"],
)
def test_l1_work_that_does_not_fit_or_proceeds_may_wait(change):
    assert looks_over(DispatchWatch(Disturbances()).update, 4.0, change) == []


def test_l1_work_without_a_free_worker_may_wait():
    assert looks_over(DispatchWatch(Disturbances()).update, 4.0, room={"w1": 0}) == []


def test_l1_frames_that_stay_claimed_and_unbooked_are_detected():
    def change(facts, at):
        facts.unbooked = [UnbookedClaim(7, LAYERS[LOW], 2), UnbookedClaim(100 + int(at), LAYERS[LOW], 2)]

    claims = ClaimWatch(Disturbances())
    [wait] = looks_over(lambda facts, room: claims.update(facts), 3.0, change)
    assert wait.key == (7, LAYERS[LOW])
    assert wait.seconds > CALM_LIMIT_S


def order_after(seconds, low_priority=1, more=lambda facts, at: None):
    """The high job waits at the burst; a frame of the low one is booked after so many seconds."""

    def change(facts, at):
        more(facts, at)
        facts.jobs[1].priority, facts.jobs[0].priority = 8, low_priority
        facts.shares[0].burst = 200
        if at >= seconds:
            facts.procs[0] = proc(CAPPED, 50, booked=1000.0 + seconds, claimed=999.5 + seconds)

    order = OrderWatch(Disturbances())
    return looks_over(lambda facts, room: order.update(facts), 9.0, change)


def test_o1_lower_priority_booked_before_a_waiting_higher_one_is_detected():
    [wait] = order_after(ORDER_LIMIT_S + 1)
    assert "job 1 (1) was booked, job 2 (8) waits" in wait.sentence


def test_o1_booking_of_equal_priority_or_close_to_the_submission_is_allowed():
    assert order_after(1.0) == []
    assert order_after(ORDER_LIMIT_S + 1, low_priority=8) == []


def test_o1_frames_that_a_server_claimed_or_that_were_retried_have_not_waited():
    def claimed(facts, at):
        facts.unbooked = [UnbookedClaim(7, LAYERS[LOW], 2)] if at == ORDER_LIMIT_S else []

    def one_of_two_claimed(facts, at):
        facts.unbooked = [UnbookedClaim(7, LAYERS[LOW], 1)] if at == ORDER_LIMIT_S else []

    def retried(facts, at):
        facts.layers[1].attempt = 1 + (at >= ORDER_LIMIT_S)

    assert order_after(ORDER_LIMIT_S + 1, more=claimed) == []
    assert order_after(ORDER_LIMIT_S + 1, more=retried) == []
    assert order_after(ORDER_LIMIT_S + 1, more=one_of_two_claimed)


@pytest.mark.parametrize(
    ("frames", "claimed_s", "returned_s", "allowed"),
    [
        (2, -0.5, 0.1, True),
        (1, -0.5, 0.1, False),
        (2, 0.2, 0.3, False),
        (2, -0.5, -0.1, False),
    ],
    ids=["all of them", "one of two", "after the lower one", "given back before"],
)
def test_o1_frames_that_were_claimed_when_the_lower_ones_were_have_not_waited(frames, claimed_s, returned_s, allowed):
    low_at = 1000.0 + ORDER_LIMIT_S + 0.5

    def returned(facts, at):
        facts.returned = [ReturnedClaim(LAYERS[LOW], frames, 3, low_at + claimed_s, low_at + returned_s)]

    assert (order_after(ORDER_LIMIT_S + 1, more=returned) == []) is allowed


def test_l2_process_that_ended_on_its_own_is_detected():
    ended = SimpleNamespace(name="server0", alive=False, process=SimpleNamespace(returncode=1))
    running = SimpleNamespace(name="server1", alive=True, process=SimpleNamespace(returncode=None))
    assert ended_processes([ended, running], {"server0"}) == []
    assert ended_processes([ended, running], set()) == ["server0 ended with status 1"]


def test_l3_frame_that_was_stopped_on_a_live_worker_is_detected():
    disturbances = Disturbances()
    disturbances.begin("kill", "worker1", 5.0).ended = 6.0
    disturbances.begin("kill", "server0", 5.0).ended = 6.0
    stopped = [Run("j", "l", 0, 1, 10, f"worker{number}", 1.0) for number in range(4)]
    stopped[2].ended, stopped[3].raised = 2.0, True
    [sentence] = stopped_runs(stopped, set(), disturbances)
    assert sentence.endswith("was stopped on worker0")
    assert [*stopped_runs(stopped, {"j"}, disturbances)] == []

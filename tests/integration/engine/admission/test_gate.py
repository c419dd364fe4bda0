"""Pending jobs: each is decided once across replicas and retries, and none is forgotten."""

import asyncio
from datetime import timedelta

import pytest

from rota.engine.admission import audit, transitions
from rota.engine.admission.controller import AdmissionController
from rota.engine.admission.decision import DeferAll
from rota.engine.admission.pending_replayer import LEASE, REPLAYED, PendingReplayer
from rota.engine.admission.transitions import change_unqueued_state
from rota.engine.queries.jobs import JobQueries
from rota.engine.submission.submitter import Submitter
from rota.infra.lease import Leases
from rota.infra.service import Service, Supervisor
from rota.model.job_states import JobState
from rota.model.settings.lifecycle import ReplayerSettings as Pace
from rota.policy.decision_store import DecisionStore
from rota.queue import DeadLetterFilter, Queue, dead_letters
from tests.support.jobs import NO_EVENTS, a_show, completions, task
from tests.support.kernels import AWAY, OPEN, TABLE, Hanging, Table
from tests.support.queue import agreed, sql
from tests.support.waiting import until

AGE = sql("UPDATE rota.job SET ts_updated = ts_updated - $1 * interval '1 s'")
DUE = sql("UPDATE rota.job SET ts_ask_at = clock_timestamp() WHERE ts_ask_at IS NOT NULL")
WAITS = sql("SELECT extract(epoch FROM ts_ask_at - ts_updated)::float8 FROM rota.job")
DECISION_OF = sql("""
SELECT word FROM rota.job WHERE pk_job = $1 UNION ALL SELECT word FROM rota.job_done WHERE pk_job = $1""")
BLOCKED = sql("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
STATES = sql("""
SELECT pk_job, state, reason FROM rota.job UNION ALL SELECT pk_job, state, reason FROM rota.job_done ORDER BY 1""")


@pytest.fixture
def kernel():
    return Table()


@pytest.fixture
async def controller(database, kernel):
    await a_show(database)
    return AdmissionController(database, completions(database), kernel)


@pytest.fixture
def replayer(database, controller):
    return PendingReplayer(database, Leases(database), controller)


async def submitted(database, *topics, **more):
    many = [task(topic=topic, **more) for topic in topics]
    return [one.job for one in await Submitter(database, NO_EVENTS, gate=DeferAll()).submit(many)]


async def states(database):
    return {row["pk_job"]: (row["state"], row["reason"]) for row in await database.rows(STATES)}


async def decided(database):
    return {state for state, _ in (await states(database)).values()} == {"SCHEDULED"}


async def waiting(database):
    return sum(counts["waiting"] for counts in (await agreed(database)).values())


async def test_each_policy_effect_sets_the_matching_job_state(database, controller):
    topics = ("allow", "tight", "deny", "throttle", "approval", "odd")
    allow, tight, deny, throttle, approval, odd = jobs = await submitted(database, *topics)
    await controller.decide_all(jobs)
    assert await states(database) == {
        allow: ("SCHEDULED", None),
        tight: ("SCHEDULED", None),
        deny: ("DENIED", "safety_denied"),
        throttle: ("PENDING", "policy_throttled"),
        approval: ("APPROVAL_REQUIRED", "approval_required"),
        odd: ("DENIED", "safety_denied"),
    }
    assert await waiting(database) == 2


async def test_every_job_references_its_stored_decision(database, controller):
    topics = ("allow", "tight", "deny", "throttle", "approval")
    jobs = await submitted(database, *topics)
    await controller.decide_all(jobs)
    decisions = DecisionStore(database)
    for topic, job in zip(topics, jobs, strict=True):
        number = await database.value(DECISION_OF, job)
        assert (await decisions.read([number]))[number] == TABLE[topic]


async def test_denied_job_ends_with_all_frames_and_one_dead_letter(database, controller):
    [job] = await submitted(database, "deny", layer={"frames": 7})
    ended = []
    controller.publisher.listeners.append(ended.extend)
    await controller.decide_all([job])
    await controller.decide_all([job])
    done = await JobQueries(database).get(job)
    assert (done.state, done.layers[0].counts) == (JobState.DENIED, {"DENIED": 7})
    assert [moment.state for moment in done.history] == ["PENDING", "DENIED"]
    [dead_letter] = await Queue(database).dead_letters.find(DeadLetterFilter())
    assert (dead_letter.kind, dead_letter.reason, dead_letter.job, dead_letter.error) == (
        "job",
        "safety_denied",
        job,
        "rule rule7: no",
    )
    assert [end.job for end in ended] == [job]
    assert await waiting(database) == 0


async def test_failed_audit_entry_rolls_back_the_denial(database, controller, monkeypatch):
    [job] = await submitted(database, "deny")

    async def refuse(tx, outcome):
        assert outcome.denied == [job], "it has ended in this transaction"
        assert await tx.value(dead_letters.COUNT, *DeadLetterFilter().arguments()) == 1
        raise OSError("not now")

    monkeypatch.setattr(audit, "append_decisions", refuse)
    with pytest.raises(OSError, match="not now"):
        await controller.decide([job])
    assert (await states(database))[job] == ("PENDING", "policy_pending")
    assert await Queue(database).dead_letters.count(DeadLetterFilter()) == 0


async def test_unavailable_policy_leaves_jobs_pending_with_that_reason(database, controller):
    [job] = await submitted(database, "away")
    await controller.decide_all([job])
    assert (await states(database))[job] == ("PENDING", "policy_unavailable")


async def test_policy_crash_on_one_job_does_not_block_others(database, controller):
    allow, crash, deny = jobs = await submitted(database, "allow", "crash", "deny")
    await controller.decide_all(jobs)
    assert await states(database) == {
        allow: ("SCHEDULED", None),
        crash: ("PENDING", "policy_unavailable"),
        deny: ("DENIED", "safety_denied"),
    }


async def test_two_replicas_deciding_the_same_jobs_apply_each_decision_once(database, controller, kernel):
    jobs = await submitted(database, *(["allow", "deny"] * 10))
    both = asyncio.Barrier(2)
    kernel.pause = both.wait
    other = AdmissionController(database, controller.publisher, kernel)
    one, two = await asyncio.gather(controller.decide(jobs), other.decide(jobs[::-1]))
    admitted = [*one.admitted, *two.admitted]
    denied = [*one.denied, *two.denied]
    assert sorted(map(str, admitted)) == sorted(map(str, jobs[::2]))
    assert sorted(map(str, denied)) == sorted(map(str, jobs[1::2]))
    assert await waiting(database) == 10
    assert await Queue(database).dead_letters.count(DeadLetterFilter()) == 10


async def test_replicas_with_opposite_decisions_do_not_deadlock(database, controller, monkeypatch):
    """Each replica admits the jobs that the other one throttles."""
    await controller.decide_all(
        await submitted(database, "allow", "throttle")
    )  # stores the decisions first, so that no insert waits for one
    jobs = await submitted(database, *(["a", "b"] * 10))
    rules = [Table(a=TABLE["allow"], b=TABLE["throttle"]), Table(a=TABLE["throttle"], b=TABLE["allow"])]
    controllers = [AdmissionController(database, controller.publisher, kernel) for kernel in rules]
    real, admitted = transitions.admit, []

    async def admit(*args, **more):
        """Hold each admit until the other has admitted too or waits for a lock."""
        admitted.append(await real(*args, **more))

        async def other():
            return len(admitted) == 2 or await database.value(BLOCKED)

        await until(other, what="the other replica")
        return admitted[-1]

    monkeypatch.setattr(transitions, "admit", admit)
    await asyncio.gather(*(controller.decide(jobs) for controller in controllers))
    assert {state for state, _ in (await states(database)).values()} == {"SCHEDULED", "PENDING"}


async def test_job_cancelled_during_the_policy_check_is_not_denied(database, controller, kernel):
    [job] = await submitted(database, "deny")

    async def cancel():
        await database.run(sql("UPDATE rota.job SET ends_as = 'CANCELLED'"))

    kernel.pause = cancel
    await controller.decide_all([job])
    assert (await states(database))[job][0] == "PENDING"
    assert await Queue(database).dead_letters.count(DeadLetterFilter()) == 0


@pytest.mark.parametrize(
    "place", ["rota.engine.admission.controller.DECISION_TTL_S", "rota.engine.admission.controller.timedelta"]
)
async def test_expired_policy_decision_is_not_applied(database, controller, monkeypatch, place):
    """Checked by the local clock, and by PostgreSQL in case the process pauses after the local check."""
    [job] = await submitted(database, "allow")
    monkeypatch.setattr(place, -1.0 if place.endswith("DECISION_TTL_S") else lambda **_: timedelta(seconds=-1))
    await controller.decide_all([job])
    assert (await states(database))[job] == ("PENDING", "policy_unavailable")
    assert await waiting(database) == 0
    monkeypatch.undo()
    await database.run(DUE)
    assert await PendingReplayer(database, Leases(database), controller).retry_deferred() == 1


async def test_replayer_replays_and_counts_old_orphans_only(database, replayer):
    [old] = await submitted(database, "replayed")
    await database.run(AGE, 121)
    [young] = await submitted(database, "allow")
    before = REPLAYED.labels("replayed")._value.get()
    assert await replayer.replay() == 1
    assert await states(database) == {old: ("SCHEDULED", None), young: ("PENDING", "policy_pending")}
    assert REPLAYED.labels("replayed")._value.get() == before + 1
    assert await replayer.replay() == 0


async def test_replayer_processes_batches_oldest_first(database, replayer, kernel, monkeypatch):
    monkeypatch.setattr("rota.engine.admission.pending_replayer.BATCH_JOBS_MAX", 2)
    jobs = []
    for _ in range(5):
        jobs += await submitted(database, "allow")
        await database.run(AGE, 121)
    order = []
    real = replayer.controller.decide

    async def decide(batch):
        order.append(list(batch))
        return await real(batch)

    replayer.controller.decide = decide
    assert await replayer.replay() == 5
    assert order == [jobs[:2], jobs[2:4], jobs[4:]]


async def test_replayer_skips_jobs_that_wait_for_another_reason(database, replayer, kernel):
    jobs = await submitted(database, "allow", "allow", "allow")
    reasons = ("waiting_on_job", "paused", "approval_required")
    async with database.transaction() as tx:
        for job, reason in zip(jobs, reasons, strict=True):
            await change_unqueued_state(tx, [job], JobState.PENDING, JobState.PENDING, reason)
    await database.run(AGE, 10_000)
    assert (await replayer.replay(), await replayer.retry_deferred()) == (0, 0)
    assert kernel.asked == []


async def test_deferred_jobs_are_retried_once_the_policy_answers(database, controller, replayer, kernel):
    jobs = await submitted(database, *(["wait"] * 3))
    kernel.fails = AWAY
    await controller.decide_all(jobs)
    assert set((await states(database)).values()) == {("PENDING", "policy_unavailable")}
    kernel.fails = None
    assert await replayer.retry_deferred() == 0, "it is not due yet"
    await database.run(AGE, 121)
    assert await replayer.replay() == 0, "they are not orphans"
    await database.run(DUE)
    assert await replayer.retry_deferred() == 3
    assert await waiting(database) == 3
    assert await database.value(sql("SELECT count(*) FROM rota.job WHERE ts_ask_at IS NULL AND asks IS NULL")) == 3


async def test_policy_outage_backs_off_exponentially(database, controller, kernel):
    [job] = await submitted(database, "wait")
    kernel.fails = AWAY
    waits = []
    for _ in range(7):
        await controller.decide_all([job])
        waits.append(round(await database.value(WAITS)))
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    kernel.fails = None
    kernel.decisions["wait"] = TABLE["throttle"]
    await controller.decide_all([job])
    kernel.fails = AWAY
    await controller.decide_all([job])
    assert round(await database.value(WAITS)) == 1, "a decision resets the backoff"
    assert await database.value(sql("SELECT dispatch_failures FROM rota.job")) == 0


@pytest.mark.parametrize(
    ("topic", "fails", "seconds"), [("throttle", None, 5), ("later", None, 60), ("allow", OPEN, 5)]
)
async def test_throttle_and_open_breaker_wait_for_the_configured_delay(
    database, controller, kernel, topic, fails, seconds
):
    [job] = await submitted(database, topic)
    kernel.fails = fails
    for _ in range(2):
        await controller.decide_all([job])
        assert round(await database.value(WAITS)) == seconds


async def test_retry_pass_during_a_policy_outage_asks_once(database, controller, replayer, kernel, monkeypatch):
    monkeypatch.setattr("rota.engine.admission.pending_replayer.BATCH_JOBS_MAX", 2)
    kernel.fails = AWAY
    await controller.decide_all(await submitted(database, *(["wait"] * 6)))
    await database.run(DUE)
    kernel.questions.clear()
    await replayer.retry_deferred()
    assert kernel.asked == [["wait"]]


async def test_identical_jobs_share_one_policy_question(database, controller, kernel):
    jobs = await submitted(database, *(["allow"] * 5), "other", *(["allow"] * 5))
    await controller.decide_all(jobs)
    assert kernel.asked == [["allow", "other"]]
    assert sorted(kernel.jobs) == sorted(jobs)


async def test_hanging_kernel_times_out_and_the_job_stays_pending(database, controller):
    controller.kernel_timeout_s = 0.01
    controller.kernel = Hanging()
    [job] = await submitted(database, "allow")
    await controller.decide_all([job])
    assert (await states(database))[job] == ("PENDING", "policy_unavailable")


async def test_reply_with_too_few_decisions_is_discarded(database, controller, kernel):
    kernel.miscounts = 1
    jobs = await submitted(database, "allow", "other")
    await controller.decide_all(jobs)
    assert set((await states(database)).values()) == {("PENDING", "policy_unavailable")}


async def test_replayer_resumes_granted_approvals(database, replayer, controller, monkeypatch):
    monkeypatch.setattr("rota.engine.admission.pending_replayer.BATCH_JOBS_MAX", 1)
    jobs = await submitted(database, "approval", "approval", "approval")
    await controller.decide_all(jobs)
    granted = jobs[1]
    replayer.approvals = Granting(granted)
    assert await replayer.replay() == 0, "it is not due yet"
    await database.run(AGE, 121)
    assert await replayer.replay() == 1
    held = ("APPROVAL_REQUIRED", "approval_required")
    assert await states(database) == {jobs[0]: held, granted: ("PENDING", "approved"), jobs[2]: held}
    controller.kernel.decisions["approval"] = TABLE["allow"]
    await database.run(AGE, 121)
    await replayer.replay()
    assert (await states(database))[granted] == ("SCHEDULED", None)


class Granting:
    def __init__(self, *jobs):
        self.jobs = jobs

    async def granted_jobs(self, jobs):
        return [job for job in jobs if job in self.jobs]


async def test_replayer_service_runs_at_startup_with_one_leader(database, controller, kernel):
    jobs = await submitted(database, *(["allow"] * 5))
    await database.run(AGE, 121)
    supervisor = Supervisor(drain_budget_s=2.0)
    for name in ("one", "two"):
        replayer = PendingReplayer(database, Leases(database, name), controller, Pace(poll_interval=3600.0))
        supervisor.add(Service(name, replayer.run))
    async with supervisor.running():
        await until(lambda: decided(database), what="a decision for each job")
        holder = await database.value(sql("SELECT holder FROM rota.lease WHERE name = $1"), LEASE)
        assert holder.split("/")[0] in ("one", "two")
    assert kernel.asked == [["allow"]]
    assert sorted(kernel.jobs) == sorted(jobs)

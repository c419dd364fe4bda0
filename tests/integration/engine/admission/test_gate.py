"""Jobs that wait for a decision: each is decided once, whoever asks and however often, and none is forgotten."""

import asyncio
from datetime import timedelta

import pytest

from rota.accounting.service import AccountingService
from rota.engine.admission import transitions
from rota.engine.admission.controller import AdmissionController
from rota.engine.admission.decision import DeferAll
from rota.engine.admission.pending_replayer import LEASE, REPLAYED, PendingReplayer
from rota.engine.admission.transitions import change_unqueued_state
from rota.engine.completion.finisher import Finisher
from rota.engine.queries.jobs import JobQueries
from rota.engine.submission.submitter import Submitter
from rota.infra.lease import Leases
from rota.infra.service import Service, Supervisor
from rota.model.job_states import JobState
from rota.model.settings.lifecycle import ReplayerSettings as Pace
from rota.policy.decision_store import DecisionStore
from rota.queue import DeadLetterFilter, Queue
from tests.support.jobs import a_show, task
from tests.support.kernels import AWAY, OPEN, TABLE, Hanging, Table
from tests.support.queue import agreed, sql
from tests.support.waiting import until

AGE = sql("UPDATE rota.job SET ts_updated = ts_updated - $1 * interval '1 s'")
DUE = sql("UPDATE rota.job SET ts_ask_at = clock_timestamp() WHERE ts_ask_at IS NOT NULL")
WAITS = sql("SELECT extract(epoch FROM ts_ask_at - ts_updated)::float8 FROM rota.job")
WORD = sql("""
SELECT word FROM rota.job WHERE pk_job = $1 UNION ALL SELECT word FROM rota.job_done WHERE pk_job = $1""")
BLOCKED = sql("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
STATES = sql("""
SELECT pk_job, state, reason FROM rota.job UNION ALL SELECT pk_job, state, reason FROM rota.job_done ORDER BY 1""")


@pytest.fixture
def kernel():
    return Table()


@pytest.fixture
async def gatekeeper(database, kernel):
    await a_show(database)
    return AdmissionController(database, Finisher(database, Queue(database), AccountingService(database, None)), kernel)


@pytest.fixture
def replayer(database, gatekeeper):
    return PendingReplayer(database, Leases(database), gatekeeper)


async def submitted(database, *topics, **more):
    many = [task(topic=topic, **more) for topic in topics]
    return [one.job for one in await Submitter(database, gate=DeferAll()).submit(many)]


async def states(database):
    return {row["pk_job"]: (row["state"], row["reason"]) for row in await database.rows(STATES)}


async def decided(database):
    return {state for state, _ in (await states(database)).values()} == {"SCHEDULED"}


async def waiting(database):
    return sum(counts["waiting"] for counts in (await agreed(database)).values())


async def test_what_is_decided_happens(database, gatekeeper):
    topics = ("allow", "tight", "deny", "throttle", "approval", "odd")
    allow, tight, deny, throttle, approval, odd = jobs = await submitted(database, *topics)
    await gatekeeper.decide_all(jobs)
    assert await states(database) == {
        allow: ("SCHEDULED", None),
        tight: ("SCHEDULED", None),
        deny: ("DENIED", "safety_denied"),
        throttle: ("PENDING", "policy_throttled"),
        approval: ("APPROVAL_REQUIRED", "approval_required"),
        odd: ("DENIED", "safety_denied"),
    }
    assert await waiting(database) == 2


async def test_every_job_names_the_word_that_was_said_of_it(database, gatekeeper):
    topics = ("allow", "tight", "deny", "throttle", "approval")
    jobs = await submitted(database, *topics)
    await gatekeeper.decide_all(jobs)
    words = DecisionStore(database)
    for topic, job in zip(topics, jobs, strict=True):
        number = await database.value(WORD, job)
        assert (await words.read([number]))[number] == TABLE[topic]


async def test_a_denied_job_has_ended_with_all_its_frames_and_one_dead_letter(database, gatekeeper):
    [job] = await submitted(database, "deny", layer={"frames": 7})
    ended = []
    gatekeeper.on_ended = ended.extend
    await gatekeeper.decide_all([job])
    await gatekeeper.decide_all([job])
    done = await JobQueries(database).get(job)
    assert (done.state, done.layers[0].counts) == (JobState.DENIED, {"DENIED": 7})
    assert [moment.state for moment in done.history] == ["PENDING", "DENIED"]
    [letter] = await Queue(database).dead_letters.find(DeadLetterFilter())
    assert (letter.kind, letter.reason, letter.job, letter.error) == ("job", "safety_denied", job, "rule rule7: no")
    assert [end.job for end in ended] == [job]
    assert await waiting(database) == 0


async def test_what_a_hook_raises_undoes_the_denial(database, gatekeeper):
    [job] = await submitted(database, "deny")

    async def refuse(_tx, _ends):
        raise OSError("not now")

    gatekeeper.finisher.hooks.append(refuse)
    with pytest.raises(OSError, match="not now"):
        await gatekeeper.decide([job])
    assert (await states(database))[job] == ("PENDING", "policy_pending")
    assert await Queue(database).dead_letters.count(DeadLetterFilter()) == 0


async def test_a_policy_that_is_away_makes_jobs_wait_with_that_reason(database, gatekeeper):
    [job] = await submitted(database, "away")
    await gatekeeper.decide_all([job])
    assert (await states(database))[job] == ("PENDING", "policy_unavailable")


async def test_one_job_that_the_policy_fails_on_holds_up_no_other(database, gatekeeper):
    allow, crash, deny = jobs = await submitted(database, "allow", "crash", "deny")
    await gatekeeper.decide_all(jobs)
    assert await states(database) == {
        allow: ("SCHEDULED", None),
        crash: ("PENDING", "policy_unavailable"),
        deny: ("DENIED", "safety_denied"),
    }


async def test_of_two_replicas_that_ask_at_once_one_takes_effect(database, gatekeeper, kernel):
    jobs = await submitted(database, *(["allow", "deny"] * 10))
    both = asyncio.Barrier(2)
    kernel.pause = both.wait
    other = AdmissionController(database, gatekeeper.finisher, kernel)
    one, two = await asyncio.gather(gatekeeper.decide(jobs), other.decide(jobs[::-1]))
    admitted = [*one.admitted, *two.admitted]
    denied = [*one.denied, *two.denied]
    assert sorted(map(str, admitted)) == sorted(map(str, jobs[::2]))
    assert sorted(map(str, denied)) == sorted(map(str, jobs[1::2]))
    assert await waiting(database) == 10
    assert await Queue(database).dead_letters.count(DeadLetterFilter()) == 10


async def test_two_who_hear_different_words_about_the_same_jobs_never_wait_in_a_circle(
    database, gatekeeper, monkeypatch
):
    """Each lets in first what the other lets wait."""
    await gatekeeper.decide_all(await submitted(database, "allow", "throttle"))  # so that nobody waits for new words
    jobs = await submitted(database, *(["a", "b"] * 10))
    rules = [Table(a=TABLE["allow"], b=TABLE["throttle"]), Table(a=TABLE["throttle"], b=TABLE["allow"])]
    keepers = [AdmissionController(database, gatekeeper.finisher, kernel) for kernel in rules]
    real, let_in = transitions.admit, []

    async def admit(*args, **more):
        """Nobody goes on before the other has let in as well, or waits."""
        let_in.append(await real(*args, **more))

        async def other():
            return len(let_in) == 2 or await database.value(BLOCKED)

        await until(other, what="the other one")
        return let_in[-1]

    monkeypatch.setattr(transitions, "admit", admit)
    await asyncio.gather(*(keeper.decide(jobs) for keeper in keepers))
    assert {state for state, _ in (await states(database)).values()} == {"SCHEDULED", "PENDING"}


async def test_a_job_that_was_cancelled_meanwhile_is_not_denied(database, gatekeeper, kernel):
    [job] = await submitted(database, "deny")

    async def cancel():
        await database.run(sql("UPDATE rota.job SET ends_as = 'CANCELLED'"))

    kernel.pause = cancel
    await gatekeeper.decide_all([job])
    assert (await states(database))[job][0] == "PENDING"
    assert await Queue(database).dead_letters.count(DeadLetterFilter()) == 0


@pytest.mark.parametrize(
    "place", ["rota.engine.admission.controller.DECISION_TTL_S", "rota.engine.admission.controller.timedelta"]
)
async def test_a_word_that_is_too_old_is_not_carried_out(database, gatekeeper, monkeypatch, place):
    """By our own clock; and by that of PostgreSQL, for a pause that begins after we looked at ours."""
    [job] = await submitted(database, "allow")
    monkeypatch.setattr(place, -1.0 if place.endswith("DECISION_TTL_S") else lambda **_: timedelta(seconds=-1))
    await gatekeeper.decide_all([job])
    assert (await states(database))[job] == ("PENDING", "policy_unavailable")
    assert await waiting(database) == 0
    monkeypatch.undo()
    await database.run(DUE)
    assert await PendingReplayer(database, Leases(database), gatekeeper).retry_deferred() == 1


async def test_old_orphans_are_replayed_and_counted_and_young_ones_are_not(database, replayer):
    [old] = await submitted(database, "replayed")
    await database.run(AGE, 121)
    [young] = await submitted(database, "allow")
    before = REPLAYED.labels("replayed")._value.get()
    assert await replayer.replay() == 1
    assert await states(database) == {old: ("SCHEDULED", None), young: ("PENDING", "policy_pending")}
    assert REPLAYED.labels("replayed")._value.get() == before + 1
    assert await replayer.replay() == 0


async def test_orphans_beyond_one_batch_are_replayed_oldest_first(database, replayer, kernel, monkeypatch):
    monkeypatch.setattr("rota.engine.admission.pending_replayer.BATCH_JOBS_MAX", 2)
    jobs = []
    for _ in range(5):
        jobs += await submitted(database, "allow")
        await database.run(AGE, 121)
    order = []
    real = replayer.controller.decide

    async def judge(batch):
        order.append(list(batch))
        return await real(batch)

    replayer.controller.decide = judge
    assert await replayer.replay() == 5
    assert order == [jobs[:2], jobs[2:4], jobs[4:]]


async def test_what_says_why_it_waits_is_left_to_who_mends_that(database, replayer, kernel):
    jobs = await submitted(database, "allow", "allow", "allow")
    reasons = ("waiting_on_job", "paused", "approval_required")
    async with database.transaction() as tx:
        for job, reason in zip(jobs, reasons, strict=True):
            await change_unqueued_state(tx, [job], JobState.PENDING, JobState.PENDING, reason)
    await database.run(AGE, 10_000)
    assert (await replayer.replay(), await replayer.retry_deferred()) == (0, 0)
    assert kernel.asked == []


async def test_jobs_without_a_word_are_asked_about_again_once_there_is_one(database, gatekeeper, replayer, kernel):
    jobs = await submitted(database, *(["wait"] * 3))
    kernel.fails = AWAY
    await gatekeeper.decide_all(jobs)
    assert set((await states(database)).values()) == {("PENDING", "policy_unavailable")}
    kernel.fails = None
    assert await replayer.retry_deferred() == 0, "not before its time"
    await database.run(AGE, 121)
    assert await replayer.replay() == 0, "they are no orphans"
    await database.run(DUE)
    assert await replayer.retry_deferred() == 3
    assert await waiting(database) == 3
    assert await database.value(sql("SELECT count(*) FROM rota.job WHERE ts_ask_at IS NULL AND asks IS NULL")) == 3


async def test_silence_is_waited_out_for_longer_each_time(database, gatekeeper, kernel):
    [job] = await submitted(database, "wait")
    kernel.fails = AWAY
    waits = []
    for _ in range(7):
        await gatekeeper.decide_all([job])
        waits.append(round(await database.value(WAITS)))
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    kernel.fails = None
    kernel.said["wait"] = TABLE["throttle"]
    await gatekeeper.decide_all([job])
    kernel.fails = AWAY
    await gatekeeper.decide_all([job])
    assert round(await database.value(WAITS)) == 1, "a word ends the streak"
    assert await database.value(sql("SELECT dispatch_failures FROM rota.job")) == 0


@pytest.mark.parametrize(
    ("topic", "fails", "seconds"), [("throttle", None, 5), ("later", None, 60), ("allow", OPEN, 5)]
)
async def test_throttles_and_an_open_breaker_wait_as_long_as_is_set(
    database, gatekeeper, kernel, topic, fails, seconds
):
    [job] = await submitted(database, topic)
    kernel.fails = fails
    for _ in range(2):
        await gatekeeper.decide_all([job])
        assert round(await database.value(WAITS)) == seconds


async def test_while_the_policy_is_away_a_pass_asks_once(database, gatekeeper, replayer, kernel, monkeypatch):
    monkeypatch.setattr("rota.engine.admission.pending_replayer.BATCH_JOBS_MAX", 2)
    kernel.fails = AWAY
    await gatekeeper.decide_all(await submitted(database, *(["wait"] * 6)))
    await database.run(DUE)
    kernel.questions.clear()
    await replayer.retry_deferred()
    assert kernel.asked == [["wait"]]


async def test_alike_jobs_are_one_question(database, gatekeeper, kernel):
    jobs = await submitted(database, *(["allow"] * 5), "other", *(["allow"] * 5))
    await gatekeeper.decide_all(jobs)
    assert kernel.asked == [["allow", "other"]]
    assert sorted(kernel.jobs) == sorted(jobs)


async def test_a_kernel_that_hangs_holds_nobody_up_for_long(database, gatekeeper, monkeypatch):
    monkeypatch.setattr("rota.engine.admission.controller.KERNEL_TIMEOUT_S", 0.01)
    gatekeeper.kernel = Hanging()
    [job] = await submitted(database, "allow")
    await gatekeeper.decide_all([job])
    assert (await states(database))[job] == ("PENDING", "policy_unavailable")


async def test_too_few_words_are_none(database, gatekeeper, kernel):
    kernel.miscounts = 1
    jobs = await submitted(database, "allow", "other")
    await gatekeeper.decide_all(jobs)
    assert set((await states(database)).values()) == {("PENDING", "policy_unavailable")}


async def test_a_granted_approval_that_nobody_acted_on_is_taken_up(database, replayer, gatekeeper, monkeypatch):
    monkeypatch.setattr("rota.engine.admission.pending_replayer.BATCH_JOBS_MAX", 1)
    jobs = await submitted(database, "approval", "approval", "approval")
    await gatekeeper.decide_all(jobs)
    granted = jobs[1]
    replayer.approvals = Granting(granted)
    assert await replayer.replay() == 0, "not before its time"
    await database.run(AGE, 121)
    assert await replayer.replay() == 1
    held = ("APPROVAL_REQUIRED", "approval_required")
    assert await states(database) == {jobs[0]: held, granted: ("PENDING", "approved"), jobs[2]: held}
    gatekeeper.kernel.said["approval"] = TABLE["allow"]
    await database.run(AGE, 121)
    await replayer.replay()
    assert (await states(database))[granted] == ("SCHEDULED", None)


class Granting:
    def __init__(self, *jobs):
        self.jobs = jobs

    async def granted_jobs(self, jobs):
        return [job for job in jobs if job in self.jobs]


async def test_as_a_service_it_runs_at_once_and_one_of_two_leads(database, gatekeeper, kernel):
    jobs = await submitted(database, *(["allow"] * 5))
    await database.run(AGE, 121)
    supervisor = Supervisor(drain_budget_s=2.0)
    for name in ("one", "two"):
        replayer = PendingReplayer(database, Leases(database, name), gatekeeper, Pace(poll_interval=3600.0))
        supervisor.add(Service(name, replayer.run))
    async with supervisor.running():
        await until(lambda: decided(database), what="a decision about each")
        holder = await database.value(sql("SELECT holder FROM rota.lease WHERE name = $1"), LEASE)
        assert holder.split("/")[0] in ("one", "two")
    assert kernel.asked == [["allow"]]
    assert sorted(kernel.jobs) == sorted(jobs)

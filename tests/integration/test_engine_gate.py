"""Jobs that wait for a decision: each is decided once, whoever asks and however often, and none is forgotten."""

import asyncio

import msgspec
import pytest

from rota.accounting.books import Books
from rota.engine import gatekeeper as gatekeeper_module
from rota.engine.finish import Finisher
from rota.engine.gate import ALLOWED, Decision, Verdict
from rota.engine.gatekeeper import Gatekeeper
from rota.engine.jobs import Jobs
from rota.engine.replay import LEASE, REPLAYED, Replayer
from rota.engine.submit import Submitter
from rota.engine.submit_admit import hold
from rota.infra.lease import Leases
from rota.infra.service import Service, Supervisor
from rota.model.errors import NatsUnavailable
from rota.model.lifecycle import JobState
from rota.model.settings.lifecycle import Replayer as Pace
from rota.queue import DeadLetterFilter, Queue
from tests.ground.databases import cleaned_by, one_database
from tests.ground.jobs import EMPTY, a_show, task
from tests.ground.queues import agreed, sql
from tests.ground.waiting import until

shared_database_url = one_database()
database_url = cleaned_by(EMPTY)

AGE = sql("UPDATE rota.job SET ts_updated = ts_updated - $1 * interval '1 s'")
STATES = sql("""
SELECT pk_job, state, reason FROM rota.job UNION ALL SELECT pk_job, state, reason FROM rota.job_done ORDER BY 1""")
DENY = Decision(Verdict.DENY, "rule 7 says no")
WAIT = Decision(Verdict.WAIT, "policy_unavailable")
APPROVAL = Decision(Verdict.REQUIRE_APPROVAL, "needs_ann")


class Later:
    at_once = False

    def decide(self, _batch):
        raise AssertionError("nobody is asked while jobs are written")


class Words:
    """A policy that says what is written in the job's name, and remembers whom it was asked about."""

    def __init__(self):
        self.asked = []
        self.pause = None
        self.words = {"allow": ALLOWED, "deny": DENY, "wait": WAIT, "approval": APPROVAL}

    async def decide(self, jobs):
        self.asked.append([job.name for job in jobs])
        if self.pause is not None:
            await self.pause()
        if any(job.name == "crash" for job in jobs):
            raise ZeroDivisionError
        if any(job.name == "away" for job in jobs):
            raise NatsUnavailable("The kernel does not answer.")
        return [self.words[job.name] for job in jobs]


@pytest.fixture
def policy():
    return Words()


@pytest.fixture
async def gatekeeper(database, policy):
    await a_show(database)
    return Gatekeeper(database, Finisher(database, Queue(database), Books(database, None)), policy)


@pytest.fixture
def replayer(database, gatekeeper):
    return Replayer(database, Leases(database), gatekeeper)


async def submitted(database, *names, **more):
    many = [msgspec.structs.replace(task(**more), name=name) for name in names]
    return [one.job for one in await Submitter(database, gate=Later()).submit(many)]


async def states(database):
    return {row["pk_job"]: (row["state"], row["reason"]) for row in await database.rows(STATES)}


async def decided(database):
    return {state for state, _ in (await states(database)).values()} == {"SCHEDULED"}


async def waiting(database):
    return sum(counts["waiting"] for counts in (await agreed(database)).values())


async def test_what_is_decided_happens(database, gatekeeper):
    allow, deny, wait, approval = jobs = await submitted(database, "allow", "deny", "wait", "approval")
    await gatekeeper.judge_all(jobs)
    assert await states(database) == {
        allow: ("SCHEDULED", None),
        deny: ("DENIED", "safety_denied"),
        wait: ("PENDING", "policy_unavailable"),
        approval: ("APPROVAL_REQUIRED", "needs_ann"),
    }
    assert await waiting(database) == 1


async def test_a_denied_job_has_ended_with_all_its_frames_and_one_dead_letter(database, gatekeeper):
    [job] = await submitted(database, "deny", layer={"frames": 7})
    ended = []
    gatekeeper.on_ended = ended.extend
    await gatekeeper.judge_all([job])
    await gatekeeper.judge_all([job])
    done = await Jobs(database).get(job)
    assert (done.state, done.layers[0].counts) == (JobState.DENIED, {"DENIED": 7})
    assert [moment.state for moment in done.history] == ["PENDING", "DENIED"]
    [letter] = await Queue(database).dead_letters.find(DeadLetterFilter())
    assert (letter.kind, letter.reason, letter.job, letter.error) == ("job", "safety_denied", job, "rule 7 says no")
    assert [end.job for end in ended] == [job]
    assert await waiting(database) == 0


async def test_what_a_hook_raises_undoes_the_denial(database, gatekeeper):
    [job] = await submitted(database, "deny")

    async def refuse(_tx, _ends):
        raise OSError("not now")

    gatekeeper.finisher.hooks.append(refuse)
    with pytest.raises(OSError, match="not now"):
        await gatekeeper.judge([job])
    assert (await states(database))[job] == ("PENDING", "policy_pending")
    assert await Queue(database).dead_letters.count(DeadLetterFilter()) == 0


async def test_a_policy_that_is_away_makes_jobs_wait_with_that_reason(database, gatekeeper):
    [job] = await submitted(database, "away")
    await gatekeeper.judge_all([job])
    assert (await states(database))[job] == ("PENDING", "policy_unavailable")


async def test_one_job_that_the_policy_fails_on_holds_up_no_other(database, gatekeeper):
    allow, crash, deny = jobs = await submitted(database, "allow", "crash", "deny")
    await gatekeeper.judge_all(jobs)
    assert await states(database) == {
        allow: ("SCHEDULED", None),
        crash: ("PENDING", "policy_unavailable"),
        deny: ("DENIED", "safety_denied"),
    }


async def test_of_two_replicas_that_ask_at_once_one_takes_effect(database, gatekeeper, policy):
    jobs = await submitted(database, *(["allow", "deny"] * 10))
    both = asyncio.Barrier(2)
    policy.pause = both.wait
    other = Gatekeeper(database, gatekeeper.finisher, policy)
    one, two = await asyncio.gather(gatekeeper.judge(jobs), other.judge(jobs[::-1]))
    admitted = [*one.admitted, *two.admitted]
    denied = [*one.denied, *two.denied]
    assert sorted(map(str, admitted)) == sorted(map(str, jobs[::2]))
    assert sorted(map(str, denied)) == sorted(map(str, jobs[1::2]))
    assert await waiting(database) == 10
    assert await Queue(database).dead_letters.count(DeadLetterFilter()) == 10


async def test_a_job_that_was_cancelled_meanwhile_is_not_denied(database, gatekeeper, policy):
    [job] = await submitted(database, "deny")

    async def cancel():
        await database.run(sql("UPDATE rota.job SET ends_as = 'CANCELLED'"))

    policy.pause = cancel
    await gatekeeper.judge_all([job])
    assert (await states(database))[job][0] == "PENDING"
    assert await Queue(database).dead_letters.count(DeadLetterFilter()) == 0


async def test_a_word_that_is_too_old_is_not_carried_out(database, gatekeeper, monkeypatch):
    [job] = await submitted(database, "allow")
    monkeypatch.setattr(gatekeeper_module, "WORD_S", -1.0)
    await gatekeeper.judge_all([job])
    assert (await states(database))[job] == ("PENDING", "policy_unavailable")
    assert await waiting(database) == 0


async def test_old_orphans_are_replayed_and_counted_and_young_ones_are_not(database, replayer):
    [old] = await submitted(database, "allow", topic="replayed")
    await database.run(AGE, 121)
    [young] = await submitted(database, "allow")
    before = REPLAYED.labels("replayed")._value.get()
    assert await replayer.replay() == 1
    assert await states(database) == {old: ("SCHEDULED", None), young: ("PENDING", "policy_pending")}
    assert REPLAYED.labels("replayed")._value.get() == before + 1
    assert await replayer.replay() == 0


async def test_orphans_beyond_one_batch_are_replayed_oldest_first(database, replayer, policy, monkeypatch):
    monkeypatch.setattr("rota.engine.replay.BATCH", 2)
    jobs = []
    for _ in range(5):
        jobs += await submitted(database, "allow")
        await database.run(AGE, 121)
    order = []
    real = replayer.gatekeeper.judge

    async def judge(batch):
        order.append(list(batch))
        return await real(batch)

    replayer.gatekeeper.judge = judge
    assert await replayer.replay() == 5
    assert order == [jobs[:2], jobs[2:4], jobs[4:]]


async def test_what_says_why_it_waits_is_left_to_who_mends_that(database, replayer, policy):
    jobs = await submitted(database, "allow", "allow", "allow")
    reasons = ("waiting_on_job", "paused", "approval_required")
    async with database.transaction() as tx:
        for job, reason in zip(jobs, reasons, strict=True):
            await hold(tx, [job], JobState.PENDING, JobState.PENDING, reason)
    await database.run(AGE, 10_000)
    assert (await replayer.replay(), await replayer.ask_again()) == (0, 0)
    assert policy.asked == []


async def test_jobs_without_a_word_are_asked_about_again_once_there_is_one(database, gatekeeper, replayer, policy):
    jobs = await submitted(database, *(["wait"] * 3))
    await gatekeeper.judge_all(jobs)
    assert await replayer.ask_again() == 0, "not before the delay"
    await database.run(AGE, 6)
    assert await replayer.replay() == 0, "they are no orphans"
    policy.words["wait"] = ALLOWED
    assert await replayer.ask_again() == 3
    assert await waiting(database) == 3


async def test_while_the_policy_is_away_a_pass_asks_once(database, gatekeeper, replayer, policy, monkeypatch):
    monkeypatch.setattr("rota.engine.replay.BATCH", 2)
    await gatekeeper.judge_all(await submitted(database, *(["wait"] * 6)))
    await database.run(AGE, 6)
    policy.asked.clear()
    await replayer.ask_again()
    assert policy.asked == [["wait", "wait"]]


async def test_a_granted_approval_that_nobody_acted_on_is_taken_up(database, replayer, gatekeeper, monkeypatch):
    monkeypatch.setattr("rota.engine.replay.BATCH", 1)
    jobs = await submitted(database, "approval", "approval", "approval")
    await gatekeeper.judge_all(jobs)
    granted = jobs[1]
    replayer.approvals = Granting(granted)
    assert await replayer.replay() == 0, "not before its time"
    await database.run(AGE, 121)
    assert await replayer.replay() == 1
    held = ("APPROVAL_REQUIRED", "needs_ann")
    assert await states(database) == {jobs[0]: held, granted: ("PENDING", "approved"), jobs[2]: held}
    gatekeeper.policy.words["approval"] = ALLOWED
    await database.run(AGE, 121)
    await replayer.replay()
    assert (await states(database))[granted] == ("SCHEDULED", None)


class Granting:
    def __init__(self, *jobs):
        self.jobs = jobs

    async def granted(self, jobs):
        return [job for job in jobs if job in self.jobs]


async def test_as_a_service_it_runs_at_once_and_one_of_two_leads(database, gatekeeper, policy):
    jobs = await submitted(database, *(["allow"] * 5))
    await database.run(AGE, 121)
    supervisor = Supervisor(drain_budget_s=2.0)
    for name in ("one", "two"):
        replayer = Replayer(database, Leases(database, name), gatekeeper, Pace(poll_interval=3600.0))
        supervisor.add(Service(name, replayer.run))
    async with supervisor.running():
        await until(lambda: decided(database), what="a decision about each")
        holder = await database.value(sql("SELECT holder FROM rota.lease WHERE name = $1"), LEASE)
        assert holder.split("/")[0] in ("one", "two")
    assert policy.asked == [["allow"] * len(jobs)]

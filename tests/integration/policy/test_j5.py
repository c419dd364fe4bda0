"""J5: no job that the policy did not allow reaches a worker, whatever the kernel does and however it is submitted."""

import asyncio
from itertools import cycle

import pytest

from rota import runtime
from rota.engine.admission.decision import DeferAll
from rota.engine.submission.submitter import Submitter
from rota.infra.nats import BusMessage
from rota.model.approvals import Voter
from rota.model.errors import BreakerOpen, SelfApprovalDenied, Unavailable
from rota.model.identity.principals import Principal, is_unverified
from rota.model.jobs.submission import LayerSpec, Submission, encode_submission
from rota.model.policy.decision import PolicyDecision, PolicyEffect
from rota.model.protocol import SUBMIT_SUBJECT
from tests.support.jobs import NO_EVENTS
from tests.support.kernels import TABLE, decision
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, seen
from tests.support.waiting import until

KINDS = {"allow": 1, "tight": 2, "deny": 3, "approval": 4, "throttle": 5, "odd": 6}
MAY_RUN = {1, 2}
RAN_WITHOUT_DECISION = sql("""
SELECT count(*) FROM (SELECT word, state FROM rota.job UNION ALL SELECT word, state FROM rota.job_done) AS j
WHERE j.word IS NULL AND j.state IN ('SCHEDULED', 'DISPATCHED', 'RUNNING', 'SUCCEEDED', 'FAILED')""")
DUE = sql("""
UPDATE rota.job SET ts_ask_at = now() WHERE pk_job IN (
  SELECT pk_job FROM rota.job WHERE reason = 'policy_unavailable' ORDER BY pk_job FOR UPDATE SKIP LOCKED)""")
BY_LABEL = sql("""
SELECT DISTINCT j.labels ->> 'as' AS kind, j.state FROM (
  SELECT labels, state FROM rota.job UNION ALL SELECT labels, state FROM rota.job_done) AS j""")


class UnreliableKernel:
    """Answers by a label; fails in a different way on each call until `healthy`."""

    def __init__(self):
        self.healthy = False
        self.calls = 0
        self._failures = cycle(("away", "breaker", "crash", "short", "long", "hang", "garbage", "killed", "well"))
        self.decisions = dict(TABLE)

    async def check(self, questions):
        self.calls += 1
        decisions = [self.decisions[each.asked.labels["as"]] for each in questions]
        match "well" if self.healthy else next(self._failures):
            case "away":
                raise Unavailable("The kernel does not answer.")
            case "breaker":
                raise BreakerOpen("safety kernel circuit open")
            case "crash":
                raise RuntimeError("what now")
            case "short":
                return decisions[1:]
            case "long":
                return [*decisions, decision(PolicyEffect.ALLOW)]
            case "hang":
                await asyncio.Event().wait()
            case "garbage":
                return [
                    PolicyDecision(says="ALLOW_EVERYTHING", snapshot="x") if at % 2 else None
                    for at, _ in enumerate(decisions)
                ]
            case "killed":
                raise asyncio.CancelledError
        return decisions


@pytest.fixture
def kernel(monkeypatch):
    kernel = UnreliableKernel()
    monkeypatch.setattr(runtime, "build_policy_kernel", lambda *_: kernel)
    monkeypatch.setattr("rota.engine.engine.kernel_timeout_s", lambda _safety: 0.2)
    monkeypatch.setattr("rota.engine.admission.precheck.COOL_DOWN_S", 0.0)
    return kernel


@pytest.fixture
async def cluster(kernel, database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        await cluster.show()
        await cluster.server()
        await cluster.worker()
        yield cluster


def submission_of(kind):
    layer = LayerSpec(task="square", input={"args": [KINDS[kind]], "kwargs": {}})
    return Submission(show="film", layers=(layer,), labels={"as": kind})


async def submit_every_way(cluster, kinds):
    """Submit by both servers, in a caller transaction, over the bus, and without a kernel."""
    one, two = (replica.engine.submitter for replica in cluster.replicas)
    batch = [submission_of(kind) for kind in kinds]
    calls = [
        one.submit(batch),
        two.submit(batch),
        Submitter(cluster.database, NO_EVENTS, gate=DeferAll()).submit(batch),
    ]
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, list), result
    async with cluster.database.transaction() as tx:
        await one.submit(batch, on=tx)
    messages = [
        BusMessage(subject=SUBMIT_SUBJECT, data=encode_submission(each), msg_id=f"{id(batch)}:{n}")
        for n, each in enumerate(batch)
    ]
    await cluster.replica.bus.publish_many(messages)


async def states(cluster):
    return {(row["kind"], row["state"]) for row in await cluster.database.rows(BY_LABEL)}


async def settled(cluster):
    await cluster.database.run(DUE)
    found = {state for kind, state in await states(cluster) if kind in ("allow", "tight", "deny", "odd")}
    held = {state for kind, state in await states(cluster) if kind == "approval"}
    return found == {"SUCCEEDED", "DENIED"} and held == {"APPROVAL_REQUIRED"}


async def test_only_allowed_jobs_run_whatever_the_kernel_does(cluster, kernel):
    for _ in range(4):
        await submit_every_way(cluster, KINDS)
        assert set(seen.get("square", [])) <= MAY_RUN
    kernel.healthy = True
    await until(lambda: settled(cluster), within_s=60.0, what="a decision for each job")
    assert set(seen["square"]) == MAY_RUN
    assert await cluster.database.value(RAN_WITHOUT_DECISION) == 0
    assert dict(await states(cluster)) == {
        "allow": "SUCCEEDED",
        "tight": "SUCCEEDED",
        "deny": "DENIED",
        "odd": "DENIED",
        "approval": "APPROVAL_REQUIRED",
        "throttle": "PENDING",
    }
    await approved_then_denied(cluster, kernel)


async def approved_then_denied(cluster, kernel):
    """Approved jobs are checked once more: a policy that denies them by then wins. Those that no key submitted are
    rejected."""
    kernel.decisions["approval"] = TABLE["deny"]
    approver, ann = cluster.replica.engine.approver, Voter(Principal("ann"), "key:ann:1", is_operator=True)
    for each in await approver.approvals.list(most=100):
        if is_unverified(each.principal):
            with pytest.raises(SelfApprovalDenied):
                await approver.approve(each, ann)
            await approver.reject(each, ann)
        else:
            await approver.approve(each, ann)

    async def denied():
        return {state for kind, state in await states(cluster) if kind == "approval"} == {"DENIED"}

    await until(denied, within_s=30.0, what="the denial of the approved jobs")
    assert set(seen["square"]) == MAY_RUN

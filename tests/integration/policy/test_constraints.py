"""Policy constraints are enforced: runtime, retries, artifact bytes and concurrent jobs."""

import asyncio
import json

import pytest

from rota import runtime
from rota.engine.dispatch.concurrency_limits import ConcurrencyLimiter
from rota.model.jobs.submission import LayerSpec, Submission
from rota.model.jobs.work import Work
from rota.model.policy.constraints import apply_constraints
from rota.model.policy.decision import Constraints, PolicyBudgets, PolicyEffect
from rota.model.protocol import Artifact, AttemptResult, AttemptStatus
from rota.queue import DeadLetterFilter
from tests.support.kernels import Table, decision
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, gates, hanging, seen
from tests.support.waiting import until

REASONS = sql("SELECT pk_job, reason FROM rota.job")
PROCS = sql("SELECT token, pk_host FROM rota.proc")


@pytest.fixture
def kernel(monkeypatch):
    kernel = Table()
    monkeypatch.setattr(runtime, "build_policy_kernel", lambda *_: kernel)
    return kernel


@pytest.fixture
async def cluster(kernel, database_url, redis_url, nats_url, bus_prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        await cluster.show()
        cluster.submitter = cluster.replica.engine.submitter
        yield cluster
        for gate in gates.values():
            gate.set()
        await cluster.quiet()


def set_constraints(kernel, redaction="", **budgets):
    kernel.decisions["default"] = decision(
        PolicyEffect.ALLOW_WITH_CONSTRAINTS,
        "tight",
        constraints=Constraints(
            budgets=PolicyBudgets(**budgets), redaction_level=redaction, sandbox={"network": False}
        ),
    )


async def command(cluster, script, **layer):
    spec = LayerSpec(argv=("sh", "-c", script), **layer)
    [one] = await cluster.submitter.submit([Submission(show="film", layers=(spec,))])
    return one.job


async def ends(cluster, job):
    return [(each[1], each[2], each[3]) for each in await cluster.ends(job)]


async def test_frame_runs_under_its_constraints_and_sees_them_in_its_environment(cluster, kernel, tmp_path):
    set_constraints(
        kernel, "strict", max_runtime_ms=60_000, max_retries=3, max_artifact_bytes=1000, max_concurrent_jobs=7
    )
    await cluster.worker()
    out = tmp_path / "env"
    job = await command(cluster, f"env > {out}", env={"ROTA_MAX_RETRIES": "999", "MINE": "1"})
    assert await cluster.ended(job) == "SUCCEEDED"
    env = dict(line.split("=", 1) for line in out.read_text().splitlines())
    assert json.loads(env["ROTA_POLICY_CONSTRAINTS"])["sandbox"] == {"network": False}
    names = ("ROTA_REDACTION_LEVEL", "ROTA_MAX_ARTIFACT_BYTES", "ROTA_MAX_CONCURRENT_JOBS", "ROTA_MAX_RETRIES", "MINE")
    assert [env[name] for name in names] == ["strict", "1000", "7", "3", "1"]
    assert (await cluster.jobs.get(job)).policy.rule == "tight"


async def test_policy_runtime_limit_overrides_the_requested_timeout(cluster, kernel):
    set_constraints(kernel, max_runtime_ms=200)
    await cluster.worker()
    job = await command(cluster, "sleep 60", timeout_s=30.0, kill_after_s=0.1)
    assert await cluster.ended(job) == "TIMEOUT"


async def test_policy_limits_the_number_of_attempts(cluster, kernel):
    set_constraints(kernel, max_retries=1)
    await cluster.worker()
    job = await cluster.submit("flaky", 9, layer={"retries": 5})
    assert await cluster.ended(job) == "FAILED"
    assert await ends(cluster, job) == [(1, "RETRIED", "retry"), (2, "FAILED", "max_retries_exceeded")]
    [dead_letter] = await cluster.replica.queue.dead_letters.find(DeadLetterFilter())
    assert (dead_letter.reason, dead_letter.job) == ("max_retries_exceeded", job)
    seen["flaky"].clear()
    plain = await cluster.submit("flaky", 9, layer={"retries": 0})
    assert await cluster.ended(plain) == "FAILED"
    assert [each[2] for each in await ends(cluster, plain)] == ["retry"], "it asked for no more retries than allowed"


async def test_policy_limits_the_artifact_bytes_of_a_frame(cluster, kernel):
    set_constraints(kernel, max_artifact_bytes=100)
    await cluster.worker()
    small = await command(cluster, "head -c 100 /dev/zero > a", artifacts=("a",))
    assert await cluster.ended(small) == "SUCCEEDED"
    large = await command(cluster, "head -c 60 /dev/zero > a; head -c 60 /dev/zero > b", artifacts=("a", "b"))
    assert await cluster.ended(large) == "FAILED"
    assert await ends(cluster, large) == [(1, "FAILED", "artifact_limit")]


async def test_server_refuses_artifacts_over_the_limit_that_a_worker_accepted(cluster, kernel):
    set_constraints(kernel, max_artifact_bytes=100)
    await cluster.worker()
    hanging("a")
    job = await cluster.submit("hang", "a")
    await cluster.running("a")
    row = await cluster.database.row(PROCS)
    pointer = f"file:{'00' * 32}:90"
    artifacts = (Artifact("a", pointer=pointer), Artifact("b", data=b"x" * 11))
    await cluster.replica.engine.finisher.finish_attempts(
        {row["pk_host"]: [AttemptResult(row["token"], AttemptStatus.SUCCEEDED, b"\x01", artifacts=artifacts)]}
    )
    assert await cluster.ended(job) == "FAILED"
    [end] = await cluster.jobs.frame_ends((await cluster.jobs.get(job)).layers[0].id)
    assert (end.code, end.artifacts, end.value) == ("artifact_limit", None, None)


async def test_policy_limits_the_concurrent_jobs_of_a_show(cluster, kernel):
    set_constraints(kernel, max_concurrent_jobs=2)
    await cluster.worker(slots=20)
    for name in ("a", "b", "c"):
        hanging(name)
    jobs = {}
    for name in ("a", "b"):
        jobs[name] = await cluster.submit("hang", name, frames=2)
        await cluster.running(name, 2)
    jobs["c"] = await cluster.submit("hang", "c", frames=2)

    async def has_reason():
        rows = await cluster.database.rows(REASONS)
        return {row["pk_job"]: row["reason"] for row in rows}.get(jobs["c"]) == "tenant_limit"

    await until(has_reason, what="the wait reason")
    explained = await cluster.replica.engine.explainer.explain(jobs["c"])
    assert (explained.reasons[0].code, explained.reasons[0].amounts.limit) == ("tenant_limit", 2)
    gates["a"].set()
    await cluster.running("c", 2)
    gates["b"].set(), gates["c"].set()
    for job in jobs.values():
        assert await cluster.ended(job) == "SUCCEEDED"


async def test_two_limiters_together_respect_the_policy_limit(cluster, kernel):
    set_constraints(kernel, max_concurrent_jobs=3)
    jobs = [await cluster.submit("noop") for _ in range(10)]
    show = await cluster.database.value(sql("SELECT pk_show FROM rota.show"))
    one, two = ConcurrencyLimiter(cluster.database), ConcurrencyLimiter(cluster.database)
    admitted = await asyncio.gather(one.admit(show, jobs), two.admit(show, jobs[::-1]))
    assert admitted[0] == admitted[1]
    assert len(admitted[0]) == 3
    assert (await cluster.replica.engine.dispatcher.reader.read_limits()).limited == {show}
    await cluster.worker()
    for job in jobs:
        assert await cluster.ended(job) == "SUCCEEDED"


@pytest.mark.parametrize(
    ("asked_s", "allowed_ms", "holds_s"),
    [(0.0, 0, 0.0), (5.0, 0, 5.0), (0.0, 2000, 2.0), (5.0, 2000, 2.0), (1.0, 2000, 1.0)],
)
def test_lower_of_requested_and_allowed_runtime_applies(asked_s, allowed_ms, holds_s):
    work = apply_constraints(
        Work(task="t", timeout_s=asked_s), Constraints(budgets=PolicyBudgets(max_runtime_ms=allowed_ms))
    )
    assert work.timeout_s == holds_s

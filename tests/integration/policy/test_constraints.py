"""Constraints of a policy act: on the time of a frame, its retries, what it leaves behind, and how many jobs run."""

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
from tests.support.kernels import Table, word
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
async def farm(kernel, database_url, redis_url, nats_url, bus_prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        farm.submitter = farm.replica.engine.submitter
        yield farm
        for gate in gates.values():
            gate.set()
        await farm.quiet()


def under(kernel, redaction="", **budgets):
    kernel.said["default"] = word(
        PolicyEffect.ALLOW_WITH_CONSTRAINTS,
        "tight",
        constraints=Constraints(
            budgets=PolicyBudgets(**budgets), redaction_level=redaction, sandbox={"network": False}
        ),
    )


async def command(farm, script, **layer):
    spec = LayerSpec(argv=("sh", "-c", script), **layer)
    [one] = await farm.submitter.submit([Submission(show="film", layers=(spec,))])
    return one.job


async def ends(farm, job):
    return [(each[1], each[2], each[3]) for each in await farm.ends(job)]


async def test_a_frame_runs_under_its_constraints_and_is_told_them(farm, kernel, tmp_path):
    under(kernel, "strict", max_runtime_ms=60_000, max_retries=3, max_artifact_bytes=1000, max_concurrent_jobs=7)
    await farm.worker()
    out = tmp_path / "env"
    job = await command(farm, f"env > {out}", env={"ROTA_MAX_RETRIES": "999", "MINE": "1"})
    assert await farm.ended(job) == "SUCCEEDED"
    env = dict(line.split("=", 1) for line in out.read_text().splitlines())
    assert json.loads(env["ROTA_POLICY_CONSTRAINTS"])["sandbox"] == {"network": False}
    told = ("ROTA_REDACTION_LEVEL", "ROTA_MAX_ARTIFACT_BYTES", "ROTA_MAX_CONCURRENT_JOBS", "ROTA_MAX_RETRIES", "MINE")
    assert [env[name] for name in told] == ["strict", "1000", "7", "3", "1"]
    assert (await farm.jobs.get(job)).policy.rule == "tight"


async def test_a_frame_is_stopped_when_its_policy_says_and_not_when_it_asks(farm, kernel):
    under(kernel, max_runtime_ms=200)
    await farm.worker()
    job = await command(farm, "sleep 60", timeout_s=30.0, kill_after_s=0.1)
    assert await farm.ended(job) == "TIMEOUT"


async def test_no_more_attempts_are_made_than_the_policy_allows(farm, kernel):
    under(kernel, max_retries=1)
    await farm.worker()
    job = await farm.submit("flaky", 9, layer={"retries": 5})
    assert await farm.ended(job) == "FAILED"
    assert await ends(farm, job) == [(1, "RETRIED", "retry"), (2, "FAILED", "max_retries_exceeded")]
    [letter] = await farm.replica.queue.dead_letters.find(DeadLetterFilter())
    assert (letter.reason, letter.job) == ("max_retries_exceeded", job)
    seen["flaky"].clear()
    plain = await farm.submit("flaky", 9, layer={"retries": 0})
    assert await farm.ended(plain) == "FAILED"
    assert [each[2] for each in await ends(farm, plain)] == ["retry"], "it asked for no more than it may"


async def test_a_frame_leaves_no_more_behind_than_the_policy_allows(farm, kernel):
    under(kernel, max_artifact_bytes=100)
    await farm.worker()
    small = await command(farm, "head -c 100 /dev/zero > a", artifacts=("a",))
    assert await farm.ended(small) == "SUCCEEDED"
    large = await command(farm, "head -c 60 /dev/zero > a; head -c 60 /dev/zero > b", artifacts=("a", "b"))
    assert await farm.ended(large) == "FAILED"
    assert await ends(farm, large) == [(1, "FAILED", "artifact_limit")]


async def test_what_a_worker_lets_pass_the_server_refuses(farm, kernel):
    under(kernel, max_artifact_bytes=100)
    await farm.worker()
    hanging("a")
    job = await farm.submit("hang", "a")
    await farm.running("a")
    row = await farm.database.row(PROCS)
    pointer = f"file:{'00' * 32}:90"
    left = (Artifact("a", pointer=pointer), Artifact("b", data=b"x" * 11))
    await farm.replica.engine.finisher.finish_attempts(
        row["pk_host"], [AttemptResult(row["token"], AttemptStatus.SUCCEEDED, b"\x01", artifacts=left)]
    )
    assert await farm.ended(job) == "FAILED"
    [end] = await farm.jobs.frame_ends((await farm.jobs.get(job)).layers[0].id)
    assert (end.code, end.artifacts, end.value) == ("artifact_limit", None, None)


async def test_so_many_jobs_of_the_show_run_at_once_as_the_policy_says(farm, kernel):
    under(kernel, max_concurrent_jobs=2)
    await farm.worker(slots=20)
    for name in ("a", "b", "c"):
        hanging(name)
    jobs = {}
    for name in ("a", "b"):
        jobs[name] = await farm.submit("hang", name, frames=2)
        await farm.running(name, 2)
    jobs["c"] = await farm.submit("hang", "c", frames=2)

    async def told():
        rows = await farm.database.rows(REASONS)
        return {row["pk_job"]: row["reason"] for row in rows}.get(jobs["c"]) == "tenant_limit"

    await until(told, what="the reason")
    explained = await farm.replica.engine.explainer.explain(jobs["c"])
    assert (explained.reasons[0].code, explained.reasons[0].amounts.limit) == ("tenant_limit", 2)
    gates["a"].set()
    await farm.running("c", 2)
    gates["b"].set(), gates["c"].set()
    for job in jobs.values():
        assert await farm.ended(job) == "SUCCEEDED"


async def test_two_dispatchers_at_once_let_in_no_more_than_the_policy_says(farm, kernel):
    under(kernel, max_concurrent_jobs=3)
    jobs = [await farm.submit("noop") for _ in range(10)]
    show = await farm.database.value(sql("SELECT pk_show FROM rota.show"))
    one, two = ConcurrencyLimiter(farm.database), ConcurrencyLimiter(farm.database)
    let_in = await asyncio.gather(one.admit(show, jobs), two.admit(show, jobs[::-1]))
    assert let_in[0] == let_in[1]
    assert len(let_in[0]) == 3
    await one.refresh()
    assert one.limited == {show}
    await farm.worker()
    for job in jobs:
        assert await farm.ended(job) == "SUCCEEDED"


@pytest.mark.parametrize(
    ("asked_s", "allowed_ms", "holds_s"),
    [(0.0, 0, 0.0), (5.0, 0, 5.0), (0.0, 2000, 2.0), (5.0, 2000, 2.0), (1.0, 2000, 1.0)],
)
def test_the_lower_of_both_times_holds(asked_s, allowed_ms, holds_s):
    work = apply_constraints(
        Work(task="t", timeout_s=asked_s), Constraints(budgets=PolicyBudgets(max_runtime_ms=allowed_ms))
    )
    assert work.timeout_s == holds_s

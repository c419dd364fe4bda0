"""What a policy costs the pipeline: single jobs with a kernel to be asked about each, and without, lap by lap.

The kernel is a process of its own, asked over gRPC by whoever submits and by the server; its policy has a hundred
rules, of which the last allows. Without it every job is allowed by nobody. Everything else is as in `e2e`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final
from uuid import UUID

from bench.e2e.deployment import Farm, farm, job_of, prepare
from bench.e2e.setup import Ground, one_ground
from bench.report import Figure, Report
from rota.engine.admission.decision import DeferAll
from rota.engine.admission.precheck import AdmissionPrecheck
from rota.engine.events.sink import DiscardedEvents
from rota.engine.submission.submitter import Submitter
from rota.model.errors import Unavailable
from rota.model.ids import JobId
from rota.model.jobs.validation import validate_submission
from rota.model.settings import Settings
from rota.model.settings.lifecycle import SafetyKernelSettings, SafetySettings
from rota.policy.grpc.client import RemoteKernel
from rota.policy.request_builder import PolicyRequestBuilder

MADE: Final = "policy_made"
RULES: Final = 100
START_S: Final = 30.0
_NOBODY: Final = UUID(int=0)


def policy_text() -> str:
    """Rules of several kinds, none of them for the jobs of this benchmark but the last."""
    kinds = (
        "match: {{topics: [other.t{n}]}}, decision: allow",
        'match: {{topics: ["other.p{n}.*"]}}, decision: deny',
        "match: {{shows: [show{n}]}}, decision: throttle",
        'match: {{labels: {{env: "e{n}*"}}}}, decision: require_approval',
        "match: {{risk_tags: [risk{n}]}}, decision: deny",
    )
    rules = "".join(f"  - {{id: r{n}, {kinds[n % len(kinds)].format(n=n)}}}\n" for n in range(RULES - 1))
    return f"rules:\n{rules}  - {{id: rest, decision: allow}}\n"


def run(quick: bool) -> Report:
    return asyncio.run(measure(rounds=3 if quick else 9, jobs=5_000 if quick else 20_000))


async def measure(rounds: int, jobs: int) -> Report:
    async with one_ground() as ground, _kernel(ground) as addr:
        await prepare(ground, MADE)
        ratios, rates, bare = [], [], []
        for number in range(rounds):
            both = [await _lap(ground, jobs, each) for each in ((addr, "") if number % 2 else ("", addr))]
            with_policy, without = both if number % 2 else reversed(both)
            ratios.append(with_policy / without)
            rates.append(with_policy)
            bare.append(without)
    note = f"single jobs, {RULES} rules over gRPC / no policy"
    return Report(
        [
            Figure("pipeline_with_policy", ratios, bar=0.85, higher_is_better=True, note=note),
            Figure("jobs_per_s_with_policy", rates),
            Figure("jobs_per_s_without", bare),
            Figure(
                "asking_us_per_job", [_asking_us() for _ in range(rounds)], bar=3.0, note="questions about 500 plans"
            ),
        ]
    )


async def _lap(ground: Ground, jobs: int, addr: str) -> float:
    """Jobs a second, from the first submission to the commit of the last end."""
    await ground.postgres.create("lap", MADE)
    try:
        more = {"SAFETY_KERNEL_ADDR": addr} if addr else {}
        async with farm(ground, "lap", more=more) as running, _submitting(running, addr):
            return (await running.jobs(jobs)).per_s
    finally:
        await ground.postgres.drop("lap")


@asynccontextmanager
async def _submitting(running: Farm, addr: str) -> AsyncIterator[None]:
    """As servers do: the policy is asked before jobs are written."""
    if not addr:
        yield
        return
    kernel = _client(addr)
    running.submitter = Submitter(
        running.database, DiscardedEvents(), gate=DeferAll(), ahead=AdmissionPrecheck(running.database, kernel)
    )
    try:
        yield
    finally:
        await kernel.close()


def _client(addr: str) -> RemoteKernel:
    """One that asks however often it failed."""
    safety = SafetySettings(circuit_fail_budget=1_000_000)
    return RemoteKernel(Settings(safety_kernel=SafetyKernelSettings(addr=addr), safety=safety), None)


@asynccontextmanager
async def _kernel(ground: Ground) -> AsyncIterator[str]:
    path = ground.folder / "policy.yaml"
    path.write_text(policy_text())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "ROTA_POLICY_FILE": str(path),
        "ROTA_SAFETY_KERNEL_PORT": str(port),
        "ROTA_SAFETY_KERNEL_HEALTH_PORT": "0",
        "ROTA_LOG_LEVEL": "error",
    }
    words = (sys.executable, "-P", "-m", "rota.cli", "kernel")
    process = await asyncio.create_subprocess_exec(*words, env=env, cwd=ground.folder)
    async with AsyncExitStack() as closing:
        closing.push_async_callback(process.wait)
        closing.callback(process.terminate)
        addr = f"127.0.0.1:{port}"
        await _until_it_answers(addr)
        yield addr


async def _until_it_answers(addr: str) -> None:
    kernel, give_up_at = _client(addr), time.monotonic() + START_S
    [question] = PolicyRequestBuilder().group_submissions([JobId(_NOBODY)], [validate_submission(job_of(0))]).questions
    while True:
        try:
            await kernel.check([question])
        except Unavailable:
            if time.monotonic() > give_up_at:
                raise
            await asyncio.sleep(0.1)
        else:
            await kernel.close()
            return


def _asking_us() -> float:
    """Of 500 jobs of one task with a payload each, as they come in one batch."""
    plans = [validate_submission(job_of(number)) for number in range(500)]
    jobs, asking = [JobId(_NOBODY)] * 500, PolicyRequestBuilder()
    took = []
    for _ in range(20):
        began = time.perf_counter()
        asking.group_submissions(jobs, plans)
        took.append(time.perf_counter() - began)
    return statistics.median(took) / 500 * 1e6

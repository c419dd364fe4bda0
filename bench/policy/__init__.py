"""Policy: how many jobs a kernel decides about in a second, here and over gRPC, and how long a caller waits.

The rules are a mix: most are for one topic or for topics that begin alike, others for a show, a label, a risk tag, and
one in ten has a condition. The jobs are of two hundred kinds; `new` ones were never seen before, so nothing of what is
remembered helps. The kernel over gRPC is a process of its own, asked by one client, which is Python too: on a machine
of two cores a figure is of both.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

from bench.policy import outputs, pipeline
from bench.report import Figure, Report
from rota.model.errors import Unavailable
from rota.model.ids import JobId
from rota.model.policy.decision import PolicyRequest, PolicyRequestGroup
from rota.model.settings import Settings
from rota.model.settings.lifecycle import SafetyKernelSettings, SafetySettings
from rota.policy.evaluate import CompiledPolicy
from rota.policy.grpc.client import RemoteKernel
from rota.policy.kernel import LocalKernel
from rota.policy.loader import parse, snapshot_id
from rota.policy.snapshots import PolicySnapshots

SIZES = (10, 100, 1000)
KINDS = 200
BATCH = 500
AT_ONCE = 16
RATE = 1000
START_S = 30.0


def rule(number: int) -> str:
    match number % 10:
        case 0 | 1 | 2 | 3:
            return f"match: {{topics: [job.t{number}]}}, decision: allow"
        case 4 | 5:
            return f'match: {{topics: ["job.p{number}.*"]}}, decision: allow'
        case 6:
            return f"match: {{shows: [show{number}]}}, decision: throttle"
        case 7:
            return f'match: {{labels: {{env: "e{number}*"}}}}, decision: require_approval'
        case 8:
            return f"match: {{risk_tags: [risk{number}]}}, decision: deny"
        case _:
            return (
                f"match: {{topics: [job.w{number}]}}, when: \"frames > {number} && 'gpu' in requires\", decision: deny"
            )


def policy_text(rules: int) -> str:
    written = "".join(f"  - {{id: r{number}, {rule(number)}}}\n" for number in range(rules - 1))
    return f"rules:\n{written}  - {{id: rest, decision: allow}}\n"


def asked(number: int, rules: int, mark: str = "") -> PolicyRequest:
    """Something for every kind of rule."""
    at = number * 7 % rules
    topic = (f"job.t{at}", f"job.p{at}.x", f"job.w{at}", "job.other")[number % 4]
    labels = {"env": f"e{at}", "shot": f"{number}{mark}"}
    return PolicyRequest(
        show=f"show{number % 20}", topic=topic, labels=labels, requires=("gpu",), frames=number, tasks=("t",)
    )


def questions(count: int, rules: int, mark: str = "") -> list[PolicyRequestGroup]:
    return [PolicyRequestGroup(asked(number % KINDS, rules, mark), (JobId(uuid4()),)) for number in range(count)]


def run(quick: bool) -> Report:
    report = Report()
    rounds = 3 if quick else 9
    for rules in SIZES:
        asyncio.run(_of(report, rules, rounds))
    report.figures += [*pipeline.run(quick).figures, *outputs.figures(quick)]
    return report


async def _of(report: Report, rules: int, rounds: int) -> None:
    text = policy_text(rules)
    name = "" if rules == 100 else f"_{rules}"
    kernel = LocalKernel(PolicySnapshots(CompiledPolicy(parse(text), snapshot_id(text))))
    known = [await _rate(kernel, questions(5000, rules)) for _ in range(rounds)]
    report.add(
        Figure(f"checks_per_s_inproc{name}", known, note=f"{rules} rules, jobs of {KINDS} kinds, {BATCH} a call")
    )
    new = [await _rate(kernel, _never_seen(rules, at)) for at in range(rounds)]
    report.add(Figure(f"checks_per_s_inproc_new{name}", new, note="jobs that are like none before"))
    with tempfile.TemporaryDirectory(prefix="rota-bench-") as folder:
        async with _kernel(Path(folder), text) as remote:
            single = [await _single(remote, questions(600, rules)) for _ in range(rounds)]
            report.add(Figure(f"checks_per_s_grpc{name}", single, note=f"one job a call, {AT_ONCE} calls at a time"))
            batched = [await _rate(remote, questions(5000, rules)) for _ in range(rounds)]
            report.add(
                Figure(f"checks_per_s_grpc_batched{name}", batched, note=f"{BATCH} jobs a call, each a question")
            )
            alike = [await _rate(remote, _alike(5000, rules)) for _ in range(rounds)]
            report.add(Figure(f"checks_per_s_grpc_alike{name}", alike, note=f"{BATCH} jobs a call, 20 kinds of job"))
            waits = [await _p99_ms(remote, rules, 2.0 if rounds < 9 else 5.0) for _ in range(3)]
            report.add(Figure(f"p99_ms_at_1000_per_s{name}", waits, note=f"one job a call over gRPC, {RATE} calls/s"))


def _never_seen(rules: int, at: int) -> list[PolicyRequestGroup]:
    return [PolicyRequestGroup(asked(number, rules, f".{at}.{number}"), (JobId(uuid4()),)) for number in range(2000)]


def _alike(count: int, rules: int) -> list[PolicyRequestGroup]:
    """As a server asks: jobs that are alike are one question."""
    each = BATCH // 20
    return [
        PolicyRequestGroup(asked(n % KINDS, rules), tuple(JobId(uuid4()) for _ in range(each)))
        for n in range(count // each)
    ]


async def _rate(kernel: LocalKernel | RemoteKernel, asked: Sequence[PolicyRequestGroup]) -> float:
    """Jobs a second, `BATCH` of them a call."""
    per_call = max(1, BATCH // len(asked[0].jobs))
    began = time.perf_counter()
    for at in range(0, len(asked), per_call):
        await kernel.check(asked[at : at + per_call])
    return sum(len(each.jobs) for each in asked) / (time.perf_counter() - began)


async def _single(kernel: RemoteKernel, asked: Sequence[PolicyRequestGroup]) -> float:
    waiting = iter(asked)

    async def caller() -> None:
        for each in waiting:
            await kernel.check([each])

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(caller())
    return len(asked) / (time.perf_counter() - began)


async def _p99_ms(kernel: RemoteKernel, rules: int, seconds: float) -> float:
    """Calls begin on time whether or not those before have ended, and wait from when they were due."""
    took: list[float] = []
    due = questions(int(RATE * seconds), rules)

    async def call(each: PolicyRequestGroup, at: float) -> None:
        await kernel.check([each])
        took.append(time.perf_counter() - at)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number, each in enumerate(due):
            at = began + number / RATE
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            tasks.create_task(call(each, at))
    return sorted(took)[int(0.99 * len(took))] * 1000


@asynccontextmanager
async def _kernel(folder: Path, text: str) -> AsyncIterator[RemoteKernel]:
    path = folder / "policy.yaml"
    path.write_text(text)
    port = _free_port()
    env = {
        **os.environ,
        "ROTA_POLICY_FILE": str(path),
        "ROTA_SAFETY_KERNEL_PORT": str(port),
        "ROTA_SAFETY_KERNEL_HEALTH_PORT": "0",
        "ROTA_LOG_LEVEL": "error",
    }
    process = _started(env, folder)
    safety = SafetySettings(timeout=30.0, circuit_fail_budget=1_000_000)
    kernel = RemoteKernel(Settings(safety_kernel=SafetyKernelSettings(addr=f"127.0.0.1:{port}"), safety=safety), None)
    try:
        await _until_answered(kernel)
        yield kernel
    finally:
        await kernel.close()
        process.terminate()
        process.wait(30)


def _started(env: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "rota.cli", "kernel"], env=env, cwd=folder)


async def _until_answered(kernel: RemoteKernel) -> None:
    give_up_at = time.monotonic() + START_S
    while True:
        try:
            await kernel.check(questions(1, 10))
        except Unavailable:
            if time.monotonic() > give_up_at:
                raise
            await asyncio.sleep(0.1)
        else:
            return


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])

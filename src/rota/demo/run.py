"""`rota demo`: starts a stack, shares it between two shows, injects failures, and checks the totals at the end.

Every line is checked before it is printed: a failed check ends the demo with status 1.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from rota.accounting.audit import LedgerAuditLine
from rota.accounting.audit import audit as audit_ledger
from rota.cli.jobs.view import frame_counts
from rota.demo import policy as demo_policy
from rota.demo import trip as demo_trip
from rota.demo.policy import PUBLISHED, WIPED
from rota.demo.stack import ACTOR, DemoSnapshot, DemoStack
from rota.demo.view import DemoReport
from rota.infra import audit
from rota.infra.postgres import query
from rota.model.errors import RotaError
from rota.model.job_states import FrameState, JobState
from rota.model.jobs.submission import LayerSpec, RetrySpec, Submission
from rota.model.quota import Usage
from rota.placement.route_store import RouteStore

FRAME_RESULTS = query(__package__, "demo_ends")
LOST_FRAMES = query(__package__, "demo_lost")

POLL_INTERVAL_S: Final = 0.2
WAIT_TIMEOUT_S: Final = 90.0
FILM, SHORT = "film", "short"
BURSTS: Final = {FILM: 1200, SHORT: 600}
FRAMES: Final = {
    "render": 150,
    "train": 10,
    "comp": 36,
    "flaky": 8,
    "oops": 30,
    "notes": 1,
    WIPED: 3,
    PUBLISHED: 2,
}
BROKEN_FRAME: Final = 5
RAISED_CAP_CORES: Final = 4
AGENT_INTERVAL: Final = timedelta(seconds=1)
AGENT_RUNS_MIN: Final = 5


async def run() -> int:
    task = asyncio.current_task()
    assert task
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # clean up on SIGTERM
    with tempfile.TemporaryDirectory(prefix="rota-demo-", ignore_cleanup_errors=True) as folder, DemoReport() as report:
        report.heading("A new cluster")
        async with DemoStack.open(Path(folder), demo_policy.POLICY) as cluster:
            demo = Demo(cluster, report)
            await demo.prepare()
            await demo.run_scenarios()
            await demo.check_totals()
        report.check(True, "everything has stopped")
    return 0


class Demo:
    def __init__(self, cluster: DemoStack, report: DemoReport) -> None:
        self.cluster = cluster
        self.report = report
        self._most: Counter[str] = Counter()
        self._polls = 0

    async def prepare(self) -> None:
        cluster, report = self.cluster, self.report
        names = ", ".join(server.binary.label for server in cluster.stack.servers.values())
        report.check(True, f"{names} and a server are up, schema created from {cluster.migrations} files")
        await cluster.create_show(FILM, {"farm": (8, 12, -1), "gpu": (4, 4, 2)})
        await cluster.create_show(SHORT, {"farm": (4, 6, -1)})
        for topic, pool in (("*", "farm"), ("train", "gpu")):
            await RouteStore(cluster.database).set_topic(topic, [pool], actor=ACTOR)
        for name in ("anna", "bert"):
            cluster.start_worker(name, pool="farm", cores=8)
        cluster.start_worker("cleo", pool="gpu", cores=4, gpus=2)
        snapshot = await self.wait_until(
            lambda snapshot: len(snapshot.workers) == len(cluster.processes), "the workers"
        )
        workers = ", ".join(f"{worker.name} ({worker.hello.cores // 100} cores)" for worker in snapshot.workers)
        report.check(True, f"workers, each in its own process: {workers}; cleo has 2 GPUs")

    async def observe(self) -> DemoSnapshot:
        """Draw the dashboard, and record the maximum usage of each show."""
        snapshot = await self.cluster.snapshot()
        self._polls += 1
        for show in BURSTS:
            self._most[show] = max(self._most[show], snapshot.used_cores(show, "farm"))
        if "comp" in snapshot.jobs:
            self._most["comp"] = max(self._most["comp"], _running_frames(snapshot, "comp"))
        self.report.draw(snapshot)
        return snapshot

    async def wait_until(self, condition: Callable[[DemoSnapshot], bool], what: str) -> DemoSnapshot:
        """The first snapshot that satisfies `condition`."""
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while not condition(snapshot := await self.observe()):
            if time.monotonic() > deadline:
                raise RotaError(f"The demo waited {WAIT_TIMEOUT_S:.0f} s for {what} without success: please report it.")
            await asyncio.sleep(POLL_INTERVAL_S)
        return snapshot

    async def run_scenarios(self) -> None:
        await self._submit_jobs()
        await self._check_full_subscription()
        await self._check_quarantined_output()
        await demo_policy.run_policy_scenario(self.cluster, self.report, self.wait_until)
        await demo_trip.run_saga_scenario(self.cluster, self.report, self.observe)
        await self._check_cancelled_job()
        await self._check_killed_worker()
        await self._check_raised_cap()
        await self._check_flushed_redis()
        await self.wait_until(
            lambda snapshot: all(job.state.terminal for job in snapshot.jobs.values()), "the end of all jobs"
        )

    async def _submit_jobs(self) -> None:
        self.report.heading(f"Two shows, {len(FRAMES)} jobs, {sum(FRAMES.values())} frames")
        submit = self.cluster.submit
        await submit(_job(FILM, "render", 1.2))
        await submit(_job(FILM, "train", 1.5, layer={"gpus": 1}))
        await submit(_job(SHORT, "comp", 0.8, task="render", max_cores=1))
        await submit(_job(SHORT, "flaky", BROKEN_FRAME, layer={"retries": RetrySpec(most=2)}))
        # Urgent by mistake: at equal priority it would wait for every frame of render, which was submitted before it.
        await submit(_job(FILM, "oops", 600.0, task="render", max_cores=2, priority=7))
        await submit(_job(SHORT, "notes", 7))
        await submit(_job(SHORT, WIPED, 0.1, task="render"))
        await submit(_job(SHORT, PUBLISHED, 0.1, task="render", principal=ACTOR))

    async def _check_full_subscription(self) -> None:
        await self.wait_until(lambda snapshot: snapshot.used_cores(FILM, "farm") == BURSTS[FILM], "a full share")
        passed = await self._is_explained_by("render", "quota_subscription")
        self.report.check(passed, "film uses all 12 cores of its share: render waits, quota_subscription")
        snapshot = await self.wait_until(lambda snapshot: _running_frames(snapshot, "train") == 2, "two GPUs in use")
        self.report.check(_running_frames(snapshot, "train") == 2, "cleo runs one frame of train on each of its 2 GPUs")

    async def _is_explained_by(self, name: str, reason: str) -> bool:
        """Whether `rota explain` gives this reason in one of several polls: between two frames capacity may be free."""
        for _ in range(20):
            explanation = await self.cluster.replica.engine.explainer.explain(self.cluster.submitted[name])
            if reason in [each.code for each in explanation.reasons]:
                return True
            await asyncio.sleep(POLL_INTERVAL_S / 4)
        return False

    async def _check_quarantined_output(self) -> None:
        """The output of `notes`, which returned a key."""
        await self.wait_until(
            lambda snapshot: snapshot.jobs["notes"].state is JobState.OUTPUT_QUARANTINED, "a quarantined output"
        )
        value = await self.cluster.first_result("notes")
        self.report.check(value is None, "notes returned an AWS key: its output is quarantined and cannot be read")
        await self.cluster.redact_output("notes")
        value = await self.cluster.first_result("notes")
        self.report.check(
            value == {"note": "used [REDACTED] for node 7"}, f"an operator redacted it, and it can be read: {value}"
        )

    async def _check_cancelled_job(self) -> None:
        await self.wait_until(lambda snapshot: _running_frames(snapshot, "oops") > 0, "frames of oops")
        job = self.cluster.submitted["oops"]
        began = time.monotonic()
        await self.cluster.replica.engine.canceller.terminate(job, JobState.CANCELLED, "cancelled")
        snapshot = await self.wait_until(
            lambda snapshot: snapshot.jobs["oops"].state is JobState.CANCELLED, "the end of oops"
        )
        await self.wait_until(lambda snapshot: _running_frames(snapshot, "oops") == 0, "frames of oops to stop")
        ended = _counts(snapshot, "oops")[FrameState.CANCELLED]
        took_s = time.monotonic() - began
        self.report.check(
            ended == FRAMES["oops"], f"oops is cancelled: {ended} frames, the running ones stopped {took_s:.1f} s later"
        )

    async def _check_killed_worker(self) -> None:
        snapshot = await self.wait_until(
            lambda snapshot: any(w.name == "bert" and w.frames > 3 for w in snapshot.workers), "work for bert"
        )
        bert = next(worker for worker in snapshot.workers if worker.name == "bert")
        self.cluster.kill_worker("bert")
        began = time.monotonic()
        await self.wait_until(lambda snapshot: bert.id not in snapshot.busy_workers, "the frames of bert")
        took_s = time.monotonic() - began
        lost = await self.cluster.database.value(LOST_FRAMES, bert.id)
        self.report.check(
            lost > 0, f"bert was killed with SIGKILL: its {lost} frames were requeued {took_s:.1f} s later"
        )

    async def _check_raised_cap(self) -> None:
        await self.wait_until(lambda snapshot: _counts(snapshot, "comp")[FrameState.SUCCEEDED] > 3, "frames of comp")
        job, passed = self.cluster.submitted["comp"], await self._is_explained_by("comp", "quota_job")
        self.report.check(passed, "comp waits at its own cap of 1 core: quota_job")
        self.report.check(self._most["comp"] == 1, "it never used more than 1")
        await self.cluster.accounting.change(
            lambda admin: admin.change_job(SHORT, job, max_cores=RAISED_CAP_CORES, actor=ACTOR)
        )
        began = time.monotonic()
        await self.wait_until(lambda snapshot: _running_frames(snapshot, "comp") > 1, "more of comp")
        self.report.check(
            True, f"its cap is raised to {RAISED_CAP_CORES}: more frames run {time.monotonic() - began:.1f} s later"
        )

    async def _check_flushed_redis(self) -> None:
        live = self.cluster.accounting.live
        assert live is not None, "shows of the demo are managed"
        done = _counts(await self.cluster.snapshot(), "render")[FrameState.SUCCEEDED]
        await live.client.flushdb()
        await self.wait_until(
            lambda snapshot: _counts(snapshot, "render")[FrameState.SUCCEEDED] > done + 20, "frames after that"
        )
        self.report.check(True, "Redis was flushed: its accounting is rebuilt from PostgreSQL, and frames continue")

    async def check_totals(self) -> None:
        cluster, report = self.cluster, self.report
        snapshot = await cluster.snapshot()
        report.draw(snapshot)
        report.heading("Totals")
        expected = {name: {FrameState.SUCCEEDED: n} for name, n in FRAMES.items()}
        expected["flaky"] = {FrameState.SUCCEEDED: FRAMES["flaky"] - 1, FrameState.FAILED: 1}
        expected["oops"] = {FrameState.CANCELLED: FRAMES["oops"]}
        expected[WIPED] = {FrameState.DENIED: FRAMES[WIPED]}
        counted = {name: dict(_counts(snapshot, name)) for name in FRAMES}
        report.check(counted == expected, f"{sum(FRAMES.values())} frames, and each ended as expected")
        row = await cluster.database.row(FRAME_RESULTS, list(cluster.submitted.values()))
        assert row is not None
        good = sum(each.get(FrameState.SUCCEEDED, 0) for each in expected.values())
        report.check(
            (row["ends"], row["frames"]) == (good, good),
            f"{row['ends']} results of {row['frames']} frames: none lost, none duplicated; "
            f"{row['retried']} attempts were retried, {row['lost']} of them from bert",
        )
        for show, burst in BURSTS.items():
            most = self._most[show]
            report.check(
                most <= burst,
                f"{show} never used more than {burst // 100} cores in {self._polls} polls (maximum {most / 100:g})",
            )
        await self._check_agent_runs()
        await self._check_ledger_empty()
        audit_result = await audit.verify(cluster.database)
        report.check(audit_result.ok, f"{audit_result.checked} entries of the audit log, every hash verified")

    async def _check_agent_runs(self) -> None:
        """The killed worker and the flushed Redis must not make the agent run early, twice or no more."""
        runs = await self.cluster.agent_runs("pulse")
        good = [run for run in runs if run.outcome == "SUCCEEDED"]
        apart = [after.started - before.started for before, after in pairwise(runs) if before in good]
        passed = (
            len(good) > AGENT_RUNS_MIN
            and min(apart, default=AGENT_INTERVAL) >= AGENT_INTERVAL
            and len(good) >= len(runs) - 1
        )
        replicas = len({run.replica for run in runs})
        longest = max(apart, default=AGENT_INTERVAL)
        self.report.check(
            passed,
            f"the agent pulse ran {len(runs)} times on {replicas} workers throughout, never less than"
            f" {AGENT_INTERVAL.total_seconds():g} s apart (at most {longest.total_seconds():.1f} s)",
        )

    async def _check_ledger_empty(self) -> None:
        for show in await self.cluster.accounting.admin.shows():
            found = await audit_ledger(self.cluster.accounting, show)
            empty = all(_is_empty(line) for line in found.lines)
            text = f"accounts of {show.name} are empty: {len(found.lines)} keys agree in Redis and PostgreSQL, all at 0"
            self.report.check(found.ok and empty, text)


def _job(
    show: str, name: str, argument: float, *, task: str = "", layer: dict[str, Any] | None = None, **more: Any
) -> Submission:
    spec = LayerSpec(
        task=task or name, input={"args": [argument], "kwargs": {}}, frames=f"1-{FRAMES[name]}", **(layer or {})
    )
    return Submission(show=show, name=name, topic=name, layers=(spec,), **more)


def _counts(snapshot: DemoSnapshot, job: str) -> Counter[FrameState]:
    return Counter(frame_counts(snapshot.jobs[job]))


def _running_frames(snapshot: DemoSnapshot, job: str) -> int:
    return _counts(snapshot, job)[FrameState.DISPATCHED]


def _is_empty(line: LedgerAuditLine) -> bool:
    return line.procs == Usage() and line.redis in (None, Usage())

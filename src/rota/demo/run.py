"""`rota demo`: a farm from nothing, two shows that share it, and what goes wrong on such a day; counted at the end.

Every line it prints is checked before it is printed: a promise that is not kept ends the demo with status 1.
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
from rota.accounting.audit import audit as audit_books
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
PULSE_INTERVAL: Final = timedelta(seconds=1)
PULSE_RUNS_MIN: Final = 5


async def run() -> int:
    task = asyncio.current_task()
    assert task
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that nothing is left behind
    with tempfile.TemporaryDirectory(prefix="rota-demo-", ignore_cleanup_errors=True) as folder, DemoReport() as story:
        story.heading("A farm from nothing")
        async with DemoStack.open(Path(folder), demo_policy.POLICY) as farm:
            demo = Demo(farm, story)
            await demo.prepare()
            await demo.run_scenarios()
            await demo.check_totals()
        story.check(True, "everything has stopped")
    return 0


class Demo:
    def __init__(self, farm: DemoStack, story: DemoReport) -> None:
        self.farm = farm
        self.story = story
        self._most: Counter[str] = Counter()
        self._looks = 0

    async def prepare(self) -> None:
        farm, story = self.farm, self.story
        names = ", ".join(server.binary.label for server in farm.stack.servers.values())
        story.check(True, f"{names} and a server are up, schema made by {farm.migrations} migrations")
        await farm.create_show(FILM, {"farm": (8, 12, -1), "gpu": (4, 4, 2)})
        await farm.create_show(SHORT, {"farm": (4, 6, -1)})
        for topic, pool in (("*", "farm"), ("train", "gpu")):
            await RouteStore(farm.database).set_topic(topic, [pool], actor=ACTOR)
        for name in ("anna", "bert"):
            farm.start_worker(name, pool="farm", cores=8)
        farm.start_worker("cleo", pool="gpu", cores=4, gpus=2)
        seen = await self.wait_until(lambda seen: len(seen.workers) == len(farm.processes), "the workers")
        told = ", ".join(f"{worker.name} ({worker.hello.cores // 100} cores)" for worker in seen.workers)
        story.check(True, f"workers, each a process of its own: {told}; cleo has 2 GPUs")

    async def observe(self) -> DemoSnapshot:
        """For the picture, and for the most that each show was ever seen to use."""
        seen = await self.farm.snapshot()
        self._looks += 1
        for show in BURSTS:
            self._most[show] = max(self._most[show], seen.used_cores(show, "farm"))
        if "comp" in seen.jobs:
            self._most["comp"] = max(self._most["comp"], _running_frames(seen, "comp"))
        self.story.draw(seen)
        return seen

    async def wait_until(self, condition: Callable[[DemoSnapshot], bool], what: str) -> DemoSnapshot:
        """The farm at the first moment at which this is so."""
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while not condition(seen := await self.observe()):
            if time.monotonic() > deadline:
                raise RotaError(f"The demo waited {WAIT_TIMEOUT_S:.0f} s in vain for {what}; please report it.")
            await asyncio.sleep(POLL_INTERVAL_S)
        return seen

    async def run_scenarios(self) -> None:
        await self._submit_jobs()
        await self._check_full_subscription()
        await self._check_quarantined_output()
        await demo_policy.run_policy_scenario(self.farm, self.story, self.wait_until)
        await demo_trip.run_saga_scenario(self.farm, self.story, self.observe)
        await self._check_cancelled_job()
        await self._check_killed_worker()
        await self._check_raised_cap()
        await self._check_flushed_redis()
        await self.wait_until(lambda seen: all(job.state.terminal for job in seen.jobs.values()), "the end of all jobs")

    async def _submit_jobs(self) -> None:
        self.story.heading(f"Two shows, {len(FRAMES)} jobs, {sum(FRAMES.values())} frames")
        submit = self.farm.submit
        await submit(_job(FILM, "render", 1.2))
        await submit(_job(FILM, "train", 1.5, layer={"gpus": 1}))
        await submit(_job(SHORT, "comp", 0.8, task="render", max_cores=1))
        await submit(_job(SHORT, "flaky", BROKEN_FRAME, layer={"retries": RetrySpec(most=2)}))
        await submit(_job(FILM, "oops", 600.0, task="render", max_cores=2))
        await submit(_job(SHORT, "notes", 7))
        await submit(_job(SHORT, WIPED, 0.1, task="render"))
        await submit(_job(SHORT, PUBLISHED, 0.1, task="render", principal=ACTOR))

    async def _check_full_subscription(self) -> None:
        await self.wait_until(lambda seen: seen.used_cores(FILM, "farm") == BURSTS[FILM], "a full share")
        kept = await self._is_explained_by("render", "quota_subscription")
        self.story.check(kept, "film has all 12 cores of its share: render waits, quota_subscription")
        seen = await self.wait_until(lambda seen: _running_frames(seen, "train") == 2, "two GPUs in use")
        self.story.check(_running_frames(seen, "train") == 2, "cleo runs one frame of train on each of its 2 GPUs")

    async def _is_explained_by(self, name: str, reason: str) -> bool:
        """Whether `rota explain` says so, in one of a few looks: between two frames there is room for a moment."""
        for _ in range(20):
            told = await self.farm.replica.engine.explainer.explain(self.farm.submitted[name])
            if reason in [each.code for each in told.reasons]:
                return True
            await asyncio.sleep(POLL_INTERVAL_S / 4)
        return False

    async def _check_quarantined_output(self) -> None:
        """Of notes, which returned a key."""
        await self.wait_until(
            lambda seen: seen.jobs["notes"].state is JobState.OUTPUT_QUARANTINED, "a quarantined output"
        )
        kept = await self.farm.first_result("notes")
        self.story.check(kept is None, "notes returned a key of AWS: its output is quarantined, and nobody reads it")
        await self.farm.redact_output("notes")
        told = await self.farm.first_result("notes")
        self.story.check(
            told == {"note": "used [REDACTED] for node 7"}, f"redacted by an operator it is let out: {told}"
        )

    async def _check_cancelled_job(self) -> None:
        await self.wait_until(lambda seen: _running_frames(seen, "oops") > 0, "frames of oops")
        job = self.farm.submitted["oops"]
        began = time.monotonic()
        await self.farm.replica.engine.canceller.terminate(job, JobState.CANCELLED, "cancelled")
        seen = await self.wait_until(lambda seen: seen.jobs["oops"].state is JobState.CANCELLED, "the end of oops")
        await self.wait_until(lambda seen: _running_frames(seen, "oops") == 0, "frames of oops to stop")
        ended = _counts(seen, "oops")[FrameState.CANCELLED]
        took_s = time.monotonic() - began
        self.story.check(
            ended == FRAMES["oops"], f"oops is cancelled: {ended} frames, those that ran stopped {took_s:.1f} s later"
        )

    async def _check_killed_worker(self) -> None:
        seen = await self.wait_until(
            lambda seen: any(w.name == "bert" and w.frames > 3 for w in seen.workers), "work for bert"
        )
        bert = next(worker for worker in seen.workers if worker.name == "bert")
        self.farm.kill_worker("bert")
        began = time.monotonic()
        await self.wait_until(lambda seen: bert.id not in seen.busy_workers, "the frames of bert")
        took_s = time.monotonic() - began
        lost = await self.farm.database.value(LOST_FRAMES, bert.id)
        self.story.check(lost > 0, f"bert was killed with -9: its {lost} frames wait again {took_s:.1f} s later")

    async def _check_raised_cap(self) -> None:
        await self.wait_until(lambda seen: _counts(seen, "comp")[FrameState.SUCCEEDED] > 3, "frames of comp")
        job, kept = self.farm.submitted["comp"], await self._is_explained_by("comp", "quota_job")
        self.story.check(kept, "comp waits at its own cap of 1 core: quota_job")
        self.story.check(self._most["comp"] == 1, "and was never seen with more than 1")
        await self.farm.books.change(
            lambda admin: admin.change_job(SHORT, job, max_cores=RAISED_CAP_CORES, actor=ACTOR)
        )
        began = time.monotonic()
        await self.wait_until(lambda seen: _running_frames(seen, "comp") > 1, "more of comp")
        self.story.check(
            True, f"its cap is raised to {RAISED_CAP_CORES}: more of it runs {time.monotonic() - began:.1f} s later"
        )

    async def _check_flushed_redis(self) -> None:
        live = self.farm.books.live
        assert live is not None, "shows of the demo are managed"
        done = _counts(await self.farm.snapshot(), "render")[FrameState.SUCCEEDED]
        await live.client.flushdb()
        await self.wait_until(
            lambda seen: _counts(seen, "render")[FrameState.SUCCEEDED] > done + 20, "frames after that"
        )
        self.story.check(True, "Redis was emptied: its books are rebuilt from PostgreSQL, and frames go on")

    async def check_totals(self) -> None:
        farm, story = self.farm, self.story
        seen = await farm.snapshot()
        story.draw(seen)
        story.heading("Counted at the end")
        expected = {name: {FrameState.SUCCEEDED: n} for name, n in FRAMES.items()}
        expected["flaky"] = {FrameState.SUCCEEDED: FRAMES["flaky"] - 1, FrameState.FAILED: 1}
        expected["oops"] = {FrameState.CANCELLED: FRAMES["oops"]}
        expected[WIPED] = {FrameState.DENIED: FRAMES[WIPED]}
        counted = {name: dict(_counts(seen, name)) for name in FRAMES}
        story.check(counted == expected, f"{sum(FRAMES.values())} frames, and each ended in the way it should")
        row = await farm.database.row(FRAME_RESULTS, list(farm.submitted.values()))
        assert row is not None
        good = sum(each.get(FrameState.SUCCEEDED, 0) for each in expected.values())
        story.check(
            (row["ends"], row["frames"]) == (good, good),
            f"{row['ends']} results of {row['frames']} frames: none lost, none twice; "
            f"{row['retried']} attempts were made again, {row['lost']} of them bert's",
        )
        for show, burst in BURSTS.items():
            most = self._most[show]
            story.check(
                most <= burst,
                f"{show} was never seen above {burst // 100} cores in {self._looks} looks (most {most / 100:g})",
            )
        await self._check_agent_runs()
        await self._check_ledger_empty()
        whole = await audit.verify(farm.database)
        story.check(whole.ok, f"{whole.checked} entries of the audit log, every hash recomputed")

    async def _check_agent_runs(self) -> None:
        """An agent of the app: bert's death and the emptied Redis have not made it run early, twice or no more."""
        runs = await self.farm.agent_runs("pulse")
        good = [run for run in runs if run.outcome == "SUCCEEDED"]
        apart = [after.started - before.started for before, after in pairwise(runs) if before in good]
        kept = (
            len(good) > PULSE_RUNS_MIN
            and min(apart, default=PULSE_INTERVAL) >= PULSE_INTERVAL
            and len(good) >= len(runs) - 1
        )
        where = len({run.replica for run in runs})
        self.story.check(
            kept,
            f"pulse, an agent, ran {len(runs)} times on {where} workers through all of it, never less than"
            f" {PULSE_INTERVAL.total_seconds():g} s apart (at most {max(apart, default=PULSE_INTERVAL).total_seconds():.1f})",
        )

    async def _check_ledger_empty(self) -> None:
        for show in await self.farm.books.admin.shows():
            found = await audit_books(self.farm.books, show)
            empty = all(_is_empty(line) for line in found.lines)
            text = (
                f"the books of {show.name} are empty: {len(found.lines)} keys agree in Redis and PostgreSQL, all at 0"
            )
            self.story.check(found.ok and empty, text)


def _job(
    show: str, name: str, argument: float, *, task: str = "", layer: dict[str, Any] | None = None, **more: Any
) -> Submission:
    spec = LayerSpec(
        task=task or name, input={"args": [argument], "kwargs": {}}, frames=f"1-{FRAMES[name]}", **(layer or {})
    )
    return Submission(show=show, name=name, topic=name, layers=(spec,), **more)


def _counts(seen: DemoSnapshot, job: str) -> Counter[FrameState]:
    return Counter(frame_counts(seen.jobs[job]))


def _running_frames(seen: DemoSnapshot, job: str) -> int:
    return _counts(seen, job)[FrameState.DISPATCHED]


def _is_empty(line: LedgerAuditLine) -> bool:
    return line.procs == Usage() and line.redis in (None, Usage())

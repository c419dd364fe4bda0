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

from rota.accounting.audit import Line
from rota.accounting.audit import audit as audit_books
from rota.cli import demo_policy, demo_trip
from rota.cli.demo_farm import ACTOR, DemoFarm, Seen
from rota.cli.demo_policy import PUBLISHED, WIPED
from rota.cli.demo_view import Story
from rota.cli.jobs_view import counts_of
from rota.infra import audit
from rota.infra.postgres import query
from rota.model.errors import RotaError
from rota.model.job import LayerSpec, RetrySpec, Submission
from rota.model.lifecycle import FrameState, JobState
from rota.model.quota import Usage
from rota.placement.routing import Routing

ENDS = query(__package__, "demo_ends")
LOST_FRAMES = query(__package__, "demo_lost")

LOOK_S: Final = 0.2
LONG_S: Final = 90.0
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
BROKEN: Final = 5
RAISED: Final = 4
PULSE: Final = timedelta(seconds=1)
PULSES_LEAST: Final = 5


async def run() -> int:
    task = asyncio.current_task()
    assert task
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that nothing is left behind
    with tempfile.TemporaryDirectory(prefix="rota-demo-", ignore_cleanup_errors=True) as folder, Story() as story:
        story.chapter("A farm from nothing")
        async with DemoFarm.opened(Path(folder), demo_policy.POLICY) as farm:
            demo = Demo(farm, story)
            await demo.prepare()
            await demo.tell()
            await demo.count()
        story.kept(True, "everything has stopped")
    return 0


class Demo:
    def __init__(self, farm: DemoFarm, story: Story) -> None:
        self.farm = farm
        self.story = story
        self._most: Counter[str] = Counter()
        self._looks = 0

    async def prepare(self) -> None:
        farm, story = self.farm, self.story
        names = ", ".join(server.binary.label for server in farm.stack.servers.values())
        story.kept(True, f"{names} and a server are up, schema made by {farm.migrations} migrations")
        await farm.show(FILM, {"farm": (8, 12, -1), "gpu": (4, 4, 2)})
        await farm.show(SHORT, {"farm": (4, 6, -1)})
        for topic, pool in (("*", "farm"), ("train", "gpu")):
            await Routing(farm.database).set_topic(topic, [pool], actor=ACTOR)
        for name in ("anna", "bert"):
            farm.start_worker(name, pool="farm", cores=8)
        farm.start_worker("cleo", pool="gpu", cores=4, gpus=2)
        seen = await self.until(lambda seen: len(seen.workers) == len(farm.processes), "the workers")
        told = ", ".join(f"{worker.name} ({worker.hello.cores // 100} cores)" for worker in seen.workers)
        story.kept(True, f"workers, each a process of its own: {told}; cleo has 2 GPUs")

    async def look(self) -> Seen:
        """For the picture, and for the most that each show was ever seen to use."""
        seen = await self.farm.look()
        self._looks += 1
        for show in BURSTS:
            self._most[show] = max(self._most[show], seen.used(show, "farm"))
        if "comp" in seen.jobs:
            self._most["comp"] = max(self._most["comp"], _on_workers(seen, "comp"))
        self.story.show(seen)
        return seen

    async def until(self, condition: Callable[[Seen], bool], what: str) -> Seen:
        """The farm at the first moment at which this is so."""
        deadline = time.monotonic() + LONG_S
        while not condition(seen := await self.look()):
            if time.monotonic() > deadline:
                raise RotaError(f"The demo waited {LONG_S:.0f} s in vain for {what}; please report it.")
            await asyncio.sleep(LOOK_S)
        return seen

    async def tell(self) -> None:
        await self._submit()
        await self._a_full_share()
        await self._a_kept_output()
        await demo_policy.tell(self.farm, self.story, self.until)
        await demo_trip.tell(self.farm, self.story, self.look)
        await self._a_cancelled_job()
        await self._a_killed_worker()
        await self._a_raised_cap()
        await self._an_emptied_redis()
        await self.until(lambda seen: all(job.state.terminal for job in seen.jobs.values()), "the end of all jobs")

    async def _submit(self) -> None:
        self.story.chapter(f"Two shows, {len(FRAMES)} jobs, {sum(FRAMES.values())} frames")
        submit = self.farm.submit
        await submit(_job(FILM, "render", 1.2))
        await submit(_job(FILM, "train", 1.5, layer={"gpus": 1}))
        await submit(_job(SHORT, "comp", 0.8, task="render", max_cores=1))
        await submit(_job(SHORT, "flaky", BROKEN, layer={"retries": RetrySpec(most=2)}))
        await submit(_job(FILM, "oops", 600.0, task="render", max_cores=2))
        await submit(_job(SHORT, "notes", 7))
        await submit(_job(SHORT, WIPED, 0.1, task="render"))
        await submit(_job(SHORT, PUBLISHED, 0.1, task="render", principal=ACTOR))

    async def _a_full_share(self) -> None:
        await self.until(lambda seen: seen.used(FILM, "farm") == BURSTS[FILM], "a full share")
        kept = await self._explained("render", "quota_subscription")
        self.story.kept(kept, "film has all 12 cores of its share: render waits, quota_subscription")
        seen = await self.until(lambda seen: _on_workers(seen, "train") == 2, "two GPUs in use")
        self.story.kept(_on_workers(seen, "train") == 2, "cleo runs one frame of train on each of its 2 GPUs")

    async def _explained(self, name: str, reason: str) -> bool:
        """Whether `rota explain` says so, in one of a few looks: between two frames there is room for a moment."""
        for _ in range(20):
            told = await self.farm.replica.engine.explainer.explain(self.farm.submitted[name])
            if reason in [each.code for each in told.reasons]:
                return True
            await asyncio.sleep(LOOK_S / 4)
        return False

    async def _a_kept_output(self) -> None:
        """Of notes, which returned a key."""
        await self.until(lambda seen: seen.jobs["notes"].state is JobState.OUTPUT_QUARANTINED, "a quarantined output")
        kept = await self.farm.returned("notes")
        self.story.kept(kept is None, "notes returned a key of AWS: its output is quarantined, and nobody reads it")
        await self.farm.redact("notes")
        told = await self.farm.returned("notes")
        self.story.kept(
            told == {"note": "used [REDACTED] for node 7"}, f"redacted by an operator it is let out: {told}"
        )

    async def _a_cancelled_job(self) -> None:
        await self.until(lambda seen: _on_workers(seen, "oops") > 0, "frames of oops")
        job = self.farm.submitted["oops"]
        began = time.monotonic()
        await self.farm.replica.engine.ender.end(job, JobState.CANCELLED, "cancelled")
        seen = await self.until(lambda seen: seen.jobs["oops"].state is JobState.CANCELLED, "the end of oops")
        await self.until(lambda seen: _on_workers(seen, "oops") == 0, "frames of oops to stop")
        ended = _counts(seen, "oops")[FrameState.CANCELLED]
        took_s = time.monotonic() - began
        self.story.kept(
            ended == FRAMES["oops"], f"oops is cancelled: {ended} frames, those that ran stopped {took_s:.1f} s later"
        )

    async def _a_killed_worker(self) -> None:
        seen = await self.until(
            lambda seen: any(w.name == "bert" and w.frames > 3 for w in seen.workers), "work for bert"
        )
        bert = next(worker for worker in seen.workers if worker.name == "bert")
        self.farm.kill("bert")
        began = time.monotonic()
        await self.until(lambda seen: bert.id not in seen.busy, "the frames of bert")
        took_s = time.monotonic() - began
        lost = await self.farm.database.value(LOST_FRAMES, bert.id)
        self.story.kept(lost > 0, f"bert was killed with -9: its {lost} frames wait again {took_s:.1f} s later")

    async def _a_raised_cap(self) -> None:
        await self.until(lambda seen: _counts(seen, "comp")[FrameState.SUCCEEDED] > 3, "frames of comp")
        job, kept = self.farm.submitted["comp"], await self._explained("comp", "quota_job")
        self.story.kept(kept, "comp waits at its own cap of 1 core: quota_job")
        self.story.kept(self._most["comp"] == 1, "and was never seen with more than 1")
        await self.farm.books.change(lambda admin: admin.change_job(SHORT, job, max_cores=RAISED, actor=ACTOR))
        began = time.monotonic()
        await self.until(lambda seen: _on_workers(seen, "comp") > 1, "more of comp")
        self.story.kept(True, f"its cap is raised to {RAISED}: more of it runs {time.monotonic() - began:.1f} s later")

    async def _an_emptied_redis(self) -> None:
        live = self.farm.books.live
        assert live is not None, "shows of the demo are managed"
        done = _counts(await self.farm.look(), "render")[FrameState.SUCCEEDED]
        await live.client.flushdb()
        await self.until(lambda seen: _counts(seen, "render")[FrameState.SUCCEEDED] > done + 20, "frames after that")
        self.story.kept(True, "Redis was emptied: its books are rebuilt from PostgreSQL, and frames go on")

    async def count(self) -> None:
        farm, story = self.farm, self.story
        seen = await farm.look()
        story.show(seen)
        story.chapter("Counted at the end")
        expected = {name: {FrameState.SUCCEEDED: n} for name, n in FRAMES.items()}
        expected["flaky"] = {FrameState.SUCCEEDED: FRAMES["flaky"] - 1, FrameState.FAILED: 1}
        expected["oops"] = {FrameState.CANCELLED: FRAMES["oops"]}
        expected[WIPED] = {FrameState.DENIED: FRAMES[WIPED]}
        counted = {name: dict(_counts(seen, name)) for name in FRAMES}
        story.kept(counted == expected, f"{sum(FRAMES.values())} frames, and each ended in the way it should")
        row = await farm.database.row(ENDS, list(farm.submitted.values()))
        assert row is not None
        good = sum(each.get(FrameState.SUCCEEDED, 0) for each in expected.values())
        story.kept(
            (row["ends"], row["frames"]) == (good, good),
            f"{row['ends']} results of {row['frames']} frames: none lost, none twice; "
            f"{row['retried']} attempts were made again, {row['lost']} of them bert's",
        )
        for show, burst in BURSTS.items():
            most = self._most[show]
            story.kept(
                most <= burst,
                f"{show} was never seen above {burst // 100} cores in {self._looks} looks (most {most / 100:g})",
            )
        await self._pulse_was_regular()
        await self._books_are_empty()
        whole = await audit.verify(farm.database)
        story.kept(whole.ok, f"{whole.checked} entries of the audit log, every hash recomputed")

    async def _pulse_was_regular(self) -> None:
        """An agent of the app: bert's death and the emptied Redis have not made it run early, twice or no more."""
        runs = await self.farm.runs("pulse")
        good = [run for run in runs if run.outcome == "SUCCEEDED"]
        apart = [after.started - before.started for before, after in pairwise(runs) if before in good]
        kept = len(good) > PULSES_LEAST and min(apart, default=PULSE) >= PULSE and len(good) >= len(runs) - 1
        where = len({run.replica for run in runs})
        self.story.kept(
            kept,
            f"pulse, an agent, ran {len(runs)} times on {where} workers through all of it, never less than"
            f" {PULSE.total_seconds():g} s apart (at most {max(apart, default=PULSE).total_seconds():.1f})",
        )

    async def _books_are_empty(self) -> None:
        for show in await self.farm.books.admin.shows():
            found = await audit_books(self.farm.books, show)
            empty = all(_is_empty(line) for line in found.lines)
            text = (
                f"the books of {show.name} are empty: {len(found.lines)} keys agree in Redis and PostgreSQL, all at 0"
            )
            self.story.kept(found.ok and empty, text)


def _job(
    show: str, name: str, argument: float, *, task: str = "", layer: dict[str, Any] | None = None, **more: Any
) -> Submission:
    spec = LayerSpec(
        task=task or name, input={"args": [argument], "kwargs": {}}, frames=f"1-{FRAMES[name]}", **(layer or {})
    )
    return Submission(show=show, name=name, topic=name, layers=(spec,), **more)


def _counts(seen: Seen, job: str) -> Counter[FrameState]:
    return Counter(counts_of(seen.jobs[job]))


def _on_workers(seen: Seen, job: str) -> int:
    return _counts(seen, job)[FrameState.DISPATCHED]


def _is_empty(line: Line) -> bool:
    return line.procs == Usage() and line.redis in (None, Usage())

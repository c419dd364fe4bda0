"""Rota as people run it: `rota server` and `rota worker` as processes of their own, on the servers of the run.

The show is managed and has a limit at every level, all of them there and none of them in the way. Jobs are submitted
from the benchmark's own process. The clock runs from the first submission to the commit of the last end, which is
looked for every few milliseconds: by the ids submitted last, and when these have ended by the exact counts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

import asyncpg
import redis.asyncio

from bench import peers
from bench.contenders.marks import MARKS
from bench.contenders.serve import FILL, PRODUCERS, body
from bench.e2e.cpu import used_s
from bench.e2e.setup import Ground
from bench.server import statement
from rota.accounting.resources import CapsUpdate
from rota.accounting.service import AccountingService
from rota.engine.events.sink import DiscardedEvents
from rota.engine.submission.submitter import Submitter
from rota.infra.postgres import Database, PostgresTarget, migrate
from rota.model.jobs.submission import LayerSpec, Submission
from rota.placement.route_store import RouteStore
from rota.queue import Queue
from rota.queue.counts import QueueCounts

SLOTS: Final = 2000
"""Twice the frames of the batches that are under way."""
POOL: Final = "bench"
ELSEWHERE: Final = "elsewhere"
"""A pool without a worker: what is submitted for it waits."""
SHOW: Final = "film"
PLENTY: Final = 1_000_000
POLL_S: Final = 0.02
START_TIMEOUT_S: Final = 60.0
RUN_TIMEOUT_S: Final = 300.0
END_TIMEOUT_S: Final = 30.0
WARM: Final = 2000
REDIS_DB: Final = 0

UP = statement("SELECT count(*) FROM rota.worker WHERE state = 'up'")
LIVE: Final = "SELECT count(*) FROM rota.job WHERE pk_job = ANY($1::uuid[])"
BY_INDEX: Final = {"enable_seqscan": "off", "enable_bitmapscan": "off"}
"""For looking at a few jobs in a table that was never analysed."""
PROCS = statement("SELECT count(*) FROM rota.proc")


class Broken(Exception):
    """A process of Rota's ended, or its books are wrong; says which and how."""


@dataclass(frozen=True, slots=True)
class Lap:
    """One measured run of n frames."""

    n: int
    seconds: float
    cpu_s: dict[str, float]

    @property
    def per_s(self) -> float:
        return self.n / self.seconds

    def cpu_us(self, component: str = "") -> float:
        """Per frame; of all components together unless one is named."""
        return (self.cpu_s[component] if component else sum(self.cpu_s.values())) / self.n * 1e6


async def prepare(ground: Ground, database: str) -> None:
    """A database with Rota's schema, the show with its limits, and topics for both pools."""
    url = await ground.postgres.create(database)
    await migrate(url)
    opened = await Database.open(PostgresTarget(url=url))
    admin, caps = AccountingService(opened, None).admin, CapsUpdate(max_cores=PLENTY, max_gpus=PLENTY)
    for pool in (POOL, ELSEWHERE):
        await admin.create_pool(pool, actor="bench")
        await RouteStore(opened).set_topic(pool, [pool], actor="bench")
    await admin.create_dept("default", actor="bench")
    await admin.create_show(SHOW, actor="bench", managed=True)
    await admin.create_folder(SHOW, "default", actor="bench", caps=caps)
    await admin.create_point(SHOW, "default", actor="bench", caps=caps)
    for pool in (POOL, ELSEWHERE):
        await admin.create_subscription(SHOW, pool, size=PLENTY, burst=PLENTY, gpu_burst=PLENTY, actor="bench")
    await opened.close()
    async with farm(ground, database):
        """What the first server on a database makes for good, such as partitions, is in every copy."""


def layer_of(n: int) -> Submission:
    """One job of one layer, both with caps of their own."""
    layer = LayerSpec(task="noop", frames=n, max_cores=PLENTY, max_gpus=PLENTY)
    return Submission(show=SHOW, topic=POOL, layers=(layer,), max_cores=PLENTY, max_gpus=PLENTY)


def job_of(number: int, task: str = "noop") -> Submission:
    """A job of one frame with a payload of its own."""
    return Submission(show=SHOW, topic=POOL, layers=(LayerSpec(task=task, input={"kwargs": body(number)}),))


async def put_all(submitter: Submitter, submissions: Sequence[Submission]) -> list[UUID]:
    """Several producers, many jobs in a commit. Returns the last jobs of each."""
    batches = iter([submissions[first : first + FILL] for first in range(0, len(submissions), FILL)])

    async def produce() -> list[UUID]:
        last: list[UUID] = []
        for batch in batches:
            last = [each.job for each in await submitter.submit(batch)]
        return last[-10:]

    return [job for last in await asyncio.gather(*(produce() for _ in range(PRODUCERS))) for job in last]


class Farm:
    """A server and a worker that are up."""

    def __init__(
        self,
        ground: Ground,
        database: Database,
        looking: asyncpg.Connection[asyncpg.Record],
        pids: dict[str, int],
    ) -> None:
        self.database = database
        self.queue = Queue(database)
        self.submitter = Submitter(database, DiscardedEvents())
        self.pids = ground.pids | pids
        self.polls = 0
        """Statements of ours, which are no cost of Rota's."""
        self._ground = ground
        self._looking = looking
        self.submitted = 0
        self._ended_before = 0
        self._others = 0

    async def begin(self) -> None:
        """What waits or has ended already is none of ours."""
        counts = (await self.queue.counts_exact()).values()
        self._ended_before = sum(each.completed for each in counts)
        self._others = sum(each.waiting for each in counts)

    async def warm_up(self, frames: int) -> None:
        await self.frames(frames)
        await self.jobs(max(1, frames // 10))

    async def frames(self, n: int) -> Lap:
        """A layer of n frames, from its submission to the commit of its last end."""
        submission = layer_of(n)

        async def put() -> list[UUID]:
            return [each.job for each in await self.submitter.submit([submission])]

        return await self.lap(n, put)

    async def jobs(self, n: int, task: str = "noop") -> Lap:
        """n jobs of one frame each, submitted as the peers are: several producers, many in a commit."""
        submissions = [job_of(number, task) for number in range(n)]
        return await self.lap(n, lambda: put_all(self.submitter, submissions))

    async def lap(self, n: int, put: Callable[[], Awaitable[list[UUID]]]) -> Lap:
        self.expect(n)
        before = self.used_s()
        began = time.perf_counter()
        last = await put()
        await self.ended(last)
        seconds = time.perf_counter() - began
        after = self.used_s()
        return Lap(n, seconds, {name: after[name] - before[name] for name in before})

    def used_s(self) -> dict[str, float]:
        """Of this process, which is everybody's parent, without its children."""
        return used_s(self.pids) | {"submitter": time.process_time()}

    async def check(self) -> None:
        """The books: each frame ended once, nothing is booked any more, in PostgreSQL and in Redis."""
        counts = (await self.queue.counts_exact()).values()
        found = {word: sum(getattr(each, word) for each in counts) for word in QueueCounts.__struct_fields__}
        wanted = dict.fromkeys(found, 0) | {"completed": self._ended_before + self.submitted, "waiting": self._others}
        if found != wanted:
            raise Broken(f"the queue counts {found} after {self.submitted} frames were submitted")
        deadline = time.monotonic() + END_TIMEOUT_S
        while left := await self._booked():
            if time.monotonic() > deadline:
                raise Broken(f"all frames have ended, and yet {left}")
            await asyncio.sleep(POLL_S)

    async def _booked(self) -> str:
        """What is, in words."""
        procs, counted = await self.database.value(PROCS), await self._counted_in_redis()
        found = (f"{procs} procs are left" if procs else "", f"Redis counts at {counted[:5]}" if counted else "")
        return " and ".join(filter(None, found))

    async def _counted_in_redis(self) -> list[str]:
        client = redis.asyncio.from_url(self._ground.redis_url(REDIS_DB), decode_responses=True)
        try:
            found = [
                key
                async for key in client.scan_iter("acct:*", count=1000)
                if key.split(":")[1] in ("sub", "folder", "job", "layer", "point")
                and any(float(word or 0) for word in await client.hmget(key, "int_cores", "int_gpus"))
            ]
        finally:
            await client.aclose()
        return found

    def expect(self, n: int) -> None:
        """So many frames more are about to be submitted."""
        self.submitted += n

    async def ended(self, last: Sequence[UUID] = ()) -> None:
        """All that was submitted; `last` are the jobs to look at first."""
        await until(lambda: self._have_ended(last), RUN_TIMEOUT_S, f"the end of {self.submitted} frames", POLL_S)

    async def count_live(self, jobs: Sequence[UUID]) -> int:
        """How many of the jobs have not ended."""
        self.polls += 1
        return int(await self._looking.fetchval(LIVE, jobs))

    async def _have_ended(self, last: Sequence[UUID]) -> bool:
        if await self.count_live(last):
            return False
        self.polls += 1
        completed = sum(each.completed for each in (await self.queue.counts_exact()).values())
        return completed >= self._ended_before + self.submitted


@asynccontextmanager
async def farm(
    ground: Ground,
    database: str,
    *,
    slots: int = SLOTS,
    marks: Path | None = None,
    warm: int = WARM,
    servers: int = 1,
    more: Mapping[str, str] | None = None,
) -> AsyncIterator[Farm]:
    """Up and warm; everything is checked at the end, and the processes are gone when this returns. `more` is for the
    environment of the servers and the worker."""
    await ground.flush(REDIS_DB)
    env = _environment(ground, database, marks) | dict(more or {})
    async with AsyncExitStack() as closing:
        opened = await Database.open(PostgresTarget(url=ground.postgres.url(database), pool_min=PRODUCERS))
        closing.push_async_callback(opened.close)
        names = ["server", *(f"server{number}" for number in range(2, servers + 1))]
        started = {
            name: await closing.enter_async_context(rota_process(name, ground.folder, env, "server")) for name in names
        }
        worker = rota_process("worker", ground.folder, env, *_worker_words(slots))
        started["worker"] = await closing.enter_async_context(worker)
        await until(lambda: _is_up(opened, started.values()), START_TIMEOUT_S, "the worker to be up")
        looking = await asyncpg.connect(ground.postgres.url(database), server_settings=BY_INDEX)
        closing.push_async_callback(looking.close)
        running = Farm(ground, opened, looking, {name: process.pid for name, process in started.items()})
        await running.begin()
        await running.warm_up(warm)
        await ground.postgres.checkpoint()
        yield running
        await running.check()


async def _is_up(database: Database, processes: Iterable[asyncio.subprocess.Process]) -> bool:
    if any(process.returncode is not None for process in processes):
        raise Broken("a process of Rota's ended at its start")
    return bool(await database.value(UP))


def _worker_words(slots: int) -> tuple[str, ...]:
    return ("worker", "bench.e2e.app:app", "--pool", POOL, "--slots", str(slots), "--cores", str(slots), "--gpus", "0")


def _environment(ground: Ground, database: str, marks: Path | None) -> dict[str, str]:
    """A URL holds a password, so it goes where only we can read it."""
    return own_environment(ground.folder) | {
        "ROTA_POSTGRES_URL": ground.postgres.url(database),
        "ROTA_REDIS_URL": ground.redis_url(REDIS_DB),
        "ROTA_NATS_URL": ground.nats_url,
        "ROTA_NATS_PREFIX": f"B{time.monotonic_ns()}",
        "ROTA_LISTEN_PORT": "0",
        "ROTA_LOG_LEVEL": "warning",
        **({MARKS: str(marks)} if marks else {}),
    }


def own_environment(folder: Path) -> dict[str, str]:
    """Of a process that finds this package, without the settings of the user who runs the benchmark."""
    path = os.pathsep.join(filter(None, (str(peers.ROOT), os.environ.get("PYTHONPATH"))))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROTA_", "PYTHON"))}
    return kept | {"PYTHONPATH": path, "PYTHONPYCACHEPREFIX": str(folder / "compiled")}


@asynccontextmanager
async def rota_process(
    name: str, folder: Path, env: dict[str, str], *words: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`rota WORDS`, started in `folder`, where its log is; it has ended when this returns."""
    said = folder / f"{name}.log"
    with said.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "rota.cli", *words), cwd=folder, env=env, stdout=file, stderr=file
        )
    try:
        yield process
    except Exception as error:
        error.add_note(f"the {name} said:\n{said.read_text(errors='replace')[-4000:]}")
        raise
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def until(holds: Callable[[], Awaitable[bool]], within_s: float, what: str, every_s: float = 0.05) -> None:
    deadline = time.monotonic() + within_s
    while not await holds():
        if time.monotonic() > deadline:
            raise Broken(f"waited {within_s:.0f} s in vain for {what}")
        await asyncio.sleep(every_s)

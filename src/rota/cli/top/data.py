"""`rota top`: everything at a glance, again and again. Reads, and changes nothing.

A look is a handful of statements, however much waits: shares, jobs, workers, pools. They walk what runs and the
counters of queues, never what waits. What runs is what rows of `proc` hold; Redis is not asked. While PostgreSQL does
not answer the last picture stays, and says so.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Final
from uuid import UUID

import msgspec

from rota.cli.core import output
from rota.cli.core.output_format import OutputFormat
from rota.cli.db import commands as db_commands
from rota.cli.top import view as top_view
from rota.engine.queries.workers import WorkerRecord, worker_records
from rota.infra.postgres import Database, check_current, query
from rota.model.errors import PostgresUnavailable
from rota.model.settings import Settings
from rota.placement.route_store import RouteStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

TOP_SUBSCRIPTIONS = query(__package__, "top_shares")
TOP_JOBS = query(__package__, "top_jobs")

JOBS_SHOWN_MAX: Final = 50
LIVE_JOBS_MAX: Final = 100_001
"""Live jobs are counted so far and no further."""
PACES_MAX: Final = 60


class SubscriptionUsage(msgspec.Struct, frozen=True):
    """A show in a pool, cores in hundredths; what waits and has ended is of the whole show."""

    show: str
    pool: str | None
    size: int
    burst: int
    cores: int
    gpus: int
    frames: int
    waiting: int
    ended: int
    failed: int


class LiveJob(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    name: str
    show: str
    state: str
    reason: str | None
    priority: int
    submitted_at: datetime
    running: int
    frames: int
    succeeded: int
    ended: int


class PoolUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Its workers together, cores in hundredths."""

    name: str
    status: str
    workers: int
    frames: int
    cores: int
    cores_used: int
    gpus: int
    gpus_used: int


class TopSnapshot(msgspec.Struct, kw_only=True):
    """One look."""

    at: datetime
    shares: list[SubscriptionUsage]
    jobs: list[LiveJob]
    live: int
    """Live jobs; `LIVE_MOST` stands for that many and more."""
    workers: list[WorkerRecord]
    pools: list[PoolUsage]
    took_ms: float = 0.0
    per_s: float | None = None
    """Frames that ended a second since the look before."""
    paces: Sequence[float] = ()
    """The same of the last looks."""
    problem: str = ""

    @property
    def waiting(self) -> int:
        return sum({share.show: share.waiting for share in self.shares}.values())

    @property
    def ended(self) -> int:
        return sum({share.show: share.ended for share in self.shares}.values())

    @property
    def running(self) -> int:
        return sum(worker.frames for worker in self.workers)


async def read_snapshot(database: Database) -> TopSnapshot:
    began = time.monotonic()
    shares = [SubscriptionUsage(*row.values()) for row in await database.rows(TOP_SUBSCRIPTIONS)]
    rows = await database.rows(TOP_JOBS, JOBS_SHOWN_MAX, LIVE_JOBS_MAX)
    jobs = [LiveJob(**{name: row[name] for name in LiveJob.__struct_fields__}) for row in rows]
    workers = await worker_records(database)
    pools = await _read_pools(database, workers)
    return TopSnapshot(
        at=datetime.now().astimezone(),
        shares=shares,
        jobs=jobs,
        live=rows[0]["live"] if rows else 0,
        workers=workers,
        pools=pools,
        took_ms=round((time.monotonic() - began) * 1000, 1),
    )


async def _read_pools(database: Database, workers: Sequence[WorkerRecord]) -> list[PoolUsage]:
    routing = RouteStore(database)
    routes, now_ms = await routing.read(), routing.clock.now_ms()
    found = []
    for name, pool in sorted(routes.pools.items()):
        there = [worker for worker in workers if worker.pool == name]
        found.append(
            PoolUsage(
                name=name,
                status=pool.spec.status_at(now_ms).value,
                workers=len(there),
                frames=sum(worker.frames for worker in there),
                cores=sum(worker.hello.cores for worker in there),
                cores_used=sum(worker.cores for worker in there),
                gpus=sum(worker.hello.gpus for worker in there),
                gpus_used=sum(worker.gpus for worker in there),
            )
        )
    return found


class TopPoller:
    """Looks that know of the ones before them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._last: TopSnapshot | None = None
        self._last_at = 0.0
        self._paces: deque[float] = deque(maxlen=PACES_MAX)

    async def poll(self) -> TopSnapshot:
        try:
            seen = await read_snapshot(self._database)
        except PostgresUnavailable as away:
            if self._last is None:
                raise
            self._last.problem = away.sentence
            return self._last
        now = time.monotonic()
        if self._last is not None and now > self._last_at:
            # Discarded frames are not counted any more, so it may go down.
            seen.per_s = max(0.0, (seen.ended - self._last.ended) / (now - self._last_at))
            self._paces.append(seen.per_s)
        seen.paces = tuple(self._paces)
        self._last, self._last_at = seen, now
        return seen


def show_top(settings: Settings, *, every_s: float, once: bool, form: OutputFormat) -> None:
    """Until q or Ctrl-C; once where nobody looks."""
    with suppress(KeyboardInterrupt):
        asyncio.run(_show_top(settings, every_s=every_s, once=once or form.is_data, form=form))


async def _show_top(settings: Settings, *, every_s: float, once: bool, form: OutputFormat) -> None:
    async with db_commands.open_database(settings) as database:
        await check_current(database)
        looking, console = TopPoller(database), output.console()
        if form.is_data:
            output.print_data(snapshot_data(await looking.poll()), form)
        elif once or not console.is_terminal:
            with output.IgnoreBrokenPipe():
                console.print(top_view.render(await looking.poll(), _width(console), None))
        else:
            await _show_live(looking, console, every_s)


async def _show_live(looking: TopPoller, console: Console, every_s: float) -> None:
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False) as live:
        async with _quit_key() as pressed:
            while True:
                seen = await looking.poll()
                live.update(top_view.render(seen, console.width, console.height), refresh=True)
                with suppress(TimeoutError):
                    async with asyncio.timeout(every_s):
                        if await pressed():
                            return


@asynccontextmanager
async def _quit_key() -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """Gives what waits until q is pressed. Nothing is echoed meanwhile, and the terminal is left as it was."""
    loop, quitting = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        try:
            typed = os.read(sys.stdin.fileno(), 64)
        except OSError:
            typed = b""
        if not typed:
            loop.remove_reader(sys.stdin.fileno())
        if b"q" in typed.lower():
            quitting.set()

    if not sys.stdin.isatty():
        yield quitting.wait
        return
    with _cbreak_mode(sys.stdin.fileno()):
        loop.add_reader(sys.stdin.fileno(), read)
        try:
            yield quitting.wait
        finally:
            loop.remove_reader(sys.stdin.fileno())


@contextmanager
def _cbreak_mode(terminal: int) -> Iterator[None]:
    import termios
    import tty

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _width(console: Console) -> int:
    return console.width if console.is_terminal else top_view.PIPE_WIDTH


def snapshot_data(seen: TopSnapshot) -> dict[str, object]:
    """For programs: cores as numbers of cores."""
    return {
        "at": seen.at,
        "waiting": seen.waiting,
        "running": seen.running,
        "ended": seen.ended,
        "live_jobs": seen.live,
        "shows": [
            msgspec.structs.asdict(share)
            | {"size": share.size / 100, "burst": share.burst / 100, "cores": share.cores / 100}
            for share in seen.shares
        ],
        "pools": [
            msgspec.structs.asdict(pool) | {"cores": pool.cores / 100, "cores_used": pool.cores_used / 100}
            for pool in seen.pools
        ],
        "workers": [
            {
                "id": worker.id,
                "name": worker.name,
                "pool": worker.pool,
                "frames": worker.frames,
                "slots": worker.hello.slots,
                "cores": worker.hello.cores / 100,
                "used_cores": worker.cores / 100,
                "gpus": worker.hello.gpus,
                "used_gpus": worker.gpus,
            }
            for worker in seen.workers
        ],
        "jobs": [msgspec.structs.asdict(job) for job in seen.jobs],
    }

"""`rota top`: polls a snapshot of the whole system from PostgreSQL. Read-only.

A snapshot is a few statements (shares, jobs, workers, pools). They read running frames and queue counters, never
waiting frames, so the cost does not depend on the backlog. Usage comes from `proc` rows, not from Redis. While
PostgreSQL does not answer, the last snapshot stays with an error message.
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
"""Live jobs are counted up to this number."""
PACES_MAX: Final = 60


class SubscriptionUsage(msgspec.Struct, frozen=True):
    """A show's use of a pool, in centicores; `waiting`, `ended` and `failed` are of the whole show."""

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
    """Totals of a pool's workers, in centicores."""

    name: str
    status: str
    workers: int
    frames: int
    cores: int
    cores_used: int
    gpus: int
    gpus_used: int


class TopSnapshot(msgspec.Struct, kw_only=True):
    """One poll."""

    at: datetime
    shares: list[SubscriptionUsage]
    jobs: list[LiveJob]
    live: int
    """Number of live jobs; `LIVE_JOBS_MAX` means that many or more."""
    workers: list[WorkerRecord]
    pools: list[PoolUsage]
    took_ms: float = 0.0
    per_s: float | None = None
    """Frames ended per second since the previous poll."""
    paces: Sequence[float] = ()
    """`per_s` of the previous polls."""
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
        members = [worker for worker in workers if worker.pool == name]
        found.append(
            PoolUsage(
                name=name,
                status=pool.spec.status_at(now_ms).value,
                workers=len(members),
                frames=sum(worker.frames for worker in members),
                cores=sum(worker.hello.cores for worker in members),
                cores_used=sum(worker.cores for worker in members),
                gpus=sum(worker.hello.gpus for worker in members),
                gpus_used=sum(worker.gpus for worker in members),
            )
        )
    return found


class TopPoller:
    """Takes snapshots and derives rates from consecutive ones."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._last: TopSnapshot | None = None
        self._last_at = 0.0
        self._paces: deque[float] = deque(maxlen=PACES_MAX)

    async def poll(self) -> TopSnapshot:
        try:
            snapshot = await read_snapshot(self._database)
        except PostgresUnavailable as error:
            if self._last is None:
                raise
            self._last.problem = error.sentence
            return self._last
        now = time.monotonic()
        if self._last is not None and now > self._last_at:
            # The count can decrease: discarded frames are no longer counted.
            snapshot.per_s = max(0.0, (snapshot.ended - self._last.ended) / (now - self._last_at))
            self._paces.append(snapshot.per_s)
        snapshot.paces = tuple(self._paces)
        self._last, self._last_at = snapshot, now
        return snapshot


def show_top(settings: Settings, *, every_s: float, once: bool, form: OutputFormat) -> None:
    """Poll until q or Ctrl-C; only once when standard output is not a terminal."""
    with suppress(KeyboardInterrupt):
        asyncio.run(_show_top(settings, every_s=every_s, once=once or form.is_data, form=form))


async def _show_top(settings: Settings, *, every_s: float, once: bool, form: OutputFormat) -> None:
    async with db_commands.open_database(settings) as database:
        await check_current(database)
        poller, console = TopPoller(database), output.console()
        if form.is_data:
            output.print_data(snapshot_data(await poller.poll()), form)
        elif once or not console.is_terminal:
            with output.IgnoreBrokenPipe():
                console.print(top_view.render(await poller.poll(), _width(console), None))
        else:
            await _show_live(poller, console, every_s)


async def _show_live(poller: TopPoller, console: Console, every_s: float) -> None:
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False) as live:
        async with _quit_key() as pressed:
            while True:
                snapshot = await poller.poll()
                live.update(top_view.render(snapshot, console.width, console.height), refresh=True)
                with suppress(TimeoutError):
                    async with asyncio.timeout(every_s):
                        if await pressed():
                            return


@asynccontextmanager
async def _quit_key() -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """Yield a function that waits until q is pressed. Turns echo off, and restores the terminal on exit."""
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


def snapshot_data(snapshot: TopSnapshot) -> dict[str, object]:
    """For programs: cores as numbers, not centicores."""
    return {
        "at": snapshot.at,
        "waiting": snapshot.waiting,
        "running": snapshot.running,
        "ended": snapshot.ended,
        "live_jobs": snapshot.live,
        "shows": [
            msgspec.structs.asdict(share)
            | {"size": share.size / 100, "burst": share.burst / 100, "cores": share.cores / 100}
            for share in snapshot.shares
        ],
        "pools": [
            msgspec.structs.asdict(pool) | {"cores": pool.cores / 100, "cores_used": pool.cores_used / 100}
            for pool in snapshot.pools
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
            for worker in snapshot.workers
        ],
        "jobs": [msgspec.structs.asdict(job) for job in snapshot.jobs],
    }

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

from rota.cli import db, output, top_view
from rota.cli.form import Form
from rota.engine.workers import Known, known
from rota.infra.postgres import Database, check_current, query
from rota.model.errors import PostgresUnavailable
from rota.model.settings import Settings
from rota.placement.routing import Routing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

SHARES = query(__package__, "top_shares")
JOBS = query(__package__, "top_jobs")

JOBS_MOST: Final = 50
LIVE_MOST: Final = 100_001
"""Live jobs are counted so far and no further."""
PACES_KEPT: Final = 60


class Share(msgspec.Struct, frozen=True):
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


class PoolSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Its workers together, cores in hundredths."""

    name: str
    status: str
    workers: int
    frames: int
    cores: int
    cores_used: int
    gpus: int
    gpus_used: int


class Seen(msgspec.Struct, kw_only=True):
    """One look."""

    at: datetime
    shares: list[Share]
    jobs: list[LiveJob]
    live: int
    """Live jobs; `LIVE_MOST` stands for that many and more."""
    workers: list[Known]
    pools: list[PoolSeen]
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


async def look(database: Database) -> Seen:
    began = time.monotonic()
    shares = [Share(*row.values()) for row in await database.rows(SHARES)]
    rows = await database.rows(JOBS, JOBS_MOST, LIVE_MOST)
    jobs = [LiveJob(**{name: row[name] for name in LiveJob.__struct_fields__}) for row in rows]
    workers = await known(database)
    pools = await _pools(database, workers)
    return Seen(
        at=datetime.now().astimezone(),
        shares=shares,
        jobs=jobs,
        live=rows[0]["live"] if rows else 0,
        workers=workers,
        pools=pools,
        took_ms=round((time.monotonic() - began) * 1000, 1),
    )


async def _pools(database: Database, workers: Sequence[Known]) -> list[PoolSeen]:
    routing = Routing(database)
    routes, now_ms = await routing.read(), routing.clock.now_ms()
    found = []
    for name, pool in sorted(routes.pools.items()):
        there = [worker for worker in workers if worker.pool == name]
        found.append(
            PoolSeen(
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


class Looking:
    """Looks that know of the ones before them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._last: Seen | None = None
        self._last_at = 0.0
        self._paces: deque[float] = deque(maxlen=PACES_KEPT)

    async def look(self) -> Seen:
        try:
            seen = await look(self._database)
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


def show(settings: Settings, *, every_s: float, once: bool, form: Form) -> None:
    """Until q or Ctrl-C; once where nobody looks."""
    with suppress(KeyboardInterrupt):
        asyncio.run(_show(settings, every_s=every_s, once=once or form.is_data, form=form))


async def _show(settings: Settings, *, every_s: float, once: bool, form: Form) -> None:
    async with db.opened(settings) as database:
        await check_current(database)
        looking, console = Looking(database), output.console()
        if form.is_data:
            output.as_data(data(await looking.look()), form)
        elif once or not console.is_terminal:
            with output.readers_may_leave():
                console.print(top_view.picture(await looking.look(), _width(console), None))
        else:
            await _live(looking, console, every_s)


async def _live(looking: Looking, console: Console, every_s: float) -> None:
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False) as live:
        async with _keys() as pressed:
            while True:
                seen = await looking.look()
                live.update(top_view.picture(seen, console.width, console.height), refresh=True)
                with suppress(TimeoutError):
                    async with asyncio.timeout(every_s):
                        if await pressed():
                            return


@asynccontextmanager
async def _keys() -> AsyncIterator[Callable[[], Awaitable[object]]]:
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
    with _unbuffered(sys.stdin.fileno()):
        loop.add_reader(sys.stdin.fileno(), read)
        try:
            yield quitting.wait
        finally:
            loop.remove_reader(sys.stdin.fileno())


@contextmanager
def _unbuffered(terminal: int) -> Iterator[None]:
    import termios
    import tty

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _width(console: Console) -> int:
    return console.width if console.is_terminal else top_view.WIDTH


def data(seen: Seen) -> dict[str, object]:
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

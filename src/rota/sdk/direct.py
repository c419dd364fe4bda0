"""Rota by its database: for scripts beside one, and for servers that have no HTTP.

Jobs are written, looked at and marked as cancelled in PostgreSQL; servers do the rest, now or when one is up. Waiting
is looking again and again, with pauses of at most `LOOK_S`. If we die, or a reply is lost, after a job was marked, it
may be marked again; a submission may be repeated when it has a key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from rota.engine.ender import mark_cancelled
from rota.engine.engine import store_target
from rota.engine.explain import Explainer
from rota.engine.jobs import FrameEnd, Job, Jobs, Layer, Moment
from rota.engine.logs import Logs, Piece, Stream
from rota.engine.submit_steps import Submitted
from rota.infra.clock import Clock, SystemClock
from rota.infra.postgres import Database, check_current
from rota.infra.settings_file import load
from rota.infra.store import Store
from rota.model.errors import InvalidSetting
from rota.model.ids import JobId
from rota.model.job import Submission
from rota.model.settings import Settings
from rota.runtime import postgres_target, submitter_of
from rota.sdk.transport import Result, Why

if TYPE_CHECKING:
    from rota.engine.submit import Submitter

FIRST_LOOK_S: Final = 0.02
LOOK_S: Final = 0.25
PAGE: Final = 1000
POOL_MAX: Final = 4


class Opened(msgspec.Struct, frozen=True):
    database: Database
    submitter: Submitter
    jobs: Jobs
    logs: Logs
    store: Store


class Direct:
    def __init__(self, url: str = "", *, actor: str = "", clock: Clock | None = None) -> None:
        self._url = url
        self._actor = actor or "sdk"
        self._clock = clock or SystemClock()
        self._lock = asyncio.Lock()
        self._open: Opened | None = None

    async def submit(self, submissions: Sequence[Submission]) -> Sequence[Submitted]:
        return await (await self._opened()).submitter.submit(submissions)

    async def get(self, job: JobId) -> Job:
        return await (await self._opened()).jobs.get(job)

    async def ended(self, job: JobId, within_s: float) -> Job:
        until, pause_s = time.monotonic() + within_s, FIRST_LOOK_S
        while True:
            found = await self.get(job)
            left_s = until - time.monotonic()
            if found.state.terminal or left_s <= 0:
                return found
            await self._clock.sleep(min(pause_s, left_s))
            pause_s = min(LOOK_S, pause_s * 2)

    async def results(self, job: JobId) -> AsyncIterator[Result]:
        here = await self._opened()
        for layer in (await here.jobs.get(job)).layers:
            places = {place: at for at, place in enumerate(layer.frames.places())}
            frame = min(places)
            while ends := await here.jobs.ends(layer.id, frame=frame, most=PAGE):
                for end in ends:
                    yield await _result(here.store, layer, places[end.frame], end)
                frame = ends[-1].frame + 1

    async def cancel(self, job: JobId) -> bool:
        marked = await mark_cancelled((await self._opened()).database, job, self._actor)
        if not marked:
            await self.get(job)
        return marked

    async def logs(
        self,
        job: JobId,
        frame: int | None = None,
        *,
        layer: str | None = None,
        attempt: int | None = None,
        stream: Stream | None = None,
        after: int = 0,
        most: int = 100,
    ) -> Sequence[Piece]:
        logs = (await self._opened()).logs
        return await logs.read(job, frame, layer=layer, attempt=attempt, stream=stream, after=after, most=most)

    async def events(self, job: JobId) -> AsyncIterator[Moment]:
        seen, pause_s = 0, FIRST_LOOK_S
        while True:
            found = await self.get(job)
            for moment in found.history[seen:]:
                yield moment
            pause_s = FIRST_LOOK_S if len(found.history) > seen else min(LOOK_S, pause_s * 2)
            seen = len(found.history)
            if found.state.terminal:
                return
            await self._clock.sleep(pause_s)

    async def explain(self, job: JobId) -> Sequence[Why]:
        told = await Explainer((await self._opened()).database).explain(job)
        return [
            Why(code=each.code.value, sentence=each.sentence, remedy=each.remedy, layer=each.layer)
            for each in told.reasons
        ]

    async def close(self) -> None:
        async with self._lock:
            here, self._open = self._open, None
        if here is not None:
            await here.database.close()

    async def _opened(self) -> Opened:
        if self._open is None:
            async with self._lock:
                if self._open is None:
                    self._open = await _opened(self._url)
        return self._open


async def _opened(url: str) -> Opened:
    settings = load().settings
    url = url or settings.postgres.url or ""
    if not url:
        settings, url = _local(settings)
    target = postgres_target(settings, url)
    database = await Database.open(
        msgspec.structs.replace(target, pool_min=1, pool_max=POOL_MAX, application_name="rota-sdk")
    )
    try:
        await check_current(database)
    except BaseException:
        await database.close()
        raise
    store = Store(database, store_target(settings))
    return Opened(database, submitter_of(settings, database), Jobs(database), Logs(database), store)


def _local(settings: Settings) -> tuple[Settings, str]:
    """The PostgreSQL and the store of the `rota up` of this directory."""
    from rota.cli.local import local_url, with_store

    url = local_url(settings, "postgres")
    if not url:
        raise InvalidSetting("No Rota is known here: give Rota(url), set postgres.url, or start one with `rota up`.")
    return with_store(settings), url


async def _result(store: Store, layer: Layer, place: int, end: FrameEnd) -> Result:
    value = end.value if end.value_at is None else await store.get(end.value_at)
    return Result(
        layer=layer.number,
        place=place,
        frame=layer.frames.number(end.frame),
        attempt=end.attempt,
        state=end.state,
        value=value,
        code=end.code or "",
        error=end.error or "",
    )

"""Events as they happen, and the moments of one job, as server-sent events.

Each has the id of its place: whoever was cut off sends the last one (`Last-Event-ID`, which browsers do by themselves,
or `?after=`) and goes on behind it. An event `reset` says that some are missing: look anew.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import Annotated, Final, Generic
from uuid import UUID

import msgspec
from litestar import Controller, get
from litestar.params import HeaderParameter, QueryParameter

from rota.engine.events_feed import Behind, Reader
from rota.engine.events_history import Histories, M, Watched
from rota.engine.jobs import Job, Moment
from rota.model import sse
from rota.model.access import Role, guard
from rota.model.errors import InvalidInput
from rota.model.events import Event, Place, Portion, Wanted, checked_kinds
from rota.model.ids import JobId, RunId, parse_id
from rota.server.http.desk import Desk
from rota.server.http.routes import AtDesk, needs
from rota.server.http.seen import JobPath, seen
from rota.server.http.sse import MEDIA_TYPE, Sse
from rota.server.http.wire import Ask

RETRY_MS: Final = 1000
"""After which a client that was cut off comes again."""
REMEMBERED: Final = 16

After = Annotated[str, QueryParameter(description="Go on behind this event.", max_length=80)]
LastEventId = Annotated[
    str, HeaderParameter(name="Last-Event-ID", description="The same, as browsers send it.", max_length=80)
]
Show = Annotated[str | None, QueryParameter(description="Only of this show.", max_length=64)]
OfRun = Annotated[str | None, QueryParameter(description="Only of the run of a workflow with this id.")]
OfJob = Annotated[str | None, QueryParameter(description="Only of the job with this id.")]
Kinds = Annotated[
    str, QueryParameter(description="Only these, separated by commas: `job.failed`, or a family such as `worker`.")
]


class EventRoutes(Controller):
    tags = ("events",)

    @get("/events", opt=needs(Role.VIEWER, "somewhere"), media_type=MEDIA_TYPE)
    async def follow_events(
        self,
        request: Ask,
        desk: AtDesk,
        show: Show = None,
        job: OfJob = None,
        run: OfRun = None,
        kind: Kinds = "",
        after: After = "",
        last: LastEventId = "",
    ) -> Sse:
        """Follow what happens, in the shows that the key may look into."""
        if show is not None:
            guard(request.user, Role.VIEWER, show)
        wanted = Wanted(
            shows=request.user.limited_to(Role.VIEWER),
            show=show,
            job=parse_id(JobId, job) if job else None,
            run=parse_id(RunId, run) if run else None,
            kinds=checked_kinds([kind]),
        )
        place = Place.parse(last or after) if last or after else None
        return Sse(request, desk.streams, _following(desk, wanted, place))

    @get("/jobs/{job:str}/events", opt=needs(Role.VIEWER, "somewhere"), media_type=MEDIA_TYPE)
    async def follow_job(
        self, request: Ask, desk: AtDesk, job: JobPath, after: After = "", last: LastEventId = ""
    ) -> Sse:
        """Every moment of a job, from the first one on, until its end."""
        found = await seen(request.user, desk, job)
        told = watching(desk.histories, found.id, last or after, partial(_event, found))
        return Sse(request, desk.streams, told)


class Following:
    """Events of the whole installation."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def opening(self) -> bytes:
        return f"retry: {RETRY_MS}\n{self._place()}".encode()

    async def next(self, wait_s: float) -> list[bytes] | None:
        try:
            portions = await self._reader.read(wait_s)
        except Behind:
            return None
        if not portions:
            return [f": {self._place()}".encode()]
        return [_text_once(each) if each.only is None else text_of(each) for each in portions]

    def _place(self) -> str:
        """Without any data it is no event; the client remembers it."""
        return f"\nid: {self._reader.place}\n\n"


class Watching(Generic[M]):
    """The moments of one job or run."""

    def __init__(self, watched: Watched[M], event: Callable[[int, M], Event]) -> None:
        self._watched = watched
        self._event = event

    def opening(self) -> bytes:
        return f"retry: {RETRY_MS}\n\n".encode()

    async def next(self, wait_s: float) -> list[bytes] | None:
        if self._watched.ended:
            return None
        moments = await self._watched.news(wait_s)
        return [_written(self._event(*each)) for each in moments] or [b":\n\n"]


@asynccontextmanager
async def _following(desk: Desk, wanted: Wanted, after: Place | None) -> AsyncIterator[Following]:
    async with desk.feed.subscribed(wanted, after) as reader:
        yield Following(reader)


@asynccontextmanager
async def watching(
    histories: Histories[M], which: UUID, after: str, event: Callable[[int, M], Event]
) -> AsyncIterator[Watching[M] | None]:
    """None, for a client that has seen the end: it need not come again."""
    number = _number(after)
    async with histories.watched(which, number) as watched:
        yield None if watched.over_after(number) else Watching(watched, event)


def _written(event: Event) -> bytes:
    return sse.written(event.id, event.kind, msgspec.json.encode(event))


def text_of(portion: Portion) -> bytes:
    """All of its events, which differ in their ids, jobs and runs alone: what they share is written once."""
    ids, runs = portion.group.jobs.hex(), portion.group.runs.hex()
    if not (ids or runs) or portion.place.index is None:
        return b"".join([_written(event) for event in portion.events()])
    some = portion.event(0)
    kind, before = some.kind, some.id.rpartition("-")[0]
    at, told, show, facts = (msgspec.json.encode(each).decode() for each in (some.at, kind, some.show, some.facts))
    shared, end = f'"at":{at},"kind":{told},"show":{show},"job":', f',"facts":{facts}}}\n\n'
    lines = []
    for place in portion.places:
        event_id, job, run = f"{before}-{portion.place.index + place}", _dashed(ids, place), _dashed(runs, place)
        lines.append(f'id: {event_id}\nevent: {kind}\ndata: {{"id":"{event_id}",{shared}{job},"run":{run}{end}')
    return "".join(lines).encode()


def _dashed(ids: str, place: int) -> str:
    one = ids[32 * place : 32 * place + 32]
    return f'"{one[:8]}-{one[8:12]}-{one[12:16]}-{one[16:20]}-{one[20:]}"' if one else "null"


# All who follow read the same portions, about the same time.
_text_once = lru_cache(maxsize=REMEMBERED)(text_of)


def _event(job: Job, number: int, moment: Moment) -> Event:
    return Event(
        id=str(number),
        at=moment.at,
        kind=f"job.{moment.state.lower()}",
        show=job.show,
        job=job.id,
        facts={"reason": moment.reason} if moment.reason else {},
    )


def _number(after: str) -> int:
    if after and not (after.isascii() and after.isdigit() and len(after) <= 9):
        raise InvalidInput(f"{after[:40]!r} is no number of a moment: give one as it was told, or none for all.")
    return int(after or 0)

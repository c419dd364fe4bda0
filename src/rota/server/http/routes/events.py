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

from rota.engine.events.history import HistoryWatch, HistoryWatcher, M
from rota.engine.events.subscriptions import EventSubscription, SlowConsumer
from rota.engine.queries.jobs import JobHistoryEntry, JobView
from rota.model import sse
from rota.model.access import Role, require_role
from rota.model.errors import InvalidInput
from rota.model.events import Event, EventBatch, EventFilter, StreamPosition, parse_event_kinds
from rota.model.ids import JobId, RunId, parse_id
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.permissions import Deps, requires
from rota.server.http.sse import MEDIA_TYPE, SseResponse
from rota.server.http.visibility import JobPath, visible_job

RETRY_MS: Final = 1000
"""After which a client that was cut off comes again."""
ENCODED_CACHE_MAX: Final = 16

After = Annotated[str, QueryParameter(description="Go on behind this event.", max_length=80)]
LastEventId = Annotated[
    str, HeaderParameter(name="Last-Event-ID", description="The same, as browsers send it.", max_length=80)
]
ShowQuery = Annotated[str | None, QueryParameter(description="Only of this show.", max_length=64)]
RunQuery = Annotated[str | None, QueryParameter(description="Only of the run of a workflow with this id.")]
JobQuery = Annotated[str | None, QueryParameter(description="Only of the job with this id.")]
KindsQuery = Annotated[
    str, QueryParameter(description="Only these, separated by commas: `job.failed`, or a family such as `worker`.")
]


class EventRoutes(Controller):
    tags = ("events",)

    @get("/events", opt=requires(Role.VIEWER, "somewhere"), media_type=MEDIA_TYPE)
    async def follow_events(
        self,
        request: ApiRequest,
        desk: Deps,
        show: ShowQuery = None,
        job: JobQuery = None,
        run: RunQuery = None,
        kind: KindsQuery = "",
        after: After = "",
        last: LastEventId = "",
    ) -> SseResponse:
        """Follow what happens, in the shows that the key may look into."""
        if show is not None:
            require_role(request.user, Role.VIEWER, show)
        wanted = EventFilter(
            shows=request.user.shows_with_role(Role.VIEWER),
            show=show,
            job=parse_id(JobId, job) if job else None,
            run=parse_id(RunId, run) if run else None,
            kinds=parse_event_kinds([kind]),
        )
        place = StreamPosition.parse(last or after) if last or after else None
        return SseResponse(request, desk.streams, _open_event_stream(desk, wanted, place))

    @get("/jobs/{job:str}/events", opt=requires(Role.VIEWER, "somewhere"), media_type=MEDIA_TYPE)
    async def follow_job(
        self, request: ApiRequest, desk: Deps, job: JobPath, after: After = "", last: LastEventId = ""
    ) -> SseResponse:
        """Every moment of a job, from the first one on, until its end."""
        found = await visible_job(request.user, desk, job)
        told = open_history(desk.histories, found.id, last or after, partial(_job_event, found))
        return SseResponse(request, desk.streams, told)


class EventStreamSource:
    """Events of the whole installation."""

    def __init__(self, reader: EventSubscription) -> None:
        self._reader = reader

    def preamble(self) -> bytes:
        return f"retry: {RETRY_MS}\n{self._id_field()}".encode()

    async def next(self, wait_s: float) -> list[bytes] | None:
        try:
            portions = await self._reader.read(wait_s)
        except SlowConsumer:
            return None
        if not portions:
            return [f": {self._id_field()}".encode()]
        return [_encode_batch_cached(each) if each.only is None else encode_batch(each) for each in portions]

    def _id_field(self) -> str:
        """Without any data it is no event; the client remembers it."""
        return f"\nid: {self._reader.place}\n\n"


class HistoryStreamSource(Generic[M]):
    """The moments of one job or run."""

    def __init__(self, watched: HistoryWatch[M], event: Callable[[int, M], Event]) -> None:
        self._watched = watched
        self._event = event

    def preamble(self) -> bytes:
        return f"retry: {RETRY_MS}\n\n".encode()

    async def next(self, wait_s: float) -> list[bytes] | None:
        if self._watched.ended:
            return None
        moments = await self._watched.next_entries(wait_s)
        return [_encode_event(self._event(*each)) for each in moments] or [b":\n\n"]


@asynccontextmanager
async def _open_event_stream(
    desk: HttpDependencies, wanted: EventFilter, after: StreamPosition | None
) -> AsyncIterator[EventStreamSource]:
    async with desk.feed.subscribe(wanted, after) as reader:
        yield EventStreamSource(reader)


@asynccontextmanager
async def open_history(
    histories: HistoryWatcher[M], which: UUID, after: str, event: Callable[[int, M], Event]
) -> AsyncIterator[HistoryStreamSource[M] | None]:
    """None, for a client that has seen the end: it need not come again."""
    number = _parse_moment_number(after)
    async with histories.watch(which, number) as watched:
        yield None if watched.ends_with(number) else HistoryStreamSource(watched, event)


def _encode_event(event: Event) -> bytes:
    return sse.format_event(event.id, event.kind, msgspec.json.encode(event))


def encode_batch(portion: EventBatch) -> bytes:
    """All of its events, which differ in their ids, jobs and runs alone: what they share is written once."""
    ids, runs = portion.group.jobs.hex(), portion.group.runs.hex()
    if not (ids or runs) or portion.place.index is None:
        return b"".join([_encode_event(event) for event in portion.events()])
    some = portion.event(0)
    kind, before = some.kind, some.id.rpartition("-")[0]
    at, told, show, facts = (msgspec.json.encode(each).decode() for each in (some.at, kind, some.show, some.facts))
    shared, end = f'"at":{at},"kind":{told},"show":{show},"job":', f',"facts":{facts}}}\n\n'
    lines = []
    for place in portion.indexes:
        event_id, job, run = f"{before}-{portion.place.index + place}", _uuid_json(ids, place), _uuid_json(runs, place)
        lines.append(f'id: {event_id}\nevent: {kind}\ndata: {{"id":"{event_id}",{shared}{job},"run":{run}{end}')
    return "".join(lines).encode()


def _uuid_json(ids: str, place: int) -> str:
    one = ids[32 * place : 32 * place + 32]
    return f'"{one[:8]}-{one[8:12]}-{one[12:16]}-{one[16:20]}-{one[20:]}"' if one else "null"


# All who follow read the same portions, about the same time.
_encode_batch_cached = lru_cache(maxsize=ENCODED_CACHE_MAX)(encode_batch)


def _job_event(job: JobView, number: int, moment: JobHistoryEntry) -> Event:
    return Event(
        id=str(number),
        at=moment.at,
        kind=f"job.{moment.state.lower()}",
        show=job.show,
        job=job.id,
        facts={"reason": moment.reason} if moment.reason else {},
    )


def _parse_moment_number(after: str) -> int:
    if after and not (after.isascii() and after.isdigit() and len(after) <= 9):
        raise InvalidInput(f"{after[:40]!r} is no number of a moment: give one as it was told, or none for all.")
    return int(after or 0)

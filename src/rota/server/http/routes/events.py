"""Events as they happen, and the history of one job, as server-sent events.

Each event id is a stream position. A disconnected client sends its last id (`Last-Event-ID`, which browsers do by
themselves, or `?after=`) and resumes after it. The event `reset` says that events were lost: read the state again.
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

from rota.api.jobs import JobHistoryEntry, JobView
from rota.engine.events.history import HistoryWatch, HistoryWatcher, M
from rota.engine.events.subscriptions import EventSubscription, SlowConsumer
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
"""Reconnect delay of a disconnected client."""
ENCODED_CACHE_MAX: Final = 16

After = Annotated[str, QueryParameter(description="Resume after this event.", max_length=80)]
LastEventId = Annotated[
    str, HeaderParameter(name="Last-Event-ID", description="The same, as browsers send it.", max_length=80)
]
ShowQuery = Annotated[str | None, QueryParameter(description="Only events of this show.", max_length=64)]
RunQuery = Annotated[str | None, QueryParameter(description="Only events of the workflow run with this id.")]
JobQuery = Annotated[str | None, QueryParameter(description="Only events of the job with this id.")]
KindsQuery = Annotated[
    str,
    QueryParameter(description="Only these kinds, separated by commas: `job.failed`, or a family such as `worker`."),
]


class EventRoutes(Controller):
    tags = ("events",)

    @get("/events", opt=requires(Role.VIEWER, "somewhere"), media_type=MEDIA_TYPE)
    async def follow_events(
        self,
        request: ApiRequest,
        deps: Deps,
        show: ShowQuery = None,
        job: JobQuery = None,
        run: RunQuery = None,
        kind: KindsQuery = "",
        after: After = "",
        last: LastEventId = "",
    ) -> SseResponse:
        """Follow events in the shows that the key can view."""
        if show is not None:
            require_role(request.user, Role.VIEWER, show)
        event_filter = EventFilter(
            shows=request.user.shows_with_role(Role.VIEWER),
            show=show,
            job=parse_id(JobId, job) if job else None,
            run=parse_id(RunId, run) if run else None,
            kinds=parse_event_kinds([kind]),
        )
        position = StreamPosition.parse(last or after) if last or after else None
        return SseResponse(request, deps.streams, _open_event_stream(deps, event_filter, position))

    @get("/jobs/{job:str}/events", opt=requires(Role.VIEWER, "somewhere"), media_type=MEDIA_TYPE)
    async def follow_job(
        self, request: ApiRequest, deps: Deps, job: JobPath, after: After = "", last: LastEventId = ""
    ) -> SseResponse:
        """Follow the history of a job from its first entry until its end."""
        found = await visible_job(request.user, deps, job)
        source = open_history(deps.histories, found.id, last or after, partial(_job_event, found))
        return SseResponse(request, deps.streams, source)


class EventStreamSource:
    """Events of all jobs, runs and workers."""

    def __init__(self, reader: EventSubscription) -> None:
        self._reader = reader

    def preamble(self) -> bytes:
        return f"retry: {RETRY_MS}\n{self._id_field()}".encode()

    async def next(self, wait_s: float) -> list[bytes] | None:
        try:
            batches = await self._reader.read(wait_s)
        except SlowConsumer:
            return None
        if not batches:
            return [f": {self._id_field()}".encode()]
        return [_encode_batch_cached(each) if each.only is None else encode_batch(each) for each in batches]

    def _id_field(self) -> str:
        """An id without data: clients dispatch no event for it, but keep it as their position."""
        return f"\nid: {self._reader.place}\n\n"


class HistoryStreamSource(Generic[M]):
    """The history of one job or run."""

    def __init__(self, watched: HistoryWatch[M], event: Callable[[int, M], Event]) -> None:
        self._watched = watched
        self._event = event

    def preamble(self) -> bytes:
        return f"retry: {RETRY_MS}\n\n".encode()

    async def next(self, wait_s: float) -> list[bytes] | None:
        if self._watched.ended:
            return None
        entries = await self._watched.next_entries(wait_s)
        return [_encode_event(self._event(*each)) for each in entries] or [b":\n\n"]


@asynccontextmanager
async def _open_event_stream(
    deps: HttpDependencies, event_filter: EventFilter, after: StreamPosition | None
) -> AsyncIterator[EventStreamSource]:
    async with deps.feed.subscribe(event_filter, after) as reader:
        yield EventStreamSource(reader)


@asynccontextmanager
async def open_history(
    histories: HistoryWatcher[M], which: UUID, after: str, event: Callable[[int, M], Event]
) -> AsyncIterator[HistoryStreamSource[M] | None]:
    """None for a client that has already received the last entry: it gets 204 and stops reconnecting."""
    number = _parse_moment_number(after)
    async with histories.watch(which, number) as watched:
        yield None if watched.ends_with(number) else HistoryStreamSource(watched, event)


def _encode_event(event: Event) -> bytes:
    return sse.format_event(event.id, event.kind, msgspec.json.encode(event))


def encode_batch(batch: EventBatch) -> bytes:
    """Encode a batch: its events differ only in id, job and run, so the shared fields are encoded once."""
    ids, runs = batch.group.jobs.hex(), batch.group.runs.hex()
    if not (ids or runs) or batch.place.index is None:
        return b"".join([_encode_event(event) for event in batch.events()])
    first = batch.event(0)
    kind, before = first.kind, first.id.rpartition("-")[0]
    at, kind_json, show, facts = (
        msgspec.json.encode(each).decode() for each in (first.at, kind, first.show, first.facts)
    )
    shared, end = f'"at":{at},"kind":{kind_json},"show":{show},"job":', f',"facts":{facts}}}\n\n'
    lines = []
    for index in batch.indexes:
        event_id, job, run = (
            f"{before}-{batch.place.index + index}",
            _uuid_json(ids, index),
            _uuid_json(runs, index),
        )
        lines.append(f'id: {event_id}\nevent: {kind}\ndata: {{"id":"{event_id}",{shared}{job},"run":{run}{end}')
    return "".join(lines).encode()


def _uuid_json(ids: str, index: int) -> str:
    one = ids[32 * index : 32 * index + 32]
    return f'"{one[:8]}-{one[8:12]}-{one[12:16]}-{one[16:20]}-{one[20:]}"' if one else "null"


# All subscribers read the same batches at about the same time.
_encode_batch_cached = lru_cache(maxsize=ENCODED_CACHE_MAX)(encode_batch)


def _job_event(job: JobView, number: int, entry: JobHistoryEntry) -> Event:
    return Event(
        id=str(number),
        at=entry.at,
        kind=f"job.{entry.state.lower()}",
        show=job.show,
        job=job.id,
        facts={"reason": entry.reason} if entry.reason else {},
    )


def _parse_moment_number(after: str) -> int:
    if after and not (after.isascii() and after.isdigit() and len(after) <= 9):
        raise InvalidInput(
            f"{after[:40]!r} is not a valid event id: use one of this job or run, or none for all events."
        )
    return int(after or 0)

"""Results of jobs: return values, logs and artifacts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Final

import msgspec
from litestar import Controller, get
from litestar.params import FromPath, FromQuery, QueryParameter
from litestar.response import Stream as Streamed

from rota.api.job_results import ArtifactView, FrameResultPage, JobOutcome, LogChunkView
from rota.api.jobs import JobView, Layer
from rota.api.logs import LogBytes, Stream
from rota.api.pages import Page
from rota.engine.queries.log_cursor import FrameLogStream, LogCursor
from rota.engine.queries.logs import READ_MAX, LogSegment
from rota.infra.blob_store import BlobPointer
from rota.model.access import Role
from rota.model.errors import NotFound
from rota.model.ids import JobId
from rota.model.jobs.frame_ranges import FRAME_NUMBER_MAX
from rota.model.policy.outputs import check_readable
from rota.server.http.blob_stream import OCTET_STREAM, stream_blob
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.pagination import LIMIT_DEFAULT, Limit
from rota.server.http.permissions import Deps, requires
from rota.server.http.routes.jobs import WaitQuery, job_after_wait
from rota.server.http.visibility import JobPath, visible_job

JSON_LINES: Final = "application/x-ndjson"
FOLLOW_MAX_S: Final = 3600.0
POLL_INTERVAL_S: Final = 0.25
LOG_LAG_MAX_S: Final = 1.0
"""Delay until the log of an ended frame is complete, unless it wrote very much."""
ARTIFACT_FRAMES_MAX: Final = 10_000

FrameNumber = Annotated[int | None, QueryParameter(ge=0, le=FRAME_NUMBER_MAX, description="The number of a frame.")]
LayerName = Annotated[str | None, QueryParameter(max_length=200, description="The name of a layer.")]
AttemptNumber = Annotated[
    int | None, QueryParameter(ge=1, le=32767, description="The number of an attempt; default: the last one.")
]
ByteOffset = Annotated[
    int, QueryParameter(ge=0, lt=2**53, description="Start at this byte of the stream; needs `stream`.")
]
AttemptOfOffset = Annotated[
    int | None,
    QueryParameter(
        ge=1, le=32767, description="The attempt in which `at` counts; a later one is streamed from its start."
    ),
]


class JobResultRoutes(Controller):
    path = "/jobs/{job:str}"
    tags = ("outputs",)

    @get("/outcome", opt=requires(Role.VIEWER, "somewhere"))
    async def get_outcome(
        self, request: ApiRequest, deps: Deps, job: JobPath, wait: WaitQuery = 0.0, limit: Limit = LIMIT_DEFAULT
    ) -> JobOutcome:
        """Read a job and its results in one answer, or wait for them."""
        found = await job_after_wait(request, deps, job, wait)
        results = await deps.outcomes.page(found, most=limit) if found.state.terminal else None
        return JobOutcome(found, results)

    @get("/results", opt=requires(Role.VIEWER, "somewhere"))
    async def get_results(
        self,
        request: ApiRequest,
        deps: Deps,
        job: JobPath,
        frame: FrameNumber = None,
        after: FromQuery[str | None] = None,
        limit: Limit = 100,
    ) -> FrameResultPage:
        """List return values and errors of frames. A frame that succeeded without a value has no entry."""
        return await deps.outcomes.page(
            await visible_job(request.user, deps, job), after=after, most=limit, frame=frame
        )

    @get("/logs", opt=requires(Role.VIEWER, "somewhere"))
    async def get_logs(
        self,
        request: ApiRequest,
        deps: Deps,
        job: JobPath,
        frame: FrameNumber = None,
        layer: LayerName = None,
        attempt: AttemptNumber = None,
        stream: FromQuery[Stream | None] = None,
        at: ByteOffset = 0,
        limit: Limit = 100,
    ) -> Page[LogChunkView]:
        """Read the log of a frame, by default the first. For a single stream `next` is the byte to continue `at`."""
        found = await visible_job(request.user, deps, job)
        segments = await deps.logs.read(
            found.id, frame, layer=layer, attempt=attempt, stream=stream, after=at, most=limit
        )
        chunks = [
            LogChunkView(
                attempt=segment.attempt,
                stream=segment.stream,
                at=segment.at,
                text=segment.data.decode(errors="replace"),
                dropped=segment.dropped,
                lost=segment.lost,
                last=segment.last,
            )
            for segment in segments
        ]
        more = stream is not None and len(segments) == limit
        return Page(chunks, str(segments[-1].at + len(segments[-1].data)) if more else None)

    @get("/logs/{stream:str}", opt=requires(Role.VIEWER, "somewhere"), media_type=OCTET_STREAM)
    async def follow_logs(
        self,
        request: ApiRequest,
        deps: Deps,
        job: JobPath,
        stream: FromPath[Stream],
        frame: FrameNumber = None,
        layer: LayerName = None,
        attempt: AttemptNumber = None,
        at: ByteOffset = 0,
        follow: FromQuery[bool] = False,
    ) -> Streamed:
        """Stream a log byte for byte; with `follow` until it ends, for at most an hour. To resume it, read chunks."""
        found = await visible_job(request.user, deps, job)
        log_stream = FrameLogStream(found.id, frame, layer, attempt, stream)
        segments = await _open_log(request, deps, log_stream, at, None, follow=follow)
        return Streamed((segment.data async for segment in segments), media_type=OCTET_STREAM)

    @get("/logs/{stream:str}/chunks", opt=requires(Role.VIEWER, "somewhere"), media_type=JSON_LINES)
    async def follow_log_chunks(
        self,
        request: ApiRequest,
        deps: Deps,
        job: JobPath,
        stream: FromPath[Stream],
        frame: FrameNumber = None,
        layer: LayerName = None,
        attempt: AttemptNumber = None,
        at: ByteOffset = 0,
        at_attempt: AttemptOfOffset = None,
        follow: FromQuery[bool] = False,
    ) -> Streamed:
        """Stream a log as JSON lines, each with its offset and attempt, so that it can be resumed after any of them.

        `data` is base64. With `follow` until the stream ends, for at most an hour.
        """
        found = await visible_job(request.user, deps, job)
        log_stream = FrameLogStream(found.id, frame, layer, attempt, stream)
        segments = await _open_log(request, deps, log_stream, at, at_attempt, follow=follow)
        return Streamed((_log_line(segment) async for segment in segments), media_type=JSON_LINES)

    @get("/artifacts", opt=requires(Role.VIEWER, "somewhere"))
    async def get_artifacts(
        self, request: ApiRequest, deps: Deps, job: JobPath, frame: FrameNumber = None, layer: LayerName = None
    ) -> Page[ArtifactView]:
        """List the readable artifacts of the first ten thousand frames of each layer."""
        found = await visible_job(request.user, deps, job)
        if frame is not None:
            await _check_readable(deps, found, layer=layer, frame=frame)
        files = [
            file
            for one in found.layers
            if layer is None or one.name == layer
            for file in await _artifacts(deps, one, frame)
        ]
        return Page(files)

    @get("/artifacts/file", opt=requires(Role.VIEWER, "somewhere"), media_type=OCTET_STREAM)
    async def get_artifact(
        self, request: ApiRequest, deps: Deps, job: JobPath, at: Annotated[str, QueryParameter(max_length=200)]
    ) -> Streamed:
        """Download one artifact."""
        found = await visible_job(request.user, deps, job)
        for layer in found.layers:
            for file in await _artifacts(deps, layer, None):
                if file.at == at:
                    return await stream_blob(request, deps.store, at)
        await _check_readable(deps, found, file=at)
        raise NotFound(f"Job {found.id} has no artifact {at[:64]!r}: use an `at` from its list of artifacts.")


async def _open_log(
    request: ApiRequest,
    deps: HttpDependencies,
    log_stream: FrameLogStream,
    at: int,
    attempt: int | None,
    *,
    follow: bool,
) -> AsyncIterator[LogSegment]:
    """Raises errors before the response starts. HEAD reads nothing."""
    await log_stream.read(deps.logs, at, most=1)
    if request.is_head:
        return _nothing()
    if follow:
        request.auth.begin_wait()
    cursor = LogCursor(deps.logs, log_stream, at, attempt)
    return _stream_log(deps, log_stream.job, cursor, FOLLOW_MAX_S if follow else 0.0)


async def _nothing() -> AsyncIterator[LogSegment]:
    no_segments: tuple[LogSegment, ...] = ()
    for segment in no_segments:
        yield segment


async def _stream_log(
    deps: HttpDependencies, job: JobId, cursor: LogCursor, follow_s: float
) -> AsyncIterator[LogSegment]:
    """The log so far, then new data for `follow_s`, until the stream ends or the job ended `LOG_LAG_MAX_S` ago."""
    until = time.monotonic() + follow_s
    ended_at: float | None = None
    while True:
        if follow_s and ended_at is None and (await deps.jobs.get(job)).state.terminal:
            ended_at = time.monotonic()
        segments = await cursor.read()
        for segment in segments:
            yield segment
        if len(segments) == READ_MAX:
            continue
        expired = time.monotonic() >= (until if ended_at is None else min(until, ended_at + LOG_LAG_MAX_S))
        if any(segment.last for segment in segments) or expired or await _server_stopping(deps):
            return


def _log_line(segment: LogSegment) -> bytes:
    line = LogBytes(
        attempt=segment.attempt,
        at=segment.at,
        data=segment.data,
        dropped=segment.dropped,
        lost=segment.lost,
        last=segment.last,
    )
    return msgspec.json.encode(line) + b"\n"


async def _server_stopping(deps: HttpDependencies) -> bool:
    """Whether the server is stopping; waits `POLL_INTERVAL_S` to find out."""
    try:
        async with asyncio.timeout(POLL_INTERVAL_S):
            await deps.until_stopping()
    except TimeoutError:
        return False
    return True


async def _check_readable(
    deps: HttpDependencies, job: JobView, *, layer: str | None = None, frame: int | None = None, file: str | None = None
) -> None:
    """Raises when the output of this frame, or of the frame that left this file, is withheld."""
    for one in job.layers:
        index = 0 if frame is None else one.frames.queue_number(frame)
        if index is None or (layer is not None and one.name != layer):
            continue
        withheld = await deps.jobs.withheld_outputs(one.id, frame=index, most=1, file=file)
        for at, output in withheld.items():
            if frame is None or at == index:
                check_readable(output, job.id, one.frames.number(at))


async def _artifacts(deps: HttpDependencies, layer: Layer, frame: int | None) -> list[ArtifactView]:
    index = 0 if frame is None else layer.frames.queue_number(frame)
    if index is None:
        return []
    most = ARTIFACT_FRAMES_MAX if frame is None else 1
    files = []
    for artifact in await deps.jobs.artifacts(layer.id, frame=index, most=most):
        pointer = BlobPointer.parse(artifact.pointer)
        if frame is None or artifact.frame == index:
            files.append(
                ArtifactView(
                    layer=layer.name,
                    frame=layer.frames.number(artifact.frame),
                    attempt=artifact.attempt,
                    name=artifact.name,
                    bytes=pointer.size,
                    sha256=pointer.sha256.hex(),
                    at=artifact.pointer,
                )
            )
    return files

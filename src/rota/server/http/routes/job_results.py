"""What jobs leave behind: what frames returned, what they wrote, and their files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Final

import msgspec
from litestar import Controller, Response, get
from litestar.params import FromPath, FromQuery, QueryParameter
from litestar.response import Stream as Streamed

from rota.engine.queries.jobs import JobView, Layer
from rota.engine.queries.logs import READ_MAX, LogReader, LogSegment, Stream
from rota.engine.queries.results import FrameResultPage
from rota.infra.blob_store import BlobPointer
from rota.model.access import Role
from rota.model.errors import NotFound
from rota.model.ids import JobId
from rota.model.jobs.frame_ranges import FRAME_NUMBER_MAX
from rota.model.policy.outputs import check_readable
from rota.server.http.codec import ApiRequest
from rota.server.http.dependencies import HttpDependencies
from rota.server.http.pagination import Limit, Page
from rota.server.http.permissions import Deps, requires
from rota.server.http.visibility import JobPath, visible_job

OCTET_STREAM: Final = "application/octet-stream"
FOLLOW_MAX_S: Final = 3600.0
POLL_INTERVAL_S: Final = 0.25
LOG_LAG_MAX_S: Final = 1.0
"""What a frame wrote is there so much later than its end at most, unless much is written."""
ARTIFACT_FRAMES_MAX: Final = 10_000

FrameNumber = Annotated[int | None, QueryParameter(ge=0, le=FRAME_NUMBER_MAX, description="A frame, by its number.")]
LayerName = Annotated[str | None, QueryParameter(max_length=200, description="A layer, by its name.")]
AttemptNumber = Annotated[int | None, QueryParameter(ge=1, le=32767, description="Its last one, when left out.")]
ByteOffset = Annotated[
    int, QueryParameter(ge=0, lt=2**53, description="From this byte of the stream on; needs `stream`.")
]


class LogChunkView(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream of a frame wrote from byte `at` on."""

    attempt: int
    stream: Stream
    at: int
    text: str
    dropped: int = 0
    """So many bytes right before it were too many to be kept."""
    lost: int = 0
    """So many bytes right before it are missing for another reason."""
    last: bool = False
    """Nothing follows in this stream."""


class ArtifactView(msgspec.Struct, frozen=True, kw_only=True):
    """`at` fetches it: `/jobs/{job}/artifacts/file?at=...`."""

    layer: str
    frame: int
    attempt: int
    name: str
    bytes: int
    sha256: str
    at: str


class FrameLogStream(msgspec.Struct, frozen=True):
    """One stream of one frame."""

    job: JobId
    frame: int | None
    layer: str | None
    attempt: int | None
    stream: Stream

    async def read(self, logs: LogReader, at: int, most: int = READ_MAX) -> list[LogSegment]:
        return await logs.read(
            self.job, self.frame, layer=self.layer, attempt=self.attempt, stream=self.stream, after=at, most=most
        )


class JobResultRoutes(Controller):
    path = "/jobs/{job:str}"
    tags = ("outputs",)

    @get("/results", opt=requires(Role.VIEWER, "somewhere"))
    async def get_results(
        self,
        request: ApiRequest,
        desk: Deps,
        job: JobPath,
        frame: FrameNumber = None,
        after: FromQuery[str | None] = None,
        limit: Limit = 100,
    ) -> FrameResultPage:
        """What frames returned, or why they failed. One that succeeded and returned nothing has no entry."""
        return await desk.outcomes.page(
            await visible_job(request.user, desk, job), after=after, most=limit, frame=frame
        )

    @get("/logs", opt=requires(Role.VIEWER, "somewhere"))
    async def get_logs(
        self,
        request: ApiRequest,
        desk: Deps,
        job: JobPath,
        frame: FrameNumber = None,
        layer: LayerName = None,
        attempt: AttemptNumber = None,
        stream: FromQuery[Stream | None] = None,
        at: ByteOffset = 0,
        limit: Limit = 100,
    ) -> Page[LogChunkView]:
        """What a frame wrote; the first one when none is named. `next` is the byte to go on `at`, of a named stream."""
        found = await visible_job(request.user, desk, job)
        pieces = await desk.logs.read(
            found.id, frame, layer=layer, attempt=attempt, stream=stream, after=at, most=limit
        )
        told = [
            LogChunkView(
                attempt=piece.attempt,
                stream=piece.stream,
                at=piece.at,
                text=piece.data.decode(errors="replace"),
                dropped=piece.dropped,
                lost=piece.lost,
                last=piece.last,
            )
            for piece in pieces
        ]
        more = stream is not None and len(pieces) == limit
        return Page(told, str(pieces[-1].at + len(pieces[-1].data)) if more else None)

    @get("/logs/{stream:str}", opt=requires(Role.VIEWER, "somewhere"), media_type=OCTET_STREAM)
    async def follow_logs(
        self,
        request: ApiRequest,
        desk: Deps,
        job: JobPath,
        stream: FromPath[Stream],
        frame: FrameNumber = None,
        layer: LayerName = None,
        attempt: AttemptNumber = None,
        at: ByteOffset = 0,
        follow: FromQuery[bool] = False,
    ) -> Streamed:
        """A stream as it was written, byte for byte; with `follow` until it ends, for an hour at most."""
        found = await visible_job(request.user, desk, job)
        wanted = FrameLogStream(found.id, frame, layer, attempt, stream)
        await wanted.read(desk.logs, at, most=1)  # what is wrong is told before anything is sent
        if follow:
            request.auth.begin_wait()
        return Streamed(_stream_log(desk, wanted, at, FOLLOW_MAX_S if follow else 0.0), media_type=OCTET_STREAM)

    @get("/artifacts", opt=requires(Role.VIEWER, "somewhere"))
    async def get_artifacts(
        self, request: ApiRequest, desk: Deps, job: JobPath, frame: FrameNumber = None, layer: LayerName = None
    ) -> Page[ArtifactView]:
        """Files that frames have left and that may be read, of the first ten thousand frames of each layer."""
        found = await visible_job(request.user, desk, job)
        if frame is not None:
            await _check_readable(desk, found, layer=layer, frame=frame)
        files = [
            file
            for one in found.layers
            if layer is None or one.name == layer
            for file in await _artifacts(desk, one, frame)
        ]
        return Page(files)

    @get("/artifacts/file", opt=requires(Role.VIEWER, "somewhere"), media_type=OCTET_STREAM)
    async def get_artifact(
        self, request: ApiRequest, desk: Deps, job: JobPath, at: Annotated[str, QueryParameter(max_length=200)]
    ) -> Response[bytes]:
        """One of these files."""
        found = await visible_job(request.user, desk, job)
        for layer in found.layers:
            for file in await _artifacts(desk, layer, None):
                if file.at == at:
                    return Response(await desk.store.get(at), media_type=OCTET_STREAM)
        await _check_readable(desk, found, file=at)
        raise NotFound(f"Job {found.id} has left no file {at[:64]!r}: its list of artifacts says `at` of each.")


async def _stream_log(desk: HttpDependencies, wanted: FrameLogStream, at: int, follow_s: float) -> AsyncIterator[bytes]:
    """What is there, and for `follow_s` what comes: until it ends, or the job has and nothing came for a moment."""
    until = time.monotonic() + follow_s
    ended_at: float | None = None
    while True:
        if follow_s and ended_at is None and (await desk.jobs.get(wanted.job)).state.terminal:
            ended_at = time.monotonic()
        pieces = await wanted.read(desk.logs, at)
        for piece in pieces:
            at = piece.at + len(piece.data)
            yield piece.data
        if len(pieces) == READ_MAX:
            continue
        over = time.monotonic() >= (until if ended_at is None else min(until, ended_at + LOG_LAG_MAX_S))
        if any(piece.last for piece in pieces) or over or await _server_stopping(desk):
            return


async def _server_stopping(desk: HttpDependencies) -> bool:
    """Whether the server is ending; a moment later if it is not."""
    try:
        async with asyncio.timeout(POLL_INTERVAL_S):
            await desk.until_stopping()
    except TimeoutError:
        return False
    return True


async def _check_readable(
    desk: HttpDependencies, job: JobView, *, layer: str | None = None, frame: int | None = None, file: str | None = None
) -> None:
    """Raises when this frame, or the one that left this file, has an output that is kept back."""
    for one in job.layers:
        place = 0 if frame is None else one.frames.queue_number(frame)
        if place is None or (layer is not None and one.name != layer):
            continue
        kept = await desk.jobs.withheld_outputs(one.id, frame=place, most=1, file=file)
        for at, output in kept.items():
            if frame is None or at == place:
                check_readable(output, job.id, one.frames.number(at))


async def _artifacts(desk: HttpDependencies, layer: Layer, frame: int | None) -> list[ArtifactView]:
    place = 0 if frame is None else layer.frames.queue_number(frame)
    if place is None:
        return []
    most = ARTIFACT_FRAMES_MAX if frame is None else 1
    files = []
    for kept in await desk.jobs.artifacts(layer.id, frame=place, most=most):
        pointer = BlobPointer.parse(kept.pointer)
        if frame is None or kept.frame == place:
            files.append(
                ArtifactView(
                    layer=layer.name,
                    frame=layer.frames.number(kept.frame),
                    attempt=kept.attempt,
                    name=kept.name,
                    bytes=pointer.size,
                    sha256=pointer.sha256.hex(),
                    at=kept.pointer,
                )
            )
    return files

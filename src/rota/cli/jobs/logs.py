"""`rota job logs`: the stored output of a frame.

Logs bypass the JetStream streams and are stored shortly after the frame ends; gaps are reported where they occur.
Frame output is untrusted: a terminal gets it without control characters, a pipe gets the raw bytes.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from rota.api.logs import STREAMS, Stream
from rota.cli.core import output
from rota.cli.core.output_format import OutputFormat
from rota.cli.core.resolve_ids import find_job
from rota.cli.dlq.view import pluralize
from rota.cli.jobs.actions import open_jobs
from rota.engine.queries.jobs import JobQueries
from rota.engine.queries.log_cursor import FrameLogStream, LogCursor
from rota.engine.queries.logs import READ_MAX, LogReader, LogSegment
from rota.model.ids import JobId
from rota.model.settings import Settings

CHUNKS_MAX: Final = 100_000
LOG_LAG_MAX_S, POLL_INTERVAL_S = 0.5, 0.1
STORED_WITHIN_S: Final = 1.0
"""An ended job without output is asked again until it has been over for this time."""


def show_logs(
    settings: Settings,
    which: str,
    *,
    frame: int | None,
    layer: str | None,
    attempt: int | None,
    stream: Stream | None,
    form: OutputFormat,
) -> None:
    async def done() -> list[LogSegment]:
        async with open_jobs(settings) as jobs:
            job = await find_job(jobs, which)
            streams = STREAMS if stream is None else (stream,)
            while True:
                recent = await _ended_just_now(jobs, job)
                segments = [
                    segment for each in streams for segment in await _read_all(jobs, job, each, frame, layer, attempt)
                ]
                if segments or not recent:
                    return segments
                await asyncio.sleep(POLL_INTERVAL_S)

    segments = asyncio.run(done())
    if form.is_data:
        output.print_data([_data(segment) for segment in segments], form)
    elif segments:
        write_logs(segments)
    else:
        output.print_stderr("No output is stored.")


async def _ended_just_now(jobs: JobQueries, job: JobId) -> bool:
    """Whether output of the job may still be on its way."""
    ended = (await jobs.get(job)).finished_at
    return ended is not None and abs(time.time() - ended.timestamp()) < STORED_WITHIN_S


async def _read_all(
    jobs: JobQueries, job: JobId, stream: Stream, frame: int | None, layer: str | None, attempt: int | None
) -> list[LogSegment]:
    logs, segments, after = LogReader(jobs.database), list[LogSegment](), 0
    while len(segments) < CHUNKS_MAX:
        batch = await logs.read(job, frame, layer=layer, attempt=attempt, stream=stream, after=after, most=READ_MAX)
        fresh = [segment for segment in batch if segment.data or segment.dropped]
        segments += fresh
        if len(batch) < READ_MAX or not fresh:
            break
        after = segments[-1].at + len(segments[-1].data)
    return segments


def follow_logs(
    settings: Settings,
    which: str,
    *,
    frame: int | None,
    layer: str | None,
    stream: Stream | None,
    form: OutputFormat,
) -> None:
    """Print the output of the frame's last attempt as it arrives, until the job has ended."""

    async def done() -> None:
        async with open_jobs(settings) as jobs:
            job, logs = await find_job(jobs, which), LogReader(jobs.database)
            streams = STREAMS if stream is None else (stream,)
            tail = LogTail([LogCursor(logs, FrameLogStream(job, frame, layer, None, each)) for each in streams])
            while True:
                ended = (await jobs.get(job)).state.terminal
                segments = await tail.read_new()
                if form.is_data:
                    for segment in segments:
                        output.print_line(msgspec.json.encode(_data(segment)).decode())
                else:
                    write_logs(segments)
                if ended and (tail.over or not segments):
                    return
                await asyncio.sleep(LOG_LAG_MAX_S if ended else POLL_INTERVAL_S)

    asyncio.run(done())


class LogTail:
    """Reads segments since the last poll; starts over when a new attempt writes."""

    def __init__(self, cursors: Sequence[LogCursor]) -> None:
        self._cursors = cursors
        self.over = False
        """All streams have ended."""

    async def read_new(self) -> list[LogSegment]:
        batches = [await cursor.read() for cursor in self._cursors]
        self.over = all(any(segment.last for segment in batch) for batch in batches)
        return [segment for batch in batches for segment in batch if segment.data or segment.dropped]


async def read_first_frame(jobs: JobQueries, job: JobId) -> list[LogSegment]:
    """Output of the first frame; it is stored shortly after the frame ends, if there is any."""
    for _ in range(round(LOG_LAG_MAX_S / POLL_INTERVAL_S)):
        segments = await LogReader(jobs.database).read(job, most=READ_MAX)
        if any(segment.last for segment in segments):
            return segments
        await asyncio.sleep(POLL_INTERVAL_S)
    return await LogReader(jobs.database).read(job, most=READ_MAX)


def write_logs(segments: Sequence[LogSegment]) -> None:
    with output.IgnoreBrokenPipe():
        for segment in segments:
            if gap := segment.dropped + segment.lost:
                why = "over the storage limit" if segment.dropped else "lost in transit"
                output.print_stderr(f"({pluralize(gap, 'byte')} of {segment.stream} are missing here: {why})")
            if sys.stdout.isatty():
                sys.stdout.write(output.printable(segment.data.decode(errors="replace")))
            else:
                sys.stdout.buffer.write(segment.data)
                sys.stdout.buffer.flush()
        sys.stdout.flush()


def _data(segment: LogSegment) -> dict[str, object]:
    return {
        "attempt": segment.attempt,
        "stream": segment.stream,
        "at": segment.at,
        "text": segment.data.decode(errors="replace"),
        "dropped": segment.dropped,
        "lost": segment.lost,
    }

"""`rota job logs`: what a frame wrote, as far as it was kept.

Logs travel past the streams of the bus and are written a moment after the frame; what is missing is said where it is
missing. What frames write comes from elsewhere, so a terminal sees no control characters of it; a pipe gets the bytes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from rota.cli.core import output
from rota.cli.core.output_format import OutputFormat
from rota.cli.core.resolve_ids import find_job
from rota.cli.dlq.view import pluralize
from rota.cli.jobs.actions import open_jobs
from rota.engine.queries.jobs import JobQueries
from rota.engine.queries.logs import READ_MAX, STREAMS, LogReader, LogSegment, Stream
from rota.model.ids import JobId
from rota.model.settings import Settings

CHUNKS_MAX: Final = 100_000
LOG_LAG_MAX_S, POLL_INTERVAL_S = 0.5, 0.1


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
            wanted = STREAMS if stream is None else (stream,)
            return [piece for each in wanted for piece in await _read_all(jobs, job, each, frame, layer, attempt)]

    pieces = asyncio.run(done())
    if form.is_data:
        output.print_data([_data(piece) for piece in pieces], form)
    elif pieces:
        write_logs(pieces)
    else:
        output.print_stderr("Nothing that it wrote is kept.")


async def _read_all(
    jobs: JobQueries, job: JobId, stream: Stream, frame: int | None, layer: str | None, attempt: int | None
) -> list[LogSegment]:
    logs, pieces, after = LogReader(jobs.database), list[LogSegment](), 0
    while len(pieces) < CHUNKS_MAX:
        some = await logs.read(job, frame, layer=layer, attempt=attempt, stream=stream, after=after, most=READ_MAX)
        fresh = [piece for piece in some if piece.data or piece.dropped]
        pieces += fresh
        if len(some) < READ_MAX or not fresh:
            break
        after = pieces[-1].at + len(pieces[-1].data)
    return pieces


def follow_logs(
    settings: Settings,
    which: str,
    *,
    frame: int | None,
    layer: str | None,
    stream: Stream | None,
    form: OutputFormat,
) -> None:
    """What a frame writes, as it comes, until its job has ended; of its last attempt."""

    async def done() -> None:
        async with open_jobs(settings) as jobs:
            job, tail = (
                await find_job(jobs, which),
                LogTail(jobs, frame, layer, STREAMS if stream is None else (stream,)),
            )
            while True:
                ended = (await jobs.get(job)).state.terminal
                pieces = await tail.read_new(job)
                if form.is_data:
                    for piece in pieces:
                        output.print_line(msgspec.json.encode(_data(piece)).decode())
                else:
                    write_logs(pieces)
                if ended and (tail.over or not pieces):
                    return
                await asyncio.sleep(LOG_LAG_MAX_S if ended else POLL_INTERVAL_S)

    asyncio.run(done())


class LogTail:
    """What came since the last look; from the beginning again when another attempt writes."""

    def __init__(self, jobs: JobQueries, frame: int | None, layer: str | None, streams: Sequence[Stream]) -> None:
        self._logs = LogReader(jobs.database)
        self._frame = frame
        self._layer = layer
        self._ends: dict[Stream, int] = dict.fromkeys(streams, 0)
        self._attempt = 0
        self.over = False
        """Nothing follows in any stream."""

    async def read_new(self, job: JobId) -> list[LogSegment]:
        found: list[LogSegment] = []
        last: set[Stream] = set()
        for stream in self._ends:
            for piece in await self._read(job, stream):
                if piece.last:
                    last.add(stream)
                if piece.data or piece.dropped:
                    found.append(piece)
                    self._ends[stream] = piece.at + len(piece.data)
        self.over = len(last) == len(self._ends)
        return found

    async def _read(self, job: JobId, stream: Stream) -> list[LogSegment]:
        pieces = await self._read_chunks(job, stream)
        if pieces and pieces[-1].attempt > self._attempt:
            if self._attempt:
                self._ends = dict.fromkeys(self._ends, 0)
                pieces = await self._read_chunks(job, stream)
            self._attempt = pieces[-1].attempt
        return pieces

    async def _read_chunks(self, job: JobId, stream: Stream) -> list[LogSegment]:
        after = self._ends[stream]
        return await self._logs.read(job, self._frame, layer=self._layer, stream=stream, after=after, most=READ_MAX)


async def read_first_frame(jobs: JobQueries, job: JobId) -> list[LogSegment]:
    """What the first frame wrote; it comes a moment after the end of the frame, if anything does."""
    for _ in range(round(LOG_LAG_MAX_S / POLL_INTERVAL_S)):
        pieces = await LogReader(jobs.database).read(job, most=READ_MAX)
        if any(piece.last for piece in pieces):
            return pieces
        await asyncio.sleep(POLL_INTERVAL_S)
    return await LogReader(jobs.database).read(job, most=READ_MAX)


def write_logs(pieces: Sequence[LogSegment]) -> None:
    with output.IgnoreBrokenPipe():
        for piece in pieces:
            if gap := piece.dropped + piece.lost:
                why = "more than is kept" if piece.dropped else "lost on the way"
                output.print_stderr(f"({pluralize(gap, 'byte')} of {piece.stream} are missing here: {why})")
            if sys.stdout.isatty():
                sys.stdout.write(output.printable(piece.data.decode(errors="replace")))
            else:
                sys.stdout.buffer.write(piece.data)
                sys.stdout.buffer.flush()
        sys.stdout.flush()


def _data(piece: LogSegment) -> dict[str, object]:
    return {
        "attempt": piece.attempt,
        "stream": piece.stream,
        "at": piece.at,
        "text": piece.data.decode(errors="replace"),
        "dropped": piece.dropped,
        "lost": piece.lost,
    }

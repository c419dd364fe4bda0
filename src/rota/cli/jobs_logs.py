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

from rota.cli import output
from rota.cli.dlq_view import several
from rota.cli.form import Form
from rota.cli.jobs import opened
from rota.cli.naming import find
from rota.engine.jobs import Jobs
from rota.engine.logs import READ_MAX, STREAMS, Logs, Piece, Stream
from rota.model.ids import JobId
from rota.model.settings import Settings

PIECES_MAX: Final = 100_000
SETTLES_S, LOOK_S = 0.5, 0.1


def show(
    settings: Settings,
    which: str,
    *,
    frame: int | None,
    layer: str | None,
    attempt: int | None,
    stream: Stream | None,
    form: Form,
) -> None:
    async def done() -> list[Piece]:
        async with opened(settings) as jobs:
            job = await find(jobs, which)
            wanted = STREAMS if stream is None else (stream,)
            return [piece for each in wanted for piece in await _whole(jobs, job, each, frame, layer, attempt)]

    pieces = asyncio.run(done())
    if form.is_data:
        output.as_data([_data(piece) for piece in pieces], form)
    elif pieces:
        write(pieces)
    else:
        output.aside("Nothing that it wrote is kept.")


async def _whole(
    jobs: Jobs, job: JobId, stream: Stream, frame: int | None, layer: str | None, attempt: int | None
) -> list[Piece]:
    logs, pieces, after = Logs(jobs.database), list[Piece](), 0
    while len(pieces) < PIECES_MAX:
        some = await logs.read(job, frame, layer=layer, attempt=attempt, stream=stream, after=after, most=READ_MAX)
        fresh = [piece for piece in some if piece.data or piece.dropped]
        pieces += fresh
        if len(some) < READ_MAX or not fresh:
            break
        after = pieces[-1].at + len(pieces[-1].data)
    return pieces


def follow(
    settings: Settings,
    which: str,
    *,
    frame: int | None,
    layer: str | None,
    stream: Stream | None,
    form: Form,
) -> None:
    """What a frame writes, as it comes, until its job has ended; of its last attempt."""

    async def done() -> None:
        async with opened(settings) as jobs:
            job, tail = await find(jobs, which), Tail(jobs, frame, layer, STREAMS if stream is None else (stream,))
            while True:
                ended = (await jobs.get(job)).state.terminal
                pieces = await tail.more(job)
                if form.is_data:
                    for piece in pieces:
                        output.line(msgspec.json.encode(_data(piece)).decode())
                else:
                    write(pieces)
                if ended and (tail.over or not pieces):
                    return
                await asyncio.sleep(SETTLES_S if ended else LOOK_S)

    asyncio.run(done())


class Tail:
    """What came since the last look; from the beginning again when another attempt writes."""

    def __init__(self, jobs: Jobs, frame: int | None, layer: str | None, streams: Sequence[Stream]) -> None:
        self._logs = Logs(jobs.database)
        self._frame = frame
        self._layer = layer
        self._ends: dict[Stream, int] = dict.fromkeys(streams, 0)
        self._attempt = 0
        self.over = False
        """Nothing follows in any stream."""

    async def more(self, job: JobId) -> list[Piece]:
        found: list[Piece] = []
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

    async def _read(self, job: JobId, stream: Stream) -> list[Piece]:
        pieces = await self._pieces(job, stream)
        if pieces and pieces[-1].attempt > self._attempt:
            if self._attempt:
                self._ends = dict.fromkeys(self._ends, 0)
                pieces = await self._pieces(job, stream)
            self._attempt = pieces[-1].attempt
        return pieces

    async def _pieces(self, job: JobId, stream: Stream) -> list[Piece]:
        after = self._ends[stream]
        return await self._logs.read(job, self._frame, layer=self._layer, stream=stream, after=after, most=READ_MAX)


async def of_one_frame(jobs: Jobs, job: JobId) -> list[Piece]:
    """What the first frame wrote; it comes a moment after the end of the frame, if anything does."""
    for _ in range(round(SETTLES_S / LOOK_S)):
        pieces = await Logs(jobs.database).read(job, most=READ_MAX)
        if any(piece.last for piece in pieces):
            return pieces
        await asyncio.sleep(LOOK_S)
    return await Logs(jobs.database).read(job, most=READ_MAX)


def write(pieces: Sequence[Piece]) -> None:
    with output.readers_may_leave():
        for piece in pieces:
            if gap := piece.dropped + piece.lost:
                why = "more than is kept" if piece.dropped else "lost on the way"
                output.aside(f"({several(gap, 'byte')} of {piece.stream} are missing here: {why})")
            if sys.stdout.isatty():
                sys.stdout.write(output.printable(piece.data.decode(errors="replace")))
            else:
                sys.stdout.buffer.write(piece.data)
                sys.stdout.buffer.flush()
        sys.stdout.flush()


def _data(piece: Piece) -> dict[str, object]:
    return {
        "attempt": piece.attempt,
        "stream": piece.stream,
        "at": piece.at,
        "text": piece.data.decode(errors="replace"),
        "dropped": piece.dropped,
        "lost": piece.lost,
    }

"""Reads one stream of a frame's log forward, for followers.

Offsets count the bytes that the frame wrote, not the bytes that were read: after a gap they differ, and only the first
can be resumed. An offset belongs to one attempt: when a later attempt has a log, the cursor continues at its start.
"""

from __future__ import annotations

import msgspec

from rota.api.logs import Stream
from rota.engine.queries.logs import READ_MAX, LogReader, LogSegment
from rota.model.ids import JobId


class FrameLogStream(msgspec.Struct, frozen=True):
    """One stream of one frame."""

    job: JobId
    frame: int | None
    layer: str | None
    attempt: int | None
    """None: the last attempt with a log."""
    stream: Stream

    async def read(self, logs: LogReader, at: int, most: int = READ_MAX) -> list[LogSegment]:
        return await logs.read(
            self.job, self.frame, layer=self.layer, attempt=self.attempt, stream=self.stream, after=at, most=most
        )


class LogCursor:
    """`at` is an offset in `attempt`; None: in the attempt that is read first."""

    def __init__(self, logs: LogReader, source: FrameLogStream, at: int = 0, attempt: int | None = None) -> None:
        self._logs = logs
        self._source = source
        self._at = at
        self._attempt = attempt

    async def read(self) -> list[LogSegment]:
        """New segments, in order; `READ_MAX` of them: there may be more."""
        segments = await self._source.read(self._logs, self._at)
        if segments and self._attempt is not None and segments[-1].attempt != self._attempt:
            self._at = 0
            segments = await self._source.read(self._logs, 0)
        if segments:
            self._attempt = segments[-1].attempt
            self._at = segments[-1].at + len(segments[-1].data)
        return segments

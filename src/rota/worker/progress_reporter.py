"""What may get lost: which frames began, how far they have come, what they write. Told in one go every `EVERY_S`.

A frame that is over within `LONG_S` is never said to have begun: its end says enough. Of progress only the latest
counts. Logs are bounded per frame by `Capture`, and what NATS does not take is gone; its place in the stream shows it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Final
from uuid import UUID

import structlog

from rota.infra.nats import Bus
from rota.model.errors import NatsUnavailable
from rota.model.protocol import LOG_SUBJECT, PROGRESS_SUBJECT, LogChunk, Progress, encode, to_ranges
from rota.worker.data.log_capture import LogCapture, Stream

log = structlog.get_logger(__name__)
FLUSH_INTERVAL_S: Final = 0.02
START_REPORT_DELAY_S: Final = 0.02
PROGRESS_TEXT_MAX: Final = 200
CAPTURES_MAX: Final = 20_000
"""Threads that outlive their frame and go on to write in its name must not fill the memory."""


class ProgressReporter:
    """Also the ear of the frames that run on our loop; they may speak from any thread."""

    def __init__(self, bus: Bus, worker: UUID, output_max: int) -> None:
        self._bus = bus
        self._worker = worker
        self._output_max = output_max
        self._began: dict[int, float] = {}
        self._percent: dict[int, tuple[float, str]] = {}
        self._captures: dict[tuple[int, Stream], LogCapture] = {}
        self._written: dict[tuple[int, Stream], LogCapture] = {}
        self._some = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    @property
    def has_output(self) -> bool:
        """Whether frames have spoken that may not have ended."""
        return bool(self._captures or self._percent)

    def frame_started(self, token: int, now: float) -> None:
        self._began[token] = now
        self._some.set()

    def frame_ended(self, token: int) -> None:
        self._began.pop(token, None)
        self._percent.pop(token, None)
        if self._captures:
            self._close_captures(token)

    def progress(self, token: int, percent: float, word: str) -> None:
        self._percent[token] = (percent, word[:PROGRESS_TEXT_MAX])
        self._wake()

    def log(self, token: int, line: str) -> None:
        text = f"{line}\n".encode(errors="replace")
        if threading.get_ident() == self._thread:
            self.write(token, "log", text)
        else:
            self._loop.call_soon_threadsafe(self.write, token, "log", text)

    def write(self, token: int, stream: Stream, data: bytes) -> None:
        """Bytes of a frame's log; call it on the loop's thread."""
        key = (token, stream)
        capture = self._captures.get(key)
        if capture is None:
            if len(self._captures) >= CAPTURES_MAX:
                return
            capture = self._captures[key] = LogCapture(self._output_max)
        capture.write(data)
        self._written[key] = capture
        self._some.set()

    async def run(self) -> None:
        while True:
            await self._some.wait()
            await asyncio.sleep(FLUSH_INTERVAL_S)
            self._some.clear()
            try:
                await self.flush()
            except NatsUnavailable:
                await self._bus.until_connected(1.0)

    async def flush(self) -> None:
        """Everything there is to tell by now."""
        now = self._loop.time()
        due = [token for token, at in self._began.items() if now - at >= START_REPORT_DELAY_S]
        percent, self._percent = self._percent, {}
        if due or percent:
            await self._bus.publish_core(PROGRESS_SUBJECT, encode(Progress(self._worker, to_ranges(due), percent)))
        for token in due:
            self._began.pop(token, None)
        if self._began:
            self._some.set()
        await self._flush_logs()

    async def _flush_logs(self) -> None:
        written, self._written = self._written, {}
        for (token, stream), capture in written.items():
            for at, data, dropped, last in capture.take_chunks():
                await self._bus.publish_core(
                    LOG_SUBJECT, encode(LogChunk(self._worker, token, stream, at, data, dropped, last))
                )

    def _close_captures(self, token: int) -> None:
        streams: tuple[Stream, ...] = ("stdout", "stderr", "log")
        for stream in streams:
            capture = self._captures.pop((token, stream), None)
            if capture is not None:
                capture.close()
                self._written[token, stream] = capture
                self._some.set()

    def _wake(self) -> None:
        if threading.get_ident() == self._thread:
            self._some.set()
        else:
            self._loop.call_soon_threadsafe(self._some.set)

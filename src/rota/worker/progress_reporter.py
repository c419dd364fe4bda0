"""Lossy reports: started frames, progress and logs, published together every `FLUSH_INTERVAL_S`.

A frame that ends within `START_REPORT_DELAY_S` is never reported as started. Only the latest progress is sent. Logs are
bounded per frame by `LogCapture`; chunks that NATS drops show as a gap in the stream offsets.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Final
from uuid import UUID

import structlog

from rota.infra.nats import Bus
from rota.model.errors import NatsUnavailable, TooLarge
from rota.model.protocol import LOG_SUBJECT, PROGRESS_SUBJECT, LogChunk, Progress, encode
from rota.model.token_ranges import to_ranges
from rota.worker.data.log_capture import LogCapture, Stream

log = structlog.get_logger(__name__)
FLUSH_INTERVAL_S: Final = 0.02
START_REPORT_DELAY_S: Final = 0.02
PROGRESS_TEXT_MAX: Final = 200
CAPTURES_MAX: Final = 20_000
"""Bounds memory used by threads that outlive their frame and keep logging in its name."""


class ProgressReporter:
    """`progress` and `log` may be called from any thread."""

    def __init__(self, bus: Bus, worker: UUID, output_max: int) -> None:
        self._bus = bus
        self._worker = worker
        self._output_max = output_max
        self._started: dict[int, float] = {}
        self._percent: dict[int, tuple[float, str]] = {}
        self._captures: dict[tuple[int, Stream], LogCapture] = {}
        self._written: dict[tuple[int, Stream], LogCapture] = {}
        self._has_output = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    @property
    def has_output(self) -> bool:
        """Whether any frame has written output or progress since it started."""
        return bool(self._captures or self._percent)

    def frame_started(self, token: int, now: float) -> None:
        self._started[token] = now
        self._has_output.set()

    def frame_ended(self, token: int) -> None:
        self._started.pop(token, None)
        self._percent.pop(token, None)
        if self._captures:
            self._close_captures(token)

    def progress(self, token: int, percent: float, text: str) -> None:
        self._percent[token] = (percent, text[:PROGRESS_TEXT_MAX])
        self._wake()

    def log(self, token: int, line: str) -> None:
        text = f"{line}\n".encode(errors="replace")
        if threading.get_ident() == self._thread:
            self.write(token, "log", text)
        else:
            self._loop.call_soon_threadsafe(self.write, token, "log", text)

    def write(self, token: int, stream: Stream, data: bytes) -> None:
        """Appends to a frame's log. Event loop thread only."""
        key = (token, stream)
        capture = self._captures.get(key)
        if capture is None:
            if len(self._captures) >= CAPTURES_MAX:
                return
            capture = self._captures[key] = LogCapture(self._output_max)
        capture.write(data)
        self._written[key] = capture
        self._has_output.set()

    async def run(self) -> None:
        while True:
            await self._has_output.wait()
            await asyncio.sleep(FLUSH_INTERVAL_S)
            self._has_output.clear()
            try:
                await self.flush()
            except NatsUnavailable:
                await self._bus.until_connected(1.0)
            except TooLarge as error:
                log.warning("progress_too_large", reason=error.sentence)

    async def flush(self) -> None:
        """Publishes everything that is due."""
        now = self._loop.time()
        due = [token for token, at in self._started.items() if now - at >= START_REPORT_DELAY_S]
        percent, self._percent = self._percent, {}
        if due or percent:
            await self._bus.publish_core(PROGRESS_SUBJECT, encode(Progress(self._worker, to_ranges(due), percent)))
        for token in due:
            self._started.pop(token, None)
        if self._started:
            self._has_output.set()
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
                self._has_output.set()

    def _wake(self) -> None:
        if threading.get_ident() == self._thread:
            self._has_output.set()
        else:
            self._loop.call_soon_threadsafe(self._has_output.set)

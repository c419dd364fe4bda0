"""The heartbeat, in a thread and on a connection of its own: a handler that holds the loop does not make us look dead.

It also hears what servers say about us, so that the question "does anybody know us still?" has an answer that is not
older than the loop's own troubles. A loop that has not turned for `BLOCKED_S` is told once, with the place where it is.
What needs the interpreter's lock for long (a C extension that never lets go) stops this thread, too.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from uuid import UUID

import structlog

from rota.infra.nats import Bus, CoreMessage, NatsTarget
from rota.infra.telemetry import metrics
from rota.model.errors import InvalidInput, NatsUnavailable, SetupFailed
from rota.model.protocol import HEARTBEAT_SUBJECT, LIVENESS_SUBJECT, Heartbeat, WorkerLiveness, decode, encode

log = structlog.get_logger(__name__)
LOOP_BLOCKED = metrics.counter("rota_worker_loop_blocked", "Times a task held the event loop for longer than a second.")

LOOP_BLOCKED_THRESHOLD_S: Final = 1.0
POLL_INTERVAL_S: Final = 0.25
RECONNECT_INTERVAL_S: Final = 1.0
JOIN_TIMEOUT_S: Final = 5.0


class HeartbeatThread:
    def __init__(
        self,
        target: NatsTarget,
        worker: UUID,
        every_s: float,
        beat: Callable[[], Heartbeat],
        on_lost: Callable[[], None],
    ) -> None:
        self.heard_at = self.turned_at = time.monotonic()
        """When a server last said that it hears us, and when the loop last turned."""
        self._target = target
        self._worker = worker
        self._every_s = every_s
        self._beat = beat
        self._on_lost = on_lost
        self._watched = threading.get_ident()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due: asyncio.Event | None = None
        self._ended = False
        self._blocked = False
        self._thread = threading.Thread(target=self._run, name="rota pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        self._ended = True
        self.send_now()
        await asyncio.to_thread(self._thread.join, JOIN_TIMEOUT_S)

    def send_now(self) -> None:
        """Beat without waiting for the time to come."""
        loop, due = self._loop, self._due
        if loop is not None and due is not None:
            with suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(due.set)

    def record_loop_iteration(self) -> None:
        """The loop says that it turns."""
        self.turned_at = time.monotonic()

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._due = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        while not self._ended:
            try:
                bus = await Bus.connect(self._target)
            except (NatsUnavailable, SetupFailed) as error:
                log.warning("pulse_waits", code=error.code, reason=error.sentence)
                await self._pause(RECONNECT_INTERVAL_S)
                continue
            try:
                await self._send_heartbeats(bus)
            finally:
                await bus.close()

    async def _send_heartbeats(self, bus: Bus) -> None:
        async with bus.subscribe_core(LIVENESS_SUBJECT) as told, asyncio.TaskGroup() as tasks:
            hearing = tasks.create_task(self._consume_server_notices(told))
            beat_at = 0.0
            while not self._ended:
                self._check_loop_blocked()
                if time.monotonic() >= beat_at:
                    with suppress(NatsUnavailable):
                        await bus.publish_core(HEARTBEAT_SUBJECT, encode(self._beat()))
                    beat_at = time.monotonic() + self._every_s
                if await self._pause(min(POLL_INTERVAL_S, self._every_s)):
                    beat_at = 0.0
            hearing.cancel()

    async def _pause(self, seconds: float) -> bool:
        """Whether a beat was asked for meanwhile."""
        assert self._due is not None, "the thread has begun"
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._due.wait()
        asked = self._due.is_set()
        self._due.clear()
        return asked

    async def _consume_server_notices(self, told: asyncio.Queue[CoreMessage]) -> None:
        while True:
            message = await told.get()
            try:
                said = decode(WorkerLiveness, message.data)
            except InvalidInput as error:
                log.warning("told_unreadable", reason=error.sentence)
                continue
            if self._worker in said.heard:
                self.heard_at = time.monotonic()
            if self._worker in said.lost:
                self._on_lost()

    def _check_loop_blocked(self) -> None:
        held_s = time.monotonic() - self.turned_at
        if held_s < LOOP_BLOCKED_THRESHOLD_S:
            self._blocked = False
        elif not self._blocked:
            self._blocked = True
            LOOP_BLOCKED.inc()
            log.warning("loop_blocked", seconds=round(held_s, 1), at=_current_line(self._watched))


def _current_line(thread: int) -> str:
    """The innermost line that thread is at."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the only way to look at another thread
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}" if frame else ""

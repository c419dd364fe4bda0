"""Heartbeats, sent from a separate thread and connection so that a handler blocking the event loop does not look dead.

The thread also consumes the servers' liveness messages, so lease confirmations arrive while the loop is blocked. A loop
blocked for `LOOP_BLOCKED_THRESHOLD_S` is logged once, with the line it is at. Limit: code that holds the GIL (a C
extension that never releases it) stops this thread too.
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
from rota.model.errors import InvalidInput, NatsUnavailable, SetupFailed, TooLarge
from rota.model.heartbeat_parts import encode_heartbeat
from rota.model.protocol import HEARTBEAT_SUBJECT, LIVENESS_SUBJECT, Heartbeat, WorkerLiveness, decode

log = structlog.get_logger(__name__)
LOOP_BLOCKED = metrics.counter(
    "rota_worker_loop_blocked", "Times a task blocked the event loop for more than a second."
)

LOOP_BLOCKED_THRESHOLD_S: Final = 1.0
POLL_INTERVAL_S: Final = 0.25
RECONNECT_INTERVAL_S: Final = 1.0
JOIN_TIMEOUT_S: Final = 5.0


class HeartbeatThread:
    def __init__(
        self,
        target: NatsTarget,
        worker: UUID,
        interval_s: float,
        build: Callable[[], Heartbeat],
        on_lost: Callable[[], None],
    ) -> None:
        self.confirmed_at = self.loop_ran_at = time.monotonic()
        """When a server last confirmed a heartbeat, and when the event loop last ran. Monotonic seconds."""
        self._target = target
        self._worker = worker
        self._interval_s = interval_s
        self._build = build
        self._on_lost = on_lost
        self._loop_thread = threading.get_ident()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due: asyncio.Event | None = None
        self._ended = False
        self._blocked = False
        self._thread = threading.Thread(target=self._run, name="rota heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        self._ended = True
        self.send_now()
        await asyncio.to_thread(self._thread.join, JOIN_TIMEOUT_S)

    def send_now(self) -> None:
        """Sends a heartbeat before the next one is due."""
        loop, due = self._loop, self._due
        if loop is not None and due is not None:
            with suppress(RuntimeError):  # the thread's loop has just closed
                loop.call_soon_threadsafe(due.set)

    def record_loop_iteration(self) -> None:
        """Called by the event loop at every tick."""
        self.loop_ran_at = time.monotonic()

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._due = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        while not self._ended:
            try:
                bus = await Bus.connect(self._target)
            except (NatsUnavailable, SetupFailed) as error:
                log.warning("heartbeat_connection_failed", code=error.code, reason=error.sentence)
                await self._pause(RECONNECT_INTERVAL_S)
                continue
            try:
                await self._send_heartbeats(bus)
            finally:
                await bus.close()

    async def _send_heartbeat(self, bus: Bus) -> None:
        try:
            for part in encode_heartbeat(self._build(), bus.max_payload):
                await bus.publish_core(HEARTBEAT_SUBJECT, part)
        except NatsUnavailable:
            pass  # the next one follows soon
        except TooLarge as error:
            log.warning("heartbeat_too_large", reason=error.sentence)

    async def _send_heartbeats(self, bus: Bus) -> None:
        async with bus.subscribe_core(LIVENESS_SUBJECT) as messages, asyncio.TaskGroup() as tasks:
            consumer = tasks.create_task(self._consume_server_notices(messages))
            next_at = 0.0
            while not self._ended:
                self._check_loop_blocked()
                if time.monotonic() >= next_at:
                    await self._send_heartbeat(bus)
                    next_at = time.monotonic() + self._interval_s
                if await self._pause(min(POLL_INTERVAL_S, self._interval_s)):
                    next_at = 0.0
            consumer.cancel()

    async def _pause(self, seconds: float) -> bool:
        """Waits up to `seconds`; returns whether `send_now` was called."""
        assert self._due is not None, "the thread has started"
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._due.wait()
        requested = self._due.is_set()
        self._due.clear()
        return requested

    async def _consume_server_notices(self, messages: asyncio.Queue[CoreMessage]) -> None:
        while True:
            message = await messages.get()
            try:
                liveness = decode(WorkerLiveness, message.data)
            except InvalidInput as error:
                log.warning("liveness_decode_failed", reason=error.sentence)
                continue
            if self._worker in liveness.heard:
                self.confirmed_at = time.monotonic()
            if self._worker in liveness.overdue:
                self.send_now()
            if self._worker in liveness.lost:
                self._on_lost()

    def _check_loop_blocked(self) -> None:
        blocked_s = time.monotonic() - self.loop_ran_at
        if blocked_s < LOOP_BLOCKED_THRESHOLD_S:
            self._blocked = False
        elif not self._blocked:
            self._blocked = True
            LOOP_BLOCKED.inc()
            log.warning("event_loop_blocked", seconds=round(blocked_s, 1), at=_current_line(self._loop_thread))


def _current_line(thread: int) -> str:
    """The innermost line the thread is executing."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 - the only way to inspect another thread
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}" if frame else ""

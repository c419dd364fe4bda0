"""One worker session: from registration, which assigns the worker id, until the session is lost or the process stops.

Ownership of frames:
- PostgreSQL has a proc row for every frame sent to this worker, and every heartbeat lists the tokens the worker has. So
  an assignment is acknowledged as soon as it is in memory: after a crash, servers see that no worker has its frames;
- a session is lost when a server says so. Its frames may already run elsewhere, so the worker kills them, reports
  nothing about them and registers under a new id;
- while no server answers, for however long, frames go on: only a server with PostgreSQL can give them to another one.
  A worker that was paused or disconnected learns that it was declared lost from the first liveness message; the fence
  refuses its reports until then;
- `_drain` (first signal) lets running frames finish, then sends a final heartbeat; `_abort` (second signal) returns
  them to the servers immediately.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from random import SystemRandom
from typing import Any, Final

import structlog

from rota.infra import failpoints
from rota.infra.nats import Bus, ConsumerSpec, Delivery
from rota.infra.nats.topology import assignment_consumer
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.backoff import Backoff
from rota.model.error_reactions import Reaction, reaction_to
from rota.model.errors import InvalidInput, NatsUnavailable, RotaError, TooLarge
from rota.model.heartbeat_parts import encode_heartbeat
from rota.model.protocol import (
    CANCEL_SUBJECT,
    HEARTBEAT_SUBJECT,
    RECALL_SUBJECT,
    Assignment,
    CancelFrames,
    Heartbeat,
    RecallFrames,
    Registered,
    decode,
)
from rota.model.token_ranges import TokenRange, count_tokens, merge_ranges
from rota.worker.capacity import WorkerCapacity
from rota.worker.config import WorkerConfig
from rota.worker.data.artifacts import FrameArtifacts
from rota.worker.data.payloads import Payloads
from rota.worker.frame_table import WORKER_STOPPING, FrameTable
from rota.worker.frames import AssignedBatch
from rota.worker.heartbeat import HeartbeatThread
from rota.worker.host_metrics import HostLoadMeter
from rota.worker.progress_reporter import ProgressReporter
from rota.worker.registration_info import HostLoad
from rota.worker.result_reporter import ResultReporter
from rota.worker.runners.async_runner import AsyncRunner
from rota.worker.runners.command_runner import CommandRunner
from rota.worker.runners.process_runner import TaskProcessRunner

log = structlog.get_logger(__name__)
SESSIONS_LOST = metrics.counter(
    "rota_worker_lost", "Times this worker lost its session and registered again.", labels=("reason",)
)
_jitter = SystemRandom().random

TICK_INTERVAL_S: Final = 0.2
FLUSH_TIMEOUT_S: Final = 5.0
ABORT_TIMEOUT_S: Final = 1.0
"""To publish results after the second signal; the service host kills the process after two seconds."""
ASSIGNMENTS_BACKOFF: Final = Backoff(first_s=0.1, longest_s=3.0)
RANGE_FRAMES_MAX: Final = 4096
ASSIGNMENT_FRAMES_MAX: Final = 65_536
"""In one assignment: each refused frame is reported individually."""


class WorkerSession:
    def __init__(self, bus: Bus, config: WorkerConfig, registration: Registered) -> None:
        assert registration.worker is not None, "a refused worker has no session"
        self.worker = registration.worker
        self.abandoned_handlers = 0
        """Handlers that ignored their cancellation and still run on this loop."""
        self._bus = bus
        self._config = config
        self._info = config.offer.with_tasks(config.tasks)
        self._registration = registration
        self._result_reporter = ResultReporter(bus, self.worker, self._is_busy)
        self._progress_reporter = ProgressReporter(bus, self.worker, config.output_max)
        artifacts = FrameArtifacts(config.work_dir, keep_dirs=config.keep_dirs)
        self._frame_table = FrameTable(
            WorkerCapacity(config.offer),
            self._result_reporter,
            self._progress_reporter,
            config.tasks,
            artifacts,
            self._start_batch,
        )
        self._payloads = Payloads(self._frame_table, config.store)
        self._async_runner = AsyncRunner(self._frame_table, self._payloads)
        self._process_runner = TaskProcessRunner(self._frame_table, self._payloads, config)
        self._command_runner = CommandRunner(self._frame_table, self._payloads, config)
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._numbers = itertools.count(1)
        self._meter = HostLoadMeter()
        self._load = HostLoad()
        self._loop = asyncio.get_running_loop()
        self._heartbeat = HeartbeatThread(
            bus.target,
            self.worker,
            registration.heartbeat_s,
            self._next_heartbeat,
            self._on_lost_notice,
        )

    async def run(self, life: Lifecycle) -> bool:
        """True when the process is stopping, False when the session was lost."""
        spec = assignment_consumer(self.worker, forgotten_after_s=2 * self._registration.lease_s)
        await self._bus.ensure([spec])
        self._heartbeat.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [
                    self._consume_assignments(spec),
                    self._consume_cancels(),
                    self._consume_recalls(),
                    self._watch_servers(),
                    *self._background_loops(),
                ]
                running = [tasks.create_task(loop) for loop in loops]
                try:
                    return await self._wait_until_over(life)
                finally:
                    for task in running:
                        task.cancel()
        finally:
            await self._close()

    async def _close(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            abandoned_handlers = tasks.create_task(self._async_runner.close())
            tasks.create_task(self._process_runner.close())
            tasks.create_task(self._command_runner.close())
            tasks.create_task(self._payloads.close())
            tasks.create_task(self._heartbeat.stop())
        await self._frame_table.artifacts.close()
        self.abandoned_handlers = abandoned_handlers.result()

    def _background_loops(self) -> list[Coroutine[Any, Any, None]]:
        return [self._result_reporter.run(), self._progress_reporter.run(), self._async_runner.run()]

    async def _wait_until_over(self, life: Lifecycle) -> bool:
        ending = asyncio.ensure_future(life.until_draining())
        over: set[asyncio.Future[Any]] = {ending, self._lost}
        try:
            await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                return self._abandon_frames(self._lost.result())
            await self._drain()
        except asyncio.CancelledError:
            await self._abort()
            raise
        finally:
            ending.cancel()
        return True

    def _abandon_frames(self, reason: str) -> bool:
        """Kills all frames. The log event records why work was discarded."""
        SESSIONS_LOST.labels(reason).inc()
        log.warning(
            "worker_session_lost",
            reason=reason,
            detail="a server declared it lost",
            frames=count_tokens(merge_ranges(self._frame_table.active_tokens())),
        )
        self._frame_table.stop_all_now(WORKER_STOPPING)
        return False

    async def _drain(self) -> None:
        """Waits for running frames, returns waiting ones, and sends the final heartbeat."""
        self._frame_table.draining = True
        log.info("worker_draining", running=len(self._frame_table.running))
        self._frame_table.drop_waiting(WORKER_STOPPING)
        self._heartbeat.send_now()
        if not self._frame_table.is_empty:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.drain_s):
                    await self._frame_table.emptied.wait()
        self._frame_table.stop_all_now(WORKER_STOPPING)
        if not await self._result_reporter.wait_until_stored(FLUSH_TIMEOUT_S):
            log.warning("reports_lost", frames=count_tokens(merge_ranges(self._result_reporter.unconfirmed_tokens())))
        await self._send_final_heartbeat()

    async def _abort(self) -> None:
        self._frame_table.draining = True
        self._frame_table.stop_all_now(WORKER_STOPPING)
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._result_reporter.wait_until_stored(ABORT_TIMEOUT_S)
                await self._send_final_heartbeat()

    async def _send_final_heartbeat(self) -> None:
        """Best effort: a server that misses it detects the end by lease expiry."""
        with suppress(NatsUnavailable, TooLarge):
            await self._progress_reporter.flush()
            for part in encode_heartbeat(self._build_heartbeat(), self._bus.max_payload):
                await self._bus.publish_core(HEARTBEAT_SUBJECT, part)

    async def _consume_assignments(self, spec: ConsumerSpec) -> None:
        """Runs until cancelled. Frames go on while NATS refuses to deliver assignments."""
        for streak in itertools.count(1):
            try:
                async with self._bus.consumer(spec) as consumer:
                    async for deliveries in consumer.batches(most=16):
                        for delivery in deliveries:
                            await self._result_reporter.wait_for_capacity()
                            await self._accept_delivery(delivery)
            except RotaError as error:
                if reaction_to(error) is Reaction.BUG:
                    raise
                log.warning("assignments_unavailable", code=error.code, reason=error.sentence)
                await asyncio.sleep(ASSIGNMENTS_BACKOFF.pause_s(streak, _jitter()))

    async def _accept_delivery(self, delivery: Delivery) -> None:
        try:
            assignment = _validate_assignment(decode(Assignment, delivery.data))
        except InvalidInput as error:
            log.warning("assignment_decode_failed", reason=error.sentence, stream_seq=delivery.stream_seq)
            with suppress(NatsUnavailable):
                await delivery.term()
            return
        self._frame_table.accept_assignment(assignment)
        failpoints.hit("worker.taken_before_ack")
        with suppress(NatsUnavailable):
            await delivery.ack()

    def _start_batch(self, batch: AssignedBatch) -> None:
        if batch.assigned.pointer is not None and batch.input is None:
            self._payloads.fetch_input(batch, self._runner_for(batch))
        else:
            self._runner_for(batch)(batch)

    def _runner_for(self, batch: AssignedBatch) -> Callable[[AssignedBatch], None]:
        if batch.task is None:
            return self._command_runner.add
        return self._async_runner.add if batch.task.is_async else self._process_runner.add

    async def _consume_cancels(self) -> None:
        async with self._bus.subscribe_core(CANCEL_SUBJECT) as messages:
            while True:
                message = await messages.get()
                try:
                    cancel = decode(CancelFrames, message.data)
                except InvalidInput as error:
                    log.warning("cancel_decode_failed", reason=error.sentence)
                else:
                    self._frame_table.cancel(filter(_is_valid_range, cancel.tokens), cancel.reason)

    async def _consume_recalls(self) -> None:
        async with self._bus.subscribe_core(RECALL_SUBJECT.format(self.worker)) as messages:
            while True:
                message = await messages.get()
                try:
                    recall = decode(RecallFrames, message.data)
                except InvalidInput as error:
                    log.warning("recall_decode_failed", reason=error.sentence)
                else:
                    self._frame_table.hand_back(filter(_is_valid_range, recall.tokens))

    async def _watch_servers(self) -> None:
        """Records event loop progress, and logs once when no server has confirmed a heartbeat for `lease_s`."""
        reported = False
        while True:
            self._heartbeat.record_loop_iteration()
            silent_s = time.monotonic() - self._heartbeat.confirmed_at
            if silent_s <= self._registration.lease_s:
                reported = False
            elif not reported:
                reported = True
                log.warning("servers_silent", seconds=round(silent_s), detail="running frames go on")
            await asyncio.sleep(TICK_INTERVAL_S)

    def _set_lost(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)

    def _on_lost_notice(self) -> None:
        """Called on the heartbeat thread."""
        self._loop.call_soon_threadsafe(self._set_lost, "told")

    def _is_busy(self) -> bool:
        return not self._frame_table.is_empty

    def _next_heartbeat(self) -> Heartbeat:
        """Called on the heartbeat thread."""
        self._load = self._meter.sample()
        return self._build_heartbeat()

    def _build_heartbeat(self) -> Heartbeat:
        # Read `held` before `reported`: a token leaves `held` only after `reported` was raised.
        held = merge_ranges(self._frame_table.active_tokens())
        return self._info.heartbeat(
            self.worker,
            next(self._numbers),
            interval_s=self._registration.heartbeat_s,
            load=self._load,
            draining=self._frame_table.draining,
            held=held,
            reported=self._result_reporter.reported,
        )


def _is_valid_range(tokens: TokenRange) -> bool:
    return tokens[0] >= 0 and 0 < tokens[1] <= 2**53


def _validate_assignment(assignment: Assignment) -> Assignment:
    for assigned in assignment.portions:
        if (
            not 0 <= assigned.work < len(assignment.works)
            or not 0 < assigned.n <= RANGE_FRAMES_MAX
            or assigned.token < 0
        ):
            raise InvalidInput(f"A range of {assigned.n} frames of work {assigned.work} is not valid.")
    if (frames := sum(assigned.n for assigned in assignment.portions)) > ASSIGNMENT_FRAMES_MAX:
        raise InvalidInput(
            f"An assignment of {frames} frames is too large: servers send at most {ASSIGNMENT_FRAMES_MAX}."
        )
    return assignment

"""One life of a worker: from the Welcome that named it until it is told that it is lost, or is to end.

    assignments ─► desk ─► on the loop │ in processes │ commands ─► desk ─► reports
    cancels ──────► desk                                            └─► teller (progress, logs)
                     └─► pulse (heartbeats)

Who keeps what:
- PostgreSQL has a proc row for every frame that was sent to us, and every heartbeat lists what we have, so an
  assignment is acknowledged as soon as it is in memory: if we die after that, servers see that nobody has its frames;
- a worker that is lost, because a server said so or because none has heard of it for `lease_s`, has nothing any more:
  its frames may run elsewhere by now. It kills them, says nothing about them, and begins anew under another name;
- a paused process finds out by the same clock when it wakes; what it reports before that is refused by the fence;
- ending: `drain` lets frames finish and says goodbye; `cut` gives them back at once.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

import structlog

from rota.infra import failpoints
from rota.infra.nats import Bus, ConsumerSpec, Delivery
from rota.infra.nats.topology import assignment_consumer
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.errors import InvalidInput, NatsUnavailable
from rota.model.protocol import (
    CANCEL_SUBJECT,
    HEARTBEAT_SUBJECT,
    Assignment,
    CancelFrames,
    Heartbeat,
    Registered,
    TokenRange,
    decode,
    encode,
)
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
from rota.worker.runners.process_pool import TaskProcessPool
from rota.worker.token_ranges import merge_ranges

log = structlog.get_logger(__name__)
SESSIONS_LOST = metrics.counter(
    "rota_worker_lost", "Times this worker lost its place and began anew.", labels=("reason",)
)

TICK_INTERVAL_S: Final = 0.2
FLUSH_TIMEOUT_S: Final = 5.0
ABORT_TIMEOUT_S: Final = 1.0
"""For what must still be said after the second signal; the process is given up after two seconds."""
RANGE_FRAMES_MAX: Final = 4096
ASSIGNMENT_FRAMES_MAX: Final = 65_536
"""In one assignment: every frame that is refused is told one by one."""


class WorkerSession:
    def __init__(self, bus: Bus, plan: WorkerConfig, welcome: Registered) -> None:
        assert welcome.worker is not None, "a refused worker has no life"
        self.worker = welcome.worker
        self.left_behind = 0
        """Handlers that ignored their cancellation and still run on this loop."""
        self._bus = bus
        self._plan = plan
        self._offer = plan.offer.with_tasks(plan.tasks)
        self._welcome = welcome
        self._reports = ResultReporter(bus, self.worker, self._is_busy)
        self._teller = ProgressReporter(bus, self.worker, plan.output_max)
        leavings = FrameArtifacts(plan.work_dir, keep_dirs=plan.keep_dirs)
        self._desk = FrameTable(WorkerCapacity(plan.offer), self._reports, self._teller, plan.tasks, leavings)
        self._values = Payloads(self._desk, plan.store)
        self._on_loop = AsyncRunner(self._desk, self._values)
        self._in_processes = TaskProcessPool(self._desk, self._values, plan)
        self._commands = CommandRunner(self._desk, self._values, plan)
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._numbers = itertools.count(1)
        self._meter = HostLoadMeter()
        self._load = HostLoad()
        self._loop = asyncio.get_running_loop()
        self._pulse = HeartbeatThread(
            bus.target,
            self.worker,
            welcome.heartbeat_s,
            self._next_heartbeat,
            self._on_lost_notice,
        )

    async def run(self, life: Lifecycle) -> bool:
        """True when it ended because the process is to end, False when it was lost."""
        spec = assignment_consumer(self.worker, forgotten_after_s=2 * self._welcome.lease_s)
        await self._bus.ensure([spec])
        self._pulse.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                works = [
                    self._consume_assignments(spec),
                    self._consume_cancels(),
                    self._check_lease(),
                    *self._background_loops(),
                ]
                running = [tasks.create_task(work) for work in works]
                try:
                    return await self._wait_until_over(life)
                finally:
                    for task in running:
                        task.cancel()
        finally:
            await self._close()

    async def _close(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            left_behind = tasks.create_task(self._on_loop.close())
            tasks.create_task(self._in_processes.close())
            tasks.create_task(self._commands.close())
            tasks.create_task(self._values.close())
            tasks.create_task(self._pulse.stop())
        await self._desk.leavings.close()
        self.left_behind = left_behind.result()

    def _background_loops(self) -> list[Coroutine[Any, Any, None]]:
        return [self._reports.run(), self._teller.run(), self._on_loop.run()]

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
        """We have nothing any more; whoever reads this line wants to know why work was thrown away."""
        SESSIONS_LOST.labels(reason).inc()
        log.warning(
            "worker_lost",
            reason=reason,
            said="told that it is lost" if reason == "told" else f"no server knew it for {self._welcome.lease_s:g} s",
            frames=sum(n for _, n in merge_ranges(self._desk.active_tokens())),
        )
        self._desk.stop_all_now(WORKER_STOPPING)
        return False

    async def _drain(self) -> None:
        """Finish what has begun, give back what has not, and say goodbye."""
        self._desk.draining = True
        log.info("worker_drains", running=len(self._desk.running))
        self._desk.drop_waiting(WORKER_STOPPING)
        self._pulse.send_now()
        if not self._desk.is_empty:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._plan.drain_s):
                    await self._desk.emptied.wait()
        self._desk.stop_all_now(WORKER_STOPPING)
        if not await self._reports.wait_until_stored(FLUSH_TIMEOUT_S):
            log.warning("reports_lost", frames=sum(n for _, n in merge_ranges(self._reports.unconfirmed_tokens())))
        await self._send_final_heartbeat()

    async def _abort(self) -> None:
        self._desk.draining = True
        self._desk.stop_all_now(WORKER_STOPPING)
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._reports.wait_until_stored(ABORT_TIMEOUT_S)
                await self._send_final_heartbeat()

    async def _send_final_heartbeat(self) -> None:
        """The last heartbeat; a server that misses it waits for the next ones in vain, and then knows."""
        with suppress(NatsUnavailable):
            await self._teller.flush()
            await self._bus.publish_core(HEARTBEAT_SUBJECT, encode(self._build_heartbeat()))

    async def _consume_assignments(self, spec: ConsumerSpec) -> None:
        async with self._bus.consumer(spec) as consumer:
            async for deliveries in consumer.batches(most=16):
                for delivery in deliveries:
                    await self._reports.wait_for_capacity()
                    await self._accept_delivery(delivery)

    async def _accept_delivery(self, delivery: Delivery) -> None:
        try:
            assignment = _validate_assignment(decode(Assignment, delivery.data))
        except InvalidInput as error:
            log.warning("assignment_unreadable", reason=error.sentence, stream_seq=delivery.stream_seq)
            with suppress(NatsUnavailable):
                await delivery.term()
            return
        for batch in self._desk.accept_assignment(assignment):
            self._start_batch(batch)
        failpoints.hit("worker.taken_before_ack")
        with suppress(NatsUnavailable):
            await delivery.ack()

    def _start_batch(self, batch: AssignedBatch) -> None:
        if batch.portion.pointer is not None and batch.input is None:
            self._values.fetch_input(batch, self._runner_for(batch))
        else:
            self._runner_for(batch)(batch)

    def _runner_for(self, batch: AssignedBatch) -> Callable[[AssignedBatch], None]:
        if batch.task is None:
            return self._commands.add
        return self._on_loop.add if batch.task.is_async else self._in_processes.add

    async def _consume_cancels(self) -> None:
        async with self._bus.subscribe_core(CANCEL_SUBJECT) as told:
            while True:
                message = await told.get()
                try:
                    cancel = decode(CancelFrames, message.data)
                except InvalidInput as error:
                    log.warning("cancel_unreadable", reason=error.sentence)
                else:
                    self._desk.cancel(filter(_is_valid_range, cancel.tokens), cancel.reason)

    async def _check_lease(self) -> None:
        """Show that the loop turns, and look at the clock of our lease."""
        while True:
            self._pulse.record_loop_iteration()
            if time.monotonic() - self._pulse.heard_at > self._welcome.lease_s:
                self._set_lost("lease")
            await asyncio.sleep(TICK_INTERVAL_S)

    def _set_lost(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)

    def _on_lost_notice(self) -> None:
        """Called in the thread of the pulse."""
        self._loop.call_soon_threadsafe(self._set_lost, "told")

    def _is_busy(self) -> bool:
        return not self._desk.is_empty

    def _next_heartbeat(self) -> Heartbeat:
        """Called in the thread of the pulse."""
        self._load = self._meter.sample()
        return self._build_heartbeat()

    def _build_heartbeat(self) -> Heartbeat:
        # Held first: what leaves it has raised `reported` before.
        held = merge_ranges(self._desk.active_tokens())
        return self._offer.heartbeat(
            self.worker,
            next(self._numbers),
            load=self._load,
            draining=self._desk.draining,
            held=held,
            reported=self._reports.reported,
        )


def _is_valid_range(run: TokenRange) -> bool:
    return run[0] >= 0 and 0 < run[1] <= 2**53


def _validate_assignment(assignment: Assignment) -> Assignment:
    for portion in assignment.portions:
        if not 0 <= portion.work < len(assignment.works) or not 0 < portion.n <= RANGE_FRAMES_MAX or portion.token < 0:
            raise InvalidInput(f"A portion of {portion.n} frames of work {portion.work} makes no sense.")
    if (frames := sum(portion.n for portion in assignment.portions)) > ASSIGNMENT_FRAMES_MAX:
        raise InvalidInput(
            f"An assignment of {frames} frames is no server's: they send {ASSIGNMENT_FRAMES_MAX} at most."
        )
    return assignment

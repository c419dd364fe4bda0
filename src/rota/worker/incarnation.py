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

from rota.infra import faults
from rota.infra.nats import Bus, ConsumerSpec, Delivery
from rota.infra.nats.declared import assignments
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.errors import InvalidInput, NatsUnavailable
from rota.model.messages import CANCEL, HEARTBEAT, Assignment, Cancel, Heartbeat, Run, Welcome, decode, encode
from rota.worker.commands import Commands
from rota.worker.desk import STOPPED_WITH_WORKER, Desk
from rota.worker.frames import Batch
from rota.worker.leavings import Leavings
from rota.worker.machine import Meter
from rota.worker.offer import Load
from rota.worker.onloop import OnLoop
from rota.worker.plan import Plan
from rota.worker.processes import InProcesses
from rota.worker.pulse import Pulse
from rota.worker.reports import Reports
from rota.worker.room import Room
from rota.worker.runs import joined
from rota.worker.teller import Teller
from rota.worker.values import Values

log = structlog.get_logger(__name__)
LOST = metrics.counter("rota_worker_lost", "Times this worker lost its place and began anew.", labels=("reason",))

TICK_S: Final = 0.2
GOODBYE_S: Final = 5.0
CUT_S: Final = 1.0
"""For what must still be said after the second signal; the process is given up after two seconds."""
PORTION_MAX: Final = 4096
FRAMES_MAX: Final = 65_536
"""In one assignment: every frame that is refused is told one by one."""


class Incarnation:
    def __init__(self, bus: Bus, plan: Plan, welcome: Welcome) -> None:
        assert welcome.worker is not None, "a refused worker has no life"
        self.worker = welcome.worker
        self.left_behind = 0
        """Handlers that ignored their cancellation and still run on this loop."""
        self._bus = bus
        self._plan = plan
        self._offer = plan.offer.knowing(plan.tasks)
        self._welcome = welcome
        self._reports = Reports(bus, self.worker, self._is_busy)
        self._teller = Teller(bus, self.worker, plan.output_max)
        leavings = Leavings(plan.work_dir, keep_dirs=plan.keep_dirs)
        self._desk = Desk(Room(plan.offer), self._reports, self._teller, plan.tasks, leavings)
        self._values = Values(self._desk, plan.store)
        self._on_loop = OnLoop(self._desk, self._values)
        self._in_processes = InProcesses(self._desk, self._values, plan)
        self._commands = Commands(self._desk, self._values, plan)
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._numbers = itertools.count(1)
        self._meter = Meter()
        self._load = Load()
        self._loop = asyncio.get_running_loop()
        self._pulse = Pulse(
            bus.target,
            self.worker,
            welcome.heartbeat_s,
            self._beat,
            self._told_lost,
        )

    async def run(self, life: Lifecycle) -> bool:
        """True when it ended because the process is to end, False when it was lost."""
        spec = assignments(self.worker, forgotten_after_s=2 * self._welcome.lease_s)
        await self._bus.ensure([spec])
        self._pulse.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                works = [self._intake(spec), self._hear_cancels(), self._tick(), *self._runners()]
                running = [tasks.create_task(work) for work in works]
                try:
                    return await self._until_over(life)
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

    def _runners(self) -> list[Coroutine[Any, Any, None]]:
        return [self._reports.run(), self._teller.run(), self._on_loop.run()]

    async def _until_over(self, life: Lifecycle) -> bool:
        ending = asyncio.ensure_future(life.until_draining())
        over: set[asyncio.Future[Any]] = {ending, self._lost}
        try:
            await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                return self._drop(self._lost.result())
            await self._drain()
        except asyncio.CancelledError:
            await self._cut()
            raise
        finally:
            ending.cancel()
        return True

    def _drop(self, reason: str) -> bool:
        """We have nothing any more; whoever reads this line wants to know why work was thrown away."""
        LOST.labels(reason).inc()
        log.warning(
            "worker_lost",
            reason=reason,
            said="told that it is lost" if reason == "told" else f"no server knew it for {self._welcome.lease_s:g} s",
            frames=sum(n for _, n in joined(self._desk.held())),
        )
        self._desk.stop_at_once(STOPPED_WITH_WORKER)
        return False

    async def _drain(self) -> None:
        """Finish what has begun, give back what has not, and say goodbye."""
        self._desk.draining = True
        log.info("worker_drains", running=len(self._desk.running))
        self._desk.drop_waiting(STOPPED_WITH_WORKER)
        self._pulse.now()
        if not self._desk.empty:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._plan.drain_s):
                    await self._desk.emptied.wait()
        self._desk.stop_at_once(STOPPED_WITH_WORKER)
        if not await self._reports.until_stored(GOODBYE_S):
            log.warning("reports_lost", frames=sum(n for _, n in joined(self._reports.held())))
        await self._goodbye()

    async def _cut(self) -> None:
        self._desk.draining = True
        self._desk.stop_at_once(STOPPED_WITH_WORKER)
        with suppress(TimeoutError):
            async with asyncio.timeout(CUT_S):
                await self._reports.until_stored(CUT_S)
                await self._goodbye()

    async def _goodbye(self) -> None:
        """The last heartbeat; a server that misses it waits for the next ones in vain, and then knows."""
        with suppress(NatsUnavailable):
            await self._teller.tell()
            await self._bus.tell(HEARTBEAT, encode(self._heartbeat()))

    async def _intake(self, spec: ConsumerSpec) -> None:
        async with self._bus.consumer(spec) as consumer:
            async for deliveries in consumer.batches(most=16):
                for delivery in deliveries:
                    await self._reports.until_room()
                    await self._take(delivery)

    async def _take(self, delivery: Delivery) -> None:
        try:
            assignment = _checked(decode(Assignment, delivery.data))
        except InvalidInput as error:
            log.warning("assignment_unreadable", reason=error.sentence, stream_seq=delivery.stream_seq)
            with suppress(NatsUnavailable):
                await delivery.term()
            return
        for batch in self._desk.take(assignment):
            self._begin(batch)
        faults.at("worker.taken_before_ack")
        with suppress(NatsUnavailable):
            await delivery.ack()

    def _begin(self, batch: Batch) -> None:
        if batch.portion.pointer is not None and batch.input is None:
            self._values.fetch(batch, self._runner_of(batch))
        else:
            self._runner_of(batch)(batch)

    def _runner_of(self, batch: Batch) -> Callable[[Batch], None]:
        if batch.task is None:
            return self._commands.add
        return self._on_loop.add if batch.task.is_async else self._in_processes.add

    async def _hear_cancels(self) -> None:
        async with self._bus.hear(CANCEL) as told:
            while True:
                message = await told.get()
                try:
                    cancel = decode(Cancel, message.data)
                except InvalidInput as error:
                    log.warning("cancel_unreadable", reason=error.sentence)
                else:
                    self._desk.cancel(filter(_is_possible, cancel.tokens), cancel.reason)

    async def _tick(self) -> None:
        """Show that the loop turns, and look at the clock of our lease."""
        while True:
            self._pulse.turned()
            if time.monotonic() - self._pulse.heard_at > self._welcome.lease_s:
                self._lose("lease")
            await asyncio.sleep(TICK_S)

    def _lose(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)

    def _told_lost(self) -> None:
        """Called in the thread of the pulse."""
        self._loop.call_soon_threadsafe(self._lose, "told")

    def _is_busy(self) -> bool:
        return not self._desk.empty

    def _beat(self) -> Heartbeat:
        """Called in the thread of the pulse."""
        self._load = self._meter.look()
        return self._heartbeat()

    def _heartbeat(self) -> Heartbeat:
        # Held first: what leaves it has raised `reported` before.
        held = joined(self._desk.held())
        return self._offer.heartbeat(
            self.worker,
            next(self._numbers),
            load=self._load,
            draining=self._desk.draining,
            held=held,
            reported=self._reports.reported,
        )


def _is_possible(run: Run) -> bool:
    return run[0] >= 0 and 0 < run[1] <= 2**53


def _checked(assignment: Assignment) -> Assignment:
    for portion in assignment.portions:
        if not 0 <= portion.work < len(assignment.works) or not 0 < portion.n <= PORTION_MAX or portion.token < 0:
            raise InvalidInput(f"A portion of {portion.n} frames of work {portion.work} makes no sense.")
    if (frames := sum(portion.n for portion in assignment.portions)) > FRAMES_MAX:
        raise InvalidInput(f"An assignment of {frames} frames is no server's: they send {FRAMES_MAX} at most.")
    return assignment

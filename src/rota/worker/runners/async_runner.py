"""Async tasks, run on the worker's own loop.

Frames are begun one after the other in one stretch of at most `STRETCH_S`, then the loop has its turn; one that
finishes at once costs neither a task nor a turn (see `carriers`). Each has variables (contextvars) of its own. What a
handler raises, `SystemExit` included, is its own end and not ours, and so it is with tasks that it makes (`contained`).
One that forks and comes back here as the child is ended on the spot, since it would speak in our name.

What cannot be helped: a handler that never awaits holds the loop, and all its neighbours with it. The pulse goes on
from its own thread and says so; nothing but the end of the process would stop the handler. Sync tasks can be killed.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from contextvars import Context as Variables
from contextvars import copy_context
from time import monotonic
from typing import Any, Final

import msgspec

from rota.infra.telemetry import tracing
from rota.model.protocol import AttemptResult
from rota.sdk.context import CURRENT_CONTEXT, Context
from rota.worker import outcomes
from rota.worker.data.artifacts import LoopFrameSink
from rota.worker.data.payloads import Payloads
from rota.worker.frame_table import FrameTable
from rota.worker.frames import AssignedBatch, RunningFrame
from rota.worker.outcomes import TaskInput
from rota.worker.runners.coroutine_pool import SPARE_SLOTS_MAX, AnyCoroutine, CoroutineSlot, CoroutineSlotPool
from rota.worker.runners.exit_guard import guarded_task_factory

TIME_SLICE_S: Final = 0.005
FORKED_EXIT_STATUS: Final = 70


class _ForkedChild:
    """Set in a child of ours that was forked by a handler."""

    here = False


os.register_at_fork(after_in_child=lambda: setattr(_ForkedChild, "here", True))


class AsyncRunner:
    def __init__(self, desk: FrameTable, values: Payloads) -> None:
        self._desk = desk
        self._values = values
        self._ear = LoopFrameSink(desk.teller, desk.leavings)
        self._carriers = CoroutineSlotPool()
        self._waiting: deque[AssignedBatch] = deque()
        self._some = asyncio.Event()
        self._wanted = 1
        _ForkedChild.here = False  # the flag marks children of task handlers, and a worker process may itself be forked
        asyncio.get_running_loop().set_task_factory(guarded_task_factory)

    @property
    def has_waiting(self) -> bool:
        """Whether there are frames to begin right away."""
        return bool(self._waiting)

    def add(self, batch: AssignedBatch) -> None:
        self._waiting.append(batch)
        self._some.set()

    async def run(self) -> None:
        while True:
            await self._some.wait()
            while self._waiting:
                await self._run_time_slice()
                await asyncio.sleep(0)
            self._some.clear()

    async def close(self) -> int:
        """End all; how many handlers ignored it."""
        return await self._carriers.close()

    async def _run_time_slice(self) -> None:
        await self._carriers.ensure_spare(self._wanted)
        until = monotonic() + TIME_SLICE_S
        used = 0
        while self._waiting and monotonic() < until and (carrier := self._carriers.first_available()) is not None:
            self._start_in_slot(carrier, until)
            used += not carrier.is_available
        # As many as were needed this time, or twice that when there were too few.
        self._wanted = min(SPARE_SLOTS_MAX, max(1, used if self._carriers.first_available() else 2 * used))

    def _start_in_slot(self, carrier: CoroutineSlot, until: float) -> None:
        """Frames in the name of one carrier, until it has one to carry."""
        with self._carriers.as_current_task(carrier):
            while self._waiting and carrier.is_available and monotonic() < until:
                batch = self._waiting[0]
                self._start_from_batch(batch, carrier, until)
                if batch.next >= batch.end:
                    self._waiting.popleft()
                    self._desk.remove_started_batch(batch)

    def _start_from_batch(self, batch: AssignedBatch, carrier: CoroutineSlot, until: float) -> None:
        """Frames of one batch, until one has to wait or the time is over."""
        given = self._decode_input(batch)
        while given is not None and batch.next < batch.end and carrier.is_available and monotonic() < until:
            if batch.next in batch.dropped:
                batch.next += 1
                continue
            self._start_identical_frames(batch, given, carrier, until)
            if batch.next < batch.end and not given.is_shareable:
                given = self._decode_input(batch)

    def _decode_input(self, batch: AssignedBatch) -> TaskInput | None:
        """What the next frame is called with; None: nothing of the batch can be called, and all of it has ended."""
        assert batch.task is not None, "a command does not run on the loop"
        try:
            return outcomes.decode_input(batch.input, batch.task.signature)
        except msgspec.DecodeError as error:
            self._fail_bad_input(batch, error)
            return None

    def _start_identical_frames(
        self, batch: AssignedBatch, given: TaskInput, carrier: CoroutineSlot, until: float
    ) -> None:
        """Frames that return nothing at once, up to the first that does anything else: told as one run."""
        first = token = batch.next
        began_at = monotonic()
        last = batch.end if token + 1 == batch.end or given.is_shareable else token + 1
        end: AttemptResult | RunningFrame | None = None
        while token < last and token not in batch.dropped:
            end = self._first_step(batch, token, given, carrier)
            if _ForkedChild.here:
                os._exit(FORKED_EXIT_STATUS)
            if end is not None:
                break
            token += 1
            # A handler that cancelled the task it found itself in must not cancel the next frame.
            if carrier.gate.done() or monotonic() >= until:
                break
        if token > first:
            self._desk.succeed_untracked(batch, first, token - first, monotonic() - began_at)
        if isinstance(end, AttemptResult):
            self._desk.end_untracked(batch, end)
        batch.next = token + (end is not None)

    def _first_step(
        self, batch: AssignedBatch, token: int, given: TaskInput, carrier: CoroutineSlot
    ) -> AttemptResult | RunningFrame | None:
        """None: it has returned nothing. An end: it is over. A frame: it runs, and is in the desk's hands."""
        assert batch.task is not None, "a command does not run on the loop"
        frame = self._desk.start_frame(batch, token) if batch.work.gpus else None
        context = Context(batch.portion, batch.frame_number(token), token, self._ear, frame.devices if frame else ())
        CURRENT_CONTEXT.set(context)
        variables = copy_context()
        if batch.traced is not None:
            variables.run(tracing.attach, batch.traced.trace)
        end: AttemptResult | RunningFrame | None = None
        try:
            coroutine = batch.task.function(*given.args, **given.kwargs)
        except Exception as error:  # noqa: BLE001 - nothing of it has run: the arguments do not fit
            end = outcomes.bad_input_end(token, error)
            return self._end_if_tracked(frame, end)
        try:
            awaited = variables.run(coroutine.send, None)
        except StopIteration as returned:
            if returned.value is not None or batch.work.artifacts or self._desk.leavings.open:
                end = self._values.resolve_result(batch, token, returned.value, frame)
        except BaseException as error:  # noqa: BLE001 - whatever it raises is the frame's end, not ours
            end = self._failure_end(batch, token, error)
        else:
            frame = frame or self._desk.start_frame(batch, token)
            self._move_to_slot(frame, context, carrier, coroutine, awaited, variables)
            return frame
        return end if frame is None else self._end_if_tracked(frame, end)

    def _end_if_tracked(
        self, frame: RunningFrame | None, end: AttemptResult | RunningFrame | None
    ) -> AttemptResult | RunningFrame | None:
        if frame is None or isinstance(end, RunningFrame):
            return end
        self._desk.end(frame, end)
        return frame

    def _move_to_slot(
        self,
        frame: RunningFrame,
        context: Context,
        carrier: CoroutineSlot,
        coroutine: AnyCoroutine,
        awaited: Any,
        variables: Variables,
    ) -> None:
        def ask() -> None:
            context.cancelled = True
            carrier.task.cancel()

        def give_up() -> None:
            carrier.task.cancel()
            self._desk.end(frame, None)

        def on_end(value: Any, raised: BaseException | None) -> None:
            if _ForkedChild.here:
                os._exit(FORKED_EXIT_STATUS)
            self._on_coroutine_end(frame, value, raised)

        frame.ask, frame.kill = ask, give_up
        carrier.take_over(coroutine, awaited, variables, on_end)

    def _on_coroutine_end(self, frame: RunningFrame, value: Any, raised: BaseException | None) -> None:
        if raised is not None:
            self._desk.end(frame, self._failure_end(frame.batch, frame.token, raised))
        elif frame.stop is not None or frame.over:
            self._desk.end(frame, None)
        elif not isinstance(end := self._values.resolve_result(frame.batch, frame.token, value, frame), RunningFrame):
            self._desk.end(frame, end)

    def _failure_end(self, batch: AssignedBatch, token: int, error: BaseException) -> AttemptResult:
        if isinstance(error, Exception) and not isinstance(error, outcomes.INTENTIONAL_EXCEPTIONS):
            self._ear.log(token, outcomes.format_traceback(error, batch.work.env))
        return outcomes.failure_end(token, error, batch.work.env)

    def _fail_bad_input(self, batch: AssignedBatch, error: Exception) -> None:
        for token in range(batch.next, batch.end):
            if token not in batch.dropped:
                self._desk.end_untracked(batch, outcomes.bad_input_end(token, error))
        batch.next = batch.end

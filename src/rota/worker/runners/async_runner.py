"""Runs async tasks on the worker's event loop.

Frames are started in sequence for at most `TIME_SLICE_S`, then the loop runs. A frame that finishes in its first step
costs neither an asyncio task nor a loop iteration (see `coroutine_pool`). Each frame has its own contextvars. An
exception of a handler, `SystemExit` included, ends the frame and not the worker; so do exceptions of tasks it creates
(`exit_guard`). A forked child that returns here exits immediately, because it would report in the worker's name.

Limit: a handler that never awaits blocks the loop and all other async frames. The heartbeat thread continues and logs
it; only the end of the process stops such a handler. Sync tasks can be killed.
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
    """Set in a child process forked by a handler."""

    here = False


os.register_at_fork(after_in_child=lambda: setattr(_ForkedChild, "here", True))


class AsyncRunner:
    def __init__(self, frame_table: FrameTable, payloads: Payloads) -> None:
        self._frame_table = frame_table
        self._payloads = payloads
        self._sink = LoopFrameSink(frame_table.progress_reporter, frame_table.artifacts)
        self._slots = CoroutineSlotPool()
        self._waiting: deque[AssignedBatch] = deque()
        self._has_work = asyncio.Event()
        self._slots_needed = 1
        _ForkedChild.here = False  # the worker itself may have been forked; only children of handlers count
        asyncio.get_running_loop().set_task_factory(guarded_task_factory)

    def add(self, batch: AssignedBatch) -> None:
        self._waiting.append(batch)
        self._has_work.set()

    async def run(self) -> None:
        while True:
            await self._has_work.wait()
            while self._waiting:
                await self._run_time_slice()
                await asyncio.sleep(0)
            self._has_work.clear()

    async def close(self) -> int:
        """Cancels all handlers; returns how many ignored it."""
        return await self._slots.close()

    async def _run_time_slice(self) -> None:
        await self._slots.ensure_spare(self._slots_needed)
        until = monotonic() + TIME_SLICE_S
        used = 0
        while self._waiting and monotonic() < until and (slot := self._slots.first_available()) is not None:
            self._start_in_slot(slot, until)
            used += not slot.is_available
        if self._waiting and self._waiting[0].series is not None:
            self._waiting.rotate(-1)  # what waits behind a series may have a slot of its own
        # Next time: as many slots as were used, or twice that if they ran out.
        self._slots_needed = min(SPARE_SLOTS_MAX, max(1, used if self._slots.first_available() else 2 * used))

    def _start_in_slot(self, slot: CoroutineSlot, until: float) -> None:
        """Starts frames with `slot` as the current task, until one of them has to wait and takes the slot."""
        with self._slots.as_current_task(slot):
            while self._waiting and slot.is_available and monotonic() < until:
                batch = self._waiting[0]
                self._start_from_batch(batch, slot, until)
                if batch.next >= batch.end:
                    self._waiting.popleft()
                    self._frame_table.remove_started_batch(batch)
                elif batch.is_blocked:
                    self._waiting.popleft()
                    batch.suspended = True

    def _start_from_batch(self, batch: AssignedBatch, slot: CoroutineSlot, until: float) -> None:
        """Starts frames of one batch, until one has to wait or the time slice ends."""
        arguments = self._decode_input(batch)
        while arguments is not None and batch.next < batch.end and slot.is_available and monotonic() < until:
            if batch.is_blocked:
                return
            if batch.next in batch.dropped:
                batch.next += 1
                continue
            self._start_identical_frames(batch, arguments, slot, until)
            if batch.next < batch.end and not arguments.is_shareable:
                arguments = self._decode_input(batch)

    def _decode_input(self, batch: AssignedBatch) -> TaskInput | None:
        """Arguments of the next frame; None: they do not decode, and the whole batch has failed."""
        assert batch.task is not None, "a command does not run on the loop"
        try:
            return outcomes.decode_input(batch.input, batch.task.signature)
        except msgspec.DecodeError as error:
            self._fail_bad_input(batch, error)
            return None

    def _start_identical_frames(
        self, batch: AssignedBatch, arguments: TaskInput, slot: CoroutineSlot, until: float
    ) -> None:
        """Runs frames that return None in their first step, up to the first that does not; reports one range."""
        first = token = batch.next
        began_at = monotonic()
        last = batch.end if token + 1 == batch.end or arguments.is_shareable else token + 1
        end: AttemptResult | RunningFrame | None = None
        while token < last and token not in batch.dropped:
            end = self._first_step(batch, token, arguments, slot)
            if _ForkedChild.here:
                os._exit(FORKED_EXIT_STATUS)
            if end is not None:
                break
            token += 1
            # A handler that cancelled its current task must not cancel the next frame.
            if slot.gate.done() or monotonic() >= until:
                break
        took_s = monotonic() - began_at
        if token > first:
            self._frame_table.succeed_untracked(batch, first, token - first, took_s)
        if isinstance(end, AttemptResult):
            self._frame_table.end_untracked(batch, end)
        if ended := token - first + isinstance(end, AttemptResult):
            self._frame_table.record_duration(batch, ended, took_s)
        batch.next = token + (end is not None)

    def _first_step(
        self, batch: AssignedBatch, token: int, arguments: TaskInput, slot: CoroutineSlot
    ) -> AttemptResult | RunningFrame | None:
        """None: succeeded without a result. AttemptResult: ended. RunningFrame: tracked by the frame table."""
        assert batch.task is not None, "a command does not run on the loop"
        frame = self._frame_table.start_frame(batch, token) if batch.work.gpus else None
        context = Context(batch.assigned, batch.frame_number(token), token, self._sink, frame.devices if frame else ())
        CURRENT_CONTEXT.set(context)
        variables = copy_context()
        if batch.span is not None:
            variables.run(tracing.attach, batch.span.trace)
        end: AttemptResult | RunningFrame | None = None
        try:
            coroutine = batch.task.function(*arguments.args, **arguments.kwargs)
        except Exception as error:  # noqa: BLE001 - no user code has run: the arguments do not fit
            end = outcomes.bad_input_end(token, error)
            return self._end_if_tracked(frame, end)
        try:
            awaited = variables.run(coroutine.send, None)
        except StopIteration as returned:
            if returned.value is not None or batch.work.artifacts or self._frame_table.artifacts.open:
                end = self._payloads.resolve_result(batch, token, returned.value, frame)
        except BaseException as error:  # noqa: BLE001 - any exception ends the frame, not the worker
            end = self._failure_end(batch, token, error)
        else:
            frame = frame or self._frame_table.start_frame(batch, token)
            self._move_to_slot(frame, context, slot, coroutine, awaited, variables)
            return frame
        return end if frame is None else self._end_if_tracked(frame, end)

    def _end_if_tracked(
        self, frame: RunningFrame | None, end: AttemptResult | RunningFrame | None
    ) -> AttemptResult | RunningFrame | None:
        if frame is None or isinstance(end, RunningFrame):
            return end
        self._frame_table.end(frame, end)
        return frame

    def _move_to_slot(
        self,
        frame: RunningFrame,
        context: Context,
        slot: CoroutineSlot,
        coroutine: AnyCoroutine,
        awaited: Any,
        variables: Variables,
    ) -> None:
        def request_stop() -> None:
            context.cancelled = True
            slot.task.cancel()

        def kill() -> None:
            slot.task.cancel()
            self._frame_table.end(frame, None)

        def on_end(value: Any, raised: BaseException | None) -> None:
            if _ForkedChild.here:
                os._exit(FORKED_EXIT_STATUS)
            self._on_coroutine_end(frame, value, raised)

        frame.request_stop, frame.kill = request_stop, kill
        slot.take_over(coroutine, awaited, variables, on_end)

    def _on_coroutine_end(self, frame: RunningFrame, value: Any, raised: BaseException | None) -> None:
        if raised is not None:
            self._frame_table.end(frame, self._failure_end(frame.batch, frame.token, raised))
        elif frame.stop is not None or frame.over:
            self._frame_table.end(frame, None)
        elif not isinstance(end := self._payloads.resolve_result(frame.batch, frame.token, value, frame), RunningFrame):
            self._frame_table.end(frame, end)

    def _failure_end(self, batch: AssignedBatch, token: int, error: BaseException) -> AttemptResult:
        if isinstance(error, Exception) and not isinstance(error, outcomes.INTENTIONAL_EXCEPTIONS):
            self._sink.log(token, outcomes.format_traceback(error, batch.work.env))
        return outcomes.failure_end(token, error, batch.work.env)

    def _fail_bad_input(self, batch: AssignedBatch, error: Exception) -> None:
        for token in range(batch.next, batch.end):
            if token not in batch.dropped:
                self._frame_table.end_untracked(batch, outcomes.bad_input_end(token, error))
        batch.next = batch.end

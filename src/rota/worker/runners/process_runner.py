"""Runs sync tasks in killable child processes (`rota.worker.processes`).

At most `config.processes` loops take waiting frames, each with one process at a time. Invariants:
- a frame and its timeout start when a process that has loaded the app takes it;
- a frame ends once: by the result its process sends, or by the exit status of the process;
- a process that was killed or crashed is replaced when the next frame needs it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial

import structlog

from rota.model.attempt_codes import AttemptCode
from rota.model.protocol import AttemptResult, AttemptStatus
from rota.worker import outcomes
from rota.worker.config import WorkerConfig
from rota.worker.data.payloads import Payloads
from rota.worker.frame_table import FrameTable
from rota.worker.frames import AssignedBatch, RunningFrame
from rota.worker.processes.child import ChildProgram, ProcessStartFailed
from rota.worker.processes.pool import ProcessPool
from rota.worker.runners.process_messages import TASK_MESSAGE_BYTES_MAX, TASK_MESSAGE_DECODER
from rota.worker.runners.task_process import TaskProcess

log = structlog.get_logger(__name__)


class TaskProcessRunner:
    def __init__(self, frame_table: FrameTable, payloads: Payloads, config: WorkerConfig) -> None:
        self._frame_table = frame_table
        self._processes_max = config.processes
        self._waiting: deque[AssignedBatch] = deque()
        self._untaken: deque[RunningFrame] = deque()
        """Frames that have started, and were not taken by the process they were sent to."""
        self._busy: set[TaskProcess] = set()
        self._has_work = asyncio.Event()
        self._frame_loops: set[asyncio.Task[None]] = set()
        self._idle_loops = 0
        program = ChildProgram(
            "rota.worker.runners.process_main",
            config.app,
            config.folder,
            TASK_MESSAGE_DECODER,
            TASK_MESSAGE_BYTES_MAX,
            "task_process_decode_failed",
        )
        self._pool = ProcessPool(
            lambda guard: TaskProcess(program, guard, frame_table, payloads, self._is_contended),
            idle_max=config.processes,
            starts_max=config.processes,
        )

    def add(self, batch: AssignedBatch) -> None:
        series = batch.series
        if series is not None and series.process is not None and series.process.continue_with(batch):
            return
        self._waiting.append(batch)
        self._has_work.set()
        new_loops = min(
            sum(batch.remaining for batch in self._waiting) - self._idle_loops,
            self._processes_max - len(self._frame_loops),
        )
        for _ in range(new_loops):
            frame_loop = asyncio.create_task(self._frame_loop(), name="rota task process")
            self._frame_loops.add(frame_loop)
            frame_loop.add_done_callback(self._frame_loops.discard)
        if self._is_contended():
            asyncio.get_running_loop().call_soon(self._take_back)

    async def close(self) -> None:
        frame_loops = set(self._frame_loops)
        for frame_loop in frame_loops:
            frame_loop.cancel()
        if frame_loops:
            await asyncio.wait(frame_loops)
        await self._pool.close()

    async def _frame_loop(self) -> None:
        while True:
            await self._wait_for_frames()
            child = await self._acquire_process()
            if child is None:
                continue
            try:
                if (frame := self._start_next_frame()) is not None:
                    await self._run_frame(child, frame)
                await self._pool.release(child)
            except BaseException:
                await child.close()
                raise

    async def _run_frame(self, child: TaskProcess, frame: RunningFrame) -> None:
        """Runs a frame and others of its series; what is left of them waits for a process again."""
        self._busy.add(child)
        try:
            left = await child.run(frame)
        finally:
            self._busy.discard(child)
        if isinstance(left, RunningFrame):
            left.request_stop = left.kill = partial(self._frame_table.end, left, None)
            if left.stop is not None:
                left.kill()
            self._untaken.append(left)
        elif left is not None:
            self._waiting.appendleft(left)

    async def _wait_for_frames(self) -> None:
        self._idle_loops += 1
        try:
            while not self._waiting and not self._untaken:
                self._has_work.clear()
                await self._has_work.wait()
        finally:
            self._idle_loops -= 1

    def _is_contended(self) -> bool:
        """Whether frames wait although all processes are busy."""
        return len(self._waiting) > self._idle_loops + self._processes_max - len(self._frame_loops)

    def _take_back(self) -> None:
        if self._is_contended():
            for child in self._busy:
                child.take_back()

    def _start_next_frame(self) -> RunningFrame | None:
        """Starts the next waiting frame."""
        while self._untaken:
            frame = self._untaken.popleft()
            if not frame.over:
                return frame
        while self._waiting:
            batch = self._waiting[0]
            started = self._frame_table.start_next(batch)
            if batch.next >= batch.end:
                self._waiting.popleft()
            if started is not None:
                return started
        return None

    async def _acquire_process(self) -> TaskProcess | None:
        """A process that has loaded the app; if it cannot start, the frame that needs it fails."""
        try:
            return await self._pool.acquire()
        except ProcessStartFailed as failed:
            problem = failed.problem or "it exited while loading the app"
        except TimeoutError:
            problem = "loading the app timed out"
        except OSError as error:
            problem = f"it could not be started ({error.strerror or error})"
        log.warning("task_process_start_failed", reason=problem)
        if (frame := self._start_next_frame()) is not None:
            reason = outcomes.redact_and_truncate(f"The task's process did not start: {problem}.")
            self._frame_table.end(
                frame, AttemptResult(frame.token, AttemptStatus.FAILED, code=AttemptCode.NO_PROCESS, error=reason)
            )
        return None

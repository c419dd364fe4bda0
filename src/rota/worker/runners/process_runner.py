"""Runs sync tasks in killable child processes (`rota.worker.processes`).

At most `config.processes` loops take waiting frames, each with one process at a time. Invariants:
- a frame and its timeout start when a process that has loaded the app takes it;
- a frame ends once: by the result its process sends, or by the exit status of the process;
- a process that was killed or crashed is replaced when the next frame needs it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path

import structlog

from rota.infra.telemetry import metrics
from rota.model.attempt_codes import AttemptCode
from rota.model.protocol import AttemptResult, AttemptStatus
from rota.worker import outcomes
from rota.worker.config import WorkerConfig
from rota.worker.data.payloads import Payloads
from rota.worker.frame_table import FrameTable
from rota.worker.frames import AssignedBatch, RunningFrame
from rota.worker.processes.child import ChildProcess, ChildProgram, OutputStream, ProcessStartFailed
from rota.worker.processes.group_guard import ProcessGroupGuard
from rota.worker.processes.os_process import describe_exit
from rota.worker.processes.pool import ProcessPool
from rota.worker.progress_reporter import ProgressReporter
from rota.worker.runners.process_messages import (
    TASK_MESSAGE_BYTES_MAX,
    TASK_MESSAGE_DECODER,
    TaskProcessArtifact,
    TaskProcessLogLine,
    TaskProcessMessage,
    TaskProcessProgress,
    TaskProcessRequest,
    TaskProcessResult,
)

log = structlog.get_logger(__name__)
PROCESSES_STARTED = metrics.counter("rota_worker_processes_started", "Processes started for sync tasks.")


class TaskProcess(ChildProcess[TaskProcessMessage]):
    """A child process and the frame it runs."""

    def __init__(
        self,
        program: ChildProgram[TaskProcessMessage],
        guard: ProcessGroupGuard,
        progress_reporter: ProgressReporter,
    ) -> None:
        self._progress_reporter = progress_reporter
        self._token: int | None = None
        super().__init__(program, guard)
        PROCESSES_STARTED.inc()

    async def start_frame(self, call: TaskProcessRequest) -> None:
        self._token = call.token
        await self.send(call)

    def finish_frame(self) -> None:
        """Reads the rest of the frame's output; later output is dropped."""
        self.process.drain()
        self._token = None

    def _on_output(self, stream: OutputStream, data: bytes) -> None:
        if self._token is not None:
            self._progress_reporter.write(self._token, stream, data)


class TaskProcessRunner:
    def __init__(self, frame_table: FrameTable, payloads: Payloads, config: WorkerConfig) -> None:
        self._frame_table = frame_table
        self._payloads = payloads
        self._processes_max = config.processes
        self._waiting: deque[AssignedBatch] = deque()
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
            lambda guard: TaskProcess(program, guard, frame_table.progress_reporter),
            idle_max=config.processes,
            starts_max=config.processes,
        )

    def add(self, batch: AssignedBatch) -> None:
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

    async def _wait_for_frames(self) -> None:
        self._idle_loops += 1
        try:
            while not self._waiting:
                self._has_work.clear()
                await self._has_work.wait()
        finally:
            self._idle_loops -= 1

    def _start_next_frame(self) -> RunningFrame | None:
        """Starts the next waiting frame."""
        while self._waiting:
            batch = self._waiting[0]
            token = batch.next
            frame = None
            if token < batch.end and token not in batch.dropped:
                frame = self._frame_table.start_frame(batch, token)
            batch.next = min(token + 1, batch.end)
            if batch.next >= batch.end:
                self._waiting.popleft()
                self._frame_table.remove_started_batch(batch)
            if frame is not None:
                return frame
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

    async def _run_frame(self, child: TaskProcess, frame: RunningFrame) -> None:
        assigned, work = frame.batch.assigned, frame.work
        frame.request_stop = child.request_stop
        frame.kill = child.kill
        call = TaskProcessRequest(
            token=frame.token,
            task=work.task,
            job=assigned.job,
            layer=assigned.layer,
            frame=frame.number,
            attempt=assigned.attempt,
            input=frame.batch.input,
            env=work.env,
            gpus=frame.devices,
            trace=frame.trace,
            folder=str(self._frame_table.artifacts.dir_path(frame.token)),
        )
        await child.start_frame(call)
        ended = await self._wait_for_result(child, frame.token)
        child.finish_frame()
        self._finish(frame, ended, child)

    async def _wait_for_result(self, child: TaskProcess, token: int) -> TaskProcessResult | None:
        """The result the process sent, or None if it ended without one."""
        while (message := await child.messages.get()) is not None:
            match message:
                case TaskProcessResult() if message.token == token:
                    return message
                case TaskProcessProgress() if message.token == token:
                    self._frame_table.progress_reporter.progress(token, message.percent, message.word)
                case TaskProcessLogLine() if message.token == token:
                    self._frame_table.progress_reporter.log(token, message.line)
                case TaskProcessArtifact() if message.token == token and message.name:
                    self._frame_table.artifacts.add_artifact(token, Path(message.path), message.name)
                case TaskProcessArtifact() if message.token == token:
                    self._frame_table.artifacts.folder(token)
                case _:
                    log.debug("task_process_message_late")
        return None

    def _finish(self, frame: RunningFrame, ended: TaskProcessResult | None, child: TaskProcess) -> None:
        if ended is None:
            code, sentence = describe_exit(child.process.status or 0)
            end = AttemptResult(
                frame.token, AttemptStatus.FAILED, code=code, error=f"The task's process exited: {sentence}"
            )
            self._frame_table.end(frame, end)
        elif ended.status is AttemptStatus.SUCCEEDED:
            live = frame.stop is None and not frame.over
            stored = (
                self._payloads.resolve_encoded_result(frame.batch, frame.token, ended.value, frame) if live else None
            )
            if not isinstance(stored, RunningFrame):
                self._frame_table.end(frame, stored)
        else:
            end = AttemptResult(frame.token, ended.status, code=ended.code, error=ended.error, after_s=ended.after_s)
            self._frame_table.end(frame, end)

"""Runs sync tasks in killable child processes, which are started on demand and reused.

Each process loop owns one process and gives it one frame at a time. Invariants:
- a frame and its timeout start when a process that has loaded the app takes it;
- a frame ends once: by the result its process sends, or by the exit status of the process;
- a process that was killed or crashed is replaced when the next frame needs it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections import deque
from functools import partial
from pathlib import Path
from typing import Final, Literal

import msgspec
import structlog

from rota.infra.telemetry import metrics
from rota.model.protocol import AttemptResult, AttemptStatus
from rota.worker import outcomes
from rota.worker.config import WorkerConfig
from rota.worker.data.payloads import Payloads
from rota.worker.frame_table import FrameTable
from rota.worker.frames import AssignedBatch, RunningFrame
from rota.worker.progress_reporter import ProgressReporter
from rota.worker.runners.ipc import (
    TaskProcessArtifact,
    TaskProcessLogLine,
    TaskProcessMessage,
    TaskProcessMessageReader,
    TaskProcessProgress,
    TaskProcessReady,
    TaskProcessRequest,
    TaskProcessResult,
    pack_task_message,
)
from rota.worker.runners.os_process import DescriptorReader, OsProcess, describe_exit

log = structlog.get_logger(__name__)
PROCESSES_STARTED = metrics.counter("rota_worker_processes_started", "Processes started for sync tasks.")

START_TIMEOUT_S: Final = 60.0
EXIT_TIMEOUT_S: Final = 2.0


class TaskProcess:
    """A child process and the frame it runs."""

    def __init__(self, config: WorkerConfig, progress_reporter: ProgressReporter) -> None:
        self.messages: asyncio.Queue[TaskProcessMessage | None] = asyncio.Queue()
        """Messages from the process, in order; None: the process has ended."""
        self._progress_reporter = progress_reporter
        self._token: int | None = None
        self._unpacker = TaskProcessMessageReader()
        ours, theirs = socket.socketpair()
        with theirs:
            argv = [
                sys.executable,
                "-P",
                "-m",
                "rota.worker.runners.process_main",
                str(theirs.fileno()),
                str(os.getpid()),
            ]
            self.process = OsProcess(
                [*argv, config.app, str(config.folder)],
                cwd=config.folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=partial(self._on_output, "stdout"),
                stderr=partial(self._on_output, "stderr"),
                pass_fds=(theirs.fileno(),),
            )
        self._socket = ours
        ours.setblocking(False)
        self._reader = DescriptorReader(os.dup(ours.fileno()), self._on_data)
        self._exit_watcher = asyncio.create_task(self._wait_for_exit())
        PROCESSES_STARTED.inc()

    @property
    def alive(self) -> bool:
        return not self.process.ended.is_set()

    async def send_request(self, call: TaskProcessRequest) -> None:
        self._token = call.token
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, pack_task_message(call))
        except OSError:
            # The process died: `messages` closes, which ends the frame.
            self.process.kill()

    def finish_frame(self) -> None:
        """Reads the rest of the frame's output; later output is dropped."""
        self.process.drain()
        self._token = None

    async def close(self) -> None:
        await self.process.kill_and_wait(EXIT_TIMEOUT_S)
        await asyncio.wait([self._exit_watcher], timeout=EXIT_TIMEOUT_S)
        self._exit_watcher.cancel()
        self._reader.close()
        self._socket.close()

    async def _wait_for_exit(self) -> None:
        await self.process.ended.wait()
        # Read messages sent before the exit. No end-of-file: a forked descendant may keep the socket open.
        self._reader.drain()
        self.messages.put_nowait(None)

    def _on_data(self, data: bytes) -> None:
        try:
            for message in self._unpacker.feed(data):
                self.messages.put_nowait(message)
        except msgspec.DecodeError as error:
            log.warning("task_process_decode_failed", reason=str(error))
            self.process.kill()

    def _on_output(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        if self._token is not None:
            self._progress_reporter.write(self._token, stream, data)


class TaskProcessPool:
    def __init__(self, frame_table: FrameTable, payloads: Payloads, config: WorkerConfig) -> None:
        self._frame_table = frame_table
        self._payloads = payloads
        self._config = config
        self._waiting: deque[AssignedBatch] = deque()
        self._has_work = asyncio.Event()
        self._process_loops: set[asyncio.Task[None]] = set()
        self._idle = 0

    def add(self, batch: AssignedBatch) -> None:
        self._waiting.append(batch)
        self._has_work.set()
        new_processes = min(
            sum(batch.remaining for batch in self._waiting) - self._idle,
            self._config.processes - len(self._process_loops),
        )
        for _ in range(new_processes):
            process_loop = asyncio.create_task(self._process_loop(), name="rota task process")
            self._process_loops.add(process_loop)
            process_loop.add_done_callback(self._process_loops.discard)

    async def close(self) -> None:
        process_loops = set(self._process_loops)
        for process_loop in process_loops:
            process_loop.cancel()
        if process_loops:
            await asyncio.wait(process_loops)

    async def _process_loop(self) -> None:
        child: TaskProcess | None = None
        try:
            while True:
                await self._wait_for_frames()
                if child is None or not child.alive:
                    child = await self._replace_process(child)
                if child is not None and (frame := self._start_next_frame()) is not None:
                    await self._run_frame(child, frame)
        finally:
            if child is not None:
                await child.close()

    async def _wait_for_frames(self) -> None:
        self._idle += 1
        try:
            while not self._waiting:
                self._has_work.clear()
                await self._has_work.wait()
        finally:
            self._idle -= 1

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

    async def _replace_process(self, old: TaskProcess | None) -> TaskProcess | None:
        """A new process that has loaded the app; if it cannot start, the frame that needs it fails."""
        if old is not None:
            await old.close()
        problem = "loading the app timed out"
        child = None
        try:
            child = TaskProcess(self._config, self._frame_table.progress_reporter)
            async with asyncio.timeout(START_TIMEOUT_S):
                message = await child.messages.get()
            if isinstance(message, TaskProcessReady) and not message.problem:
                return child
            problem = message.problem if isinstance(message, TaskProcessReady) else "it exited while loading the app"
        except OSError as error:
            problem = f"it could not be started ({error.strerror or error})"
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if child is not None:
                await child.close()
            raise
        if child is not None:
            await child.close()
        log.warning("task_process_start_failed", reason=problem)
        if (frame := self._start_next_frame()) is not None:
            reason = outcomes.redact_and_truncate(f"The task's process did not start: {problem}.")
            self._frame_table.end(
                frame, AttemptResult(frame.token, AttemptStatus.FAILED, code="no_process", error=reason)
            )
        return None

    async def _run_frame(self, child: TaskProcess, frame: RunningFrame) -> None:
        assigned, work = frame.batch.assigned, frame.work
        frame.request_stop = partial(child.process.signal, signal.SIGTERM, group=False)
        frame.kill = child.process.kill
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
        await child.send_request(call)
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

"""Sync tasks, in processes that can be killed: a few that live long, started when they are needed.

A *hand* has one process and gives it one frame at a time. Invariants: a frame begins (and its time-out with it) when a
process that has loaded the app takes it; whatever happens to the process, its frame ends once: by its own word, or by
the way the process ended; a process that was killed or broke is replaced by the next frame that needs one.
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
    """One process and the frame it has."""

    def __init__(self, plan: WorkerConfig, teller: ProgressReporter) -> None:
        self.said: asyncio.Queue[TaskProcessMessage | None] = asyncio.Queue()
        """What it says, in order; None when nothing more can come."""
        self._teller = teller
        self._token: int | None = None
        self._unpacker = TaskProcessMessageReader()
        ours, theirs = socket.socketpair()
        with theirs:
            words = [
                sys.executable,
                "-P",
                "-m",
                "rota.worker.runners.process_main",
                str(theirs.fileno()),
                str(os.getpid()),
            ]
            self.process = OsProcess(
                [*words, plan.app, str(plan.folder)],
                cwd=plan.folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=partial(self._on_output, "stdout"),
                stderr=partial(self._on_output, "stderr"),
                pass_fds=(theirs.fileno(),),
            )
        self._socket = ours
        ours.setblocking(False)
        self._reader = DescriptorReader(os.dup(ours.fileno()), self._on_data)
        self._watching = asyncio.create_task(self._wait_for_exit())
        PROCESSES_STARTED.inc()

    @property
    def alive(self) -> bool:
        return not self.process.ended.is_set()

    async def send_request(self, call: TaskProcessRequest) -> None:
        self._token = call.token
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, pack_task_message(call))
        except OSError:
            # It has just died: `said` ends, and that is this frame's end.
            self.process.kill()

    def finish_frame(self) -> None:
        """Its frame is over: all of its output is here, and what comes now is nobody's."""
        self.process.drain()
        self._token = None

    async def close(self) -> None:
        await self.process.kill_and_wait(EXIT_TIMEOUT_S)
        await asyncio.wait([self._watching], timeout=EXIT_TIMEOUT_S)
        self._watching.cancel()
        self._reader.close()
        self._socket.close()

    async def _wait_for_exit(self) -> None:
        await self.process.ended.wait()
        # Said before it ended, perhaps; one that was forked and lives on elsewhere may keep the line open.
        self._reader.drain()
        self.said.put_nowait(None)

    def _on_data(self, data: bytes) -> None:
        try:
            for message in self._unpacker.feed(data):
                self.said.put_nowait(message)
        except msgspec.DecodeError as error:
            log.warning("process_unreadable", reason=str(error))
            self.process.kill()

    def _on_output(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        if self._token is not None:
            self._teller.write(self._token, stream, data)


class TaskProcessPool:
    def __init__(self, desk: FrameTable, values: Payloads, plan: WorkerConfig) -> None:
        self._desk = desk
        self._values = values
        self._plan = plan
        self._waiting: deque[AssignedBatch] = deque()
        self._some = asyncio.Event()
        self._hands: set[asyncio.Task[None]] = set()
        self._idle = 0

    def add(self, batch: AssignedBatch) -> None:
        self._waiting.append(batch)
        self._some.set()
        wanted = min(
            sum(batch.remaining for batch in self._waiting) - self._idle, self._plan.processes - len(self._hands)
        )
        for _ in range(wanted):
            hand = asyncio.create_task(self._process_loop(), name="rota hand")
            self._hands.add(hand)
            hand.add_done_callback(self._hands.discard)

    async def close(self) -> None:
        hands = set(self._hands)
        for hand in hands:
            hand.cancel()
        if hands:
            await asyncio.wait(hands)

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
                self._some.clear()
                await self._some.wait()
        finally:
            self._idle -= 1

    def _start_next_frame(self) -> RunningFrame | None:
        """The next frame that waits, begun."""
        while self._waiting:
            batch = self._waiting[0]
            token = batch.next
            frame = None
            if token < batch.end and token not in batch.dropped:
                frame = self._desk.start_frame(batch, token)
            batch.next = min(token + 1, batch.end)
            if batch.next >= batch.end:
                self._waiting.popleft()
                self._desk.remove_started_batch(batch)
            if frame is not None:
                return frame
        return None

    async def _replace_process(self, before: TaskProcess | None) -> TaskProcess | None:
        """A process that has loaded the app; without one, the frame that needed it fails."""
        if before is not None:
            await before.close()
        problem = "it did not load the app in time"
        child = None
        try:
            child = TaskProcess(self._plan, self._desk.teller)
            async with asyncio.timeout(START_TIMEOUT_S):
                said = await child.said.get()
            if isinstance(said, TaskProcessReady) and not said.problem:
                return child
            problem = said.problem if isinstance(said, TaskProcessReady) else "it ended while it loaded the app"
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
        log.warning("process_not_started", reason=problem)
        if (frame := self._start_next_frame()) is not None:
            reason = outcomes.redact_and_truncate(f"A process for the task: {problem}.")
            self._desk.end(frame, AttemptResult(frame.token, AttemptStatus.FAILED, code="no_process", error=reason))
        return None

    async def _run_frame(self, child: TaskProcess, frame: RunningFrame) -> None:
        portion, work = frame.batch.portion, frame.work
        frame.ask = partial(child.process.signal, signal.SIGTERM, group=False)
        frame.kill = child.process.kill
        call = TaskProcessRequest(
            token=frame.token,
            task=work.task,
            job=portion.job,
            layer=portion.layer,
            frame=frame.number,
            attempt=portion.attempt,
            input=frame.batch.input,
            env=work.env,
            gpus=frame.devices,
            trace=frame.trace,
            folder=str(self._desk.leavings.dir_path(frame.token)),
        )
        await child.send_request(call)
        ended = await self._wait_for_result(child, frame.token)
        child.finish_frame()
        self._finish(frame, ended, child)

    async def _wait_for_result(self, child: TaskProcess, token: int) -> TaskProcessResult | None:
        """Its own word, or None when the process ended without one."""
        while (said := await child.said.get()) is not None:
            match said:
                case TaskProcessResult() if said.token == token:
                    return said
                case TaskProcessProgress() if said.token == token:
                    self._desk.teller.progress(token, said.percent, said.word)
                case TaskProcessLogLine() if said.token == token:
                    self._desk.teller.log(token, said.line)
                case TaskProcessArtifact() if said.token == token and said.name:
                    self._desk.leavings.add_artifact(token, Path(said.path), said.name)
                case TaskProcessArtifact() if said.token == token:
                    self._desk.leavings.folder(token)
                case _:
                    log.debug("process_said_too_late")
        return None

    def _finish(self, frame: RunningFrame, ended: TaskProcessResult | None, child: TaskProcess) -> None:
        if ended is None:
            code, sentence = describe_exit(child.process.status or 0)
            end = AttemptResult(
                frame.token, AttemptStatus.FAILED, code=code, error=f"The process of the task is gone: {sentence}"
            )
            self._desk.end(frame, end)
        elif ended.status is AttemptStatus.SUCCEEDED:
            live = frame.stop is None and not frame.over
            stored = self._values.resolve_encoded_result(frame.batch, frame.token, ended.value, frame) if live else None
            if not isinstance(stored, RunningFrame):
                self._desk.end(frame, stored)
        else:
            end = AttemptResult(frame.token, ended.status, code=ended.code, error=ended.error, after_s=ended.after_s)
            self._desk.end(frame, end)

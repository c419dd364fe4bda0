"""Main of a task process: runs sync tasks, one frame at a time, until its worker is gone (`rota.worker.processes`).

To end a frame, the worker kills this process with everything it has started, and starts another one.

SIGTERM requests a stop: it only sets `Context.cancelled`. Standard output is the frame's log. A forked child that
returns from the task exits immediately, because it would send a second result.
"""

from __future__ import annotations

import contextvars
import fcntl
import os
import signal
import sys
import termios
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import UUID

import msgspec

from rota.infra.telemetry import tracing
from rota.model.protocol import AttemptResult, AttemptStatus
from rota.sdk.app import Rota
from rota.sdk.context import CURRENT_CONTEXT, Context
from rota.worker import outcomes
from rota.worker.processes.main import NO_BYTES, HandleRequest, WorkerChannel, run_child
from rota.worker.runners.process_environment import ProcessEnvironment
from rota.worker.runners.process_messages import (
    TASK_REQUEST_DECODER,
    TaskProcessArtifact,
    TaskProcessLogLine,
    TaskProcessProgress,
    TaskProcessRequest,
    TaskProcessResult,
)

PROGRESS_INTERVAL_S: Final = 0.05
STDOUT: Final = 1
STDERR: Final = 2


class ProcessFrameSink:
    """`FrameSink` of the running frame: sends to the worker."""

    def __init__(self, channel: WorkerChannel[TaskProcessRequest[str]]) -> None:
        self._channel = channel
        self._progress_sent_at = 0.0
        self._folder = ""
        self.has_folder = False
        """The running frame has requested its directory."""

    def start_frame(self, folder: str) -> None:
        self._folder = folder
        self.has_folder = False

    def progress(self, token: int, percent: float, text: str) -> None:
        now = time.monotonic()
        if now - self._progress_sent_at >= PROGRESS_INTERVAL_S or percent >= 100:
            self._progress_sent_at = now
            self._channel.send(TaskProcessProgress(token, percent, text))

    def log(self, token: int, line: str) -> None:
        self._channel.send(TaskProcessLogLine(token, line.encode(errors="replace").decode()))

    def folder(self, token: int) -> Path:
        """Announces the directory before creating it, so that the worker removes it after a crash."""
        self.has_folder = True
        path = Path(self._folder)
        if not path.is_dir():
            self._channel.send(TaskProcessArtifact(token))
            path.mkdir(parents=True, exist_ok=True)
        return path

    def add_artifact(self, token: int, path: Path, name: str) -> None:
        self.has_folder = True
        self._channel.send(TaskProcessArtifact(token, str(path), name))


class RequestedAttempt:
    """`AttemptInfo` of a request."""

    __slots__ = ("_call", "attempt")

    def __init__(self, call: TaskProcessRequest[str]) -> None:
        self._call = call
        self.attempt = call.attempt

    @property
    def job(self) -> UUID:
        return UUID(self._call.job)

    @property
    def layer(self) -> UUID:
        return UUID(self._call.layer)


class TaskProcessExecutor:
    def __init__(self, app: Rota, channel: WorkerChannel[TaskProcessRequest[str]], folder: Path) -> None:
        self._app = app
        self._channel = channel
        self._sink = ProcessFrameSink(channel)
        self._environment = ProcessEnvironment(folder)
        self._output = OutputPipes()
        self._pid = os.getpid()
        self._context: Context | None = None
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def run(self, call: TaskProcessRequest[str]) -> TaskProcessResult:
        """Runs the task; never raises."""
        began_at = time.monotonic()
        self._sink.start_frame(call.folder)
        self._context = context = Context(RequestedAttempt(call), call.frame, call.token, self._sink, call.gpus)
        self._environment.enter(call)
        end = contextvars.copy_context().run(self._call_task, call, context)
        self._environment.leave()
        self._context = None
        if os.getpid() != self._pid:
            os._exit(0)
        self._output.flush()
        waits = call.in_series and self._needs_worker(end)
        if waits:
            self._channel.wait_for_worker()
        return TaskProcessResult(
            call.token, end.status, end.value, end.code, end.error, end.after_s, began_at, time.monotonic(), waits
        )

    def _needs_worker(self, end: AttemptResult) -> bool:
        """Whether the worker has something to do for this frame before another one may begin."""
        return (
            self._sink.has_folder
            or self._output.is_unread
            or (end.value is not None and len(end.value) > outcomes.INLINE_VALUE_BYTES_MAX)
        )

    def _call_task(self, call: TaskProcessRequest[str], context: Context) -> AttemptResult:
        CURRENT_CONTEXT.set(context)
        if call.trace:
            tracing.attach(call.trace)
        task = self._app.tasks[call.task]
        function = task.function
        try:
            arguments = outcomes.decode_input(call.input, task.signature)
            task.signature.check(tuple(arguments.args), arguments.kwargs)
        except (msgspec.DecodeError, TypeError) as error:
            return outcomes.bad_input_end(call.token, error)
        try:
            value = function(*arguments.args, **arguments.kwargs)
        except BaseException as error:  # noqa: BLE001 - any exception ends the frame, not the process
            if not isinstance(error, outcomes.INTENTIONAL_EXCEPTIONS):
                traceback.print_exc()
            return outcomes.failure_end(call.token, error, call.env)
        try:
            return AttemptResult(
                call.token, AttemptStatus.SUCCEEDED, None if value is None else outcomes.encode_result(value)
            )
        except outcomes.UnencodableResult as error:
            return outcomes.unencodable_end(call.token, error)

    def _on_sigterm(self, _number: int, _frame: object) -> None:
        if self._context is not None:
            self._context.cancelled = True


class OutputPipes:
    """Standard output and error, which the worker reads."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        for stream in (STDOUT, STDERR):
            with suppress(OSError):  # the app may have closed it
                # A copy: a task may close its own, or send it elsewhere.
                self._descriptors.append(os.dup(stream))

    def flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:  # noqa: SIM105 - a context manager costs more than the flush
                stream.flush()
            except (OSError, ValueError, AttributeError):  # the task may have closed or replaced them
                pass

    @property
    def is_unread(self) -> bool:
        """Whether the worker has yet to read some of it. Then another frame must not write: its output would be taken
        for that of this one."""
        return any(fcntl.ioctl(pipe, termios.FIONREAD, NO_BYTES) != NO_BYTES for pipe in self._descriptors)


def create_handler(
    app: Rota, channel: WorkerChannel[TaskProcessRequest[str]], folder: Path
) -> HandleRequest[TaskProcessRequest[str]]:
    return TaskProcessExecutor(app, channel, folder).run


if __name__ == "__main__":
    run_child(TASK_REQUEST_DECODER, create_handler)

"""Main of a task process: runs sync tasks, one frame at a time, until its worker is gone (`rota.worker.processes`).

To end a frame, the worker kills this process with everything it has started, and starts another one.

SIGTERM requests a stop: it only sets `Context.cancelled`. Standard output is the frame's log. A forked child that
returns from the task exits immediately, because it would send a second result.
"""

from __future__ import annotations

import contextvars
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from rota.infra.telemetry import tracing
from rota.model.protocol import AttemptResult, AttemptStatus
from rota.sdk.app import Rota
from rota.sdk.context import CURRENT_CONTEXT, Context
from rota.worker import outcomes
from rota.worker.processes.main import HandleRequest, WorkerChannel, run_child
from rota.worker.runners.environment import frame_variables
from rota.worker.runners.process_messages import (
    TASK_REQUEST_DECODER,
    TaskProcessArtifact,
    TaskProcessLogLine,
    TaskProcessProgress,
    TaskProcessRequest,
    TaskProcessResult,
)

PROGRESS_INTERVAL_S: Final = 0.05


class ProcessFrameSink:
    """`FrameSink` of the running frame: sends to the worker."""

    def __init__(self, channel: WorkerChannel[TaskProcessRequest]) -> None:
        self._channel = channel
        self._progress_sent_at = 0.0
        self.folder_path: Path | None = None
        """Path of the running frame's directory."""

    def progress(self, token: int, percent: float, text: str) -> None:
        now = time.monotonic()
        if now - self._progress_sent_at >= PROGRESS_INTERVAL_S or percent >= 100:
            self._progress_sent_at = now
            self._channel.send(TaskProcessProgress(token, percent, text))

    def log(self, token: int, line: str) -> None:
        self._channel.send(TaskProcessLogLine(token, line.encode(errors="replace").decode()))

    def folder(self, token: int) -> Path:
        """Announces the directory before creating it, so that the worker removes it after a crash."""
        assert self.folder_path is not None, "a frame runs"
        if not self.folder_path.is_dir():
            self._channel.send(TaskProcessArtifact(token))
            self.folder_path.mkdir(parents=True, exist_ok=True)
        return self.folder_path

    def add_artifact(self, token: int, path: Path, name: str) -> None:
        self._channel.send(TaskProcessArtifact(token, str(path), name))


class TaskProcessExecutor:
    def __init__(self, app: Rota, sink: ProcessFrameSink, folder: Path) -> None:
        self._app = app
        self._sink = sink
        self._folder = folder
        self._pid = os.getpid()
        self._context: Context | None = None
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def run(self, call: TaskProcessRequest) -> TaskProcessResult:
        """Runs the task; never raises."""
        self._sink.folder_path = Path(call.folder)
        self._context = Context(call, call.frame, call.token, self._sink, call.gpus)
        with _frame_environment(call, self._folder):
            end = contextvars.copy_context().run(self._call_task, call, self._context)
        self._context = None
        if os.getpid() != self._pid:
            os._exit(0)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # the task may have closed or replaced them
                stream.flush()
        return TaskProcessResult(call.token, end.status, end.value, end.code, end.error, end.after_s)

    def _call_task(self, call: TaskProcessRequest, context: Context) -> AttemptResult:
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


@contextmanager
def _frame_environment(call: TaskProcessRequest, folder: Path) -> Iterator[None]:
    """Applies the frame's environment; restores environment and working directory afterwards."""
    saved = _environment()
    os.environ.update(call.env)
    os.environ.update(frame_variables(call.job, call.layer, call.frame, call.attempt, call.gpus, call.trace))
    try:
        yield
    finally:
        found = _environment()
        for name in found.keys() - saved.keys():
            del os.environb[name]
        os.environb.update({name: value for name, value in saved.items() if found.get(name) != value})
        with suppress(OSError):
            os.chdir(folder)


def _environment() -> dict[bytes, bytes]:
    """A copy of what `os.environb` holds. Copying the mapping itself checks every name: a tenth of a short frame."""
    return dict(os.environb._data)  # type: ignore[attr-defined]  # noqa: SLF001 - of CPython since 3.2


def create_handler(
    app: Rota, channel: WorkerChannel[TaskProcessRequest], folder: Path
) -> HandleRequest[TaskProcessRequest]:
    return TaskProcessExecutor(app, ProcessFrameSink(channel), folder).run


if __name__ == "__main__":
    run_child(TASK_REQUEST_DECODER, create_handler)

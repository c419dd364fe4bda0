"""A process that runs sync tasks, one frame at a time, until its worker is gone: `python -m rota.worker.child`.

It finds the app by itself, as the worker did. Nothing that a task does reaches further than this process: the worker
kills it, with everything it has started, when a frame must end, and begins another one.

A frame is asked to stop by SIGTERM, which only sets `Context.cancelled`. What it prints is the frame's log. A task that
forks and comes back as the child is ended on the spot, since it would answer a second time.
"""

from __future__ import annotations

import contextvars
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from rota.infra.telemetry import tracing
from rota.model.errors import RotaError
from rota.model.messages import End, Status
from rota.sdk import loading
from rota.sdk.app import Rota
from rota.sdk.context import CURRENT, Context
from rota.worker import endings
from rota.worker.environment import about_frame
from rota.worker.launch import die_with
from rota.worker.wire import CALL, LENGTH, Call, Ended, Left, Logged, Progressed, Ready, packed

PROGRESS_S: Final = 0.05


class Line:
    """The way to the worker and back; the ear of the frame."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours
        self._told_at = 0.0
        self.place: Path | None = None
        """Where the directory of the frame is to be that runs."""

    def say(self, message: msgspec.Struct) -> None:
        self._socket.sendall(packed(message))

    def hear(self) -> Call | None:
        """None when the worker is gone."""
        size = self._receive(LENGTH)
        data = self._receive(int.from_bytes(size, "big")) if size else b""
        return CALL.decode(data) if data else None

    def progress(self, token: int, percent: float, word: str) -> None:
        now = time.monotonic()
        if now - self._told_at >= PROGRESS_S or percent >= 100:
            self._told_at = now
            self.say(Progressed(token, percent, word))

    def log(self, token: int, line: str) -> None:
        self.say(Logged(token, line.encode(errors="replace").decode()))

    def folder(self, token: int) -> Path:
        """Told before it is made, so that whatever happens to us it is removed."""
        assert self.place is not None, "a frame runs"
        if not self.place.is_dir():
            self.say(Left(token))
            self.place.mkdir(parents=True, exist_ok=True)
        return self.place

    def left(self, token: int, path: Path, name: str) -> None:
        self.say(Left(token, str(path), name))

    def _receive(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(min(size - len(parts), 1 << 20))
            if not part:
                return b""
            parts += part
        return bytes(parts)


class Frames:
    def __init__(self, app: Rota, line: Line, folder: Path) -> None:
        self._app = app
        self._line = line
        self._folder = folder
        self._pid = os.getpid()
        self._context: Context | None = None
        signal.signal(signal.SIGTERM, self._on_term)

    def run(self, call: Call) -> Ended:
        """How it ended; never raises."""
        self._line.place = Path(call.folder)
        self._context = Context(call, call.frame, call.token, self._line, call.gpus)
        with _surroundings(call, self._folder):
            end = contextvars.copy_context().run(self._run, call, self._context)
        self._context = None
        if os.getpid() != self._pid:
            os._exit(0)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # the task may have closed or replaced them
                stream.flush()
        return Ended(call.token, end.status, end.value, end.code, end.error, end.after_s)

    def _run(self, call: Call, context: Context) -> End:
        CURRENT.set(context)
        if call.trace:
            tracing.enter(call.trace)
        task = self._app.tasks[call.task]
        function = task.function
        try:
            given = endings.read_input(call.input, task.signature)
            task.signature.check(tuple(given.args), given.kwargs)
        except (msgspec.DecodeError, TypeError) as error:
            return endings.bad_input(call.token, error)
        try:
            value = function(*given.args, **given.kwargs)
        except BaseException as error:  # noqa: BLE001 - whatever it raises is the frame's end, not ours
            if not isinstance(error, endings.QUIET):
                traceback.print_exc()
            return endings.failed(call.token, error, call.env)
        try:
            return End(call.token, Status.SUCCEEDED, None if value is None else endings.encoded(value))
        except endings.Unencodable as error:
            return endings.unencodable(call.token, error)

    def _on_term(self, _number: int, _frame: object) -> None:
        if self._context is not None:
            self._context.cancelled = True


@contextmanager
def _surroundings(call: Call, folder: Path) -> Iterator[None]:
    """The frame's own environment, and the directory and environment as they were for the next one."""
    before = dict(os.environ)
    os.environ.update(call.env)
    os.environ.update(about_frame(call.job, call.layer, call.frame, call.attempt, call.gpus, call.trace))
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        with suppress(OSError):
            os.chdir(folder)


def main(descriptor: int, parent: int, spec: str, folder: Path) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    line = Line(socket.socket(fileno=descriptor))
    try:
        frames = Frames(loading.load(spec, folder), line, folder)
    except RotaError as error:
        line.say(Ready(error.sentence))
        return
    line.say(Ready())
    while (call := line.hear()) is not None:
        line.say(frames.run(call))


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError):  # the worker is gone
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    # Threads that a task has left behind must not keep the process.
    os._exit(0)

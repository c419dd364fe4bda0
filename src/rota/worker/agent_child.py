"""A process that runs sync agents, one at a time, until its worker is gone: `python -m rota.worker.agent_child`.

It dies with its worker. It also dies when the lease is over under which the worker runs agents and no renewal was
heard of: the worker may be stopped, and somebody else runs the agent by then. A thread of its own sees to that, so a
body that never returns is no obstacle; only code that keeps the interpreter's lock for ever is.

A body is asked to stop by SIGTERM, which raises `Cancelled` in it. A worker kills what does not heed it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NoReturn

import msgspec

from rota.agents.runs import shown
from rota.model.errors import RotaError
from rota.model.failures import FailureClass, Hook, classify
from rota.sdk import loading
from rota.sdk.agent import Agent
from rota.sdk.endings import Cancelled
from rota.worker.agent_wire import TOLD, Begin, Done, Lease, Loaded, packed, unpacked
from rota.worker.launch import die_with

AFTER_S: Final = 1.0
"""How long after the lease it ends, at the latest: less than whoever takes over waits."""
READ_BYTES: Final = 65536


class Guard(threading.Thread):
    """Hears what the worker says while the body runs, and ends the process when it says nothing for too long."""

    def __init__(self, line: socket.socket) -> None:
        super().__init__(name="agent guard", daemon=True)
        self.begins: SimpleQueue[Begin | None] = SimpleQueue()
        self._line = line
        self._until: float | None = None
        self._buffer = bytearray()

    def over(self) -> None:
        """The body has ended: silence does no harm any more."""
        self._until = None

    def run(self) -> None:
        while True:
            self._line.settimeout(self._patience_s())
            try:
                data = self._line.recv(READ_BYTES)
            except TimeoutError:
                if self._until is not None and time.monotonic() > self._until + AFTER_S:
                    _die()
                continue
            except OSError:
                data = b""
            if not data:
                self.begins.put(None)
                return
            self._hear(data)

    def _patience_s(self) -> float:
        return 0.5 if self._until is None else max(0.01, min(0.5, self._until + AFTER_S - time.monotonic()))

    def _hear(self, data: bytes) -> None:
        self._buffer += data
        while (message := unpacked(self._buffer)) is not None:
            match TOLD.decode(message):
                case Begin() as begin:
                    self._until = begin.until
                    self.begins.put(begin)
                case Lease(until):
                    if self._until is not None:
                        self._until = max(self._until, until)


def _die() -> NoReturn:
    """With all that the body has started."""
    with suppress(OSError):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _stop(_number: int, _frame: object) -> NoReturn:
    raise Cancelled


def carried_out(agent: Agent, begin: Begin, hook: Hook | None) -> Done:
    try:
        signal.signal(signal.SIGTERM, _stop)
        agent.call(begin.run)
    except Cancelled:
        return Done(FailureClass.TRANSIENT, "It was stopped.")
    except BaseException as error:  # noqa: BLE001 - whatever a body raises is its own end, not ours
        return Done(classify(error, hook), shown(error))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return Done()


def main(descriptor: int, parent: int, spec: str, folder: Path) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    line = socket.socket(fileno=descriptor)
    try:
        app = loading.load(spec, folder)
    except RotaError as error:
        line.sendall(packed(Loaded(error.sentence)))
        return
    line.sendall(packed(Loaded()))
    guard = Guard(line)
    guard.start()
    while (begin := guard.begins.get()) is not None:
        agent = app.agents.get(begin.run.name)
        done = (
            Done(FailureClass.UNKNOWN, f"The app has no agent {begin.run.name!r}; was its file changed?")
            if agent is None
            else carried_out(agent, begin, app.failure_hook)
        )
        guard.over()
        line.sendall(packed(done))


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError, msgspec.DecodeError):  # the worker is gone
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    # Threads that a body has left behind must not keep the process.
    os._exit(0)

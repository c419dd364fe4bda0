"""A process that runs sync agents, one at a time, until its worker is gone: `python -m rota.worker.agent_child`.

It dies with its worker. It also dies when the lease is over under which the worker runs agents and no renewal was
heard of: the worker may be stopped, and somebody else runs the agent by then. A process of its own sees to that
(`rota.worker.agent_leash`), so no body is an obstacle, whatever it does.

A body is asked to stop by SIGTERM, which raises `Cancelled` in it. A worker kills what does not heed it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from rota.agents.runs import shown
from rota.model.errors import RotaError
from rota.model.failures import FailureClass, Hook, classify
from rota.sdk import loading
from rota.sdk.agent import Agent
from rota.sdk.endings import Cancelled
from rota.worker import agent_leash
from rota.worker.agent_wire import TOLD, Begin, Done, Loaded, packed, unpacked
from rota.worker.launch import die_with

READ_BYTES: Final = 65536


class Line:
    """What the worker says, one message at a time."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._buffer = bytearray()

    def say(self, message: msgspec.Struct) -> None:
        self._line.sendall(packed(message))

    def next(self) -> Begin | None:
        """None: the worker is gone."""
        while (message := unpacked(self._buffer)) is None:
            data = self._line.recv(READ_BYTES)
            if not data:
                return None
            self._buffer += data
        return TOLD.decode(message)


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


def main(line: socket.socket, leash: socket.socket, parent: int, spec: str, folder: Path) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    agent_leash.fork(leash, line)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    worker = Line(line)
    try:
        app = loading.load(spec, folder)
    except RotaError as error:
        worker.say(Loaded(error.sentence))
        return
    worker.say(Loaded())
    while (begin := worker.next()) is not None:
        agent = app.recurring.get(begin.run.name)
        done = (
            Done(FailureClass.UNKNOWN, f"The app has no agent {begin.run.name!r}; was its file changed?")
            if agent is None
            else carried_out(agent, begin, app.failure_hook)
        )
        worker.say(done)


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError, msgspec.DecodeError):  # the worker is gone
        main(
            socket.socket(fileno=int(sys.argv[1])),
            socket.socket(fileno=int(sys.argv[2])),
            int(sys.argv[3]),
            sys.argv[4],
            Path(sys.argv[5]),
        )
    # Threads that a body has left behind must not keep the process.
    os._exit(0)

"""Main of an agent process: runs sync agent bodies, one at a time, until its worker is gone.

Started as `python -m rota.worker.agents.process_main`. It dies with its worker. It also dies when the worker's lease
expires without renewal: the worker may be stopped (SIGSTOP), and another replica may run the agent by then. A separate
process enforces that (`lease_watchdog_process`), so a body cannot prevent it.

SIGTERM requests a stop: it raises `Cancelled` in the body. The worker kills a body that ignores it.
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

from rota.agents.running import format_exception
from rota.model.errors import RotaError
from rota.model.failure_classes import ClassifyHook, FailureClass, classify
from rota.sdk import load_app
from rota.sdk.agent import AgentDefinition
from rota.sdk.exceptions import Cancelled
from rota.worker.agents import lease_watchdog_process
from rota.worker.agents.ipc import (
    AGENT_REQUEST_DECODER,
    AgentProcessReady,
    AgentProcessRequest,
    AgentProcessResult,
    pack_agent_message,
    pop_agent_message,
)
from rota.worker.runners.command_launcher import die_with_parent

READ_BYTES: Final = 65536


class AgentProcessChannel:
    """Connection to the worker."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        self._socket.sendall(pack_agent_message(message))

    def receive(self) -> AgentProcessRequest | None:
        """None: the worker is gone."""
        while (message := pop_agent_message(self._buffer)) is None:
            data = self._socket.recv(READ_BYTES)
            if not data:
                return None
            self._buffer += data
        return AGENT_REQUEST_DECODER.decode(message)


def _raise_cancelled(_number: int, _frame: object) -> NoReturn:
    raise Cancelled


def run_agent_body(agent: AgentDefinition, begin: AgentProcessRequest, hook: ClassifyHook | None) -> AgentProcessResult:
    try:
        signal.signal(signal.SIGTERM, _raise_cancelled)
        agent.call(begin.run)
    except Cancelled:
        return AgentProcessResult(FailureClass.TRANSIENT, "It was stopped.")
    except BaseException as error:  # noqa: BLE001 - any exception ends the body, not the process
        return AgentProcessResult(classify(error, hook), format_exception(error))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return AgentProcessResult()


def main(connection: socket.socket, lease_socket: socket.socket, parent: int, spec: str, folder: Path) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lease_watchdog_process.fork_watchdog(lease_socket, connection)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    worker = AgentProcessChannel(connection)
    try:
        app = load_app.load(spec, folder)
    except RotaError as error:
        worker.send(AgentProcessReady(error.sentence))
        return
    worker.send(AgentProcessReady())
    while (begin := worker.receive()) is not None:
        agent = app.recurring.get(begin.run.name)
        done = (
            AgentProcessResult(
                FailureClass.UNKNOWN,
                f"The app has no agent {begin.run.name!r}: restart the worker if its file was changed.",
            )
            if agent is None
            else run_agent_body(agent, begin, app.failure_hook)
        )
        worker.send(done)


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError, msgspec.DecodeError):  # the worker is gone
        main(
            socket.socket(fileno=int(sys.argv[1])),
            socket.socket(fileno=int(sys.argv[2])),
            int(sys.argv[3]),
            sys.argv[4],
            Path(sys.argv[5]),
        )
    # Threads left by a body must not keep the process alive.
    os._exit(0)

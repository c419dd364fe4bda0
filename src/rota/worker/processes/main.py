"""Main of every child process: loads the app and handles requests, one at a time, until its worker is gone.

The module of a kind ends with `run_child(...)` under `__main__`; `ChildProcess` executes it with the arguments
DESCRIPTOR PARENT APP FOLDER and the descriptors of that kind. It loads the app as the worker did. A child dies with its
worker: it arms the parent-death signal first. SIGINT is ignored, because a terminal sends it to the worker too.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Generic, NoReturn, TypeVar

import msgspec

from rota.model.errors import RotaError
from rota.sdk import load_app
from rota.sdk.app import Rota
from rota.worker.processes.fork_server import die_with_parent
from rota.worker.processes.ipc import LENGTH_MAX, MessageReader, ProcessReady, pack_message

READ_BYTES: Final = 64 * 1024

R = TypeVar("R")


class WorkerChannel(Generic[R]):
    """Connection to the worker."""

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[R]) -> None:
        self._socket = connection
        self._reader = MessageReader(decoder, LENGTH_MAX)

    def send(self, message: msgspec.Struct) -> None:
        self._socket.sendall(pack_message(message))

    def receive(self) -> R | None:
        """None: the worker is gone."""
        while (request := self._reader.pop()) is None:
            data = self._socket.recv(READ_BYTES)
            if not data:
                return None
            self._reader.feed(data)
        return request


HandleRequest = Callable[[R], msgspec.Struct]
"""Handles a request and returns the message that ends it; never raises."""


CreateHandler = Callable[[Rota, WorkerChannel[R], Path], HandleRequest[R]]
"""Called with the loaded app and its folder."""
SetUp = Callable[[socket.socket, list[int]], object]
"""Called before the app is loaded, with the connection and the descriptors of this kind."""


def run_child(
    decoder: msgspec.msgpack.Decoder[R], create_handler: CreateHandler[R], set_up: SetUp | None = None
) -> NoReturn:
    """Runs a child with the arguments of this process."""
    descriptor, parent, app, folder, *descriptors = sys.argv[1:]
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(descriptor))
    if set_up is not None:
        set_up(connection, [int(each) for each in descriptors])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    with suppress(BrokenPipeError, ConnectionResetError):  # the worker is gone
        _serve(WorkerChannel(connection, decoder), app, Path(folder), create_handler)
    # Threads left by user code must not keep the process alive.
    os._exit(0)


def _serve(channel: WorkerChannel[R], spec: str, folder: Path, create_handler: CreateHandler[R]) -> None:
    try:
        handle = create_handler(load_app.load(spec, folder), channel, folder)
    except RotaError as error:
        channel.send(ProcessReady(error.sentence))
        return
    channel.send(ProcessReady())
    while (request := channel.receive()) is not None:
        channel.send(handle(request))

"""Main of every child process: loads the app and handles requests, one at a time, until its worker is gone.

The module of a kind ends with `run_child(...)` under `__main__`; `ChildProcess` executes it with the arguments
DESCRIPTOR REQUESTS DRY PARENT APP FOLDER and the descriptors of that kind. It loads the app as the worker did. A child
dies with its worker: it arms the parent-death signal first. SIGINT is ignored, because a terminal sends it to the
worker too.

The messages of a request are sent before the next request is taken (`request_queue`), so the worker knows what was
taken and has not ended.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Generic, NoReturn, TypeVar

import msgspec

from rota.model.errors import RotaError
from rota.sdk import load_app
from rota.sdk.app import Rota
from rota.worker.processes.fork_server import die_with_parent
from rota.worker.processes.ipc import GO_ON, LENGTH_MAX, MessageReader, ProcessReady, pack_message
from rota.worker.processes.request_queue import LARGE_REQUEST, PACKET_BYTES_MAX, RAN_DRY

READ_BYTES: Final = 64 * 1024
NO_BYTES: Final = bytes(4)
"""An int of C that is 0, as FIONREAD counts what is in a pipe."""

R = TypeVar("R")


class WorkerChannel(Generic[R]):
    """Connection to the worker: requests come one by one from a queue, large ones and the rest use a stream."""

    def __init__(self, connection: socket.socket, requests: int, dry: int, decoder: msgspec.msgpack.Decoder[R]) -> None:
        self._socket = connection
        self._requests = requests
        self._dry = dry
        self._decoder = decoder
        self._reader = MessageReader(decoder, LENGTH_MAX)
        self._found_waiting = False
        """A request was there when the one before it had been handled."""
        self._waits_for_worker = False

    def send(self, message: msgspec.Struct) -> None:
        self._socket.sendall(pack_message(message))

    def wait_for_worker(self) -> None:
        """The next request is taken only when the worker has read the messages of this one and says so."""
        self._waits_for_worker = True

    def receive(self) -> R | None:
        """None: the worker is gone."""
        if self._waits_for_worker:
            self._waits_for_worker = False
            if not self._socket.recv(len(GO_ON)):
                return None
        packet = self._receive_packet()
        if not packet:
            return None
        return self._receive_large() if packet == LARGE_REQUEST else self._decoder.decode(packet)

    def _receive_packet(self) -> bytes:
        if fcntl.ioctl(self._requests, termios.FIONREAD, NO_BYTES) != NO_BYTES:
            self._found_waiting = True
        elif self._found_waiting:
            self._found_waiting = False
            os.write(self._dry, RAN_DRY)
        return os.read(self._requests, PACKET_BYTES_MAX)

    def _receive_large(self) -> R | None:
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
    descriptor, requests, dry, parent, app, folder, *descriptors = sys.argv[1:]
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(descriptor))
    for each in (descriptor, requests, dry):
        os.set_inheritable(int(each), False)  # the programs that user code starts have no use for them
    if set_up is not None:
        set_up(connection, [int(each) for each in descriptors])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    with suppress(BrokenPipeError, ConnectionResetError):  # the worker is gone
        _serve(WorkerChannel(connection, int(requests), int(dry), decoder), app, Path(folder), create_handler)
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

"""Commands as their worker sees them: processes of a fork server, which is started with the first of them.

If the fork server dies, its commands have been killed, and the next command starts another one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from rota.worker.processes import fork_server
from rota.worker.processes.fork_server import EXITED, FAILED, HEADER, RUN, SIGNAL, STARTED
from rota.worker.processes.os_process import DataCallback, DescriptorReader

log = structlog.get_logger(__name__)
SERVER_PATH: Final = Path(fork_server.__file__)
EXIT_TIMEOUT_S: Final = 2.0
READ_BYTES: Final = 64 * 1024


class ForkedProcess:
    """A command in a session of its own. Same interface as `OsProcess`."""

    def __init__(self, connection: _ServerConnection, number: int, readers: Sequence[DescriptorReader]) -> None:
        self.pid: int | None = None
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """OSError if it cannot be started."""
        self.ended = asyncio.Event()
        self.status: int | None = None
        """Exit status, or a negative signal; None while it runs."""
        self._connection = connection
        self._number = number
        self._readers = readers

    def signal(self, number: signal.Signals) -> None:
        """For its process group."""
        if self.status is None:
            self._connection.send(HEADER.pack(SIGNAL, self._number, number))

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    async def kill_and_wait(self, timeout_s: float) -> None:
        """Kills it and waits at most `timeout_s`: a process in uninterruptible sleep may stay."""
        self.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.ended.wait()

    def set_started(self, pid: int) -> None:
        self.pid = pid
        if not self.started.done():
            self.started.set_result(None)

    def set_ended(self, status: int, failed: OSError | None = None) -> None:
        """Delivers the rest of its output."""
        self.status = status
        for reader in self._readers:
            reader.drain()
            reader.close()
        if not self.started.done():
            self.started.set_exception(failed or OSError("its fork server was killed"))
            self.started.exception()  # it is not awaited if the worker is ending
        self.ended.set()


class CommandSpawner:
    """Starts commands. `close` it when they have ended."""

    def __init__(self) -> None:
        self._connection: _ServerConnection | None = None
        self._numbers = itertools.count(1)

    @property
    def pid(self) -> int | None:
        """Of the fork server."""
        return self._connection.server.pid if self._connection is not None else None

    def spawn(
        self,
        program: str,
        argv: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        limits: str,
        stdout: DataCallback,
        stderr: DataCallback,
    ) -> ForkedProcess:
        """Raises OSError or ValueError if that is known at once; else `started` does."""
        fields = [limits, str(cwd), program, str(len(argv)), *argv, *(f"{name}={value}" for name, value in env.items())]
        if any("\0" in field for field in fields):
            raise ValueError("an argument or a variable contains the character NUL")
        body = b"\0".join(map(os.fsencode, fields))
        if self._connection is None or self._connection.is_closed:
            self._connection = _ServerConnection()
        theirs: list[int] = []
        readers: list[DescriptorReader] = []
        try:
            for feed in (stdout, stderr):
                ours, their = os.pipe()
                theirs.append(their)
                readers.append(DescriptorReader(ours, feed))
        except OSError:
            _close_all(theirs)
            for reader in readers:
                reader.close()
            raise
        number = next(self._numbers)
        process = ForkedProcess(self._connection, number, readers)
        self._connection.processes[number] = process
        self._connection.send(HEADER.pack(RUN, number, len(body)) + body, theirs)
        return process

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class _ServerConnection:
    """One fork server, and the commands that it runs."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.server = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(SERVER_PATH), str(os.getpid()), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env={},
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self.processes: dict[int, ForkedProcess] = {}
        self.is_closed = False
        self._socket = ours
        self._received = b""
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ours.fileno(), self._read)

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Sends them in order; the descriptors are closed here afterwards."""
        if self.is_closed:
            _close_all(descriptors)
            return
        self._outgoing.append((data, list(descriptors)))
        if len(self._outgoing) == 1:
            self._write()

    async def close(self) -> None:
        """The server kills what is left and ends."""
        self._lose()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.server.wait, EXIT_TIMEOUT_S)
        self.server.kill()
        await asyncio.to_thread(self.server.wait)

    def _write(self) -> None:
        while self._outgoing:
            data, descriptors = self._outgoing[0]
            try:
                sent = socket.send_fds(self._socket, [data], descriptors) if descriptors else self._socket.send(data)
            except BlockingIOError:
                self._loop.add_writer(self._socket.fileno(), self._write)
                return
            except OSError:
                self._server_died()
                return
            _close_all(descriptors)
            self._outgoing[0] = (data[sent:], [])
            if sent == len(data):
                self._outgoing.popleft()
        self._loop.remove_writer(self._socket.fileno())

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._server_died()
            return
        data = self._received + data
        complete = len(data) - len(data) % HEADER.size
        self._received = data[complete:]
        for kind, number, value in HEADER.iter_unpack(data[:complete]):
            self._handle(kind, number, value)

    def _handle(self, kind: bytes, number: int, value: int) -> None:
        process = self.processes.get(number)
        if process is None:
            return
        if kind == STARTED:
            process.set_started(value)
            return
        del self.processes[number]
        if kind == EXITED:
            process.set_ended(value)
        else:
            assert kind == FAILED, kind
            process.set_ended(-signal.SIGKILL, OSError(value, os.strerror(value)))

    def _server_died(self) -> None:
        log.warning("fork_server_lost", commands=len(self.processes))
        self._lose()
        self.server.kill()
        with suppress(subprocess.TimeoutExpired):  # it is ending: its end of the socket is closed
            self.server.wait(EXIT_TIMEOUT_S)

    def _lose(self) -> None:
        """The server is gone or to end. Its commands died with it, but not their descendants: kill their groups."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        while self._outgoing:
            _close_all(self._outgoing.popleft()[1])
        for process in self.processes.values():
            if process.pid is not None:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.set_ended(-signal.SIGKILL)
        self.processes.clear()


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

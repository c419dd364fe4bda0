"""One child process as its worker sees it: started by exec, connected by a socket, killed with its descendants.

The first message is the start handshake (`ProcessReady`). `messages` ends with None when the process has ended, after
everything that it had sent; a process that dies in the middle of a message never sent it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, Generic, Literal, TypeVar

import msgspec
import structlog

from rota.worker.processes.group_guard import ProcessGroupGuard
from rota.worker.processes.ipc import MessageReader, ProcessReady, add_length, encode_message
from rota.worker.processes.os_process import DescriptorReader, OsProcess, OutputCallbacks
from rota.worker.processes.request_queue import LARGE_REQUEST, REQUEST_BYTES_MAX, RequestQueue

log = structlog.get_logger(__name__)

START_TIMEOUT_S: Final = 60.0
EXIT_TIMEOUT_S: Final = 2.0

M = TypeVar("M")
OutputStream = Literal["stdout", "stderr"]


class ProcessStartFailed(Exception):
    """The app cannot be loaded because of `problem`; without one, the process exited with `status`."""

    def __init__(self, problem: str, status: int | None) -> None:
        super().__init__(problem or f"exit status {status}")
        self.problem = problem
        self.status = status


class ChildProgram(msgspec.Struct, Generic[M], frozen=True):
    """What a kind of process executes, and what it may send."""

    module: str
    """Its main calls `run_child`."""
    app: str
    folder: Path
    decoder: msgspec.msgpack.Decoder[M]
    message_bytes_max: int
    decode_failed_event: str
    """Log event of a message that cannot be decoded; the process is killed then."""


class ChildProcess(ABC, Generic[M]):
    """Messages are of type M, which includes `ProcessReady`."""

    def __init__(self, program: ChildProgram[M], guard: ProcessGroupGuard, descriptors: Sequence[int] = ()) -> None:
        """`descriptors` are inherited and follow the common arguments. Raises OSError if it cannot be started."""
        self.messages: asyncio.Queue[M | None] = asyncio.Queue()
        """Messages from the process, in order; None: the process has ended."""
        self._decode_failed_event = program.decode_failed_event
        self._message_reader = MessageReader(program.decoder, program.message_bytes_max)
        self._killed = False
        self._requests = RequestQueue()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = self._spawn(program, guard, theirs.fileno(), descriptors)
            except BaseException:
                ours.close()
                self._requests.close()
                raise
        ours.setblocking(False)
        self._socket = ours
        self._reader = DescriptorReader(os.dup(ours.fileno()), self._on_data)
        self._exit_watcher = asyncio.create_task(self._wait_for_exit(), name="rota child process")

    @property
    def alive(self) -> bool:
        """Whether it can handle a request."""
        return not self._killed and not self.process.ended.is_set()

    async def wait_until_ready(self) -> None:
        """Waits for the start handshake. Raises ProcessStartFailed or TimeoutError."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                message = await self.messages.get()
        except TimeoutError as error:
            raise TimeoutError(f"The process did not load the app within {START_TIMEOUT_S:g} s.") from error
        if not isinstance(message, ProcessReady):
            raise ProcessStartFailed("", self.process.status)
        if message.problem:
            raise ProcessStartFailed(message.problem, None)

    async def send(self, request: msgspec.Struct) -> None:
        """Sends a request to a process that has none."""
        await self._send_request(encode_message(request))

    def request_stop(self) -> None:
        """SIGTERM for the process only: its descendants are up to it."""
        self.process.signal(signal.SIGTERM, group=False)

    def kill(self) -> None:
        self._killed = True
        self.process.kill()

    async def stop(self, kill_after_s: float) -> None:
        """Requests a stop and closes it: after its next message, `kill_after_s`, or immediately if cancelled."""
        try:
            self.request_stop()
            async with asyncio.timeout(kill_after_s):
                await self.messages.get()
        except TimeoutError:
            pass
        finally:
            await self.close()

    async def close(self) -> None:
        """Kills and reaps it; idempotent."""
        self._killed = True
        try:
            await self.process.kill_and_wait(EXIT_TIMEOUT_S)
            await asyncio.wait([self._exit_watcher], timeout=EXIT_TIMEOUT_S)
            self._exit_watcher.cancel()
        finally:
            self._reader.close()
            self._socket.close()
            self._requests.close()

    @abstractmethod
    def _on_output(self, stream: OutputStream, data: bytes) -> None:
        """Called with what the process and its descendants write."""

    def _before_output(self) -> None:
        """Called before that is read."""

    def _on_message(self, message: M) -> None:
        self.messages.put_nowait(message)

    def _on_exit(self) -> None:
        """Called once, when all messages and output have been read."""

    async def _send_request(self, data: bytes) -> None:
        """One at a time: the queue has room for it, or for the announcement of a large one."""
        large = len(data) > REQUEST_BYTES_MAX
        self._put(LARGE_REQUEST if large else data)
        if large:
            await self._send(self._socket, add_length(data))

    def _put(self, request: bytes) -> None:
        """Of a process that has taken all others."""
        if not self._requests.put(request):
            # The system has no memory for it. The request was not taken, so another process can have it.
            self.kill()

    async def _send(self, to: socket.socket, data: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(to, data)
        except OSError:
            # The process died: `messages` ends, which ends the request.
            self.kill()

    def _spawn(
        self, program: ChildProgram[M], guard: ProcessGroupGuard, connection: int, descriptors: Sequence[int]
    ) -> OsProcess:
        pipes = self._requests.child_end, self._requests.child_dry
        numbers = connection, *pipes, os.getpid()
        arguments = [*map(str, numbers), program.app, str(program.folder), *map(str, descriptors)]
        return OsProcess(
            [sys.executable, "-P", "-m", program.module, *arguments],
            cwd=program.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            output=OutputCallbacks(
                partial(self._on_output, "stdout"), partial(self._on_output, "stderr"), self._before_output
            ),
            guard=guard,
            pass_fds=(connection, *pipes, *descriptors),
        )

    async def _wait_for_exit(self) -> None:
        await self.process.ended.wait()
        # Read messages sent before the exit. No end-of-file: a forked descendant may keep the socket open.
        self._reader.drain()
        self._on_exit()
        self.messages.put_nowait(None)

    def _on_data(self, data: bytes) -> None:
        self._message_reader.feed(data)
        try:
            while (message := self._message_reader.pop()) is not None:
                self._on_message(message)
        except msgspec.DecodeError as error:
            log.warning(self._decode_failed_event, reason=str(error))
            self.kill()

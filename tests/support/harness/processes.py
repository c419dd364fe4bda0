"""Starts Python processes: forked from a preloaded server where possible, else by exec.

`start(command, …)` returns an object with the interface of `asyncio.subprocess.Process`.
"""

import asyncio
import atexit
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

from tests.support.harness.forkserver import forkable

ROOT = Path(__file__).parents[3]
PIPE = asyncio.subprocess.PIPE
STREAM_LIMIT = 2**20
START_TIMEOUT_S = 60.0
_SPECIAL = ("PYTHON", "LD_", "LC_", "LANG", "TZ")
"""Prefixes of variables that Python reads only at startup."""


async def start(command, *, env=None, cwd=None, stdin=None, stdout=None, stderr=None, fork=True):
    """Start a process in its own session. Without `fork`, a fresh interpreter is executed."""
    command = list(map(str, command))
    env = dict(os.environ if env is None else env)
    if fork and (found := forkable(command)) and not _changed(env):
        module, argv = found
        return await _server().fork(module, argv, env, cwd or Path.cwd(), stdin, stdout, stderr)
    return await asyncio.create_subprocess_exec(
        *command, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
    )


def _changed(env):
    special = [name for name in env.keys() | os.environ.keys() if name.startswith(_SPECIAL)]
    return any(env.get(name) != os.environ.get(name) for name in special)


_servers = []


def _server():
    """The fork server of this process, started on first use and restarted if it has died."""
    if not _servers or _servers[-1].ended:
        _servers.append(ForkServer())
        atexit.register(_servers[-1].close)
    return _servers[-1]


class ForkServer:
    """Client of the preloaded fork server, see `forkserver`."""

    def __init__(self):
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.harness.forkserver", str(theirs.fileno())]
        pass_fds = [theirs.fileno()]
        self._process = subprocess.Popen(command, pass_fds=pass_fds, stdin=subprocess.DEVNULL, cwd=ROOT)
        theirs.close()

    @property
    def ended(self):
        return self._process.poll() is not None

    async def fork(self, module, argv, env, cwd, stdin, stdout, stderr):
        streams = [_Stream.of(given, writes=number == 0) for number, given in enumerate((stdin, stdout, stderr))]
        if stderr == subprocess.STDOUT:
            streams[2] = streams[1]
        status, status_writer = os.pipe()
        request = json.dumps({"module": module, "words": argv, "env": env, "cwd": str(cwd)}).encode()
        fds = [stream.theirs for stream in streams]
        socket.send_fds(self._requests, [request], [*fds, status_writer])
        os.close(status_writer)
        for stream in streams:
            stream.given()
        process = ForkedProcess(*[await stream.opened() for stream in streams])
        await process.begin(status)
        return process

    def close(self):
        self._requests.close()
        self._process.wait(timeout=10)


class _Stream:
    """One standard stream of a child: a pipe, a file, or that of this process."""

    def __init__(self, theirs, ours=None, *, writes=False, close=()):
        self.theirs = theirs
        self._ours = ours
        self._writes = writes
        self._close = close

    @classmethod
    def of(cls, target, *, writes):
        if target == PIPE:
            reading, writing = os.pipe()
            theirs, ours = (reading, writing) if writes else (writing, reading)
            return cls(theirs, ours, writes=writes, close=[theirs])
        if target is None:
            return cls(0 if writes else 2)
        if target == subprocess.DEVNULL:
            opened = os.open(os.devnull, os.O_RDWR)
            return cls(opened, close=[opened])
        if target == subprocess.STDOUT:
            return cls(1)
        return cls(target if isinstance(target, int) else target.fileno())

    def given(self):
        while self._close:
            os.close(self._close.pop())

    async def opened(self):
        if self._ours is None:
            return None
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(self._ours, "wb" if self._writes else "rb", buffering=0)
        self._ours = None
        if self._writes:
            transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe)
            return asyncio.StreamWriter(transport, protocol, None, loop)
        reader = asyncio.StreamReader(limit=STREAM_LIMIT)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        return reader


class ForkedProcess:
    """A child of the fork server, with the part of `asyncio.subprocess.Process` that tests use."""

    def __init__(self, stdin, stdout, stderr):
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.pid = None
        self.returncode = None
        self._ended = asyncio.Event()

    async def begin(self, fd):
        """Wait for the pid; the exit status arrives later."""
        status_reader = _StatusReader(self)
        await asyncio.get_running_loop().connect_read_pipe(lambda: status_reader, os.fdopen(fd, "rb", buffering=0))
        async with asyncio.timeout(START_TIMEOUT_S):
            await status_reader.began.wait()
        if self.pid is None:
            raise AssertionError("the fork server has ended")

    def end(self, status):
        self.returncode = status
        self._ended.set()

    async def wait(self):
        await self._ended.wait()
        return self.returncode

    async def communicate(self):
        """Close its input and read to the end; returns output and errors."""
        if self.stdin is not None:
            self.stdin.close()
        read = [stream.read() if stream is not None else _nothing() for stream in (self.stdout, self.stderr)]
        found = await asyncio.gather(*read)
        await self.wait()
        return tuple(found)

    def send_signal(self, number):
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


class _StatusReader(asyncio.Protocol):
    """Reads the pid and later the exit status of one child from the fork server."""

    def __init__(self, process):
        self.began = asyncio.Event()
        self._process = process
        self._unread = b""

    def data_received(self, data):
        self._unread += data
        while len(self._unread) >= 4:
            (number,) = struct.unpack("i", self._unread[:4])
            self._unread = self._unread[4:]
            if self._process.pid is None:
                self._process.pid = number
                self.began.set()
            else:
                self._process.end(number)

    def connection_lost(self, _error):
        self.began.set()
        if self._process.returncode is None:
            self._process.end(-signal.SIGKILL)


async def _nothing():
    return None

"""Forks the processes of commands. Run as a file, without site packages; `forked_process` starts it.

    fork_server.py PARENT DESCRIPTOR

A command is forked from this small process, which costs a tenth of an interpreter of its own, and sees nothing of the
worker: neither its environment nor its memory. Between fork and exec the child starts a session, resets signals, sets
limits (no `preexec_fn`: unsafe with threads, and this process has none) and arranges death with this process.

The descriptor is a stream socket; `HEADER` and the constants below describe its messages. Invariants:
- when a command exits, the rest of its process group is killed before its pid can be used again;
- every `RUN` is answered by `FAILED`, or by `STARTED` and, after the exit, `EXITED`; a command has ended only then;
- signals are sent here, where a pid is known to be of its command;
- it outlives its worker for the moment that it needs to kill what is left. The parent is checked too, because a process
  forked from the worker may keep the socket open.

If this process is killed, its commands die with it, and the worker kills their process groups.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import socket
import struct
import sys
from contextlib import suppress

HEADER = struct.Struct("!cQi")
"""Kind, number of the command, and a value."""
RUN = b"r"
"""The value is the length of the body: limits, directory, program, number of arguments, arguments and NAME=VALUE, as
strings separated by NUL. Descriptors for standard output and error come with the header."""
SIGNAL = b"s"
"""The value is a signal for the process group."""
STARTED = b"p"
"""The value is the pid."""
FAILED = b"f"
"""The value is the errno of the fork."""
EXITED = b"e"
"""The value is the exit status, or a negative signal."""

PR_SET_PDEATHSIG = 1
CPU_GRACE_S = 1
"""Seconds between SIGXCPU and SIGKILL."""
CANNOT_RUN_STATUS = 126
PARENT_CHECK_INTERVAL_S = 1.0
HANDLED_SIGNALS = (
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGPIPE,
    signal.SIGXFSZ,
)
"""Not at their defaults in this process: its own, and those that Python ignores."""


def die_with_parent(parent: int) -> None:
    """Linux only; on other systems a process outlives a killed parent. The parent is checked last, because it may have
    died before the signal was armed."""
    if sys.platform.startswith("linux"):
        _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


_LIBC = ctypes.CDLL(None, use_errno=True)


def apply_limits(limits: list[int]) -> None:
    """Seconds, bytes, bytes, a count, bytes; 0: none."""
    cpu, data, address, files, file = limits
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if cpu:
        _lower_limit(resource.RLIMIT_CPU, cpu, cpu + CPU_GRACE_S)
    kinds = (resource.RLIMIT_DATA, resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)
    for kind, limit in zip(kinds, (data, address, files, file), strict=True):
        if limit:
            _lower_limit(kind, limit, limit)


def _lower_limit(kind: int, soft: int, hard: int) -> None:
    """Never raises an existing hard limit: only root could."""
    current = resource.getrlimit(kind)[1]
    if current != resource.RLIM_INFINITY:
        soft, hard = min(soft, current), min(hard, current)
    resource.setrlimit(kind, (soft, hard))


class ForkServer:
    def __init__(self, connection: socket.socket, parent: int) -> None:
        self._connection = connection
        connection.set_inheritable(False)  # no command may talk to this process, or keep it from ending
        self._parent = parent
        self._pids: dict[int, int] = {}
        """By number of the command."""
        self._numbers: dict[int, int] = {}
        self._children_ended, wake = os.pipe()
        for descriptor in (self._children_ended, wake):
            os.set_blocking(descriptor, False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until the worker is gone."""
        events = select.poll()
        events.register(self._connection, select.POLLIN)
        events.register(self._children_ended, select.POLLIN)
        with suppress(ConnectionError, EOFError):
            while os.getppid() == self._parent:
                ready = {descriptor for descriptor, _ in events.poll(PARENT_CHECK_INTERVAL_S * 1000)}
                if self._children_ended in ready:
                    with suppress(BlockingIOError):
                        os.read(self._children_ended, 65_536)
                    self._reap()
                if self._connection.fileno() in ready:
                    self._handle()
        for pid in self._numbers:
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)

    def _handle(self) -> None:
        """Handles one message."""
        header, descriptors, _, _ = socket.recv_fds(self._connection, HEADER.size, 2)
        header += self._receive(HEADER.size - len(header))
        kind, number, value = HEADER.unpack(header)
        if kind == RUN:
            try:
                self._run(number, self._receive(value), descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        elif (pid := self._pids.get(number)) is not None:
            _send_signal(pid, value)

    def _receive(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._connection.recv(min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _run(self, number: int, body: bytes, descriptors: list[int]) -> None:
        # A signal sent before the child can take it stays pending.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        server = os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                _exec(body, descriptors, server, unblocked)
        except OSError as error:
            self._send(FAILED, number, error.errno or 0)
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        self._pids[number], self._numbers[pid] = pid, number
        self._send(STARTED, number, pid)

    def _reap(self) -> None:
        while self._numbers:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            # It is still a zombie, so its pid and group cannot have been reused.
            with suppress(OSError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            if (number := self._numbers.pop(ended.si_pid, None)) is not None:
                del self._pids[number]
                self._send(EXITED, number, os.waitstatus_to_exitcode(status))

    def _send(self, kind: bytes, number: int, value: int) -> None:
        self._connection.sendall(HEADER.pack(kind, number, value))


def _send_signal(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # it has not started its session yet
        with suppress(OSError):
            os.kill(pid, number)
    except OSError:
        pass


def _exec(body: bytes, descriptors: list[int], server: int, unblocked: set[int | signal.Signals]) -> None:
    """In the child; never returns."""
    try:
        limits, folder, program, count, *strings = body.split(b"\0")
        arguments, variables = strings[: int(count)], strings[int(count) :]
        signal.set_wakeup_fd(-1)
        for number in HANDLED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        for stream, descriptor in enumerate(descriptors, 1):
            os.dup2(descriptor, stream)
            os.close(descriptor)  # all others close on exec
        os.chdir(folder)
        apply_limits([int(limit) for limit in limits.split(b",")])
        die_with_parent(server)
        try:
            os.execve(program, arguments, dict(each.split(b"=", 1) for each in variables))  # noqa: S606 - no shell
        except OSError as error:
            os.write(2, b"%s cannot be run: %s\n" % (program, (error.strerror or "").encode()))
    except BaseException as error:  # noqa: BLE001 - nothing of this process may go on in the child
        os.write(2, f"The command cannot be started: {error}\n".encode(errors="replace"))
    finally:
        os._exit(CANNOT_RUN_STATUS)


if __name__ == "__main__":
    ForkServer(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[1])).serve()

"""A process that has imported Rota and forks children on request: `python -m tests.support.harness.forkserver FD`.

Starting an interpreter and importing Rota costs 0.5 s of CPU; a fork costs 10 ms. A request on the socket FD is JSON
(`module`, `words`, `env`, `cwd`) with four descriptors: standard input, output, error, and a pipe, to which the child
writes its pid and the server later its exit status, two signed 32-bit integers. The child has its own session and the
default signal handlers, and runs a module like `python -m`.

The server has no threads, so forking is safe. When the socket closes, it kills its children and exits.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import random
import runpy
import select
import signal
import socket
import struct
import sys
import warnings
from pathlib import Path

import rota

REQUEST_MAX = 1 << 20
PRELOADED = ("uvloop", "tests.support.queue", "tests.support.jobs")
IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores these signals by default."""
DEFAULT = [s for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP, *IGNORED)]


def forkable(command):
    """The module and arguments of a command; None if it needs exec."""
    if command[:2] == [sys.executable, "-m"]:
        return command[2], command[2:]
    if Path(command[0]) == Path(sys.executable).with_name("rota"):
        return "rota.cli", command
    return None


class Server:
    def __init__(self, fd):
        self._requests = socket.socket(fileno=fd)
        self._children = {}
        self._ended, wake = os.pipe()
        for end in (self._ended, wake):
            os.set_blocking(end, False)
            os.set_inheritable(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest handles Ctrl-C and closes the socket

    def serve(self):
        """Returns the request in each child, and None in the server when the socket closes."""
        while True:
            ready, _, _ = select.select([self._requests, self._ended], [], [])
            if self._ended in ready:
                self._reap()
            if self._requests in ready:
                text, fds, _, _ = socket.recv_fds(self._requests, REQUEST_MAX, 4)
                if not text:
                    for pid in self._children:
                        os.kill(pid, signal.SIGKILL)
                    return None
                if request := self._fork(json.loads(text), fds):
                    return request

    def _fork(self, request, fds):
        pid = os.fork()
        if pid == 0:
            self._become(request, fds)
            return request
        for fd in fds[:3]:
            os.close(fd)
        self._children[pid] = fds[3]
        return None

    def _become(self, request, fds):
        signal.set_wakeup_fd(-1)
        for number in DEFAULT:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        os.setsid()
        write_number(fds[3], os.getpid())  # from here on the child can receive signals
        for target, fd in enumerate(fds[:3]):
            os.dup2(fd, target)
        for fd in (*fds, *self._children.values(), self._ended):
            if fd > 2:
                os.close(fd)
        self._requests.close()
        # The inherited stream objects cache properties of the old files.
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])

    def _reap(self):
        os.read(self._ended, 4096)
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            fd = self._children.pop(pid)
            write_number(fd, os.waitstatus_to_exitcode(status))
            os.close(fd)


def write_number(fd, number):
    with contextlib.suppress(BrokenPipeError):  # the test process has closed the pipe
        os.write(fd, struct.pack("i", number))


def main(fd):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        preload()
    gc.collect()
    gc.freeze()
    request = Server(fd).serve()
    if request is None:
        return
    random.seed()
    # Reads its environment variables at import, see `rota.infra.failpoints`.
    importlib.reload(sys.modules["rota.infra.failpoints"])
    warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)  # runpy warns about preloaded modules
    module, sys.argv = request["module"], request["words"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def preload():
    for name in (*(found.name for found in pkgutil.walk_packages(rota.__path__, "rota.")), *PRELOADED):
        if not name.endswith("__main__"):
            importlib.import_module(name)


if __name__ == "__main__":
    main(int(sys.argv[1]))

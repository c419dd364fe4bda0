"""A child process in its own session: reads its output, detects its exit and cleans up its process group.

Invariants:
- on exit, the rest of its process group is killed before the pid can be reused;
- all output written before the exit was delivered when `ended` is set;
- it dies with the thread that started it (PR_SET_PDEATHSIG), so that must be the main thread;
- the rest of its process group is killed when the worker is killed (`group_guard`).

Not covered: a descendant that starts its own session (a daemon) is not killed.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from rota.model.attempt_codes import AttemptCode
from rota.worker.processes.group_guard import ProcessGroupGuard

POLL_INTERVAL_S: Final = 0.02
READ_BYTES: Final = 256 * 1024
DRAIN_READS_MAX: Final = 64
"""A pipe holds at most a megabyte; a descendant that keeps refilling it is cut off."""

DataCallback = Callable[[bytes], object]


class OutputCallbacks(NamedTuple):
    """What is called with the output of a process, and before it is read."""

    stdout: DataCallback
    stderr: DataCallback
    before_read: Callable[[], object] | None = None


class DescriptorReader:
    """Passes data read from a descriptor to a callback. Owns the descriptor."""

    def __init__(self, descriptor: int, feed: DataCallback, before_read: Callable[[], object] | None = None) -> None:
        self._descriptor = descriptor
        self._feed = feed
        self._before_read = before_read
        self._open = True
        self._paused = False
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def drain(self) -> None:
        """Delivers the data available now."""
        for _ in range(DRAIN_READS_MAX):
            if not self._open or not self._read():
                break

    def read(self) -> bool:
        """Delivers data available now; whether there was any."""
        return self._open and self._read()

    def pause(self) -> None:
        """From now on it reads on request only."""
        if self._open and not self._paused:
            self._paused = True
            asyncio.get_running_loop().remove_reader(self._descriptor)

    def resume(self) -> None:
        if self._open and self._paused:
            self._paused = False
            asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def close(self) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)

    def _read(self) -> bool:
        if self._before_read is not None:
            self._before_read()
            if not self._open:
                return False
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self._feed(data)
        else:
            self.close()
        return bool(data)


class OsProcess:
    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        output: OutputCallbacks,
        guard: ProcessGroupGuard,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Raises OSError or ValueError if the process cannot be started."""
        assert threading.current_thread() is threading.main_thread(), "a child dies with the thread that starts it"
        self.ended = asyncio.Event()
        self._child = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
            bufsize=0,
            start_new_session=True,
        )
        self._guard = guard
        guard.add(self._child.pid)
        pipes = zip((self._child.stdout, self._child.stderr), (output.stdout, output.stderr), strict=True)
        self._readers = [DescriptorReader(_detach_descriptor(pipe), feed, output.before_read) for pipe, feed in pipes]
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(self._child.pid) if hasattr(os, "pidfd_open") else None
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._reap)
        else:
            self._loop.call_later(POLL_INTERVAL_S, self._poll)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def status(self) -> int | None:
        """Exit status, or a negative signal; None while it runs."""
        return self._child.returncode

    def signal(self, number: signal.Signals, *, group: bool = True) -> None:
        if self.status is None:
            with suppress(ProcessLookupError, PermissionError):
                (os.killpg if group else os.kill)(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def drain(self) -> None:
        """Delivers the output written so far."""
        for reader in self._readers:
            reader.drain()

    async def kill_and_wait(self, timeout_s: float) -> None:
        """Kills it and waits at most `timeout_s`: a process in uninterruptible sleep may stay."""
        self.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.ended.wait()

    def _poll(self) -> None:
        """Fallback for systems without pidfd."""
        if self._child.poll() is None:
            self._loop.call_later(POLL_INTERVAL_S, self._poll)
        else:
            self._reap()

    def _reap(self) -> None:
        # It is still a zombie, so its pid and group cannot have been reused.
        self.kill()
        self._child.wait()
        self._guard.discard(self.pid)
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        for reader in self._readers:
            reader.drain()
            reader.close()
        self.ended.set()


def _detach_descriptor(pipe: object) -> int:
    """A copy of the pipe's descriptor, so that `subprocess` does not close it."""
    assert isinstance(pipe, io.FileIO), "unbuffered pipes are plain files"
    descriptor = os.dup(pipe.fileno())
    pipe.close()
    return descriptor


def describe_exit(status: int) -> tuple[str, str]:
    """Code and message for a failed process."""
    if status >= 0:
        return AttemptCode.EXIT_STATUS, f"It ended with exit status {status}."
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return AttemptCode.SIGNAL, f"It was ended by {name}."

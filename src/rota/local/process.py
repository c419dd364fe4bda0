"""One server as a child process: started through `launch`, watched without threads, stopped cleanly."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from rota.local.identity import LAUNCHER, OWN_IDENTITY, Identity

TAIL_BYTES = 4000
POLL_INTERVAL_S = 0.02
# Only Linux has a parent-death signal; elsewhere a guard process watches the parent.
NEEDS_GUARD = not sys.platform.startswith("linux")


class ChildProcess:
    """A running child. It dies with the thread that started it, so that must be the main thread."""

    def __init__(self, child: subprocess.Popen[bytes], log: Path) -> None:
        self._child = child
        self._log = log

    @classmethod
    def spawn(
        cls,
        argv: Sequence[str | Path],
        *,
        log: Path,
        lock_fd: int,
        die_with: signal.Signals,
        cwd: Path = Path("/"),
        stdin: Path | None = None,
        identity: Identity = OWN_IDENTITY,
    ) -> ChildProcess:
        assert threading.current_thread() is threading.main_thread(), "a child dies with the thread that starts it"
        command: list[str | Path] = [sys.executable, "-I", "-S", LAUNCHER, "--parent", str(os.getpid())]
        command += ["--deathsig", str(int(die_with)), *identity.words, *(["--guard"] if NEEDS_GUARD else [])]
        command += ["--stdin", stdin] if stdin else []
        command += ["--", *argv]
        with log.open("wb") as output:
            child = subprocess.Popen(
                [os.fspath(arg) for arg in command],
                stdin=subprocess.PIPE if NEEDS_GUARD else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**os.environ, "LC_ALL": "C"},
                pass_fds=(lock_fd,),
                # Ctrl-C in the terminal must not reach the servers before Rota has drained.
                start_new_session=True,
            )
        return cls(child, log)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._child.poll()

    def send_signal(self, number: signal.Signals) -> None:
        if self.status is None:
            self._child.send_signal(number)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its exit; False after `timeout_s`."""
        if self.status is not None:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait()
        except TimeoutError:
            return self.status is not None
        return True

    async def _wait(self) -> None:
        if not hasattr(os, "pidfd_open"):
            while self.status is None:  # noqa: ASYNC110  this system has no other notification of a child's exit
                await asyncio.sleep(POLL_INTERVAL_S)
            return
        loop, exited = asyncio.get_running_loop(), asyncio.Event()
        pidfd = os.pidfd_open(self.pid)
        try:
            loop.add_reader(pidfd, exited.set)
            await exited.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._child.wait()

    async def stop(self, stop_signal: signal.Signals, kill_signal: signal.Signals, timeout_s: float) -> None:
        self.send_signal(stop_signal)
        self.send_signal(signal.SIGCONT)  # a paused process handles no signal
        if not await self.wait(timeout_s):
            self.send_signal(kill_signal)
            await self.wait(timeout_s)
        if self._child.stdin:
            self._child.stdin.close()

    def log_tail(self) -> str:
        """The end of its log."""
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace").strip()

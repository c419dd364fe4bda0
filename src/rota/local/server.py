"""The base class of the three servers: port, password, a start that waits for a real reply, a clean stop."""

from __future__ import annotations

import asyncio
import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from rota.local.binaries import Binary
from rota.local.datadir import DataDir, port_is_free
from rota.local.identity import OWN_IDENTITY, Identity
from rota.local.process import ChildProcess
from rota.model.errors import DiskFull, PortTaken, ServerFailed, SetupFailed

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
PROBE_TIMEOUT_S = 2.0
PROBE_INTERVAL_S = 0.005
PROBE_INTERVAL_MAX_S = 0.1
START_ATTEMPTS_MAX = 5


class LocalServer(ABC):
    """One local server. `start` returns after it has replied to a real command."""

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    kill_signal: ClassVar[signal.Signals] = signal.SIGKILL

    def __init__(self, home: DataDir, binary: Binary, fixed_port: int | None) -> None:
        self.home = home
        self.binary = binary
        self.fixed_port = fixed_port
        self.port = 0
        self.process: ChildProcess | None = None
        self.start_s = 0.0

    @property
    @abstractmethod
    def url(self) -> str:
        """Its URL with the password."""

    @abstractmethod
    async def prepare(self) -> None:
        """Write its files before it starts; called again for each attempt."""

    @abstractmethod
    def argv(self) -> list[str | Path]: ...

    @abstractmethod
    async def probe(self) -> None:
        """Send a command; raises while the server cannot reply."""

    @property
    def dir(self) -> Path:
        return self.home.path / self.name

    @property
    def log_path(self) -> Path:
        return self.home.log(self.name)

    @property
    def password(self) -> str:
        return self.home.passwords[self.name]

    @property
    def stdin(self) -> Path | None:
        """A file the server reads as its standard input."""
        return None

    @property
    def identity(self) -> Identity:
        return OWN_IDENTITY

    async def start(self) -> None:
        began = time.monotonic()
        for _ in range(START_ATTEMPTS_MAX):
            self.port = self._choose_port()
            await self.prepare()
            self.process = ChildProcess.spawn(
                self.argv(),
                log=self.log_path,
                lock_fd=self.home.lock_fd,
                die_with=self.stop_signal,
                cwd=self.dir,
                stdin=self.stdin,
                identity=self.identity,
            )
            if await self._wait_ready():
                self.start_s = time.monotonic() - began
                return
        raise self._failure()

    async def restart(self) -> None:
        """Start again on the same port, so that URLs stay valid; waits out a conflict with its own dying children."""
        self.fixed_port = self.port
        await self.start()

    async def stop(self) -> None:
        if self.process:
            await self.process.stop(self.stop_signal, self.kill_signal, STOP_TIMEOUT_S)

    def _choose_port(self) -> int:
        if self.fixed_port is None:
            return self.home.port(self.name)
        if not port_is_free(self.fixed_port):
            raise PortTaken(
                f"Port {self.fixed_port} for {self.binary.product} is in use: stop the process that uses it, "
                f"or set local.{self.name}.port to another (or leave it out to have one chosen)."
            )
        return self.fixed_port

    async def _wait_ready(self) -> bool:
        """True when it replies, False when it exited in a way that a retry may fix."""
        assert self.process
        ready = asyncio.create_task(self._probe_until_ready())
        exited = asyncio.create_task(self.process.wait())
        try:
            await asyncio.wait({ready, exited}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            # Check its exit first: another process on the same port may have replied in its place.
            if self.process.status is None and ready.done():
                await ready
                return True
        finally:
            ready.cancel()
            exited.cancel()
            await asyncio.gather(ready, exited, return_exceptions=True)
        if self.process.status is None:
            await self.stop()
            raise ServerFailed(
                f"{self.binary.label} did not answer within {START_TIMEOUT_S:.0f} s: see its log, {self.log_path}"
            )
        if self._is_retryable(self.process.log_tail()):
            return False
        raise self._failure()

    async def _probe_until_ready(self) -> None:
        pause_s = PROBE_INTERVAL_S
        while True:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    return await self.probe()
            except SetupFailed:
                raise
            except Exception:  # noqa: BLE001, S110  any error means not ready yet; the caller bounds the loop
                pass
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, PROBE_INTERVAL_MAX_S)

    def _is_retryable(self, log_tail: str) -> bool:
        return "ddress already in use" in log_tail and self.fixed_port is None

    def _failure(self) -> ServerFailed | DiskFull | PortTaken:
        assert self.process
        log_tail = self.process.log_tail()
        if "No space left on device" in log_tail:
            return DiskFull(f"{self.binary.label} found no space left at {self.home.path}: free some space.")
        if "ddress already in use" in log_tail:
            return PortTaken(f"Port {self.port} for {self.binary.label} is in use: stop the process that uses it.")
        last = log_tail.splitlines()[-1] if log_tail else f"exit status {self.process.status}"
        return ServerFailed(f"{self.binary.label} did not start: {last} (its log: {self.log_path})")

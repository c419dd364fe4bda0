"""What the three servers have in common: a port, a password, a start that waits for a real answer, an orderly stop."""

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
    """One local server. `start` returns when it has answered a real command."""

    name: ClassVar[str]
    ask_to_stop: ClassVar[signal.Signals] = signal.SIGTERM
    insist: ClassVar[signal.Signals] = signal.SIGKILL

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
        """Where it answers, with its password."""

    @abstractmethod
    async def prepare(self) -> None:
        """Write what it needs on disk before it starts; called again for each attempt."""

    @abstractmethod
    def argv(self) -> list[str | Path]: ...

    @abstractmethod
    async def probe(self) -> None:
        """Ask it something; raises while it cannot answer."""

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
                die_with=self.ask_to_stop,
                cwd=self.dir,
                stdin=self.stdin,
                identity=self.identity,
            )
            if await self._wait_ready():
                self.start_s = time.monotonic() - began
                return
        raise self._failure()

    async def restart(self) -> None:
        """Start again where it was, so that URLs stay true; a clash with its own dying children is waited for."""
        self.fixed_port = self.port
        await self.start()

    async def stop(self) -> None:
        if self.process:
            await self.process.stop(self.ask_to_stop, self.insist, STOP_TIMEOUT_S)

    def _choose_port(self) -> int:
        if self.fixed_port is None:
            return self.home.port(self.name)
        if not port_is_free(self.fixed_port):
            raise PortTaken(
                f"Port {self.fixed_port} for {self.binary.product} is taken; stop what uses it, "
                f"or set local.{self.name}.port to another (or leave it out to have one chosen)."
            )
        return self.fixed_port

    async def _wait_ready(self) -> bool:
        """True when it answers, False when it ended in a way that another attempt may mend."""
        assert self.process
        answered = asyncio.create_task(self._probe_until_ready())
        ended = asyncio.create_task(self.process.wait())
        try:
            await asyncio.wait({answered, ended}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            # Whoever holds a taken port may have answered in its place, so its own end is looked at first.
            if self.process.status is None and answered.done():
                await answered
                return True
        finally:
            answered.cancel()
            ended.cancel()
            await asyncio.gather(answered, ended, return_exceptions=True)
        if self.process.status is None:
            await self.stop()
            raise ServerFailed(
                f"{self.binary.label} did not answer within {START_TIMEOUT_S:.0f} s (its log: {self.log_path})"
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
            except Exception:  # noqa: BLE001, S110  whatever it was, the server is not ready yet; bounded by the caller
                pass
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, PROBE_INTERVAL_MAX_S)

    def _is_retryable(self, said: str) -> bool:
        return "ddress already in use" in said and self.fixed_port is None

    def _failure(self) -> ServerFailed | DiskFull | PortTaken:
        assert self.process
        said = self.process.log_tail()
        if "No space left on device" in said:
            return DiskFull(f"{self.binary.label} found no space left at {self.home.path}; make room there.")
        if "ddress already in use" in said:
            return PortTaken(f"Port {self.port} for {self.binary.label} is taken; stop what uses it and try again.")
        last = said.splitlines()[-1] if said else f"exit status {self.process.status}"
        return ServerFailed(f"{self.binary.label} did not start: {last} (its log: {self.log_path})")

"""Sync agents, in processes that can be killed: a few that live long, made when they are needed.

A process has one body at a time. Invariants: whatever happens to the process, the body ends once, by its own word or by
the way the process ended; a body that is stopped is asked by SIGTERM, and killed `KILL_AFTER_S` later, with all it
has started; its process is not used again. A process hears of every renewal of the lease, and ends itself without.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import structlog

from rota.agents.running import START_FAILURES, AgentRun, BodyFailed
from rota.infra.telemetry import metrics
from rota.model.failure_classes import FailureClass
from rota.worker.agents import lease_watchdog_process
from rota.worker.agents.ipc import (
    AGENT_MESSAGE_DECODER,
    AgentProcessMessage,
    AgentProcessReady,
    AgentProcessRequest,
    AgentProcessResult,
    pack_agent_message,
    pop_agent_message,
)
from rota.worker.runners.os_process import DescriptorReader, OsProcess, describe_exit

log = structlog.get_logger(__name__)
POOL_SIZE = metrics.gauge("rota_agents_executor_pool_size", "Processes for sync agents.")
ACTIVE_PROCESSES = metrics.gauge("rota_agents_executor_active_processes", "Processes in which a sync agent runs.")

START_TIMEOUT_S: Final = 60.0
KILL_AFTER_S: Final = 3.0
EXIT_TIMEOUT_S: Final = 2.0
LEASE_SEND_INTERVAL_S: Final = 0.5
"""How often a process hears how long the lease is."""
IDLE_PROCESSES_MAX: Final = 8
LINE_CHARS_MAX: Final = 2000


class AgentProcess:
    def __init__(self, app: str, folder: Path) -> None:
        self.said: asyncio.Queue[AgentProcessMessage | None] = asyncio.Queue()
        """What it says, in order; None when nothing more can come."""
        self.agent = ""
        self._buffer = bytearray()
        self._unended = {"stdout": b"", "stderr": b""}
        ours, theirs = socket.socketpair()
        leash, collar = socket.socketpair()
        with theirs, collar:
            descriptors = (theirs.fileno(), collar.fileno())
            words = [sys.executable, "-P", "-m", "rota.worker.agents.process_main", *map(str, descriptors)]
            self.process = OsProcess(
                [*words, str(os.getpid()), app, str(folder)],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=partial(self._on_output, "stdout"),
                stderr=partial(self._on_output, "stderr"),
                pass_fds=descriptors,
            )
        for each in (ours, leash):
            each.setblocking(False)
        self._socket = ours
        self._leash = leash
        self._reader = DescriptorReader(os.dup(ours.fileno()), self._on_data)
        POOL_SIZE.inc()
        self._watching = asyncio.create_task(self._wait_for_exit(), name="agent process")

    @property
    def alive(self) -> bool:
        return not self.process.ended.is_set()

    async def start_run(self, run: AgentRun, until: float) -> None:
        await self.extend_lease(until)
        await self._send(self._socket, pack_agent_message(AgentProcessRequest(run)))

    async def extend_lease(self, until: float) -> None:
        """Its body may go on until then, and no longer unless it hears of us again."""
        await self._send(self._leash, lease_watchdog_process.encode_deadline(until))

    async def _send(self, to: socket.socket, data: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(to, data)
        except OSError:
            self.process.kill()  # it has just died, or nobody holds its leash: `said` ends, and so has its body

    async def close(self) -> None:
        await self.process.kill_and_wait(EXIT_TIMEOUT_S)
        await asyncio.wait([self._watching], timeout=EXIT_TIMEOUT_S)
        self._watching.cancel()
        self._reader.close()
        self._socket.close()
        self._leash.close()

    async def _wait_for_exit(self) -> None:
        await self.process.ended.wait()
        POOL_SIZE.dec()
        self._reader.drain()
        self.finish_run()
        self.said.put_nowait(None)

    def _on_data(self, data: bytes) -> None:
        self._buffer += data
        try:
            while (message := pop_agent_message(self._buffer)) is not None:
                self.said.put_nowait(AGENT_MESSAGE_DECODER.decode(message))
        except msgspec.DecodeError as error:
            log.warning("agent_process_unreadable", reason=str(error))
            self.process.kill()

    def finish_run(self) -> None:
        """Its body has ended; what it wrote after its last line is one, too."""
        self.process.drain()
        for stream, left in self._unended.items():
            if left:
                self._on_output(stream, b"\n")
        self.agent = ""

    def _on_output(self, stream: str, data: bytes) -> None:
        *lines, left = (self._unended[stream] + data).split(b"\n")
        if len(left) > LINE_CHARS_MAX:
            lines, left = [*lines, left], b""
        self._unended[stream] = left
        for line in lines:
            log.info(
                "agent_output",
                agent=self.agent,
                stream=stream,
                line=line.decode(errors="replace")[:LINE_CHARS_MAX].rstrip(),
            )


class AgentProcessPool:
    """`body` is that of every sync agent of the app; `lease_until` is when the lease of now ends."""

    def __init__(self, app: str, folder: Path, lease_until: Callable[[], float]) -> None:
        self._app = app
        self._folder = folder
        self._lease_until = lease_until
        self._idle: list[AgentProcess] = []

    async def run_agent(self, run: AgentRun) -> None:
        try:
            child = await self._acquire()
        except Exception as error:
            START_FAILURES.labels(type(error).__name__).inc()
            raise
        with ACTIVE_PROCESSES.track_inprogress():
            await self._run(child, run)

    async def _run(self, child: AgentProcess, run: AgentRun) -> None:
        try:
            child.agent = run.name
            await child.start_run(run, self._lease_until())
            said = await self._wait_for_result(child)
        except asyncio.CancelledError:
            await self._stop(child)
            raise
        except BaseException:
            await child.close()
            raise
        if said is None:
            await child.close()
            raise BodyFailed(_exit_reason(child), FailureClass.UNKNOWN)
        await self._release(child)
        if said.failure is not None:
            raise BodyFailed(said.error, said.failure)

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        await asyncio.gather(*(child.close() for child in idle))

    async def _acquire(self) -> AgentProcess:
        while self._idle:
            child = self._idle.pop()
            if child.alive:
                return child
            await child.close()
        child = AgentProcess(self._app, self._folder)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                loaded = await child.said.get()
        except BaseException:
            await child.close()
            raise
        if not isinstance(loaded, AgentProcessReady) or loaded.problem:
            await child.close()
            problem = loaded.problem if isinstance(loaded, AgentProcessReady) else _exit_reason(child)
            raise BodyFailed(f"Its process did not start: {problem}", FailureClass.UNKNOWN)
        return child

    async def _wait_for_result(self, child: AgentProcess) -> AgentProcessResult | None:
        """How the body ended; meanwhile its process hears how long it may go on."""
        while True:
            try:
                async with asyncio.timeout(LEASE_SEND_INTERVAL_S):
                    said = await child.said.get()
            except TimeoutError:
                await child.extend_lease(self._lease_until())
                continue
            return said if isinstance(said, AgentProcessResult) else None

    async def _stop(self, child: AgentProcess) -> None:
        """Asked, then killed. Cancelled once more it is killed at once."""
        try:
            child.process.signal(signal.SIGTERM, group=False)
            async with asyncio.timeout(KILL_AFTER_S):
                await child.said.get()
        except TimeoutError:
            pass
        finally:
            child.process.kill()
            await child.close()

    async def _release(self, child: AgentProcess) -> None:
        child.finish_run()
        await child.extend_lease(lease_watchdog_process.NO_DEADLINE)
        if len(self._idle) < IDLE_PROCESSES_MAX:
            self._idle.append(child)
        else:
            await child.close()


def _exit_reason(child: AgentProcess) -> str:
    status = child.process.status
    return describe_exit(status)[1] if status is not None else "Its process ended without a word."

"""Runs sync agent bodies in killable child processes, which are started on demand and reused.

A process runs one body at a time. Invariants:
- a body ends once: by the result its process sends, or by the exit status of the process;
- a body is stopped by SIGTERM, then killed with its descendants `KILL_AFTER_S` later; its process is not reused;
- every renewal of the lease is sent to the process, whose watchdog kills it without one.
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
ACTIVE_PROCESSES = metrics.gauge("rota_agents_executor_active_processes", "Processes that run a sync agent.")

START_TIMEOUT_S: Final = 60.0
KILL_AFTER_S: Final = 3.0
EXIT_TIMEOUT_S: Final = 2.0
LEASE_SEND_INTERVAL_S: Final = 0.5
"""How often the lease deadline is sent to a process."""
IDLE_PROCESSES_MAX: Final = 8
LINE_CHARS_MAX: Final = 2000


class AgentProcess:
    def __init__(self, app: str, folder: Path) -> None:
        self.messages: asyncio.Queue[AgentProcessMessage | None] = asyncio.Queue()
        """Messages from the process, in order; None: the process has ended."""
        self.agent = ""
        self._buffer = bytearray()
        self._partial_lines = {"stdout": b"", "stderr": b""}
        ours, theirs = socket.socketpair()
        lease_socket, watchdog_socket = socket.socketpair()
        with theirs, watchdog_socket:
            descriptors = (theirs.fileno(), watchdog_socket.fileno())
            argv = [sys.executable, "-P", "-m", "rota.worker.agents.process_main", *map(str, descriptors)]
            self.process = OsProcess(
                [*argv, str(os.getpid()), app, str(folder)],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=partial(self._on_output, "stdout"),
                stderr=partial(self._on_output, "stderr"),
                pass_fds=descriptors,
            )
        for each in (ours, lease_socket):
            each.setblocking(False)
        self._socket = ours
        self._lease_socket = lease_socket
        self._reader = DescriptorReader(os.dup(ours.fileno()), self._on_data)
        POOL_SIZE.inc()
        self._exit_watcher = asyncio.create_task(self._wait_for_exit(), name="agent process")

    @property
    def alive(self) -> bool:
        return not self.process.ended.is_set()

    async def start_run(self, run: AgentRun, until: float) -> None:
        await self.extend_lease(until)
        await self._send(self._socket, pack_agent_message(AgentProcessRequest(run)))

    async def extend_lease(self, until: float) -> None:
        """Lets the body run until `until` (monotonic seconds)."""
        await self._send(self._lease_socket, lease_watchdog_process.encode_deadline(until))

    async def _send(self, to: socket.socket, data: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(to, data)
        except OSError:
            self.process.kill()  # the process or its watchdog died: `messages` closes and the run is reported as ended

    async def close(self) -> None:
        await self.process.kill_and_wait(EXIT_TIMEOUT_S)
        await asyncio.wait([self._exit_watcher], timeout=EXIT_TIMEOUT_S)
        self._exit_watcher.cancel()
        self._reader.close()
        self._socket.close()
        self._lease_socket.close()

    async def _wait_for_exit(self) -> None:
        await self.process.ended.wait()
        POOL_SIZE.dec()
        self._reader.drain()
        self.finish_run()
        self.messages.put_nowait(None)

    def _on_data(self, data: bytes) -> None:
        self._buffer += data
        try:
            while (message := pop_agent_message(self._buffer)) is not None:
                self.messages.put_nowait(AGENT_MESSAGE_DECODER.decode(message))
        except msgspec.DecodeError as error:
            log.warning("agent_process_decode_failed", reason=str(error))
            self.process.kill()

    def finish_run(self) -> None:
        """The body has ended: logs the rest of its output, including an unterminated line."""
        self.process.drain()
        for stream, partial_line in self._partial_lines.items():
            if partial_line:
                self._on_output(stream, b"\n")
        self.agent = ""

    def _on_output(self, stream: str, data: bytes) -> None:
        *lines, rest = (self._partial_lines[stream] + data).split(b"\n")
        if len(rest) > LINE_CHARS_MAX:
            lines, rest = [*lines, rest], b""
        self._partial_lines[stream] = rest
        for line in lines:
            log.info(
                "agent_output",
                agent=self.agent,
                stream=stream,
                line=line.decode(errors="replace")[:LINE_CHARS_MAX].rstrip(),
            )


class AgentProcessPool:
    """`lease_until` returns the end of the current lease, in monotonic seconds."""

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
            message = await self._wait_for_result(child)
        except asyncio.CancelledError:
            await self._stop(child)
            raise
        except BaseException:
            await child.close()
            raise
        if message is None:
            await child.close()
            raise BodyFailed(_exit_reason(child), FailureClass.UNKNOWN)
        await self._release(child)
        if message.failure is not None:
            raise BodyFailed(message.error, message.failure)

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
                loaded = await child.messages.get()
        except BaseException:
            await child.close()
            raise
        if not isinstance(loaded, AgentProcessReady) or loaded.problem:
            await child.close()
            problem = loaded.problem if isinstance(loaded, AgentProcessReady) else _exit_reason(child)
            raise BodyFailed(f"Its process did not start: {problem}", FailureClass.UNKNOWN)
        return child

    async def _wait_for_result(self, child: AgentProcess) -> AgentProcessResult | None:
        """Waits for the end of the body, sending lease deadlines meanwhile."""
        while True:
            try:
                async with asyncio.timeout(LEASE_SEND_INTERVAL_S):
                    message = await child.messages.get()
            except TimeoutError:
                await child.extend_lease(self._lease_until())
                continue
            return message if isinstance(message, AgentProcessResult) else None

    async def _stop(self, child: AgentProcess) -> None:
        """SIGTERM, then SIGKILL after `KILL_AFTER_S`, or immediately if cancelled again."""
        try:
            child.process.signal(signal.SIGTERM, group=False)
            async with asyncio.timeout(KILL_AFTER_S):
                await child.messages.get()
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
    return describe_exit(status)[1] if status is not None else "Its process ended without a result."

"""Runs sync agent bodies in killable child processes (`rota.worker.processes`).

A process runs one body at a time. Invariants:
- a body ends once: by the result its process sends, or by the exit status of the process;
- a body is stopped by SIGTERM, then killed with its descendants `KILL_AFTER_S` later; its process is not reused;
- the time limit of a run starts when a process that has loaded the app takes it;
- every renewal of the lease is sent to the process, whose watchdog kills it without one.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from rota.agents.running import START_FAILURES, AgentRun, BodyFailed, PreparedBody
from rota.infra.telemetry import metrics
from rota.model.failure_classes import FailureClass
from rota.worker import host_metrics
from rota.worker.agents import lease_watchdog_process
from rota.worker.agents.process_messages import (
    AGENT_MESSAGE_BYTES_MAX,
    AGENT_MESSAGE_DECODER,
    AgentProcessMessage,
    AgentProcessRequest,
    AgentProcessResult,
)
from rota.worker.processes.child import ChildProcess, ChildProgram, OutputStream, ProcessStartFailed
from rota.worker.processes.group_guard import ProcessGroupGuard
from rota.worker.processes.os_process import describe_exit
from rota.worker.processes.pool import ProcessPool

log = structlog.get_logger(__name__)
POOL_SIZE = metrics.gauge("rota_agents_executor_pool_size", "Processes for sync agents.")
ACTIVE_PROCESSES = metrics.gauge("rota_agents_executor_active_processes", "Processes that run a sync agent.")

KILL_AFTER_S: Final = 3.0
LEASE_SEND_INTERVAL_S: Final = 0.5
"""How often the lease deadline is sent to a process."""
IDLE_PROCESSES_MAX: Final = 8
STARTS_MAX: Final = max(1, host_metrics.cores() // 100)
LINE_CHARS_MAX: Final = 2000


class AgentProcess(ChildProcess[AgentProcessMessage]):
    """A child process, its lease and the agent it runs."""

    def __init__(self, program: ChildProgram[AgentProcessMessage], guard: ProcessGroupGuard) -> None:
        self.agent = ""
        self._partial_lines: dict[OutputStream, bytes] = {"stdout": b"", "stderr": b""}
        lease_socket, watchdog_socket = socket.socketpair()
        with watchdog_socket:
            try:
                super().__init__(program, guard, [watchdog_socket.fileno()])
            except BaseException:
                lease_socket.close()
                raise
        lease_socket.setblocking(False)
        self._lease_socket = lease_socket
        POOL_SIZE.inc()

    async def start_run(self, run: AgentRun, until: float) -> None:
        self.agent = run.name
        await self.extend_lease(until)
        await self.send(AgentProcessRequest(run))

    async def extend_lease(self, until: float) -> None:
        """Lets the body run until `until` (monotonic seconds)."""
        await self._send(self._lease_socket, lease_watchdog_process.encode_deadline(until))

    def finish_run(self) -> None:
        """The body has ended: logs the rest of its output, including an unterminated line."""
        self.process.drain()
        for stream, partial_line in self._partial_lines.items():
            if partial_line:
                self._on_output(stream, b"\n")
        self.agent = ""

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            self._lease_socket.close()

    def _on_exit(self) -> None:
        POOL_SIZE.dec()
        self.finish_run()

    def _on_output(self, stream: OutputStream, data: bytes) -> None:
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


class AgentProcessRunner(PreparedBody):
    """`lease_until` returns the end of the current lease, in monotonic seconds.

    Only `STARTS_MAX` processes start at once: many starts on few cores would all exceed the start timeout.
    """

    def __init__(self, app: str, folder: Path, lease_until: Callable[[], float]) -> None:
        self._lease_until = lease_until
        program = ChildProgram(
            "rota.worker.agents.process_main",
            app,
            folder,
            AGENT_MESSAGE_DECODER,
            AGENT_MESSAGE_BYTES_MAX,
            "agent_process_decode_failed",
        )
        self.pool = ProcessPool(
            lambda guard: AgentProcess(program, guard), idle_max=IDLE_PROCESSES_MAX, starts_max=STARTS_MAX
        )

    async def run(self, begin: Callable[[], AgentRun]) -> None:
        try:
            child = await self._acquire_process()
        except Exception as error:
            START_FAILURES.labels(type(error).__name__).inc()
            raise
        with ACTIVE_PROCESSES.track_inprogress():
            await self._run(child, begin())

    async def close(self) -> None:
        await self.pool.close()

    async def _acquire_process(self) -> AgentProcess:
        try:
            return await self.pool.acquire()
        except ProcessStartFailed as failed:
            problem = failed.problem or _exit_reason(failed.status)
            raise BodyFailed(f"Its process did not start: {problem}", FailureClass.UNKNOWN) from failed

    async def _run(self, child: AgentProcess, run: AgentRun) -> None:
        try:
            await child.start_run(run, self._lease_until())
            message = await self._wait_for_result(child)
        except asyncio.CancelledError:
            await child.stop(KILL_AFTER_S)
            raise
        except BaseException:
            await child.close()
            raise
        if message is None:
            await child.close()
            raise BodyFailed(_exit_reason(child.process.status), FailureClass.UNKNOWN)
        child.finish_run()
        await child.extend_lease(lease_watchdog_process.NO_DEADLINE)
        await self.pool.release(child)
        if message.failure is not None:
            raise BodyFailed(message.error, message.failure)

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


def _exit_reason(status: int | None) -> str:
    return describe_exit(status)[1] if status is not None else "Its process ended without a result."

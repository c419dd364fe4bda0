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

from rota.agents.runs import UNSTARTED, AgentRun, BodyFailed
from rota.infra.telemetry import metrics
from rota.model.failures import FailureClass
from rota.worker import agent_leash
from rota.worker.agent_wire import SAID, Begin, Done, Loaded, Said, packed, unpacked
from rota.worker.spawned import Reader, Spawned, how_it_ended

log = structlog.get_logger(__name__)
ALIVE = metrics.gauge("rota_agents_executor_pool_size", "Processes for sync agents.")
BUSY = metrics.gauge("rota_agents_executor_active_processes", "Processes in which a sync agent runs.")

START_S: Final = 60.0
KILL_AFTER_S: Final = 3.0
END_S: Final = 2.0
TELL_S: Final = 0.5
"""How often a process hears how long the lease is."""
IDLE_MAX: Final = 8
LINE_MAX: Final = 2000


class Child:
    def __init__(self, app: str, folder: Path) -> None:
        self.said: asyncio.Queue[Said | None] = asyncio.Queue()
        """What it says, in order; None when nothing more can come."""
        self.agent = ""
        self._buffer = bytearray()
        self._unended = {"stdout": b"", "stderr": b""}
        ours, theirs = socket.socketpair()
        leash, collar = socket.socketpair()
        with theirs, collar:
            descriptors = (theirs.fileno(), collar.fileno())
            words = [sys.executable, "-P", "-m", "rota.worker.agent_child", *map(str, descriptors)]
            self.process = Spawned(
                [*words, str(os.getpid()), app, str(folder)],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=partial(self._wrote, "stdout"),
                stderr=partial(self._wrote, "stderr"),
                pass_fds=descriptors,
            )
        for each in (ours, leash):
            each.setblocking(False)
        self._socket = ours
        self._leash = leash
        self._reader = Reader(os.dup(ours.fileno()), self._hear)
        ALIVE.inc()
        self._watching = asyncio.create_task(self._watch(), name="agent process")

    @property
    def alive(self) -> bool:
        return not self.process.ended.is_set()

    async def begin(self, run: AgentRun, until: float) -> None:
        await self.hold(until)
        await self._send(self._socket, packed(Begin(run)))

    async def hold(self, until: float) -> None:
        """Its body may go on until then, and no longer unless it hears of us again."""
        await self._send(self._leash, agent_leash.said(until))

    async def _send(self, to: socket.socket, data: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(to, data)
        except OSError:
            self.process.kill()  # it has just died, or nobody holds its leash: `said` ends, and so has its body

    async def end(self) -> None:
        await self.process.end(END_S)
        await asyncio.wait([self._watching], timeout=END_S)
        self._watching.cancel()
        self._reader.close()
        self._socket.close()
        self._leash.close()

    async def _watch(self) -> None:
        await self.process.ended.wait()
        ALIVE.dec()
        self._reader.drain()
        self.over()
        self.said.put_nowait(None)

    def _hear(self, data: bytes) -> None:
        self._buffer += data
        try:
            while (message := unpacked(self._buffer)) is not None:
                self.said.put_nowait(SAID.decode(message))
        except msgspec.DecodeError as error:
            log.warning("agent_process_unreadable", reason=str(error))
            self.process.kill()

    def over(self) -> None:
        """Its body has ended; what it wrote after its last line is one, too."""
        self.process.drain()
        for stream, left in self._unended.items():
            if left:
                self._wrote(stream, b"\n")
        self.agent = ""

    def _wrote(self, stream: str, data: bytes) -> None:
        *lines, left = (self._unended[stream] + data).split(b"\n")
        if len(left) > LINE_MAX:
            lines, left = [*lines, left], b""
        self._unended[stream] = left
        for line in lines:
            log.info(
                "agent_output", agent=self.agent, stream=stream, line=line.decode(errors="replace")[:LINE_MAX].rstrip()
            )


class AgentProcesses:
    """`body` is that of every sync agent of the app; `lease_until` is when the lease of now ends."""

    def __init__(self, app: str, folder: Path, lease_until: Callable[[], float]) -> None:
        self._app = app
        self._folder = folder
        self._lease_until = lease_until
        self._idle: list[Child] = []

    async def body(self, run: AgentRun) -> None:
        try:
            child = await self._taken()
        except Exception as error:
            UNSTARTED.labels(type(error).__name__).inc()
            raise
        with BUSY.track_inprogress():
            await self._run(child, run)

    async def _run(self, child: Child, run: AgentRun) -> None:
        try:
            child.agent = run.name
            await child.begin(run, self._lease_until())
            said = await self._heard(child)
        except asyncio.CancelledError:
            await self._stopped(child)
            raise
        except BaseException:
            await child.end()
            raise
        if said is None:
            await child.end()
            raise BodyFailed(_how(child), FailureClass.UNKNOWN)
        await self._keep(child)
        if said.failure is not None:
            raise BodyFailed(said.error, said.failure)

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        await asyncio.gather(*(child.end() for child in idle))

    async def _taken(self) -> Child:
        while self._idle:
            child = self._idle.pop()
            if child.alive:
                return child
            await child.end()
        child = Child(self._app, self._folder)
        try:
            async with asyncio.timeout(START_S):
                loaded = await child.said.get()
        except BaseException:
            await child.end()
            raise
        if not isinstance(loaded, Loaded) or loaded.problem:
            await child.end()
            problem = loaded.problem if isinstance(loaded, Loaded) else _how(child)
            raise BodyFailed(f"Its process did not start: {problem}", FailureClass.UNKNOWN)
        return child

    async def _heard(self, child: Child) -> Done | None:
        """How the body ended; meanwhile its process hears how long it may go on."""
        while True:
            try:
                async with asyncio.timeout(TELL_S):
                    said = await child.said.get()
            except TimeoutError:
                await child.hold(self._lease_until())
                continue
            return said if isinstance(said, Done) else None

    async def _stopped(self, child: Child) -> None:
        """Asked, then killed. Cancelled once more it is killed at once."""
        try:
            child.process.signal(signal.SIGTERM, group=False)
            async with asyncio.timeout(KILL_AFTER_S):
                await child.said.get()
        except TimeoutError:
            pass
        finally:
            child.process.kill()
            await child.end()

    async def _keep(self, child: Child) -> None:
        child.over()
        await child.hold(agent_leash.IDLE)
        if len(self._idle) < IDLE_MAX:
            self._idle.append(child)
        else:
            await child.end()


def _how(child: Child) -> str:
    status = child.process.status
    return how_it_ended(status)[1] if status is not None else "Its process ended without a word."

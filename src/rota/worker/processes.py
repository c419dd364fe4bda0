"""Sync tasks, in processes that can be killed: a few that live long, started when they are needed.

A *hand* has one process and gives it one frame at a time. Invariants: a frame begins (and its time-out with it) when a
process that has loaded the app takes it; whatever happens to the process, its frame ends once: by its own word, or by
the way the process ended; a process that was killed or broke is replaced by the next frame that needs one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections import deque
from functools import partial
from pathlib import Path
from typing import Final, Literal

import msgspec
import structlog

from rota.infra.telemetry import metrics
from rota.model.messages import End, Status
from rota.worker import endings
from rota.worker.desk import Desk
from rota.worker.frames import Batch, Frame
from rota.worker.plan import Plan
from rota.worker.spawned import Reader, Spawned, how_it_ended
from rota.worker.teller import Teller
from rota.worker.values import Values
from rota.worker.wire import Call, Ended, Left, Logged, Progressed, Ready, Said, Unpacker, packed

log = structlog.get_logger(__name__)
STARTED = metrics.counter("rota_worker_processes_started", "Processes started for sync tasks.")

START_S: Final = 60.0
END_S: Final = 2.0


class Child:
    """One process and the frame it has."""

    def __init__(self, plan: Plan, teller: Teller) -> None:
        self.said: asyncio.Queue[Said | None] = asyncio.Queue()
        """What it says, in order; None when nothing more can come."""
        self._teller = teller
        self._token: int | None = None
        self._unpacker = Unpacker()
        ours, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, "-P", "-m", "rota.worker.child", str(theirs.fileno()), str(os.getpid())]
            self.process = Spawned(
                [*words, plan.app, str(plan.folder)],
                cwd=plan.folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=partial(self._wrote, "stdout"),
                stderr=partial(self._wrote, "stderr"),
                pass_fds=(theirs.fileno(),),
            )
        self._socket = ours
        ours.setblocking(False)
        self._reader = Reader(os.dup(ours.fileno()), self._hear)
        self._watching = asyncio.create_task(self._watch())
        STARTED.inc()

    @property
    def alive(self) -> bool:
        return not self.process.ended.is_set()

    async def give(self, call: Call) -> None:
        self._token = call.token
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, packed(call))
        except OSError:
            # It has just died: `said` ends, and that is this frame's end.
            self.process.kill()

    def done(self) -> None:
        """Its frame is over: all of its output is here, and what comes now is nobody's."""
        self.process.drain()
        self._token = None

    async def end(self) -> None:
        await self.process.end(END_S)
        await asyncio.wait([self._watching], timeout=END_S)
        self._watching.cancel()
        self._reader.close()
        self._socket.close()

    async def _watch(self) -> None:
        await self.process.ended.wait()
        # Said before it ended, perhaps; one that was forked and lives on elsewhere may keep the line open.
        self._reader.drain()
        self.said.put_nowait(None)

    def _hear(self, data: bytes) -> None:
        try:
            for message in self._unpacker.feed(data):
                self.said.put_nowait(message)
        except msgspec.DecodeError as error:
            log.warning("process_unreadable", reason=str(error))
            self.process.kill()

    def _wrote(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        if self._token is not None:
            self._teller.write(self._token, stream, data)


class InProcesses:
    def __init__(self, desk: Desk, values: Values, plan: Plan) -> None:
        self._desk = desk
        self._values = values
        self._plan = plan
        self._waiting: deque[Batch] = deque()
        self._some = asyncio.Event()
        self._hands: set[asyncio.Task[None]] = set()
        self._idle = 0

    def add(self, batch: Batch) -> None:
        self._waiting.append(batch)
        self._some.set()
        wanted = min(sum(batch.left for batch in self._waiting) - self._idle, self._plan.processes - len(self._hands))
        for _ in range(wanted):
            hand = asyncio.create_task(self._hand(), name="rota hand")
            self._hands.add(hand)
            hand.add_done_callback(self._hands.discard)

    async def close(self) -> None:
        hands = set(self._hands)
        for hand in hands:
            hand.cancel()
        if hands:
            await asyncio.wait(hands)

    async def _hand(self) -> None:
        child: Child | None = None
        try:
            while True:
                await self._until_some()
                if child is None or not child.alive:
                    child = await self._replaced(child)
                if child is not None and (frame := self._next()) is not None:
                    await self._run(child, frame)
        finally:
            if child is not None:
                await child.end()

    async def _until_some(self) -> None:
        self._idle += 1
        try:
            while not self._waiting:
                self._some.clear()
                await self._some.wait()
        finally:
            self._idle -= 1

    def _next(self) -> Frame | None:
        """The next frame that waits, begun."""
        while self._waiting:
            batch = self._waiting[0]
            token = batch.next
            frame = None
            if token < batch.end and token not in batch.dropped:
                frame = self._desk.begin(batch, token)
            batch.next = min(token + 1, batch.end)
            if batch.next >= batch.end:
                self._waiting.popleft()
                self._desk.gone(batch)
            if frame is not None:
                return frame
        return None

    async def _replaced(self, before: Child | None) -> Child | None:
        """A process that has loaded the app; without one, the frame that needed it fails."""
        if before is not None:
            await before.end()
        problem = "it did not load the app in time"
        child = None
        try:
            child = Child(self._plan, self._desk.teller)
            async with asyncio.timeout(START_S):
                said = await child.said.get()
            if isinstance(said, Ready) and not said.problem:
                return child
            problem = said.problem if isinstance(said, Ready) else "it ended while it loaded the app"
        except OSError as error:
            problem = f"it could not be started ({error.strerror or error})"
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if child is not None:
                await child.end()
            raise
        if child is not None:
            await child.end()
        log.warning("process_not_started", reason=problem)
        if (frame := self._next()) is not None:
            reason = endings.told(f"A process for the task: {problem}.")
            self._desk.end(frame, End(frame.token, Status.FAILED, code="no_process", error=reason))
        return None

    async def _run(self, child: Child, frame: Frame) -> None:
        portion, work = frame.batch.portion, frame.work
        frame.ask = partial(child.process.signal, signal.SIGTERM, group=False)
        frame.kill = child.process.kill
        call = Call(
            token=frame.token,
            task=work.task,
            job=portion.job,
            layer=portion.layer,
            frame=frame.number,
            attempt=portion.attempt,
            input=frame.batch.input,
            env=work.env,
            gpus=frame.devices,
            trace=frame.trace,
            folder=str(self._desk.leavings.place(frame.token)),
        )
        await child.give(call)
        ended = await self._until_ended(child, frame.token)
        child.done()
        self._finish(frame, ended, child)

    async def _until_ended(self, child: Child, token: int) -> Ended | None:
        """Its own word, or None when the process ended without one."""
        while (said := await child.said.get()) is not None:
            match said:
                case Ended() if said.token == token:
                    return said
                case Progressed() if said.token == token:
                    self._desk.teller.progress(token, said.percent, said.word)
                case Logged() if said.token == token:
                    self._desk.teller.log(token, said.line)
                case Left() if said.token == token and said.name:
                    self._desk.leavings.left(token, Path(said.path), said.name)
                case Left() if said.token == token:
                    self._desk.leavings.folder(token)
                case _:
                    log.debug("process_said_too_late")
        return None

    def _finish(self, frame: Frame, ended: Ended | None, child: Child) -> None:
        if ended is None:
            code, sentence = how_it_ended(child.process.status or 0)
            end = End(frame.token, Status.FAILED, code=code, error=f"The process of the task is gone: {sentence}")
            self._desk.end(frame, end)
        elif ended.status is Status.SUCCEEDED:
            live = frame.stop is None and not frame.over
            stored = self._values.ended_with(frame.batch, frame.token, ended.value, frame) if live else None
            if not isinstance(stored, Frame):
                self._desk.end(frame, stored)
        else:
            end = End(frame.token, ended.status, code=ended.code, error=ended.error, after_s=ended.after_s)
            self._desk.end(frame, end)

"""Commands: an argv list run as it is, never by a shell, in a directory and a session of its own.

`{frame}` in a word of the argv stands for the frame's number, `{frame:04d}` for the same with leading zeros. An input
of the layer lies in the file that ROTA_INPUT names. The directory goes when the command has ended, unless it is kept;
files in it that the layer calls artifacts are stored before.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from rota.model.messages import End, Status
from rota.worker.desk import Desk
from rota.worker.endings import told
from rota.worker.environment import about_frame, for_command
from rota.worker.frames import Batch, Frame
from rota.worker.leavings import INPUT, remove
from rota.worker.limits import Held
from rota.worker.plan import Plan
from rota.worker.spawned import Spawned
from rota.worker.values import Values

log = structlog.get_logger(__name__)
LAUNCH: Final = Path(__file__).with_name("launch.py")
END_S: Final = 2.0
_FRAME = re.compile(r"\{frame(?::0?([1-9]?)d)?\}")


class Commands:
    def __init__(self, desk: Desk, values: Values, plan: Plan) -> None:
        self._desk = desk
        self._values = values
        self._plan = plan
        self._running: set[asyncio.Task[None]] = set()

    def add(self, batch: Batch) -> None:
        """All at once: there is room for each, or they would not be here."""
        while batch.next < batch.end:
            if batch.next not in batch.dropped:
                self._start(self._desk.begin(batch, batch.next))
            batch.next += 1
        self._desk.gone(batch)

    async def close(self) -> None:
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _start(self, frame: Frame) -> None:
        task = asyncio.create_task(self._run(frame), name="rota command")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, frame: Frame) -> None:
        folder = self._desk.leavings.place(frame.token)
        try:
            folder.mkdir(parents=True)
            process = self._spawned(frame, folder)
        except _Unrunnable as error:
            self._desk.end(frame, End(frame.token, Status.FAILED, code="no_command", error=told(str(error))))
        except (OSError, ValueError) as error:
            sentence = told(f"The command cannot be started: {error}.")
            self._desk.end(frame, End(frame.token, Status.FAILED, code="no_command", error=sentence))
        else:
            await self._until_ended(frame, process)
        if not self._plan.keep_dirs:
            await asyncio.to_thread(remove, folder)

    async def _until_ended(self, frame: Frame, process: Spawned) -> None:
        frame.ask = partial(process.signal, signal.SIGTERM)
        frame.kill = process.kill
        if frame.stop is not None:
            process.signal(signal.SIGTERM)
        try:
            await process.ended.wait()
        finally:
            # Cancelled only when the worker ends, and then nothing may stay behind.
            if process.status is None:
                await process.end(END_S)
        status = process.status or 0
        if status == 0 and frame.work.artifacts and frame.stop is None:
            await self._values.keep(frame, None)
        elif status == 0:
            self._desk.end(frame, None)
        else:
            code, sentence = Held(frame.work, self._plan.limits).how_it_ended(status)
            self._desk.end(frame, End(frame.token, Status.FAILED, code=code, error=sentence))

    def _spawned(self, frame: Frame, folder: Path) -> Spawned:
        portion, work = frame.batch.portion, frame.work
        about = about_frame(portion.job, portion.layer, frame.number, portion.attempt, frame.devices, frame.trace)
        env = for_command(work.env, about, str(folder))
        if frame.batch.input is not None:
            (folder / INPUT).write_bytes(frame.batch.input)
            env["ROTA_INPUT"] = str(folder / INPUT)
        argv = [_filled(word, frame.number) for word in work.argv]
        program = shutil.which(argv[0], path=env["PATH"])
        if program is None:
            raise _Unrunnable(f"There is no command {argv[0]!r} on this worker's PATH.")
        before = [str(LAUNCH), str(os.getpid()), Held(work, self._plan.limits).word, program]
        return Spawned(
            [sys.executable, "-I", "-S", *before, *argv],
            cwd=folder,
            env=env,
            stdout=partial(self._desk.teller.write, frame.token, "stdout"),
            stderr=partial(self._desk.teller.write, frame.token, "stderr"),
        )


class _Unrunnable(Exception):
    """No such program here."""


def _filled(word: str, frame: int) -> str:
    return _FRAME.sub(lambda found: f"{frame:0{int(found[1] or 0)}d}" if found[1] else str(frame), word)

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

from rota.model.protocol import AttemptResult, AttemptStatus
from rota.worker.config import WorkerConfig
from rota.worker.data.artifacts import INPUT_FILE_NAME, remove_tree
from rota.worker.data.payloads import Payloads
from rota.worker.frame_table import FrameTable
from rota.worker.frames import AssignedBatch, RunningFrame
from rota.worker.outcomes import redact_and_truncate
from rota.worker.runners.environment import command_environment, frame_variables
from rota.worker.runners.os_process import OsProcess
from rota.worker.runners.rlimits import CommandRlimits

log = structlog.get_logger(__name__)
LAUNCHER_PATH: Final = Path(__file__).with_name("command_launcher.py")
EXIT_TIMEOUT_S: Final = 2.0
_FRAME_PLACEHOLDER = re.compile(r"\{frame(?::0?([1-9]?)d)?\}")


class CommandRunner:
    def __init__(self, desk: FrameTable, values: Payloads, plan: WorkerConfig) -> None:
        self._desk = desk
        self._values = values
        self._plan = plan
        self._running: set[asyncio.Task[None]] = set()

    def add(self, batch: AssignedBatch) -> None:
        """All at once: there is room for each, or they would not be here."""
        while batch.next < batch.end:
            if batch.next not in batch.dropped:
                self._start(self._desk.start_frame(batch, batch.next))
            batch.next += 1
        self._desk.remove_started_batch(batch)

    async def close(self) -> None:
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _start(self, frame: RunningFrame) -> None:
        task = asyncio.create_task(self._run(frame), name="rota command")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, frame: RunningFrame) -> None:
        folder = self._desk.leavings.dir_path(frame.token)
        try:
            folder.mkdir(parents=True)
            process = self._spawn(frame, folder)
        except _CommandNotFound as error:
            self._desk.end(
                frame,
                AttemptResult(
                    frame.token, AttemptStatus.FAILED, code="no_command", error=redact_and_truncate(str(error))
                ),
            )
        except (OSError, ValueError) as error:
            sentence = redact_and_truncate(f"The command cannot be started: {error}.")
            self._desk.end(frame, AttemptResult(frame.token, AttemptStatus.FAILED, code="no_command", error=sentence))
        else:
            await self._wait_for_exit(frame, process)
        if not self._plan.keep_dirs:
            await asyncio.to_thread(remove_tree, folder)

    async def _wait_for_exit(self, frame: RunningFrame, process: OsProcess) -> None:
        frame.ask = partial(process.signal, signal.SIGTERM)
        frame.kill = process.kill
        if frame.stop is not None:
            process.signal(signal.SIGTERM)
        try:
            await process.ended.wait()
        finally:
            # Cancelled only when the worker ends, and then nothing may stay behind.
            if process.status is None:
                await process.kill_and_wait(EXIT_TIMEOUT_S)
        status = process.status or 0
        if status == 0 and frame.work.artifacts and frame.stop is None:
            await self._values.store_and_end(frame, None)
        elif status == 0:
            self._desk.end(frame, None)
        else:
            code, sentence = CommandRlimits(frame.work, self._plan.limits).describe_exit(status)
            self._desk.end(frame, AttemptResult(frame.token, AttemptStatus.FAILED, code=code, error=sentence))

    def _spawn(self, frame: RunningFrame, folder: Path) -> OsProcess:
        portion, work = frame.batch.portion, frame.work
        about = frame_variables(portion.job, portion.layer, frame.number, portion.attempt, frame.devices, frame.trace)
        env = command_environment(work.env, about, str(folder))
        if frame.batch.input is not None:
            (folder / INPUT_FILE_NAME).write_bytes(frame.batch.input)
            env["ROTA_INPUT"] = str(folder / INPUT_FILE_NAME)
        argv = [_expand_frame_placeholder(word, frame.number) for word in work.argv]
        program = shutil.which(argv[0], path=env["PATH"])
        if program is None:
            raise _CommandNotFound(f"There is no command {argv[0]!r} on this worker's PATH.")
        before = [
            str(LAUNCHER_PATH),
            str(os.getpid()),
            CommandRlimits(work, self._plan.limits).launcher_argument,
            program,
        ]
        return OsProcess(
            [sys.executable, "-I", "-S", *before, *argv],
            cwd=folder,
            env=env,
            stdout=partial(self._desk.teller.write, frame.token, "stdout"),
            stderr=partial(self._desk.teller.write, frame.token, "stderr"),
        )


class _CommandNotFound(Exception):
    """No such program here."""


def _expand_frame_placeholder(word: str, frame: int) -> str:
    return _FRAME_PLACEHOLDER.sub(lambda found: f"{frame:0{int(found[1] or 0)}d}" if found[1] else str(frame), word)

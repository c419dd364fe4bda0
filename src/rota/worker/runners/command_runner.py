"""Runs commands: an argv list, never through a shell, each in its own directory and session.

`{frame}` in an argument expands to the frame number, `{frame:04d}` to the same with leading zeros. The layer's input is
in the file named by ROTA_INPUT. The directory is removed when the command ends (unless `keep_dirs`), after the layer's
artifacts in it were stored.
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

from rota.model.attempt_codes import AttemptCode
from rota.model.protocol import AttemptResult, AttemptStatus
from rota.worker.config import WorkerConfig
from rota.worker.data.artifacts import INPUT_FILE_NAME, remove_tree
from rota.worker.data.payloads import Payloads
from rota.worker.frame_table import FrameTable
from rota.worker.frames import AssignedBatch, RunningFrame
from rota.worker.outcomes import redact_and_truncate
from rota.worker.processes import launcher
from rota.worker.processes.group_guard import ProcessGroupGuard
from rota.worker.processes.os_process import OsProcess, OutputCallbacks
from rota.worker.runners.environment import command_environment, frame_variables
from rota.worker.runners.rlimits import CommandRlimits

log = structlog.get_logger(__name__)
LAUNCHER_PATH: Final = Path(launcher.__file__)
EXIT_TIMEOUT_S: Final = 2.0
_FRAME_PLACEHOLDER = re.compile(r"\{frame(?::0?([1-9]?)d)?\}")


class CommandRunner:
    def __init__(self, frame_table: FrameTable, payloads: Payloads, config: WorkerConfig) -> None:
        self._frame_table = frame_table
        self._payloads = payloads
        self._config = config
        self._running: set[asyncio.Task[None]] = set()
        self._guard = ProcessGroupGuard()

    def add(self, batch: AssignedBatch) -> None:
        """Starts all frames: capacity was reserved for each on acceptance."""
        while batch.next < batch.end:
            if batch.next not in batch.dropped:
                self._start(self._frame_table.start_frame(batch, batch.next))
            batch.next += 1
        self._frame_table.remove_started_batch(batch)

    async def close(self) -> None:
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        await self._guard.close()

    def _start(self, frame: RunningFrame) -> None:
        task = asyncio.create_task(self._run(frame), name="rota command")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, frame: RunningFrame) -> None:
        folder = self._frame_table.artifacts.dir_path(frame.token)
        try:
            folder.mkdir(parents=True)
            process = self._spawn(frame, folder)
        except _CommandNotFound as error:
            self._frame_table.end(
                frame,
                AttemptResult(
                    frame.token,
                    AttemptStatus.FAILED,
                    code=AttemptCode.NO_COMMAND,
                    error=redact_and_truncate(str(error)),
                ),
            )
        except (OSError, ValueError) as error:
            sentence = redact_and_truncate(f"The command cannot be started: {error}.")
            self._frame_table.end(
                frame, AttemptResult(frame.token, AttemptStatus.FAILED, code=AttemptCode.NO_COMMAND, error=sentence)
            )
        else:
            await self._wait_for_exit(frame, process)
        if not self._config.keep_dirs:
            await asyncio.to_thread(remove_tree, folder)

    async def _wait_for_exit(self, frame: RunningFrame, process: OsProcess) -> None:
        frame.request_stop = partial(process.signal, signal.SIGTERM)
        frame.kill = process.kill
        if frame.stop is not None:
            process.signal(signal.SIGTERM)
        try:
            await process.ended.wait()
        finally:
            # Cancelled only when the worker ends: leave no process behind.
            if process.status is None:
                await process.kill_and_wait(EXIT_TIMEOUT_S)
        status = process.status or 0
        if status == 0 and frame.work.artifacts and frame.stop is None:
            await self._payloads.store_and_end(frame, None)
        elif status == 0:
            self._frame_table.end(frame, None)
        else:
            code, sentence = CommandRlimits(frame.work, self._config.limits).describe_exit(status)
            self._frame_table.end(frame, AttemptResult(frame.token, AttemptStatus.FAILED, code=code, error=sentence))

    def _spawn(self, frame: RunningFrame, folder: Path) -> OsProcess:
        assigned, work = frame.batch.assigned, frame.work
        variables = frame_variables(
            assigned.job, assigned.layer, frame.number, assigned.attempt, frame.devices, frame.trace
        )
        env = command_environment(work.env, variables, str(folder))
        if frame.batch.input is not None:
            (folder / INPUT_FILE_NAME).write_bytes(frame.batch.input)
            env["ROTA_INPUT"] = str(folder / INPUT_FILE_NAME)
        argv = [_expand_frame_placeholder(argument, frame.number) for argument in work.argv]
        program = shutil.which(argv[0], path=env["PATH"])
        if program is None:
            raise _CommandNotFound(f"The command {argv[0]!r} is not on this worker's PATH.")
        launch = [
            str(LAUNCHER_PATH),
            str(os.getpid()),
            CommandRlimits(work, self._config.limits).launcher_argument,
            program,
        ]
        return OsProcess(
            [sys.executable, "-I", "-S", *launch, *argv],
            cwd=folder,
            env=env,
            output=OutputCallbacks(
                partial(self._frame_table.progress_reporter.write, frame.token, "stdout"),
                partial(self._frame_table.progress_reporter.write, frame.token, "stderr"),
            ),
            guard=self._guard,
        )


class _CommandNotFound(Exception):
    """The program is not on the PATH."""


def _expand_frame_placeholder(argument: str, frame: int) -> str:
    return _FRAME_PLACEHOLDER.sub(lambda match: f"{frame:0{int(match[1] or 0)}d}" if match[1] else str(frame), argument)

"""The worker process that `rota up` runs with the server, so that one command is enough to run jobs.

It is a `rota worker` in its own process and session: Ctrl-C in the terminal reaches only the server, which drains the
worker first, while it still accepts results. The worker never outlives the server: the kernel kills it when the server
dies, and its frames are requeued once a server is up. A worker that dies is restarted with a new session.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import UUID

import msgspec

from rota.cli.core import output
from rota.infra.data_dir import unusable_path_error
from rota.infra.service import Lifecycle, Service
from rota.local.identity import LAUNCHER
from rota.local.process import NEEDS_GUARD, ChildProcess
from rota.model.errors import SetupFailed, Unavailable
from rota.model.settings import Settings
from rota.placement import WorkerInfo
from rota.runtime import Replica

POLL_INTERVAL_S: Final = 0.02
_CODE_SUFFIX = re.compile(r" \[[a-z_]+\]$")
KILL_TIMEOUT_S: Final = 1.5
"""Shorter than the supervisor's limit for a cancelled service."""


class EmbeddedWorkerOptions(msgspec.Struct, frozen=True):
    """Options of `rota up` for its worker."""

    app: str = ""
    config: Path | None = None


class EmbeddedWorker:
    def __init__(self, options: EmbeddedWorkerOptions, settings: Settings, replica: Replica, folder: Path) -> None:
        self.name = socket.gethostname()
        self.app = options.app
        self._config = options.config
        self._settings = settings
        self._replica = replica
        self._folder = folder

    @property
    def service(self) -> Service:
        return Service("worker", self._run)

    def registered_worker(self) -> WorkerInfo | None:
        """The worker as registered at this process's server."""
        workers = self._replica.engine.registry.workers.values()
        return next((worker for worker in workers if worker.name == self.name and worker.confirmed), None)

    async def _run(self, life: Lifecycle) -> None:
        before = set(self._replica.engine.registry.workers)
        process = self._spawn()
        try:
            await self._wait_registered(process, before)
            life.ready()
            await _wait_exit_or_drain(process, life)
            if not life.draining:
                raise Unavailable(f"The worker exited with status {process.status}: see its log {self._log_path}.")
            if (worker := self.registered_worker()) is not None and worker.frames:
                output.print_stderr("Stopping: running frames finish first; Ctrl-C again stops them immediately.")
            process.send_signal(signal.SIGTERM)
            await process.wait()
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait(KILL_TIMEOUT_S)

    async def _wait_registered(self, process: ChildProcess, before: set[UUID]) -> None:
        while True:
            if process.status is not None:
                raise SetupFailed(f"The worker did not start: {_last_log_line(process)} (log: {self._log_path})")
            found = self._replica.engine.registry.workers
            if any(worker.name == self.name and worker.confirmed for at, worker in found.items() if at not in before):
                return
            await asyncio.sleep(POLL_INTERVAL_S)

    @property
    def _log_path(self) -> Path:
        return self._folder / "log" / "worker.log"

    def _spawn(self) -> ChildProcess:
        args = [*([self.app] if self.app else []), "--name", self.name]
        return spawn_worker(args, os.environ | self._environment(), self._log_path, self._config)

    def _environment(self) -> dict[str, str]:
        """Settings that the worker cannot find in `up.json`, which is written after the worker is ready."""
        settings = self._settings
        # The worker must return its frames before the server's drain timeout ends.
        drain_s = min(settings.worker.drain_timeout, settings.service.drain_timeout / 2)
        found = {"ROTA_NATS_URL": self._replica.urls.nats, "ROTA_WORKER_DRAIN_TIMEOUT": f"{drain_s * 1000:.0f}ms"}
        # For agents; frames need neither.
        found |= {"ROTA_POSTGRES_URL": self._replica.urls.postgres, "ROTA_REDIS_URL": self._replica.urls.redis}
        if settings.store.directory:
            found["ROTA_STORE_DIRECTORY"] = settings.store.directory
        if not settings.worker.work_dir:
            # A temporary directory would be left behind when the worker is killed.
            found["ROTA_WORKER_WORK_DIR"] = str(self._folder / "work")
        return found


def spawn_worker(args: Sequence[str], env: Mapping[str, str], log: Path, config: Path | None = None) -> ChildProcess:
    """Start `rota worker ARGS` in its own session; it dies with this process."""
    launch = [sys.executable, "-I", "-S", str(LAUNCHER), "--parent", str(os.getpid())]
    launch += ["--deathsig", str(int(signal.SIGKILL)), *(["--guard"] if NEEDS_GUARD else []), "--"]
    # -P: a file in the current directory must not shadow a module.
    rota = [sys.executable, "-P", "-m", "rota.cli", *(["--config", str(config)] if config else [])]
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with log.open("wb") as file:
            child = subprocess.Popen(
                [*launch, *rota, "worker", *args],
                stdin=subprocess.PIPE if NEEDS_GUARD else subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
    except OSError as error:
        raise unusable_path_error(log.parent, error) from error
    return ChildProcess(child, log)


async def _wait_exit_or_drain(process: ChildProcess, life: Lifecycle) -> None:
    """Wait until the process has exited or the service is draining."""
    tasks = {asyncio.create_task(process.wait()), asyncio.create_task(life.until_draining())}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _last_log_line(process: ChildProcess) -> str:
    """The error message with which the worker exited, without prefix and code."""
    with suppress(OSError):
        if tail := process.log_tail():
            return _CODE_SUFFIX.sub("", tail.splitlines()[-1].removeprefix("rota: "))
    return f"it exited with status {process.status}."

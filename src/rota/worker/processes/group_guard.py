"""Kills the descendants of child processes when the worker is killed.

A child dies with its worker by the parent-death signal; its own children do not, and no worker is left to kill their
process group. A `ProcessGroupGuard` has a second process (`group_killer`) that knows the groups and outlives the worker
for the moment it needs to kill them. It is started with the first group, and again if it was killed.

Without the second process (the system has no process left) children run all the same, without this protection.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from rota.worker.processes import group_killer

log = structlog.get_logger(__name__)
KILLER_PATH: Final = Path(group_killer.__file__)
EXIT_TIMEOUT_S: Final = 2.0


class ProcessGroupGuard:
    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._killer: subprocess.Popen[bytes] | None = None

    def add(self, group: int) -> None:
        """Kill this group if the worker dies."""
        self._groups.add(group)
        if self._killer is not None and self._killer.poll() is None:
            self._send([group])
        else:
            self._start()

    def discard(self, group: int) -> None:
        """The group has ended, and its number may be used again."""
        self._groups.discard(group)
        self._send([-group])

    @property
    def pid(self) -> int | None:
        """Of the second process."""
        return self._killer.pid if self._killer is not None else None

    async def close(self) -> None:
        """End the second process. Groups that are left are no longer guarded."""
        self._send([-group for group in self._groups])
        killer, self._killer = self._killer, None
        if killer is None:
            return
        _close_pipe(killer)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(killer.wait, EXIT_TIMEOUT_S)
        killer.kill()
        await asyncio.to_thread(killer.wait)

    def _start(self) -> None:
        if self._killer is not None:
            _close_pipe(self._killer)
        try:
            self._killer = subprocess.Popen(
                [sys.executable, "-I", "-S", str(KILLER_PATH), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            self._killer = None
            log.warning("process_group_guard_not_started", reason=str(error))
            return
        assert self._killer.stdin is not None
        os.set_blocking(self._killer.stdin.fileno(), False)
        self._send(self._groups)

    def _send(self, groups: set[int] | list[int]) -> None:
        if self._killer is None or self._killer.stdin is None or self._killer.stdin.closed or not groups:
            return
        lines = b"".join(b"%d\n" % group for group in groups)
        try:
            complete = os.write(self._killer.stdin.fileno(), lines) == len(lines)
        except OSError:
            complete = False
        if not complete:  # it ended, or does not read: the next group starts another one
            log.warning("process_group_guard_lost")
            self._killer.kill()


def _close_pipe(killer: subprocess.Popen[bytes]) -> None:
    if killer.stdin is not None:
        with suppress(OSError):
            killer.stdin.close()

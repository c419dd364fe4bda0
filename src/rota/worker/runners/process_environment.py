"""Environment variables and working directory of a task process: set for each frame, restored after it.

The variables that identify a frame stay until the next one sets its own, because no task code runs in between: frames
of a series differ in few of them, and setting and removing all of them costs more than a short frame.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from rota.worker.runners.environment import TRACE_VARIABLE, frame_variables
from rota.worker.runners.process_messages import TaskProcessRequest


class ProcessEnvironment:
    def __init__(self, folder: Path) -> None:
        """Frames start in `folder`, with the variables that this process has now and their own."""
        self._folder = folder
        self._folder_path = _working_directory()
        # What the mapping holds, in CPython since 3.2. Reading the mapping itself checks every name.
        self._variables: dict[bytes, bytes] = os.environb._data  # type: ignore[attr-defined]  # noqa: SLF001
        self._own = dict(self._variables)
        self._expected = dict(self._variables)
        """What `_variables` is, unless the frame has changed it, or its layer declares some."""
        self._identity: dict[str, str] = {}
        """The variables of the frame before that are still set."""

    def enter(self, call: TaskProcessRequest[str]) -> None:
        if TRACE_VARIABLE in self._identity and not call.trace:
            self._restore()
        if call.env:
            os.environ.update(call.env)
            self._identity.clear()
        wanted = frame_variables(call.job, call.layer, call.frame, call.attempt, call.gpus, call.trace)
        for name, value in wanted.items():
            if self._identity.get(name) != value:
                self._set(name, value)

    def leave(self) -> None:
        """Restores what is different now."""
        if self._variables != self._expected:
            self._restore()
        if _working_directory() != self._folder_path:
            with suppress(OSError):
                os.chdir(self._folder)

    def _set(self, name: str, value: str) -> None:
        """As `os.environ` does it, which checks and encodes again with each access."""
        key, data = name.encode(), value.encode()
        os.putenv(key, data)
        self._variables[key] = self._expected[key] = data
        self._identity[name] = value

    def _restore(self) -> None:
        for name in self._variables.keys() - self._own.keys():
            del os.environb[name]
        for name, value in self._own.items():
            if self._variables.get(name) != value:
                os.environb[name] = value
        self._expected = dict(self._own)
        self._identity.clear()


def _working_directory() -> str:
    """Empty if it was removed."""
    try:
        return os.getcwd()  # noqa: PTH109 - a path object costs more than the call
    except OSError:
        return ""

"""The worker processes of a peer: started as commands, watched, and stopped with all their children.

The URL holds a password, so a worker finds it in its environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from bench.contenders.marks import MARKS

URL = "BENCH_URL"
KIND = "BENCH_KIND"
"""In the environment: the kind of jobs that the worker is started for, one of `bodies.KINDS`."""
END_TIMEOUT_S = 3.0


def url_of_worker() -> str:
    """Set in a worker; a process that only enqueues passes its URL on its own."""
    return os.environ.get(URL, "redis://")


def kind_of_worker() -> str:
    return os.environ.get(KIND, "sync")


class WorkerProcesses:
    def __init__(self, commands: Sequence[Sequence[str]], url: str, kind: str, marks: str) -> None:
        env = os.environ | {URL: url, KIND: kind, MARKS: marks}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", *command],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                start_new_session=True,
            )
            for command in commands
        ]

    def ended(self) -> int:
        """How many have exited, which none does by itself."""
        return sum(process.poll() is not None for process in self._processes)

    def stop(self) -> None:
        """Each has children; they are in its process group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_TIMEOUT_S)

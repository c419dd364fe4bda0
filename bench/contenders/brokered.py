"""Peers by Redis bring a command for their workers: it is started, its bodies say when they ran, and it is stopped.

The URL holds a password, so the worker finds it in its environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from bench.contenders.marks import MARKS, Marks
from bench.contenders.serve import DRAIN_TIMEOUT_S

BROKER = "BENCH_BROKER"
POLL_S = 0.1
END_TIMEOUT_S = 10.0


def broker_url() -> str:
    """Of a worker; whoever only enqueues is told otherwise."""
    return os.environ.get(BROKER, "redis://")


def drain_s(url: str, n: int, module: str, *words: str) -> float:
    """Seconds from the first body to the last, worked off by `python -m module words`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "marks")
        marks = Marks.make(path, n)
        worker = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            env=os.environ | {BROKER: url, MARKS: str(path)},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            start_new_session=True,
        )
        try:
            return _run_s(marks, worker)
        finally:
            _stop(worker)


def _run_s(marks: Marks, worker: subprocess.Popen[bytes]) -> float:
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while not all(moments := marks.read()):
        assert worker.poll() is None, "the worker ended"
        assert time.monotonic() < deadline, f"{moments.count(0)} never ran"
        time.sleep(POLL_S)
    return (max(moments) - min(moments)) / 1e9


def _stop(worker: subprocess.Popen[bytes]) -> None:
    """It has children; all of them are in a group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, number)
        with suppress(subprocess.TimeoutExpired):
            worker.wait(END_TIMEOUT_S)

"""Progress bar of a job, on standard error if that is a terminal and `rota[cli]` is installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from rota.api.jobs import JobView


class ProgressBar:
    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    @property
    def is_visible(self) -> bool:
        return self._progress is not None

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and find_spec("rich") is not None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.start()
        return self

    def __exit__(self, _kind: object, _error: BaseException | None, _trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, job: JobView) -> None:
        if self._progress is None:
            return
        if self._task is None:
            self._task = self._progress.add_task("", total=sum(layer.frames.count for layer in job.layers))
        ended = sum(n for layer in job.layers for state, n in layer.counts.items() if state.terminal)
        self._progress.update(self._task, description=f"{job.name} {job.state.lower()}", completed=ended)

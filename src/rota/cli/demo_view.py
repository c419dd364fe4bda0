"""How the demo tells its story: lines that are checked before they are printed, above a picture of the farm.

In a terminal the picture is drawn anew a few times a second; in a pipe there are the lines alone.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rota.cli import output
from rota.cli.books_view import bar, cores, in_force
from rota.cli.demo_farm import Seen
from rota.cli.jobs_view import counts_of
from rota.engine.jobs import Job
from rota.model.errors import RotaError
from rota.model.lifecycle import FrameState

PICTURE_CELLS = 24
_COLOURS = {FrameState.SUCCEEDED: "green", FrameState.FAILED: "red", FrameState.CANCELLED: "yellow"}


class Story:
    def __init__(self) -> None:
        self.console = output.console()
        self.began = time.monotonic()
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, _error: BaseException | None, _trace: TracebackType | None) -> None:
        if self._live is not None and self._live.is_started:
            self._live.stop()

    def chapter(self, text: str) -> None:
        self.console.print(Text(text, style="bold"))

    def kept(self, kept: bool, text: str) -> None:
        """A promise, and whether it is kept; the first that is not ends the demo."""
        if not kept:
            raise RotaError(f"The demo found a promise broken: {text}; please report it.")
        self.console.print(Text.assemble(f"  {time.monotonic() - self.began:5.1f} s ", ("✓", "green"), f" {text}"))

    def show(self, seen: Seen) -> None:
        if self._live is None:
            return
        if not self._live.is_started:
            self._live.start()
        self._live.update(Group(*_picture(seen)), refresh=True)


def _picture(seen: Seen) -> list[RenderableType]:
    return [Text(""), _shares(seen), Text(""), _workers(seen), Text(""), _jobs(seen)]


def _shares(seen: Seen) -> Table:
    rows = []
    for show, shares in seen.shares.items():
        for share in shares:
            burst, size = in_force("subscription", "int_burst", share.limits), share.limits["int_size"]
            used = f"{cores(share.usage.cores)} of {cores(burst or 0)} cores"
            rows.append((show, share.name, used, bar(share.usage.cores, burst, size), f"{share.usage.gpus} GPUs"))
    return output.table(("show", "pool", "in use", "of burst", ""), rows)


def _workers(seen: Seen) -> Table:
    rows = []
    for worker in seen.workers:
        filled = bar(worker.cores, worker.hello.cores)
        runs = f"{worker.frames} frames" if worker.state == "up" or worker.frames else worker.state
        rows.append((worker.name, worker.pool, runs, filled, f"{worker.gpus} GPUs"))
    return output.table(("worker", "pool", "runs", "of its cores", ""), rows)


def _jobs(seen: Seen) -> Table:
    drawn = output.table(("job", "show", "state", "frames", "waiting", "running"), [])
    for job in seen.jobs.values():
        counts = counts_of(job)
        numbers = (str(counts.get(FrameState.WAITING, 0)), str(counts.get(FrameState.DISPATCHED, 0)))
        drawn.add_row(job.name, job.show, job.state.lower(), _frames(job), *numbers)
    return drawn


def _frames(job: Job) -> Text:
    """A cell for each part of its frames, coloured by how they ended."""
    counts, total = counts_of(job), sum(layer.frames.count for layer in job.layers)
    text, filled = Text(), 0
    for state, colour in _COLOURS.items():
        cells = round(PICTURE_CELLS * counts.get(state, 0) / total)
        text.append("█" * cells, colour)
        filled += cells
    return text.append("░" * max(0, PICTURE_CELLS - filled), "dim").append(f" {total}")

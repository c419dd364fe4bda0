"""The demo's report: lines that are checked before they are printed, above a live dashboard of the stack.

A terminal redraws the dashboard a few times a second; a pipe gets only the lines.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rota.api.jobs import JobView
from rota.cli.core import output
from rota.cli.core.tables import cap_of_field, cores_text, usage_bar
from rota.cli.jobs.view import frame_counts
from rota.demo.stack import DemoSnapshot
from rota.model.errors import RotaError
from rota.model.job_states import FrameState

FRAME_BAR_CELLS = 24
_COLOURS = {FrameState.SUCCEEDED: "green", FrameState.FAILED: "red", FrameState.CANCELLED: "yellow"}


class DemoReport:
    def __init__(self) -> None:
        self.console = output.console()
        self.began = time.monotonic()
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, _error: BaseException | None, _trace: TracebackType | None) -> None:
        if self._live is not None and self._live.is_started:
            self._live.stop()

    def heading(self, text: str) -> None:
        self.console.print(Text(text, style="bold"))

    def check(self, passed: bool, text: str) -> None:
        """Print a checked statement; the first that does not hold ends the demo."""
        if not passed:
            raise RotaError(f"A check of the demo failed ({text}): please report it.")
        self.console.print(Text.assemble(f"  {time.monotonic() - self.began:5.1f} s ", ("✓", "green"), f" {text}"))

    def draw(self, snapshot: DemoSnapshot) -> None:
        if self._live is None:
            return
        if not self._live.is_started:
            self._live.start()
        self._live.update(Group(*_dashboard(snapshot)), refresh=True)


def _dashboard(snapshot: DemoSnapshot) -> list[RenderableType]:
    return [Text(""), _subscription_table(snapshot), Text(""), _worker_table(snapshot), Text(""), _job_table(snapshot)]


def _subscription_table(snapshot: DemoSnapshot) -> Table:
    rows = []
    for show, shares in snapshot.shares.items():
        for share in shares:
            burst, size = cap_of_field("subscription", "int_burst", share.limits), share.limits["int_size"]
            used = f"{cores_text(share.usage.cores)} of {cores_text(burst or 0)} cores"
            rows.append((show, share.name, used, usage_bar(share.usage.cores, burst, size), f"{share.usage.gpus} GPUs"))
    return output.make_table(("show", "pool", "in use", "of burst", ""), rows)


def _worker_table(snapshot: DemoSnapshot) -> Table:
    rows = []
    for worker in snapshot.workers:
        filled = usage_bar(worker.cores, worker.hello.cores)
        runs = f"{worker.frames} frames" if worker.state == "up" or worker.frames else worker.state
        rows.append((worker.name, worker.pool, runs, filled, f"{worker.gpus} GPUs"))
    return output.make_table(("worker", "pool", "runs", "of its cores", ""), rows)


def _job_table(snapshot: DemoSnapshot) -> Table:
    table = output.make_table(("job", "show", "state", "frames", "waiting", "running"), [])
    for job in snapshot.jobs.values():
        counts = frame_counts(job)
        numbers = (str(counts.get(FrameState.WAITING, 0)), str(counts.get(FrameState.DISPATCHED, 0)))
        table.add_row(job.name, job.show, job.state.lower(), _frame_bar(job), *numbers)
    return table


def _frame_bar(job: JobView) -> Text:
    """The frames of a job, coloured by how they ended."""
    counts, total = frame_counts(job), sum(layer.frames.count for layer in job.layers)
    text, filled = Text(), 0
    for state, colour in _COLOURS.items():
        cells = round(FRAME_BAR_CELLS * counts.get(state, 0) / total)
        text.append("█" * cells, colour)
        filled += cells
    return text.append("░" * max(0, FRAME_BAR_CELLS - filled), "dim").append(f" {total}")

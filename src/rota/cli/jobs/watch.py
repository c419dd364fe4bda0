"""Live display of `rota job watch`: a bar for each layer, redrawn in place; in a pipe, one line per change.

It is written to standard error; standard output is for the result of the job.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from rota.api.jobs import JobView, Layer
from rota.cli.core import output
from rota.model.job_states import FrameState, JobState
from rota.model.units import humanize_duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.text import Text

LAYERS_SHOWN_MAX: Final = 12
BAR_CELLS: Final = 24
LINE_INTERVAL_S: Final = 1.0
"""Minimum interval between lines in a pipe."""
PACE_WINDOW_S: Final = 15.0
"""Window over which the pace is measured."""
_COLOURS: Final = {
    FrameState.SUCCEEDED: "green",
    FrameState.OUTPUT_QUARANTINED: "magenta",
    FrameState.FAILED: "red",
    FrameState.TIMEOUT: "red",
    FrameState.DENIED: "red",
    FrameState.CANCELLED: "yellow",
    FrameState.DISPATCHED: "cyan",
}
"""In drawing order; waiting frames are left empty."""


class JobProgressDisplay:
    def __init__(self) -> None:
        self._live: Live | None = None
        self._last_line = ""
        self._last_line_at = float("-inf")
        self._pace: deque[tuple[float, int]] = deque()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.live import Live

            self._live = Live(console=output.console(sys.stderr), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, _kind: object, _error: BaseException | None, _trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, job: JobView) -> None:
        now = time.monotonic()
        self._pace.append((now, _ended_count(job)))
        while now - self._pace[0][0] > PACE_WINDOW_S:
            self._pace.popleft()
        if self._live is not None:
            self._live.update(self._render(job), refresh=True)
        elif (
            now - self._last_line_at >= LINE_INTERVAL_S
            and (line := _progress_line(job)) != self._last_line
            and not job.state.terminal
        ):
            output.print_stderr(line)
            self._last_line, self._last_line_at = line, now

    def _render(self, job: JobView) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        why = f"  {job.reason}" if job.reason else ""
        head = Text.assemble(
            (job.name, "bold"), f"  {job.id}  ", (job.state.value, _state_style(job.state)), (why, "dim")
        )
        grid = Table.grid(padding=(0, 2))
        for layer in job.layers[:LAYERS_SHOWN_MAX]:
            counts = layer.counts
            ended = sum(n for state, n in counts.items() if state.terminal)
            running, waiting = counts.get(FrameState.DISPATCHED, 0), counts.get(FrameState.WAITING, 0)
            numbers = f"{ended} of {layer.frames.count}"
            more = ", ".join(f"{n} {word}" for n, word in ((running, "on workers"), (waiting, "waiting")) if n)
            grid.add_row(output.printable(layer.name), layer_bar(layer), numbers, Text(more, "dim"))
        lines: list[RenderableType] = [head, grid]
        if len(job.layers) > LAYERS_SHOWN_MAX:
            lines.append(Text(f"and {len(job.layers) - LAYERS_SHOWN_MAX} more layers", "dim"))
        if pace := self._pace_text(job):
            lines.append(Text(pace, "dim"))
        return Group(*lines)

    def _pace_text(self, job: JobView) -> str:
        (first_at, first), (last_at, last) = self._pace[0], self._pace[-1]
        if last <= first or last_at <= first_at:
            return ""
        per_s = (last - first) / (last_at - first_at)
        left = _frame_count(job) - last
        return f"{per_s:.1f} frames/s, {humanize_duration(left / per_s)} left at this pace" if left else ""


def layer_bar(layer: Layer, cells: int = BAR_CELLS) -> Text:
    """The frames of a layer, coloured by state."""
    from rich.text import Text

    text, filled, total = Text(), 0, max(1, layer.frames.count)
    so_far = 0
    for state, colour in _COLOURS.items():
        so_far += layer.counts.get(state, 0)
        upto = cells * so_far // total
        text.append("█" * (upto - filled), colour)
        filled = upto
    return text.append("░" * (cells - filled), "dim")


def _state_style(state: JobState) -> str:
    return "green" if state is JobState.SUCCEEDED else "red" if state.terminal else "cyan"


def _progress_line(job: JobView) -> str:
    running = sum(layer.counts.get(FrameState.DISPATCHED, 0) for layer in job.layers)
    why = f" ({job.reason})" if job.reason else ""
    return f"{job.name} {job.state}{why}: {_ended_count(job)} of {_frame_count(job)} frames ended, {running} on workers"


def _ended_count(job: JobView) -> int:
    return sum(n for layer in job.layers for state, n in layer.counts.items() if state.terminal)


def _frame_count(job: JobView) -> int:
    return sum(layer.frames.count for layer in job.layers)

"""The span of frames that were handed over together: from their arrival to the end of the last of them.

Most frames have none; then `Batch.traced` is None. What a frame runs finds the span as its parent: async tasks in their
context variables, processes and commands as TRACEPARENT in their environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rota.infra.telemetry import tracing
from rota.model.messages import End, Portion, Status
from rota.model.work import Work

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_WELL = (Status.SUCCEEDED, Status.CANCELLED, Status.REFUSED)


class Traced:
    def __init__(self, span: Span | None, trace: str, frames: int) -> None:
        self.trace = trace
        """Of this span, or of the hand-over where nobody collects spans on this worker."""
        self._span = span
        self._left = frames
        self._ends: dict[str, int] = {}
        self._error = ""

    @classmethod
    def of(cls, portion: Portion, work: Work, frames: int) -> Traced:
        if not tracing.on():
            return cls(None, portion.trace, frames)
        what = work.task or work.argv[0]
        span = tracing.begin(
            "run",
            portion.trace,
            job=portion.job,
            layer=portion.layer,
            attempt=portion.attempt,
            frames=frames,
            runs=what,
        )
        return cls(span, tracing.traceparent(span) or portion.trace, frames)

    def ended(self, n: int, end: End | None) -> None:
        """So many of the frames are over; None: they succeeded."""
        self._left -= n
        if self._span is None:
            return
        status = Status.SUCCEEDED if end is None else end.status
        self._ends[status.value.lower()] = self._ends.get(status.value.lower(), 0) + n
        if end is not None and status not in _WELL:
            self._error = self._error or f"{end.code}: {end.error}"
        if self._left <= 0:
            tracing.end(self._span, self._error, **self._ends)
            self._span = None

"""The span of one assigned batch: from its arrival to the end of its last frame.

Most batches have none (`AssignedBatch.span` is None). User code gets the span as its parent: async tasks in their
context variables, processes and commands as TRACEPARENT in their environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rota.infra.telemetry import tracing
from rota.model.jobs.work import Work
from rota.model.protocol import AssignedRange, AttemptResult, AttemptStatus

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_NON_ERROR_STATUSES = (AttemptStatus.SUCCEEDED, AttemptStatus.CANCELLED, AttemptStatus.REFUSED)


class BatchSpan:
    def __init__(self, span: Span | None, trace: str, frames: int) -> None:
        self.trace = trace
        """Traceparent of this span, or of the assignment when tracing is disabled on this worker."""
        self._span = span
        self._left = frames
        self._ends: dict[str, int] = {}
        self._error = ""

    @classmethod
    def start(cls, assigned: AssignedRange, work: Work, frames: int) -> BatchSpan:
        if not tracing.is_enabled():
            return cls(None, assigned.trace, frames)
        what = work.task or work.argv[0]
        span = tracing.start_span(
            "run",
            assigned.trace,
            job=assigned.job,
            layer=assigned.layer,
            attempt=assigned.attempt,
            frames=frames,
            runs=what,
        )
        return cls(span, tracing.traceparent(span) or assigned.trace, frames)

    def frames_ended(self, n: int, end: AttemptResult | None) -> None:
        """`n` frames ended with `end`; None: they succeeded."""
        self._left -= n
        if self._span is None:
            return
        status = AttemptStatus.SUCCEEDED if end is None else end.status
        self._ends[status.value.lower()] = self._ends.get(status.value.lower(), 0) + n
        if end is not None and status not in _NON_ERROR_STATUSES:
            self._error = self._error or f"{end.code}: {end.error}"
        if self._left <= 0:
            tracing.end_span(self._span, self._error, **self._ends)
            self._span = None

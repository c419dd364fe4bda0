"""Traces of jobs, from submission to end, as OpenTelemetry spans.

    submit        by the submitter, a child of its own span if there is one
      queue       from the submission until frames were claimed
      dispatch    from the claim until they were assigned to a worker: one for each layer and worker of a batch
        run       on the worker, until the last frame of that assignment has ended (`rota.worker.tracing`)
      finish      the transaction that ended the job

The submitter decides whether a job is traced: the traceparent of `submit` is stored in its details, and a job without
one costs nothing further. While no SDK is set up (`tracing.is_enabled`) nothing here is called and no query is made.
Spans describe committed work and are lost with a process that has not exported them; no decision depends on them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self
from uuid import UUID

import msgspec

from rota.infra.postgres import Database, Query, query
from rota.infra.telemetry import tracing
from rota.model.errors import PostgresUnavailable
from rota.model.ids import JobId
from rota.model.job_states import JobState
from rota.model.jobs.submission import decode_details, encode_details
from rota.model.jobs.validation import ValidatedSubmission

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

LAYER_TRACES = query(__package__, "traces_of_layers")
JOB_TRACES = query(__package__, "traces_of_jobs")
CACHE_MAX: Final = 10_000


class TracedSubmission(Protocol):
    @property
    def job(self) -> JobId: ...

    @property
    def already(self) -> bool: ...


class SubmissionSpans:
    """One span for each plan that is written; `plans` carry their traceparents."""

    def __init__(self, plans: Sequence[ValidatedSubmission], parents: Sequence[Context | None] | None = None) -> None:
        self.plans = plans
        self._spans: list[Span] = []
        if tracing.is_enabled():
            of = parents or [None] * len(plans)
            self._spans = [
                tracing.start_span("submit", parent, show=plan.show, topic=plan.topic, frames=_frame_count(plan))
                for plan, parent in zip(plans, of, strict=True)
            ]
            self.plans = [_with_traceparent(plan, span) for plan, span in zip(plans, self._spans, strict=True)]

    def __enter__(self) -> Self:
        return self

    def record_submitted(self, submitted: Sequence[TracedSubmission]) -> None:
        for span, each in zip(self._spans, submitted, strict=False):
            span.set_attributes({"job": str(each.job), "already": each.already})

    def __exit__(self, _kind: object, error: BaseException | None, _trace: TracebackType | None) -> None:
        for span in self._spans:
            tracing.end_span(span, f"{type(error).__name__}: {error}" if error is not None else "")


class TracedDispatch(msgspec.Struct, frozen=True):
    """Frames of one layer that a worker is assigned in one message."""

    job: UUID
    layer: UUID
    worker: UUID
    attempt: int
    frames: int


class TracedJobEnd(Protocol):
    """A job that has ended."""

    @property
    def job(self) -> JobId: ...

    @property
    def state(self) -> JobState: ...


class JobTracer:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._layers: dict[UUID, str] = {}

    async def begin_dispatches(self, assignments: Sequence[TracedDispatch], since_ns: int) -> list[Span | None]:
        """Dispatch spans that begin now; None for jobs that are not traced."""
        traces = await self._layer_traceparents({each.layer for each in assignments})
        return [
            _begin_dispatch(each, trace, since_ns) if (trace := traces[each.layer]) else None for each in assignments
        ]

    async def record_finished(self, ended: Sequence[TracedJobEnd], since_ns: int) -> None:
        """Finish spans of the traced jobs."""
        traces = await self._read_traceparents(JOB_TRACES, [each.job for each in ended])
        for each in ended:
            if trace := traces.get(each.job):
                span = tracing.start_span("finish", trace, since_ns=since_ns, job=each.job, state=each.state.value)
                tracing.end_span(span, "" if each.state is JobState.SUCCEEDED else f"It ended as {each.state.value}.")

    async def _layer_traceparents(self, layers: Iterable[UUID]) -> dict[UUID, str]:
        missing = [layer for layer in layers if layer not in self._layers]
        if missing:
            if len(self._layers) > CACHE_MAX:
                self._layers.clear()
                missing = list(layers)
            found = await self._read_traceparents(LAYER_TRACES, missing)
            self._layers |= {layer: found.get(layer, "") for layer in missing}
        return {layer: self._layers[layer] for layer in layers}

    async def _read_traceparents(self, statement: Query, ids: Sequence[UUID]) -> dict[UUID, str]:
        """Without PostgreSQL spans are dropped; nothing else is affected."""
        try:
            rows = await self._database.rows(statement, list(ids))
        except PostgresUnavailable:
            return {}
        return {row["id"]: decode_details(row["request"]).trace for row in rows}


def _begin_dispatch(each: TracedDispatch, trace: str, since_ns: int) -> Span:
    if each.attempt == 1:
        queue = tracing.start_span("queue", trace, since_ns=_submitted_ns(each.job), job=each.job, frames=each.frames)
        queue.end(since_ns)
    return tracing.start_span("dispatch", trace, since_ns=since_ns, **msgspec.structs.asdict(each))


def end_spans(spans: Iterable[Span | None]) -> None:
    for span in spans:
        if span is not None:
            tracing.end_span(span)


def now_ns() -> int:
    """The time in OpenTelemetry's unit."""
    return time.time_ns()


def _with_traceparent(plan: ValidatedSubmission, span: Span) -> ValidatedSubmission:
    trace = tracing.traceparent(span)
    if not trace:
        return plan
    details = msgspec.structs.replace(decode_details(plan.details), trace=trace)
    return msgspec.structs.replace(plan, details=encode_details(details))


def _frame_count(plan: ValidatedSubmission) -> int:
    return sum(layer.frames.count for layer in plan.layers)


def _submitted_ns(job: UUID) -> int:
    """The submission time, from the job's id (UUIDv7)."""
    return (job.int >> 80) * 1_000_000

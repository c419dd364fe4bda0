"""Traces of jobs: what became of one, from whoever submitted it to its end, as spans of OpenTelemetry.

    submit        by whoever submits, below its own span if it is in one
      queue       from the submission until frames were claimed
      dispatch    from the claim until they were handed to a worker: one for each layer and worker of a batch
        run       on the worker, until the last frame of that hand-over has ended (`rota.worker.traced`)
      finish      the transaction that ended the job

Whoever submits decides whether a job is traced: the traceparent of `submit` lies in its details, and a job without one
costs nothing further on. While no SDK is set up (`tracing.on`) nothing here is called and no query is made. Spans tell
of what was committed, and are lost with the process that has not exported them; nothing is decided by them.
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
from rota.model.job import decode_details, encode_details
from rota.model.job_plan import Plan
from rota.model.lifecycle import JobState

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

OF_LAYERS = query(__package__, "traces_of_layers")
OF_JOBS = query(__package__, "traces_of_jobs")
REMEMBERED: Final = 10_000


class Written(Protocol):
    @property
    def job(self) -> JobId: ...

    @property
    def already(self) -> bool: ...


class Submitting:
    """Spans around the writing of plans, one for each; `plans` carry their traceparents."""

    def __init__(self, plans: Sequence[Plan], parents: Sequence[Context | None] | None = None) -> None:
        self.plans = plans
        self._spans: list[Span] = []
        if tracing.on():
            of = parents or [None] * len(plans)
            self._spans = [
                tracing.begin("submit", parent, show=plan.show, topic=plan.topic, frames=_frames(plan))
                for plan, parent in zip(plans, of, strict=True)
            ]
            self.plans = [_traced(plan, span) for plan, span in zip(plans, self._spans, strict=True)]

    def __enter__(self) -> Self:
        return self

    def wrote(self, submitted: Sequence[Written]) -> None:
        for span, one in zip(self._spans, submitted, strict=False):
            span.set_attributes({"job": str(one.job), "already": one.already})

    def __exit__(self, _kind: object, error: BaseException | None, _trace: TracebackType | None) -> None:
        for span in self._spans:
            tracing.end(span, f"{type(error).__name__}: {error}" if error is not None else "")


class Handed(msgspec.Struct, frozen=True):
    """Frames of one layer that a worker gets in one message."""

    job: UUID
    layer: UUID
    worker: UUID
    attempt: int
    frames: int


class Ended(Protocol):
    """A job that has ended."""

    @property
    def job(self) -> JobId: ...

    @property
    def state(self) -> JobState: ...


class Traces:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._layers: dict[UUID, str] = {}

    async def dispatching(self, handed: Sequence[Handed], since_ns: int) -> list[Span | None]:
        """Spans of hand-overs that begin now, for each that is traced."""
        traces = await self._of_layers({one.layer for one in handed})
        return [_dispatch(one, trace, since_ns) if (trace := traces[one.layer]) else None for one in handed]

    async def finished(self, ended: Sequence[Ended], since_ns: int) -> None:
        """The ends of those that are traced."""
        traces = await self._read(OF_JOBS, [one.job for one in ended])
        for one in ended:
            if trace := traces.get(one.job):
                span = tracing.begin("finish", trace, since_ns=since_ns, job=one.job, state=one.state.value)
                tracing.end(span, "" if one.state is JobState.SUCCEEDED else f"It ended as {one.state.value}.")

    async def _of_layers(self, layers: Iterable[UUID]) -> dict[UUID, str]:
        missing = [layer for layer in layers if layer not in self._layers]
        if missing:
            if len(self._layers) > REMEMBERED:
                self._layers.clear()
                missing = list(layers)
            found = await self._read(OF_LAYERS, missing)
            self._layers |= {layer: found.get(layer, "") for layer in missing}
        return {layer: self._layers[layer] for layer in layers}

    async def _read(self, asked: Query, ids: Sequence[UUID]) -> dict[UUID, str]:
        """Without PostgreSQL there are no spans, and all else goes on."""
        try:
            rows = await self._database.rows(asked, list(ids))
        except PostgresUnavailable:
            return {}
        return {row["id"]: decode_details(row["request"]).trace for row in rows}


def _dispatch(one: Handed, trace: str, since_ns: int) -> Span:
    if one.attempt == 1:
        queue = tracing.begin("queue", trace, since_ns=_made_ns(one.job), job=one.job, frames=one.frames)
        queue.end(since_ns)
    return tracing.begin("dispatch", trace, since_ns=since_ns, **msgspec.structs.asdict(one))


def end(spans: Iterable[Span | None]) -> None:
    for span in spans:
        if span is not None:
            tracing.end(span)


def now_ns() -> int:
    """As OpenTelemetry tells the time."""
    return time.time_ns()


def _traced(plan: Plan, span: Span) -> Plan:
    trace = tracing.traceparent(span)
    if not trace:
        return plan
    details = msgspec.structs.replace(decode_details(plan.details), trace=trace)
    return msgspec.structs.replace(plan, details=encode_details(details))


def _frames(plan: Plan) -> int:
    return sum(layer.frames.count for layer in plan.layers)


def _made_ns(job: UUID) -> int:
    """When it was submitted: the time in its id."""
    return (job.int >> 80) * 1_000_000

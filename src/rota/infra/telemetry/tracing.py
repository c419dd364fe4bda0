"""OpenTelemetry spans, with the trace passed between processes as a W3C traceparent.

    with tracing.span("book", topic=topic): ...
    ...
    if tracing.is_enabled():
        run = tracing.start_span("run", assigned.trace, frames=assigned.n)
        ...
        tracing.end_span(run, error)

Only the API is a dependency: users who want traces set up an SDK (`opentelemetry-instrument rota server`, or in the
app's own module). Until then `is_enabled` is False and OpenTelemetry is not imported; check it once per batch before
starting spans. An unsampled span has no traceparent (""), so no process downstream creates spans for it.

Attributes and error texts pass the same redaction as logs, because traces leave the installation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

from rota.infra.telemetry.redaction import redact, redact_text

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator


@contextmanager
def span(name: str, parent: Context | None = None, /, **attributes: object) -> Iterator[Span]:
    """A span below `parent`, or below the current one. An exception sets its status and propagates."""
    with _tracer().start_as_current_span(
        name, parent, record_exception=False, set_status_on_exception=False
    ) as current:
        if current.is_recording():
            current.set_attributes({key: _attribute(key, value) for key, value in attributes.items()})
        try:
            yield current
        except Exception as error:
            if current.is_recording():
                _set_error(current, f"{type(error).__name__}: {error}")
            raise


def is_enabled() -> bool:
    """Whether an SDK collects spans in this process."""
    if "opentelemetry.trace" not in sys.modules:
        return False
    from opentelemetry import trace

    unset = (trace.ProxyTracerProvider, trace.NoOpTracerProvider)
    return not isinstance(trace.get_tracer_provider(), unset)


def start_span(
    name: str, parent: str | Context | None = None, /, *, since_ns: int | None = None, **attributes: object
) -> Span:
    """A span below `parent` (a traceparent, or a context from `extract`), not made current; end it with `end_span`."""
    context = parent_context(parent) if isinstance(parent, str) else parent
    begun = _tracer().start_span(name, context, start_time=since_ns)
    if begun.is_recording():
        begun.set_attributes({key: _attribute(key, value) for key, value in attributes.items()})
    return begun


def end_span(begun: Span, error: str = "", /, **attributes: object) -> None:
    """End a span from `start_span`; a non-empty `error` sets the error status."""
    if begun.is_recording():
        begun.set_attributes({key: _attribute(key, value) for key, value in attributes.items()})
        if error:
            _set_error(begun, error)
    begun.end()


def traceparent(of: Span) -> str:
    """The header that continues the span's trace in another process; empty for an unrecorded span."""
    if not of.is_recording():
        return ""
    from opentelemetry import trace

    carrier: dict[str, str] = {}
    _propagator().inject(carrier, trace.set_span_in_context(of))
    return carrier.get("traceparent", "")


def parent_context(parent: str) -> Context:
    """The context for children of this traceparent."""
    return _propagator().extract({"traceparent": parent})


def attach(parent: str) -> None:
    """Make this traceparent the parent of spans in the current context."""
    from opentelemetry import context

    context.attach(parent_context(parent))


def inject() -> dict[str, str]:
    """Headers that carry the current trace to another process; empty outside of any trace."""
    headers: dict[str, str] = {}
    # Without the import there can be no current trace.
    if "opentelemetry.trace" in sys.modules:
        _propagator().inject(headers)
    return headers


def extract(headers: Mapping[str, str] | None) -> Context:
    """The trace in `headers` from `inject`; the current trace if absent or malformed."""
    return _propagator().extract(headers or {})


@cache
def _tracer() -> Tracer:
    from opentelemetry import trace

    # A proxy until the user configures a provider, so caching it is safe.
    return trace.get_tracer("rota")


@cache
def _propagator() -> TraceContextTextMapPropagator:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


def _attribute(key: str, value: object) -> Any:
    plain = redact(str(value) if isinstance(value, UUID) else value, key)
    return plain if isinstance(plain, str | bool | int | float) else str(plain)


def _set_error(current: Span, error: str) -> None:
    from opentelemetry.trace import StatusCode

    current.set_status(StatusCode.ERROR, redact_text(error))

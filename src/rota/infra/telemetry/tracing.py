"""Hooks for OpenTelemetry: spans around the steps of a frame, and the trace carried over the bus and the
outbox.

    with tracing.span("dispatch", topic=topic):
        await bus.publish(subject, payload, headers=tracing.inject())
    ...
    with tracing.span("run", tracing.extract(message.headers), topic=topic):

Only the API is a dependency. Without an SDK set up by the user a span is a no-op (microseconds), and
nothing of OpenTelemetry is imported before the first span. Attributes and error texts pass the same
redaction as logs, because traces leave the house.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from rota.infra.telemetry.redaction import redact, redact_text

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator


@contextmanager
def span(name: str, parent: Context | None = None, /, **attributes: object) -> Iterator[Span]:
    """A span below `parent`, or below the current one. An error that leaves it marks it and goes on."""
    with _tracer().start_as_current_span(
        name, parent, record_exception=False, set_status_on_exception=False
    ) as current:
        if current.is_recording():
            current.set_attributes({key: _attribute(key, value) for key, value in attributes.items()})
        try:
            yield current
        except Exception as error:
            _mark_failed(current, error)
            raise


def inject() -> dict[str, str]:
    """Headers that carry the current trace to another process; empty outside of any trace."""
    headers: dict[str, str] = {}
    # Nobody can be in a trace before OpenTelemetry was imported.
    if "opentelemetry.trace" in sys.modules:
        _propagator().inject(headers)
    return headers


def extract(headers: Mapping[str, str] | None) -> Context:
    """The trace that `inject` put into `headers`; without one, or with a malformed one, the current trace."""
    return _propagator().extract(headers or {})


@cache
def _tracer() -> Tracer:
    from opentelemetry import trace

    # A proxy until the user sets a provider up, so keeping it is safe.
    return trace.get_tracer("rota")


@cache
def _propagator() -> TraceContextTextMapPropagator:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


def _attribute(key: str, value: object) -> Any:
    plain = redact(value, key)
    return plain if isinstance(plain, str | bool | int | float) else str(plain)


def _mark_failed(current: Span, error: Exception) -> None:
    if current.is_recording():
        from opentelemetry.trace import StatusCode

        current.set_status(StatusCode.ERROR, redact_text(f"{type(error).__name__}: {error}"))

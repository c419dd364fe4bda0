"""A minimal OpenTelemetry SDK: records spans with ids, parents and times."""

import itertools
import time
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from rota.infra.telemetry import tracing


class RecordedSpan(NonRecordingSpan):
    def __init__(self, name, context, parent, since_ns):
        super().__init__(context)
        self.name, self.parent, self.since_ns = name, parent, since_ns
        self.attributes, self.status, self.ended_ns = {}, None, None

    @property
    def id(self):
        return self.get_span_context().span_id

    def is_recording(self):
        return self.ended_ns is None

    def set_attributes(self, attributes):
        self.attributes.update(attributes)

    def set_status(self, status, description=None):
        self.status = (status, description)

    def end(self, end_time=None):
        assert self.ended_ns is None, f"span {self.name} ended twice"
        self.ended_ns = end_time or time.time_ns()


class Recorder(trace.Tracer):
    def __init__(self):
        self.spans = []
        self.sampled = True
        self._ids = itertools.count(1)

    def start_span(self, name, context=None, *, start_time=None, **_options):
        parent = trace.get_current_span(context).get_span_context()
        number = next(self._ids)
        flags = TraceFlags(TraceFlags.SAMPLED if self.sampled else 0)
        own = SpanContext(parent.trace_id or number << 64, number, is_remote=False, trace_flags=flags)
        if not self.sampled:
            return NonRecordingSpan(own)
        self.spans.append(RecordedSpan(name, own, parent, start_time or time.time_ns()))
        return self.spans[-1]

    @contextmanager
    def start_as_current_span(self, name, context=None, *, record_exception, set_status_on_exception, **_options):
        span = self.start_span(name, context)
        with trace.use_span(span, record_exception=record_exception, set_status_on_exception=set_status_on_exception):
            yield span

    def named(self, name):
        return [span for span in self.spans if span.name == name]

    def tree(self, root):
        """The span tree of `root` as (name, [children]), in start order."""
        return (root.name, [self.tree(span) for span in self.spans if span.parent.span_id == root.id])


def recording(monkeypatch):
    """Record the spans of this process until the end of the test."""
    recorder = Recorder()
    monkeypatch.setattr(tracing, "_tracer", lambda: recorder)
    monkeypatch.setattr(tracing, "is_enabled", lambda: True)
    return recorder

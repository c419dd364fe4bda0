"""Spans and the trace that is carried from process to process."""

import itertools
import subprocess
import sys
from contextlib import contextmanager

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, StatusCode, TraceFlags

from rota.infra.telemetry import tracing

SECRET = "c4nary-S3cret"
TRACE_ID = 0x1234567890ABCDEF1234567890ABCDEF


class RecordedSpan(NonRecordingSpan):
    def __init__(self, name, context, parent):
        super().__init__(context)
        self.name, self.parent, self.attributes, self.status = name, parent, {}, None

    def is_recording(self):
        return True

    def set_attributes(self, attributes):
        self.attributes.update(attributes)

    def set_status(self, status, description=None):
        self.status = (status, description)


class RecordingTracer(trace.Tracer):
    """The least that an SDK does: spans with ids, parents and a place to look at them."""

    def __init__(self):
        self.spans = []
        self._ids = itertools.count(1)

    def start_span(self, name, context=None, **_options):
        parent = trace.get_current_span(context).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else TRACE_ID
        own = SpanContext(trace_id, next(self._ids), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        self.spans.append(RecordedSpan(name, own, parent))
        return self.spans[-1]

    @contextmanager
    def start_as_current_span(self, name, context=None, *, record_exception, set_status_on_exception, **_options):
        span = self.start_span(name, context)
        with trace.use_span(span, record_exception=record_exception, set_status_on_exception=set_status_on_exception):
            yield span


@pytest.fixture
def tracer(monkeypatch):
    recording = RecordingTracer()
    monkeypatch.setattr(tracing, "_tracer", lambda: recording)
    return recording


def test_without_an_sdk_a_span_does_nothing_and_carries_nothing():
    with tracing.span("dispatch", topic="render") as span:
        assert not span.is_recording()
        assert tracing.inject() == {}


def test_a_span_in_another_process_continues_the_trace_of_its_headers(tracer):
    with tracing.span("submit"):
        headers = tracing.inject()
    with tracing.span("run", tracing.extract(headers)):
        pass
    submit, run = tracer.spans
    assert headers["traceparent"].split("-")[1] == f"{TRACE_ID:032x}"
    assert run.parent.span_id == submit.get_span_context().span_id
    assert run.parent.is_remote


def test_spans_nest_and_the_outer_one_is_current_again_afterwards(tracer):
    with tracing.span("outer") as outer:
        with tracing.span("inner"):
            pass
        assert trace.get_current_span() is outer
    assert tracer.spans[1].parent.span_id == outer.get_span_context().span_id
    assert tracing.inject() == {}


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "nonsense"}, {"traceparent": "00-0-0-00"}])
def test_missing_or_malformed_headers_begin_a_new_trace(tracer, headers):
    with tracing.span("run", tracing.extract(headers)):
        pass
    assert not tracer.spans[0].parent.is_valid


def test_an_error_marks_the_span_and_goes_on(tracer):
    with pytest.raises(ValueError, match="redis"), tracing.span("book"):
        raise ValueError(f"lost redis://:{SECRET}@host")
    status, description = tracer.spans[0].status
    assert status is StatusCode.ERROR
    assert description == "ValueError: lost redis://:***@host"


def test_attributes_are_plain_values_without_secrets(tracer):
    with tracing.span("book", topic="render", frames=3, token=SECRET, target={"url": f"nats://{SECRET}@host"}):
        pass
    attributes = tracer.spans[0].attributes
    assert attributes["topic"] == "render"
    assert attributes["frames"] == 3
    assert SECRET not in str(attributes)
    assert all(isinstance(value, str | int) for value in attributes.values())


def test_importing_the_hooks_does_not_import_opentelemetry():
    script = (
        "import sys; from rota.infra.telemetry import tracing; tracing.inject(); print('opentelemetry' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20)
    assert shown.stdout.strip() == "False"

"""Spans, and trace context propagated between processes."""

import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode

from rota.infra.telemetry import tracing
from tests.support.tracing import recording

SECRET = "c4nary-S3cret"


@pytest.fixture
def tracer(monkeypatch):
    return recording(monkeypatch)


def test_span_without_an_sdk_is_a_no_op():
    assert not tracing.is_enabled()
    with tracing.span("dispatch", topic="render") as span:
        assert not span.is_recording()
        assert tracing.inject() == {}
        assert tracing.traceparent(span) == ""


def test_span_in_another_process_continues_the_trace_of_its_headers(tracer):
    with tracing.span("submit"):
        headers = tracing.inject()
    with tracing.span("run", tracing.extract(headers)):
        pass
    submit, run = tracer.spans
    assert headers["traceparent"].split("-")[1] == f"{submit.get_span_context().trace_id:032x}"
    assert run.parent.span_id == submit.get_span_context().span_id
    assert run.parent.is_remote


def test_spans_nest_and_restore_the_outer_span(tracer):
    with tracing.span("outer") as outer:
        with tracing.span("inner"):
            pass
        assert trace.get_current_span() is outer
    assert tracer.spans[1].parent.span_id == outer.get_span_context().span_id
    assert tracing.inject() == {}


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "nonsense"}, {"traceparent": "00-0-0-00"}])
def test_missing_or_malformed_headers_start_a_new_trace(tracer, headers):
    with tracing.span("run", tracing.extract(headers)):
        pass
    assert not tracer.spans[0].parent.is_valid


def test_exception_sets_the_span_status_and_propagates(tracer):
    with pytest.raises(ValueError, match="redis"), tracing.span("book"):
        raise ValueError(f"lost redis://:{SECRET}@host")
    status, description = tracer.spans[0].status
    assert status is StatusCode.ERROR
    assert description == "ValueError: lost redis://:***@host"


def test_span_attributes_are_plain_values_without_secrets(tracer):
    with tracing.span("book", topic="render", frames=3, token=SECRET, target={"url": f"nats://{SECRET}@host"}):
        pass
    attributes = tracer.spans[0].attributes
    assert attributes["topic"] == "render"
    assert attributes["frames"] == 3
    assert SECRET not in str(attributes)
    assert all(isinstance(value, str | int) for value in attributes.values())


def test_importing_tracing_does_not_import_opentelemetry():
    script = (
        "import sys; from rota.infra.telemetry import tracing; tracing.inject(); print('opentelemetry' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20)
    assert shown.stdout.strip() == "False"


def test_detached_span_is_continued_by_its_traceparent(tracer):
    one = tracing.start_span("dispatch", since_ns=5, token=SECRET)
    assert not trace.get_current_span().get_span_context().is_valid
    other = tracing.start_span("run", tracing.traceparent(one), frames=3)
    tracing.end_span(other, f"lost redis://:{SECRET}@host", failed=1)
    tracing.end_span(one)
    assert (one.since_ns, one.status, other.parent.span_id) == (5, None, one.id)
    assert other.attributes == {"frames": 3, "failed": 1}
    assert other.status == (StatusCode.ERROR, "lost redis://:***@host")
    assert one.ended_ns
    assert other.ended_ns
    assert SECRET not in str(one.attributes)


def test_unsampled_span_is_not_continued(tracer):
    tracer.sampled = False
    assert tracing.traceparent(tracing.start_span("submit")) == ""


@pytest.mark.parametrize("parent", ["", "nonsense", "00-0-0-00"])
def test_malformed_traceparent_starts_a_new_trace(tracer, parent):
    tracing.start_span("run", parent)
    assert not tracer.spans[0].parent.is_valid


@pytest.mark.parametrize("provider", ["ProxyTracerProvider", "NoOpTracerProvider", None])
def test_tracing_is_enabled_once_a_real_provider_is_set(monkeypatch, provider):
    found = getattr(trace, provider)() if provider else object()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: found)
    assert tracing.is_enabled() is (provider is None)

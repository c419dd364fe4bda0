"""One trace per job, from submission over the bus to its end, whatever the final state."""

import re
import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode

from rota.infra.nats import BusMessage
from rota.infra.telemetry import tracing
from rota.model.job_states import JobState
from rota.model.jobs.submission import LayerSpec, Submission, encode_submission
from rota.model.protocol import SUBMIT_SUBJECT
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, app, hanging
from tests.support.tracing import recording
from tests.support.waiting import until

DONE = ("submit", [("queue", []), ("dispatch", [("run", [])]), ("finish", [])])
NEWEST = sql("SELECT pk_job FROM rota.job_done ORDER BY 1 DESC LIMIT 1")

TRACEPARENT = re.compile(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-")


@pytest.fixture
def recorder(monkeypatch):
    return recording(monkeypatch)


@pytest.fixture
async def cluster(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as cluster:
        await cluster.show()
        yield cluster
        await cluster.quiet()


@app.task(name="spans")
async def spans():
    with tracing.span("own"):
        pass


async def finished(recorder, count=1):
    """Wait until `count` jobs have a finish span and every span has ended; returns the trace ids."""
    await until(lambda: len(recorder.named("finish")) >= count, what="the end of the trace")
    await until(lambda: all(span.ended_ns for span in recorder.spans), what="the end of every span")
    return {span.get_span_context().trace_id for span in recorder.spans}


async def test_job_trace_is_one_tree_from_submission_to_end(cluster, recorder):
    await cluster.worker()
    job = await cluster.submit("noop")
    assert await cluster.ended(job) == "SUCCEEDED"
    assert len(await finished(recorder)) == 1
    [submit] = recorder.named("submit")
    assert recorder.tree(submit) == DONE
    assert not submit.parent.is_valid
    assert all(span.attributes["job"] == str(job) for span in recorder.spans)
    queue, dispatch, run, finish = (recorder.named(name)[0] for name in ("queue", "dispatch", "run", "finish"))
    assert queue.since_ns <= queue.ended_ns == dispatch.since_ns <= run.since_ns
    assert dispatch.since_ns < dispatch.ended_ns
    assert (run.attributes["frames"], run.attributes["succeeded"], run.attributes["runs"]) == (1, 1, "noop")
    assert (finish.attributes["state"], finish.status) == ("SUCCEEDED", None)


async def test_job_trace_continues_the_trace_of_the_submitter(cluster, recorder):
    await cluster.worker()
    with tracing.span("request") as request:
        job = await cluster.submit("noop")
    request.end()
    assert await cluster.ended(job) == "SUCCEEDED"
    assert len(await finished(recorder)) == 1
    assert recorder.tree(request) == ("request", [DONE])


async def test_many_frames_create_few_spans(cluster, recorder):
    await cluster.accounting.change(lambda admin: admin.change_subscription("film", "local", burst=2000, actor="test"))
    await cluster.worker(slots=2000)
    job = await cluster.submit("noop", frames=1000)
    assert await cluster.ended(job) == "SUCCEEDED"
    await finished(recorder)
    assert len(recorder.named("run")) == len(recorder.named("dispatch")) <= 10
    assert sum(span.attributes["succeeded"] for span in recorder.named("run")) == 1000


async def test_failed_and_retried_jobs_have_error_spans(cluster, recorder):
    await cluster.worker()
    failed = await cluster.submit("boom")
    flaky = await cluster.submit("flaky", 1, layer={"retries": 1})
    assert (await cluster.ended(failed), await cluster.ended(flaky)) == ("FAILED", "SUCCEEDED")
    assert len(await finished(recorder, 2)) == 2
    by_job = {span.attributes["job"]: span for span in recorder.named("submit")}
    assert recorder.tree(by_job[str(failed)]) == DONE
    assert recorder.tree(by_job[str(flaky)]) == (
        "submit",
        [("queue", []), ("dispatch", [("run", [])]), ("dispatch", [("run", [])]), ("finish", [])],
    )
    runs = {(span.attributes["job"], span.attributes["attempt"]): span.status for span in recorder.named("run")}
    assert runs[str(failed), 1] == (StatusCode.ERROR, "exception: ValueError: no luck")
    assert runs[str(flaky), 1][0] is StatusCode.ERROR
    assert runs[str(flaky), 2] is None
    ends = {span.attributes["job"]: span.status for span in recorder.named("finish")}
    assert ends == {str(failed): (StatusCode.ERROR, "It ended as FAILED."), str(flaky): None}


async def test_cancelled_job_trace_covers_running_and_never_started_frames(cluster, recorder):
    await cluster.worker(slots=1)
    hanging("x")
    job = await cluster.submit("hang", "x", frames=2)
    await cluster.running("x")
    await cluster.replica.engine.canceller.terminate(job, JobState.CANCELLED, "cancelled")
    assert await cluster.ended(job) == "CANCELLED"
    assert len(await finished(recorder)) == 1
    assert recorder.tree(recorder.named("submit")[0]) == DONE
    [run] = recorder.named("run")
    assert (run.attributes["cancelled"], run.status) == (1, None)
    assert recorder.named("finish")[0].attributes["state"] == "CANCELLED"


async def test_bus_submission_continues_the_trace_of_its_message(cluster, recorder):
    await cluster.worker()
    with tracing.span("producer") as producer:
        headers = tracing.inject()
    producer.end()
    given = encode_submission(Submission(show="film", layers=(LayerSpec(task="noop"),)))
    await cluster.replica.bus.publish(BusMessage(subject=SUBMIT_SUBJECT, data=given, msg_id="one", headers=headers))
    assert len(await finished(recorder)) == 1
    assert recorder.tree(producer) == ("producer", [DONE])


async def test_span_created_in_a_task_is_a_child_of_its_run(cluster, recorder):
    await cluster.worker()
    job = await cluster.submit("spans")
    assert await cluster.ended(job) == "SUCCEEDED"
    [own] = recorder.named("own")
    own.end()
    assert len(await finished(recorder)) == 1
    [run] = recorder.named("run")
    assert own.parent.span_id == run.id
    assert not trace.get_current_span().get_span_context().is_valid


async def test_command_finds_the_trace_in_its_environment(cluster, recorder):
    await cluster.worker()
    layer = LayerSpec(argv=("sh", "-c", 'test "$TRACEPARENT"'))
    await cluster.submitter.submit([Submission(show="film", layers=(layer,))])
    await finished(recorder)
    assert await cluster.ended(await cluster.database.value(NEWEST)) == "SUCCEEDED"


async def test_unsampled_job_creates_no_span(cluster, recorder):
    await cluster.worker()
    recorder.sampled = False
    job = await cluster.submit("noop")
    recorder.sampled = True
    assert await cluster.ended(job) == "SUCCEEDED"
    other = await cluster.submit("noop")
    assert await cluster.ended(other) == "SUCCEEDED"
    await finished(recorder)
    assert {span.attributes["job"] for span in recorder.spans} == {str(other)}


async def test_without_an_otel_sdk_no_trace_data_is_read_or_sent(cluster, monkeypatch):
    """Without a collector, tracing costs no query and no message bytes."""
    sent = []
    publish = cluster.replica.bus.publish_many

    async def recording_publish(messages):
        sent.extend(messages)
        return await publish(messages)

    async def refuse(*_args):
        raise AssertionError("asked for traces")

    monkeypatch.setattr(cluster.replica.bus, "publish_many", recording_publish)
    monkeypatch.setattr("rota.engine.tracing.JobTracer._read_traceparents", refuse)
    await cluster.worker()
    job = await cluster.submit("noop", frames=3)
    assert await cluster.ended(job) == "SUCCEEDED"
    assert sent
    assert not [message for message in sent if TRACEPARENT.search(message.data)]
    assert (await cluster.jobs.get(job)).details.trace == ""


def test_worker_does_not_import_opentelemetry():
    script = "import sys, rota.worker.worker, rota.worker.runners.process_main; print('opentelemetry' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20)
    assert shown.stdout.strip() == "False"

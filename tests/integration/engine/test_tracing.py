"""One trace for a job, from its submission over the bus to its end, however it ends."""

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
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix) as farm:
        await farm.show()
        yield farm
        await farm.quiet()


@app.task(name="spans")
async def spans():
    with tracing.span("own"):
        pass


async def finished(recorder, count=1):
    """Until the spans of so many ended jobs are there, and all of them have ended."""
    await until(lambda: len(recorder.named("finish")) >= count, what="the end of the trace")
    await until(lambda: all(span.ended_ns for span in recorder.spans), what="the end of every span")
    return {span.get_span_context().trace_id for span in recorder.spans}


async def test_a_job_is_one_tree_from_its_submission_to_its_end(farm, recorder):
    await farm.worker()
    job = await farm.submit("noop")
    assert await farm.ended(job) == "SUCCEEDED"
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


async def test_the_trace_goes_on_where_whoever_submits_is(farm, recorder):
    await farm.worker()
    with tracing.span("request") as request:
        job = await farm.submit("noop")
    request.end()
    assert await farm.ended(job) == "SUCCEEDED"
    assert len(await finished(recorder)) == 1
    assert recorder.tree(request) == ("request", [DONE])


async def test_spans_are_few_for_many_frames(farm, recorder):
    await farm.books.change(lambda admin: admin.change_subscription("film", "local", burst=2000, actor="test"))
    await farm.worker(slots=2000)
    job = await farm.submit("noop", frames=1000)
    assert await farm.ended(job) == "SUCCEEDED"
    await finished(recorder)
    assert len(recorder.named("run")) == len(recorder.named("dispatch")) <= 10
    assert sum(span.attributes["succeeded"] for span in recorder.named("run")) == 1000


async def test_a_job_that_failed_and_one_that_was_tried_again(farm, recorder):
    await farm.worker()
    failed = await farm.submit("boom")
    flaky = await farm.submit("flaky", 1, layer={"retries": 1})
    assert (await farm.ended(failed), await farm.ended(flaky)) == ("FAILED", "SUCCEEDED")
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


async def test_a_cancelled_job_with_a_frame_that_runs_and_one_that_never_began(farm, recorder):
    await farm.worker(slots=1)
    hanging("x")
    job = await farm.submit("hang", "x", frames=2)
    await farm.running("x")
    await farm.replica.engine.canceller.terminate(job, JobState.CANCELLED, "cancelled")
    assert await farm.ended(job) == "CANCELLED"
    assert len(await finished(recorder)) == 1
    assert recorder.tree(recorder.named("submit")[0]) == DONE
    [run] = recorder.named("run")
    assert (run.attributes["cancelled"], run.status) == (1, None)
    assert recorder.named("finish")[0].attributes["state"] == "CANCELLED"


async def test_a_submission_over_the_bus_continues_the_trace_of_its_message(farm, recorder):
    await farm.worker()
    with tracing.span("producer") as producer:
        headers = tracing.inject()
    producer.end()
    given = encode_submission(Submission(show="film", layers=(LayerSpec(task="noop"),)))
    await farm.replica.bus.publish(BusMessage(subject=SUBMIT_SUBJECT, data=given, msg_id="one", headers=headers))
    assert len(await finished(recorder)) == 1
    assert recorder.tree(producer) == ("producer", [DONE])


async def test_what_a_task_does_is_below_its_run(farm, recorder):
    await farm.worker()
    job = await farm.submit("spans")
    assert await farm.ended(job) == "SUCCEEDED"
    [own] = recorder.named("own")
    own.end()
    assert len(await finished(recorder)) == 1
    [run] = recorder.named("run")
    assert own.parent.span_id == run.id
    assert not trace.get_current_span().get_span_context().is_valid


async def test_a_command_finds_the_trace_in_its_environment(farm, recorder):
    await farm.worker()
    layer = LayerSpec(argv=("sh", "-c", 'test "$TRACEPARENT"'))
    await farm.submitter.submit([Submission(show="film", layers=(layer,))])
    await finished(recorder)
    assert await farm.ended(await farm.database.value(NEWEST)) == "SUCCEEDED"


async def test_a_job_that_no_sampler_chose_leaves_no_span_anywhere(farm, recorder):
    await farm.worker()
    recorder.sampled = False
    job = await farm.submit("noop")
    recorder.sampled = True
    assert await farm.ended(job) == "SUCCEEDED"
    other = await farm.submit("noop")
    assert await farm.ended(other) == "SUCCEEDED"
    await finished(recorder)
    assert {span.attributes["job"] for span in recorder.spans} == {str(other)}


async def test_without_an_sdk_nothing_is_asked_kept_or_sent(farm, monkeypatch):
    """Neither a query nor a byte of a frame is for traces that nobody collects."""
    sent = []
    publish = farm.replica.bus.publish_many

    async def seen(messages):
        sent.extend(messages)
        return await publish(messages)

    async def refuse(*_args):
        raise AssertionError("asked for traces")

    monkeypatch.setattr(farm.replica.bus, "publish_many", seen)
    monkeypatch.setattr("rota.engine.tracing.JobTracer._read_traceparents", refuse)
    await farm.worker()
    job = await farm.submit("noop", frames=3)
    assert await farm.ended(job) == "SUCCEEDED"
    assert sent
    assert not [message for message in sent if TRACEPARENT.search(message.data)]
    assert (await farm.jobs.get(job)).details.trace == ""


def test_a_worker_imports_nothing_of_opentelemetry():
    script = "import sys, rota.worker.worker, rota.worker.runners.process_main; print('opentelemetry' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=20)
    assert shown.stdout.strip() == "False"

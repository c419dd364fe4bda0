"""Single submissions that share requests: when they travel together, and that none of them notices."""

import asyncio
import gc
import random
from datetime import UTC, datetime

import pytest

from rota.client import coalescer
from rota.client.endpoint import ApiEndpoint
from rota.client.http import HttpClient
from rota.client.jobs import HttpTransport
from rota.infra.telemetry import tracing
from rota.model import errors
from rota.model.jobs.submission import LayerSpec, Submission
from rota.testing import MovableClock
from tests.support.answers import CUT, answer, problem
from tests.support.harness.effort import effort
from tests.support.tracing import recording
from tests.support.waiting import until
from tests.unit.sdk.submit_api_support import REFUSED, SubmitProblem, submit_api

KEY = "rota_0123456789_" + "k" * 39
LONG_S = 60.0
SEEDS = effort(20, 2000)


@pytest.fixture
async def api():
    async with submit_api() as api:
        yield api


@pytest.fixture
async def transport(api):
    clock = MovableClock(datetime(2030, 1, 1, tzinfo=UTC))
    transport = HttpTransport(HttpClient(lambda: ApiEndpoint(api.server.url, KEY), clock=clock))
    yield transport
    await transport.close()


@pytest.fixture
def no_hold(monkeypatch):
    """A submission waits for the request that is under way, however long it takes."""
    monkeypatch.setattr(coalescer, "HOLD_S", LONG_S)


def job(name="comp", **more):
    return Submission(show="film", name=name, layers=(LayerSpec(task="noop"),), **more)


async def submit(transport, name="comp", **more):
    [submitted] = await transport.submit([job(name, **more)])
    return submitted.job


def submitting(transport, *names, **more):
    return [asyncio.create_task(submit(transport, name, **more)) for name in names]


async def under_way(api, transport):
    """A submission whose request is under way, and the event that lets the server answer it."""
    gate = asyncio.Event()
    api.faults.append(gate)
    first = asyncio.create_task(submit(transport, "first"))
    await until(lambda: api.batches == [["first"]], what="the request of the first submission")
    return first, gate


async def test_submission_alone_is_sent_by_itself(api, transport):
    for name in ("a", "b"):
        assert await submit(transport, name) == api.job_named(name)
    assert (api.paths, api.batches) == (["/jobs", "/jobs"], [["a"], ["b"]])


async def test_submissions_of_one_iteration_share_a_request_in_their_order(api, transport):
    names = [f"n{number}" for number in range(20)]
    found = await asyncio.gather(*submitting(transport, *names))
    assert (api.paths, api.batches) == (["/jobs/batch"], [names])
    assert found == [api.job_named(name) for name in names]


async def test_submissions_during_a_request_share_the_next_one(api, transport, no_hold):
    first, gate = await under_way(api, transport)
    rest = []
    for name in ("a", "b", "c"):
        rest += submitting(transport, name)
        await asyncio.sleep(0)
    gate.set()
    found = await asyncio.gather(first, *rest)
    assert api.batches == [["first"], ["a", "b", "c"]]
    assert found == [api.job_named(name) for name in ("first", "a", "b", "c")]


async def test_slow_request_delays_others_by_the_hold_time_only(api, transport):
    first, gate = await under_way(api, transport)
    assert await submit(transport, "a") == api.job_named("a")
    assert not first.done()
    gate.set()
    await first


async def test_callers_that_submit_one_after_the_other_stay_together(api, transport, no_hold):
    async def caller(number):
        for turn in range(5):
            await submit(transport, f"{number}-{turn}")

    await asyncio.gather(*(caller(number) for number in range(8)))
    assert [len(names) for names in api.batches] == [8] * 5


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ({"ITEMS_MAX": 3}, [3, 3, 1]),
        ({"BATCH_BYTES_MAX": 400}, [2, 2, 2, 1]),
        ({"ITEM_BYTES_MAX": 10}, [1] * 7),
        ({"ITEMS_MAX": 1, "REQUESTS_MAX": 1}, [1] * 7),
    ],
)
async def test_requests_stay_within_their_limits(api, transport, monkeypatch, no_hold, limits, sizes):
    for name, value in limits.items():
        monkeypatch.setattr(coalescer, name, value)
    names = [f"n{number}" for number in range(7)]
    found = await asyncio.gather(*(submit(transport, name, labels={"x": "y" * 50}) for name in names))
    assert found == [api.job_named(name) for name in names]
    assert [len(each) for each in api.batches] == sizes


async def test_full_batch_does_not_wait_for_the_request_under_way(api, transport, monkeypatch, no_hold):
    monkeypatch.setattr(coalescer, "ITEMS_MAX", 3)
    first, gate = await under_way(api, transport)
    await asyncio.gather(*submitting(transport, "a", "b", "c"))
    assert api.batches == [["first"], ["a", "b", "c"]]
    assert not first.done()
    gate.set()
    await first


async def test_requests_under_way_are_limited(api, transport, monkeypatch):
    monkeypatch.setattr(coalescer, "REQUESTS_MAX", 2)
    monkeypatch.setattr(coalescer, "HOLD_S", 0.0)
    gates = [asyncio.Event(), asyncio.Event()]
    api.faults = list(gates)
    tasks = submitting(transport, "n0")
    await until(lambda: api.batches == [["n0"]], what="the first request")
    tasks += submitting(transport, "n1")
    await until(lambda: api.batches == [["n0"], ["n1"]], what="the second request")
    tasks += submitting(transport, "n2", "n3")
    await asyncio.sleep(0)
    await until(lambda: transport._coalescer._hold is None, what="the end of the hold time")
    assert (len(transport._coalescer._requests), len(api.batches)) == (2, 2)
    gates[0].set()
    assert await tasks[0] == api.job_named("n0")
    await asyncio.gather(*tasks[2:])
    assert api.batches == [["n0"], ["n1"], ["n2", "n3"]]
    gates[1].set()
    await tasks[1]


async def test_request_that_is_cancelled_from_outside_is_repeated(api, transport):
    gate = asyncio.Event()
    api.faults = [gate]
    both = submitting(transport, "a", "b")
    await until(lambda: api.batches == [["a", "b"]], what="the request")
    [request] = [task for task in asyncio.all_tasks() if task.get_name() == "submit"]
    request.cancel()
    assert await asyncio.gather(*both) == [api.job_named("a"), api.job_named("b")]
    gate.set()


async def test_refused_submission_gets_its_own_error_and_harms_no_other(api, transport):
    names = [REFUSED + "-a", "good", REFUSED + "-b"]
    a, good, b = await asyncio.gather(*submitting(transport, *names), return_exceptions=True)
    with pytest.raises(errors.Refused) as alone:
        await submit(transport, names[0])
    for error, name in ((a, names[0]), (b, names[2]), (alone.value, names[0])):
        assert (type(error), error.sentence) == (errors.Refused, f"Not {name}.")
        assert error.facts == {"name": name, "status": 409}
    assert good == api.job_named("good")
    assert api.paths == ["/jobs/batch", "/jobs"]


async def test_submission_that_cannot_be_encoded_fails_before_it_joins(api, transport):
    bad, good = await asyncio.gather(
        submit(transport, "bad", context=object()), submit(transport, "good"), return_exceptions=True
    )
    assert isinstance(bad, errors.InvalidInput)
    assert "cannot be encoded" in bad.sentence
    assert (good, api.batches) == (api.job_named("good"), [["good"]])


async def test_transient_error_of_one_item_is_retried_for_that_item_only(api, transport):
    def busy(submission):
        if submission.name != "b":
            return None
        return SubmitProblem(status=503, code="postgres_unavailable", detail="Later.", retry_after_s=1)

    api.faults = [busy, busy]
    found = await asyncio.gather(*submitting(transport, "a", "b", "c"))
    assert found == [api.job_named(name) for name in "abc"]
    assert api.batches == [["a", "b", "c"], ["b"], ["b"]]


@pytest.mark.parametrize(
    "fault",
    [
        problem(400, "invalid_input"),
        problem(403, "forbidden"),
        problem(413, "too_large"),
        problem(500, "defect"),
        answer(200, b"<html>", kind="text/html"),
        answer(201, {"items": []}),
    ],
)
async def test_batch_refused_as_a_whole_is_sent_one_by_one(api, transport, fault):
    for turn in range(2):
        api.faults = [fault]
        names = [f"{turn}-{name}" for name in ("a", "b", "c")]
        names[1] = REFUSED + names[1]
        a, b, c = await asyncio.gather(*submitting(transport, *names), return_exceptions=True)
        assert (a, c) == (api.job_named(names[0]), api.job_named(names[2]))
        assert isinstance(b, errors.Refused)
    assert api.paths == ["/jobs/batch", "/jobs", "/jobs", "/jobs"] * 2


@pytest.mark.parametrize("fault", [problem(405, "method_not_allowed"), problem(404, "not_found")])
async def test_server_without_the_batch_route_is_asked_for_it_only_now_and_then(api, transport, fault, monkeypatch):
    api.faults = [fault]
    for turn in range(2):
        found = await asyncio.gather(*submitting(transport, f"{turn}-a", f"{turn}-b"))
        assert found == [api.job_named(f"{turn}-a"), api.job_named(f"{turn}-b")]
    assert api.paths == ["/jobs/batch", *["/jobs"] * 4]
    monkeypatch.setattr(transport._coalescer, "_single_until_s", 0.0)
    await asyncio.gather(*submitting(transport, "a", "b"))
    assert api.paths[-1] == "/jobs/batch"


@pytest.mark.parametrize("fault", ["lost", CUT, problem(503, "unavailable"), problem(429, "rate_limited")])
async def test_batch_without_an_answer_is_repeated_under_the_same_keys(api, transport, fault):
    api.faults = [fault] * 3
    own = submitting(transport, "own", idempotency_key="own-key")
    found = await asyncio.gather(*submitting(transport, "a", "b"), *own)
    assert found == [api.job_named(name) for name in ("a", "b", "own")]
    assert len(api.jobs) == 3
    assert "own-key" in api.jobs


async def test_job_made_by_a_lost_attempt_is_not_reported_as_existing(api, transport):
    api.faults = ["lost"]
    mine, theirs = await asyncio.gather(
        transport.submit([job("mine")]), transport.submit([job("theirs", idempotency_key="k")])
    )
    assert (mine[0].already, theirs[0].already) == (False, True)


async def test_unreachable_server_fails_each_caller_with_an_error_of_its_own(api):
    transport = HttpTransport(HttpClient(lambda: ApiEndpoint(api.server.url, KEY), retry_budget_s=0))
    api.faults = [CUT]
    failed = await asyncio.gather(*submitting(transport, "a", "b"), return_exceptions=True)
    assert [type(error) for error in failed] == [errors.Unavailable] * 2
    assert failed[0] is not failed[1]
    assert all("does not answer" in error.sentence and error.__cause__ is not None for error in failed)
    await transport.close()


async def test_wrong_key_fails_each_caller_with_an_error_of_its_own(api, transport):
    api.faults = [problem(401, "unauthenticated")] * 3
    failed = await asyncio.gather(*submitting(transport, "a", "b"), return_exceptions=True)
    assert [type(error) for error in failed] == [errors.Unauthenticated] * 2
    assert failed[0] is not failed[1]


async def test_missing_endpoint_fails_each_caller(transport, monkeypatch):
    def find():
        raise errors.InvalidSetting("No endpoint.")

    monkeypatch.setattr(transport.http, "_resolve", find)
    failed = await asyncio.gather(*submitting(transport, "a", "b"), return_exceptions=True)
    assert [error.sentence for error in failed] == ["No endpoint."] * 2


async def test_defect_of_the_client_reaches_each_caller(transport, monkeypatch):
    def find():
        raise ZeroDivisionError

    monkeypatch.setattr(transport.http, "_resolve", find)
    failed = await asyncio.gather(*submitting(transport, "a", "b"), return_exceptions=True)
    assert [type(error) for error in failed] == [ZeroDivisionError] * 2


async def test_cancelled_caller_leaves_a_batch_that_is_not_sent(api, transport, no_hold):
    first, gate = await under_way(api, transport)
    a, b, c = submitting(transport, "a", "b", "c")
    await asyncio.sleep(0)
    b.cancel()
    await asyncio.wait([b])
    gate.set()
    assert await asyncio.gather(a, c) == [api.job_named("a"), api.job_named("c")]
    assert api.batches == [["first"], ["a", "c"]]
    await first


async def test_cancelled_caller_does_not_affect_the_others_of_its_request(api, transport):
    gate = asyncio.Event()
    api.faults = [gate]
    a, b = submitting(transport, "a", "b")
    await until(lambda: api.batches == [["a", "b"]], what="the request")
    a.cancel()
    await asyncio.wait([a])
    gate.set()
    assert await b == api.job_named("b")
    assert a.cancelled()
    assert api.batches == [["a", "b"]]


async def test_request_is_cancelled_with_its_last_caller_and_the_next_ones_go_on(api, transport, no_hold):
    gate = asyncio.Event()
    api.faults = [gate]
    both = submitting(transport, "a", "b")
    await until(lambda: api.batches == [["a", "b"]], what="the request")
    later = submitting(transport, "c")
    await asyncio.sleep(0)
    for each in both:
        each.cancel()
    assert await later[0] == api.job_named("c")
    assert all(each.cancelled() for each in both)
    assert not gate.is_set()
    gate.set()


async def test_submissions_survive_that_the_client_is_closed(api, transport, no_hold):
    first, gate = await under_way(api, transport)
    waiting = submitting(transport, "a", "b")
    await asyncio.sleep(0)
    await transport.close()
    gate.set()
    assert await asyncio.gather(first, *waiting) == [api.job_named(name) for name in ("first", "a", "b")]
    assert len(api.jobs) == 3


async def test_loop_that_ends_with_submissions_under_way_leaves_nothing_behind(api, caplog):
    gate = asyncio.Event()
    api.faults = [gate]
    sent = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def program():
        transport = HttpTransport(HttpClient(lambda: ApiEndpoint(api.server.url, KEY)))
        submitting(transport, "a")
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(sent.wait(), loop))
        submitting(transport, "b")
        await asyncio.sleep(0)
        submitting(transport, "c")

    ending = asyncio.create_task(asyncio.to_thread(asyncio.run, program()))
    await until(lambda: api.batches == [["a"]], what="the first request")
    sent.set()
    await ending
    gc.collect()
    gate.set()
    assert (caplog.text, api.batches) == ("", [["a"]])


async def test_each_submission_carries_the_trace_of_its_own_caller(api, transport, monkeypatch):
    recording(monkeypatch)

    async def traced(name):
        with tracing.span(name) as span:
            await submit(transport, name)
            return tracing.traceparent(span)

    traces = await asyncio.gather(traced("a"), traced("b"))
    traces.append(await traced("c"))
    [(_, names, both, headers), (_, _, alone, _)] = api.received
    assert (names, [*both, *alone]) == (["a", "b"], traces)
    assert "traceparent" not in headers


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_every_submission_has_one_job_and_its_own_answer_under_any_faults(api, transport, seed, monkeypatch):
    chance = random.Random(seed)
    monkeypatch.setattr(transport.http, "_retry_budget_s", 10**9)
    monkeypatch.setattr(coalescer, "ITEMS_MAX", chance.choice([2, 3, 500]))
    monkeypatch.setattr(coalescer, "HOLD_S", chance.choice([0.0, 0.001, LONG_S]))
    monkeypatch.setattr(coalescer, "REQUESTS_MAX", chance.choice([1, 2, 32]))

    def busy(_submission):
        if chance.random() < 0.3:
            return SubmitProblem(status=503, code="unavailable", detail="Later.", retry_after_s=1)
        return None

    whole = [CUT, "lost", problem(503, "unavailable"), problem(429, "rate_limited"), problem(413, "too_large")]
    api.faults = [chance.choice([None, None, busy, *whole]) for _ in range(30)]
    tasks = {}
    for number in range(30):
        name = f"{REFUSED}-{number}" if chance.random() < 0.2 else f"good-{number}"
        [tasks[name]] = submitting(transport, name)
        for _ in range(chance.choice([0, 0, 1, 20])):
            await asyncio.sleep(0)
        if chance.random() < 0.1:
            chance.choice(list(tasks.values())).cancel()
    _, pending = await asyncio.wait(tasks.values(), timeout=30)
    assert not pending
    for name, task in tasks.items():
        if task.cancelled():
            continue
        if name.startswith(REFUSED):
            # Sent alone after a batch was refused as a whole, it may meet the next fault, which no retry cures.
            assert isinstance(task.exception(), (errors.Refused, errors.TooLarge)), task.exception()
        elif not isinstance(task.exception(), errors.TooLarge):
            assert task.result() == api.job_named(name)
    assert len({submission.name for _, submission in api.jobs.values()}) == len(api.jobs), "no name has two jobs"

"""API calls of the SDK: retried only if safe, errors mapped to exceptions, the key never shown."""

import asyncio
import logging
from datetime import UTC, datetime

import pytest
import uvloop

from rota import NotEnded, Rota
from rota.client.discovery import endpoint_resolver
from rota.client.endpoint import ApiEndpoint
from rota.client.errors import error_from_response, parse_retry_after
from rota.client.events import follow_events
from rota.client.http import HttpClient
from rota.client.log_stream import merge_streams, read_in_order
from rota.infra.telemetry import logs
from rota.model import errors
from rota.model.errors import (
    InvalidInput,
    InvalidSetting,
    JobNotSucceeded,
    NotFound,
    RotaError,
    RunNotSucceeded,
    Unauthenticated,
    Unavailable,
)
from rota.testing import MovableClock, manual
from tests.support.answers import CUT, answer, answering, problem

KEY = "rota_0123456789_" + "k" * 39
IDEMPOTENT = {"idempotent": True}


def http_client(server, **more):
    return HttpClient(
        lambda: ApiEndpoint(server.url, KEY), clock=MovableClock(datetime(2030, 1, 1, tzinfo=UTC)), **more
    )


async def test_idempotent_call_is_retried_until_answered():
    async with answering(CUT, answer(502, b"<html>"), problem(503, "postgres_unavailable"), answer(body=5)) as server:
        client = http_client(server)
        assert await client.call("GET", "/jobs", int, **IDEMPOTENT) == 5
        await client.close()
    assert [(each.method, each.path) for each in server.requests] == [("GET", "/api/v1/jobs")] * 4
    assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"


async def test_non_idempotent_call_is_sent_once_and_reported_as_unknown_outcome():
    async with answering(CUT) as server:
        client = http_client(server)
        with pytest.raises(Unavailable, match="the outcome of the request is unknown"):
            await client.call("POST", "/shows", int, idempotent=False, body={"name": "film"})
        await client.close()
    assert len(server.requests) == 1


async def test_non_idempotent_call_is_not_retried_after_a_server_error():
    async with answering(problem(503, "postgres_unavailable"), answer(body=5)) as server:
        client = http_client(server)
        with pytest.raises(errors.PostgresUnavailable):
            await client.call("POST", "/shows", int, idempotent=False)
        await client.close()
    assert len(server.requests) == 1


async def test_rate_limited_call_waits_for_the_given_time():
    clock = MovableClock(datetime(2030, 1, 1, tzinfo=UTC))
    async with answering(problem(429, "rate_limited", retry_after="17"), answer(body=5)) as server:
        client = HttpClient(lambda: ApiEndpoint(server.url, KEY), clock=clock)
        assert await client.call("POST", "/shows", int, idempotent=False) == 5
        await client.close()
    assert clock.now >= datetime(2030, 1, 1, 0, 0, 17, tzinfo=UTC)


@pytest.mark.parametrize("response", [CUT, problem(503, "unavailable", retry_after="3600")])
async def test_retries_end_after_the_retry_budget(response):
    async with answering(response) as server:
        client = http_client(server, retry_budget_s=60)
        with pytest.raises(Unavailable):
            await client.call("GET", "/jobs", int, **IDEMPOTENT)
        await client.close()
    assert len(server.requests) == 1 if response is not CUT else 10 < len(server.requests) < 60


async def test_unreachable_server_raises_unavailable():
    async with answering(CUT) as server:
        pass
    client = http_client(server, retry_budget_s=1)
    with pytest.raises(Unavailable, match=rf"Rota at {server.url} does not answer \(ConnectError\)"):
        await client.call("POST", "/shows", int, idempotent=False)
    await client.close()


async def test_client_resolves_the_endpoint_again_after_a_restart():
    async with answering(CUT) as before, answering(answer(body=5)) as after:
        endpoints = iter([before, InvalidSetting("down"), after, after])

        def find():
            endpoint = next(endpoints)
            if isinstance(endpoint, Exception):
                raise endpoint
            return ApiEndpoint(endpoint.url, KEY)

        client = HttpClient(find, clock=MovableClock())
        assert await client.call("GET", "/jobs", int, **IDEMPOTENT) == 5
        await client.close()
    assert (len(before.requests), len(after.requests)) == (2, 1)


def error_classes(root=RotaError):
    below = [each for each in root.__subclasses__() if each.__module__ == errors.__name__]
    return [root, *(found for each in below for found in error_classes(each))]


@pytest.mark.parametrize(
    "kind", [kind for kind in error_classes() if not issubclass(kind, (JobNotSucceeded, RunNotSucceeded))]
)
def test_error_code_maps_to_its_exception(kind):
    error = error_from_response(
        409, "", problem(409, kind.code, "Not now.", facts={"needs": 3}).partition(b"\r\n\r\n")[2]
    )
    assert (type(error), error.sentence, error.facts["needs"]) == (kind, "Not now.", 3)


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (404, b"<html>", NotFound, "is not Rota"),
        (401, b"", Unauthenticated, "is not Rota"),
        (400, b'{"code": "of_later", "detail": "Never heard."}', InvalidInput, "Never heard"),
        (500, b'{"code": "defect", "detail": "Oh."}', Unavailable, "Oh"),
        (302, b"", RotaError, "status 302"),
        (418, b'["teapot"]', InvalidInput, "teapot"),
        (400, b'{"code": 5}', InvalidInput, "is not Rota"),
        (400, b'{"code": "invalid_input", "detail": "A.", "facts": {"sentence": 1, "a b": 2}}', InvalidInput, "A"),
    ],
)
def test_unknown_error_response_is_mapped_by_its_status(status, body, kind, message):
    error = (
        error_from_response(status, "text/html", body)
        if b"<" in body
        else error_from_response(status, "text/plain", body)
    )
    assert type(error) is kind
    assert message in error.sentence


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", 0), ("3", 3), ("0.5", 0.5), ("-3", 0), ("inf", 0), ("soon", 0), ("Tue, 01 Jan 2030 00:01:00 GMT", 60)],
)
def test_retry_after_is_parsed_as_seconds_or_as_a_date(text, seconds):
    assert parse_retry_after(text, datetime(2030, 1, 1, tzinfo=UTC)) == seconds


async def test_api_key_is_never_shown_and_not_sent_to_redirect_targets(caplog):
    for logger in (None, *logs.NOISY_LOGGERS):  # an earlier logs.configure() silenced these
        caplog.set_level(logging.DEBUG, logger)
    async with (
        answering(answer(body=5)) as other,
        answering(
            answer(302, b"", location=f"{other.url}/api/v1/jobs"), problem(401, "unauthenticated"), event_stream()
        ) as server,
    ):
        client = http_client(server)
        for kind in (RotaError, Unauthenticated):
            with pytest.raises(kind) as raised:
                await client.call("GET", "/jobs", int, **IDEMPOTENT)
            assert KEY not in repr((raised.value, raised.value.facts, client, vars(client)))
        async with client.stream("/events") as stream:
            assert stream.is_success
        await client.close()
    assert other.requests == []
    assert {each.headers["authorization"] for each in server.requests} == {f"Bearer {KEY}"}
    assert KEY[-20:] not in caplog.text
    assert caplog.records, "something was logged"


async def test_response_of_another_version_raises():
    async with answering(answer(body="text")) as server:
        client = http_client(server)
        with pytest.raises(
            RotaError, match="GET /api/v1/jobs returned an answer that this version of Rota cannot decode"
        ):
            await client.call("GET", "/jobs", int, **IDEMPOTENT)
        await client.close()


async def test_cancelled_call_does_not_affect_others():
    hangs = asyncio.Event()

    async def never():
        hangs.set()
        await asyncio.Event().wait()

    async with answering(never, answer(body=5)) as server:
        client = http_client(server)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(client.call("GET", "/jobs", int, **IDEMPOTENT))
            await hangs.wait()
            first.cancel()
        assert await client.call("GET", "/jobs", int, **IDEMPOTENT) == 5
        await client.close()


def test_url_without_a_key_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROTA_API_KEY", raising=False)
    with pytest.raises(InvalidSetting, match="A URL needs a key"):
        endpoint_resolver("http://localhost:1", "")()
    monkeypatch.setenv("ROTA_API_KEY", KEY)
    assert endpoint_resolver("http://localhost:1/", "")() == ApiEndpoint("http://localhost:1", KEY)


async def test_wait_pauses_between_requests_to_a_server_that_answers_at_once():
    app = Rota()
    task = app.task(name="noop")(lambda: None)
    with manual():
        job = await task.submit()
        snapshot = await job.get()
    async with answering(answer(body=snapshot)) as server, Rota(server.url, key=KEY) as there:
        with pytest.raises(NotEnded):
            await there.job(job.id).wait(timeout=0.6)
    assert 1 < len(server.requests) < 8


def event_stream(*events):
    """A stream response with these events, closed after the last."""
    lines = [f"id: {number}\nevent: job.{state}\ndata: {state}\n\n" for number, state in events]
    return answer(200, f"retry: 1000\n\n{''.join(lines)}".encode(), kind="text/event-stream")


async def test_event_stream_resumes_after_the_last_event():
    busy = problem(429, "rate_limited", facts={"retry_after_s": 7})
    async with answering(
        event_stream((1, "pending"), (2, "scheduled")), CUT, busy, event_stream((3, "running")), answer(204, b"")
    ) as server:
        client = http_client(server)
        found = [each.data async for each in follow_events(client, "/events", {"show": "film"})]
        await client.close()
    assert found == ["pending", "scheduled", "running"]
    assert [each.headers.get("last-event-id") for each in server.requests] == [None, "2", "2", "2", "3"]
    assert {each.path for each in server.requests} == {"/api/v1/events?show=film"}


@pytest.mark.parametrize("response", [event_stream(), CUT, problem(503, "unavailable")])
async def test_event_stream_that_breaks_repeatedly_is_given_up(response):
    async with answering(response) as server:
        client = http_client(server)
        with pytest.raises(Unavailable, match="times in a row"):
            await anext(follow_events(client, "/events"))
        await client.close()
    assert 10 < len(server.requests) < 50


async def test_refused_event_stream_ends_at_once():
    async with answering(problem(403, "forbidden")) as server:
        client = http_client(server)
        with pytest.raises(errors.Forbidden):
            await anext(follow_events(client, "/events"))
        await client.close()
    assert len(server.requests) == 1


async def test_log_chunks_are_decoded_whole_and_delivered_as_they_arrive():
    async def bytes_of(*chunks, gate=None):
        for chunk in chunks:
            yield chunk
        if gate is not None:
            await gate.wait()

    umlaut = "ä".encode()
    assert [text async for text in read_in_order([bytes_of(b"a", umlaut[:1], umlaut[1:]), bytes_of(b"b\xff")])] == [
        "a",
        "ä",
        "b\ufffd",
    ]
    gate = asyncio.Event()
    texts = merge_streams([bytes_of(b"slow", gate=gate), bytes_of(b"x", b"y")])
    found = {await anext(texts) for _ in range(3)}
    assert found == {"slow", "x", "y"}
    await texts.aclose()
    gate.set()
    assert [text async for text in merge_streams([bytes_of(b"slow", gate=gate)])] == ["slow"]


def test_client_works_on_uvloop():
    async def program():
        async with answering(answer(body=5)) as server:
            client = HttpClient(lambda: ApiEndpoint(server.url.replace("127.0.0.1", "localhost"), KEY))
            found = await asyncio.gather(*(client.call("GET", "/jobs", int, **IDEMPOTENT) for _ in range(10)))
            found.append(await client.call("GET", "/jobs", int, **IDEMPOTENT))
            await client.close()
        return found

    assert uvloop.run(program()) == [5] * 11

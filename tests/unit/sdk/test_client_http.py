"""Calls of the API by the SDK: repeated when that does no harm, raised as what they are, never showing the key."""

import asyncio
import logging
import re
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from rota import NotEnded, Rota
from rota.client.discovery import endpoint_resolver
from rota.client.errors import error_from_response, parse_retry_after
from rota.client.events import follow_events
from rota.client.http import HttpClient
from rota.client.log_stream import merge_streams, read_in_order
from rota.infra.telemetry import logs
from rota.local.api_key import ApiEndpoint
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


def wire(server, **more):
    return HttpClient(
        lambda: ApiEndpoint(server.url, KEY), clock=MovableClock(datetime(2030, 1, 1, tzinfo=UTC)), **more
    )


async def test_what_may_be_repeated_is_until_it_is_answered():
    async with answering(CUT, answer(502, b"<html>"), problem(503, "postgres_unavailable"), answer(body=5)) as server:
        asking = wire(server)
        assert await asking.call("GET", "/jobs", int, **IDEMPOTENT) == 5
        await asking.close()
    assert [(each.method, each.path) for each in server.heard] == [("GET", "/api/v1/jobs")] * 4
    assert server.heard[0].headers["authorization"] == f"Bearer {KEY}"


async def test_what_may_not_be_repeated_is_sent_once_and_said_to_be_unknown():
    async with answering(CUT) as server:
        asking = wire(server)
        with pytest.raises(Unavailable, match="the outcome of the request is unknown"):
            await asking.call("POST", "/shows", int, idempotent=False, body={"name": "film"})
        await asking.close()
    assert len(server.heard) == 1


async def test_a_server_that_may_have_begun_is_not_asked_twice_either():
    async with answering(problem(503, "postgres_unavailable"), answer(body=5)) as server:
        asking = wire(server)
        with pytest.raises(errors.PostgresUnavailable):
            await asking.call("POST", "/shows", int, idempotent=False)
        await asking.close()
    assert len(server.heard) == 1


async def test_who_sends_too_much_waits_for_as_long_as_it_is_told_to():
    clock = MovableClock(datetime(2030, 1, 1, tzinfo=UTC))
    async with answering(problem(429, "rate_limited", retry_after="17"), answer(body=5)) as server:
        asking = HttpClient(lambda: ApiEndpoint(server.url, KEY), clock=clock)
        assert await asking.call("POST", "/shows", int, idempotent=False) == 5
        await asking.close()
    assert clock.now >= datetime(2030, 1, 1, 0, 0, 17, tzinfo=UTC)


@pytest.mark.parametrize("said", [CUT, problem(503, "unavailable", retry_after="3600")])
async def test_patience_ends(said):
    async with answering(said) as server:
        asking = wire(server, retry_budget_s=60)
        with pytest.raises(Unavailable):
            await asking.call("GET", "/jobs", int, **IDEMPOTENT)
        await asking.close()
    assert len(server.heard) == 1 if said is not CUT else 10 < len(server.heard) < 60


async def test_nobody_there_is_one_sentence():
    async with answering(CUT) as server:
        pass
    asking = wire(server, retry_budget_s=1)
    with pytest.raises(Unavailable, match=rf"Rota at {server.url} does not answer \(ConnectError\)"):
        await asking.call("POST", "/shows", int, idempotent=False)
    await asking.close()


async def test_rota_is_found_again_where_it_came_back():
    async with answering(CUT) as before, answering(answer(body=5)) as after:
        places = iter([before, InvalidSetting("down"), after, after])

        def find():
            place = next(places)
            if isinstance(place, Exception):
                raise place
            return ApiEndpoint(place.url, KEY)

        asking = HttpClient(find, clock=MovableClock())
        assert await asking.call("GET", "/jobs", int, **IDEMPOTENT) == 5
        await asking.close()
    assert (len(before.heard), len(after.heard)) == (2, 1)


def kinds(kind=RotaError):
    below = [each for each in kind.__subclasses__() if each.__module__ == errors.__name__]
    return [kind, *(found for each in below for found in kinds(each))]


@pytest.mark.parametrize("kind", [kind for kind in kinds() if not issubclass(kind, (JobNotSucceeded, RunNotSucceeded))])
def test_a_refusal_is_the_exception_of_its_code(kind):
    error = error_from_response(
        409, "", problem(409, kind.code, "Not now.", facts={"needs": 3}).partition(b"\r\n\r\n")[2]
    )
    assert (type(error), error.sentence, error.facts["needs"]) == (kind, "Not now.", 3)


@pytest.mark.parametrize(
    ("status", "body", "kind", "word"),
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
def test_whatever_else_answers_is_told_by_its_status(status, body, kind, word):
    error = (
        error_from_response(status, "text/html", body)
        if b"<" in body
        else error_from_response(status, "text/plain", body)
    )
    assert type(error) is kind
    assert word in error.sentence


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", 0), ("3", 3), ("0.5", 0.5), ("-3", 0), ("inf", 0), ("soon", 0), ("Tue, 01 Jan 2030 00:01:00 GMT", 60)],
)
def test_how_long_to_wait_comes_in_seconds_or_as_a_date(text, seconds):
    assert parse_retry_after(text, datetime(2030, 1, 1, tzinfo=UTC)) == seconds


async def test_the_key_is_shown_nowhere_and_sent_nowhere_else(caplog):
    for logger in (None, *logs.NOISY_LOGGERS):  # whoever configured logs before has silenced these
        caplog.set_level(logging.DEBUG, logger)
    async with (
        answering(answer(body=5)) as other,
        answering(answer(302, b"", location=f"{other.url}/api/v1/jobs"), problem(401, "unauthenticated")) as server,
    ):
        asking = wire(server)
        for kind in (RotaError, Unauthenticated):
            with pytest.raises(kind) as told:
                await asking.call("GET", "/jobs", int, **IDEMPOTENT)
            assert KEY not in repr((told.value, told.value.facts, asking, vars(asking)))
        await asking.close()
    assert other.heard == []
    assert KEY[-20:] not in caplog.text
    assert caplog.records, "there is something to look at"


async def test_an_answer_of_another_version_is_one_sentence():
    async with answering(answer(body="text")) as server:
        asking = wire(server)
        with pytest.raises(
            RotaError, match="GET /api/v1/jobs returned an answer that this version of Rota cannot decode"
        ):
            await asking.call("GET", "/jobs", int, **IDEMPOTENT)
        await asking.close()


async def test_a_cancelled_call_leaves_the_others_alone():
    hangs = asyncio.Event()

    async def never():
        hangs.set()
        await asyncio.Event().wait()

    async with answering(never, answer(body=5)) as server:
        asking = wire(server)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(asking.call("GET", "/jobs", int, **IDEMPOTENT))
            await hangs.wait()
            first.cancel()
        assert await asking.call("GET", "/jobs", int, **IDEMPOTENT) == 5
        await asking.close()


def test_a_url_needs_a_key(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROTA_API_KEY", raising=False)
    with pytest.raises(InvalidSetting, match="A URL needs a key"):
        endpoint_resolver("http://localhost:1", "")()
    monkeypatch.setenv("ROTA_API_KEY", KEY)
    assert endpoint_resolver("http://localhost:1/", "")() == ApiEndpoint("http://localhost:1", KEY)


async def test_a_server_that_answers_at_once_while_it_ends_is_not_asked_without_a_pause():
    app = Rota()
    task = app.task(name="noop")(lambda: None)
    with manual():
        job = await task.submit()
        as_it_is = await job.get()
    async with answering(answer(body=as_it_is)) as server, Rota(server.url, key=KEY) as there:
        with pytest.raises(NotEnded):
            await there.job(job.id).wait(timeout=0.6)
    assert 1 < len(server.heard) < 8


def told(*events):
    """A piece of a stream, which ends after it."""
    lines = [f"id: {number}\nevent: job.{state}\ndata: {state}\n\n" for number, state in events]
    return answer(200, f"retry: 1000\n\n{''.join(lines)}".encode(), kind="text/event-stream")


async def test_events_go_on_behind_the_last_one_that_was_read():
    busy = problem(429, "rate_limited", facts={"retry_after_s": 7})
    async with answering(
        told((1, "pending"), (2, "scheduled")), CUT, busy, told((3, "running")), answer(204, b"")
    ) as server:
        asking = wire(server)
        found = [each.data async for each in follow_events(asking, "/events", {"show": "film"})]
        await asking.close()
    assert found == ["pending", "scheduled", "running"]
    assert [each.headers.get("last-event-id") for each in server.heard] == [None, "2", "2", "2", "3"]
    assert {each.path for each in server.heard} == {"/api/v1/events?show=film"}


@pytest.mark.parametrize("said", [told(), CUT, problem(503, "unavailable")])
async def test_a_stream_that_breaks_again_and_again_is_given_up(said):
    async with answering(said) as server:
        asking = wire(server)
        with pytest.raises(Unavailable, match="times in a row"):
            await anext(follow_events(asking, "/events"))
        await asking.close()
    assert 10 < len(server.heard) < 50


async def test_a_refusal_ends_a_stream_at_once():
    async with answering(problem(403, "forbidden")) as server:
        asking = wire(server)
        with pytest.raises(errors.Forbidden):
            await anext(follow_events(asking, "/events"))
        await asking.close()
    assert len(server.heard) == 1


async def test_pieces_of_text_come_whole_and_as_they_come():
    async def bytes_of(*pieces, gate=None):
        for piece in pieces:
            yield piece
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


def test_importing_rota_loads_neither_the_client_nor_the_engine():
    code = "import sys, rota; rota.Rota().task(len); print({name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30).stdout
    assert not {"httpx", "asyncpg", "litestar", "redis", "nats", "grpc", "rich"} & set(re.findall(r"\w+", loaded))

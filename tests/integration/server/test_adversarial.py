"""Misbehaving HTTP clients: slow, disconnecting, malformed or over their limits."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import msgspec
import pytest
from httpx import AsyncClient

from rota.model.access import Role
from rota.server import services
from rota.server.http import codec, problem_details
from rota.server.http.middleware import rate_limit
from tests.support.api import Api, a_job, problem
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until

JOBS = sql("SELECT count(*) FROM rota.job")


@pytest.fixture
async def open_api(database_url, redis_url, nats_url, bus_prefix):
    """The API of replicas with one show; `limits` are settings of the API."""

    @asynccontextmanager
    async def opened(**limits):
        farm = Farm(database_url, redis_url, nats_url, bus_prefix, faces=services)
        limited = msgspec.structs.replace(farm.settings.api, **limits)
        farm.settings = msgspec.structs.replace(farm.settings, api=limited)
        async with farm, Api(farm) as api:
            await farm.show()
            yield api

    return opened


@pytest.fixture
async def api(open_api):
    async with open_api() as api:
        yield api


class Raw:
    """A raw TCP connection: the test writes and reads the bytes."""

    def __init__(self, api, key):
        self._port, self._key = api.farm.replica.listener.port, key

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *failure):
        self.writer.close()

    def head(self, line, *headers):
        lines = [f"{line} HTTP/1.1", "host: 127.0.0.1", f"authorization: Bearer {self._key}", *headers, "", ""]
        self.writer.write("\r\n".join(lines).encode())

    async def answer(self):
        """(status, body) of the next response."""
        async with asyncio.timeout(10):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines if line)
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(first.split()[1]), json.loads(body) if body else None

    async def closed(self):
        async with asyncio.timeout(10):
            return await self.reader.read() == b""


@pytest.fixture
async def raw(api):
    async with Raw(api, await api.key(Role.SUBMITTER)) as raw:
        yield raw


@pytest.fixture
def no_defects():
    before = defects()
    yield
    assert defects() == before


def defects():
    return problem_details.DEFECTS._value.get()


async def test_slow_request_body_times_out(api, raw, monkeypatch):
    monkeypatch.setattr(codec, "BODY_TIMEOUT_S", 0.05)
    raw.head("POST /api/v1/jobs", "content-type: application/json", "content-length: 1000")
    raw.writer.write(b'{"show":')
    status, error = await raw.answer()
    assert (status, error["code"]) == (408, "too_slow")


@pytest.mark.usefixtures("no_defects")
@pytest.mark.parametrize("path", ["/jobs", "/jobs/bulk"])
async def test_disconnect_during_body_submits_nothing(api, raw, path):
    ann = await api.client(Role.SUBMITTER)
    body = json.dumps(a_job()).encode() + b"\n"
    raw.head(f"POST /api/v1{path}", "content-type: application/json", f"content-length: {len(body) * 2}")
    raw.writer.write(body)
    await until(lambda: rate_limit.REQUESTS_IN_FLIGHT._value.get() == 1)
    raw.writer.close()
    await until(lambda: rate_limit.REQUESTS_IN_FLIGHT._value.get() == 0)
    assert (await ann.get("/jobs")).json()["items"] == []


@pytest.mark.usefixtures("no_defects")
@pytest.mark.parametrize("disconnect", ["close", "write_eof"])
async def test_disconnect_during_long_poll_ends_the_wait(api, raw, disconnect):
    job = await api.farm.submit("noop")
    raw.head(f"GET /api/v1/jobs/{job}?wait=60")
    await until(lambda: rate_limit.REQUESTS_WAITING._value.get() == 1)
    getattr(raw.writer, disconnect)()
    await until(lambda: rate_limit.REQUESTS_WAITING._value.get() == 0)


async def test_endless_chunked_body_is_cut_off_at_the_limit(api, raw):
    raw.head("POST /api/v1/jobs", "content-type: application/json", "transfer-encoding: chunked")
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    for _ in range(70):
        raw.writer.write(chunk)
    status, error = await raw.answer()
    assert (status, error["code"]) == (413, "too_large")


async def test_bulk_body_may_exceed_the_normal_size_limit(api):
    ann = await api.client(Role.SUBMITTER)
    lines = [json.dumps(a_job(layer={"input": {"args": ["x" * 60_000], "kwargs": {}}})) for _ in range(100)]
    answer = await ann.post("/jobs/bulk", content="\n".join(lines))
    assert answer.status_code == 201, answer.text
    assert await api.farm.database.value(JOBS) == 100


async def test_pipelined_requests_are_answered_in_order(api, raw):
    for path in ("/me", "/nothing", "/shows"):
        raw.head(f"GET /api/v1{path}")
    answers = [await raw.answer() for _ in range(3)]
    assert [status for status, _ in answers] == [200, 404, 200]
    assert answers[2][1]["items"][0]["name"] == "film"


async def test_wrong_host_or_oversized_header_is_refused(api, raw):
    anonymous = await api.raw_client()
    answer = await anonymous.get("/jobs", headers={"host": "evil.example"})
    assert answer.status_code == 421
    raw.head("GET /api/v1/me", *(f"x-{number}: {'y' * 100}" for number in range(2000)))
    first = await raw.reader.readline()
    assert int(first.split()[1]) in (400, 431)


async def test_head_has_no_body_and_unknown_method_lists_allowed_ones(api):
    ann = await api.client(Role.SUBMITTER)
    head, get = await ann.head("/me"), await ann.get("/me")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]
    for method in ("OPTIONS", "DELETE", "TRACE", "PROPFIND"):
        answer = await ann.request(method, "/jobs")
        problem(answer, 405, "method_not_allowed")
        assert answer.headers["allow"] == "GET, HEAD, POST"


async def test_server_shutdown_answers_long_polls(open_api):
    async with AsyncClient() as client:
        async with open_api() as api:
            job, key = await api.farm.submit("noop"), await api.key(Role.VIEWER)
            request = client.get(f"{api.url}/jobs/{job}?wait=60", headers={"X-API-Key": key})
            waiting = asyncio.create_task(request)
            await until(lambda: rate_limit.REQUESTS_WAITING._value.get() == 1)
        answer = await waiting
    assert (answer.status_code, answer.json()["state"]) == (200, "SCHEDULED")


async def test_rate_limited_key_gets_retry_after_and_submits_nothing(open_api):
    async with open_api(requests_per_s=1, requests_burst=2) as api:
        ann, bob = await api.client(Role.SUBMITTER), await api.client(Role.SUBMITTER)
        answers = [await ann.post("/jobs", json=a_job()) for _ in range(5)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) >= 2
        for answer in refused:
            problem(answer, 429, "rate_limited")
            assert answer.headers["retry-after"] == "1"
        assert await api.farm.database.value(JOBS) == 5 - len(refused)
        assert (await bob.get("/me")).status_code == 200


async def test_rate_limit_of_a_key_covers_all_servers(open_api):
    async with open_api(requests_per_s=1, requests_burst=6) as api:
        await api.farm.server()
        headers, began_s = {"X-API-Key": await api.key(Role.SUBMITTER)}, time.monotonic()
        statuses = []
        async with AsyncClient(verify=False) as client:
            for replica in api.farm.replicas:
                for _ in range(8):
                    statuses.append((await client.get(f"{replica.listen_url}/api/v1/me", headers=headers)).status_code)
        assert set(statuses) == {200, 429}
        assert 6 <= statuses.count(200) <= 6 + time.monotonic() - began_s + 1


async def test_concurrent_requests_and_long_polls_are_bounded(open_api, monkeypatch):
    monkeypatch.setattr(rate_limit, "WAITING_PER_KEY_MAX", 1)
    async with open_api(requests_at_once=1) as api:
        ann, job = await api.client(Role.SUBMITTER), await api.farm.submit("noop")
        waiting = asyncio.create_task(ann.get(f"/jobs/{job}", params={"wait": 60}))
        await until(lambda: rate_limit.REQUESTS_WAITING._value.get() == 1)
        assert (await ann.get("/me")).status_code == 200
        more = await ann.get(f"/jobs/{job}", params={"wait": 60})
        problem(more, 429, "rate_limited")
        assert more.headers["retry-after"]
        async with Raw(api, await api.key(Role.SUBMITTER)) as slow:
            slow.head("POST /api/v1/jobs", "content-type: application/json", "content-length: 1000")
            await until(lambda: rate_limit.REQUESTS_IN_FLIGHT._value.get() == 1)
            problem(await ann.get("/me"), 429, "rate_limited")
        await until(lambda: rate_limit.REQUESTS_IN_FLIGHT._value.get() == 0)
        await api.farm.replica.engine.canceller.cancel(job, "test")
        assert (await waiting).json()["state"] == "CANCELLED"

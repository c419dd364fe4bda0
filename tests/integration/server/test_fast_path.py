"""A submission that arrives whole is answered without Litestar, with the same answer as by the app.

A parameter that nobody reads sends the same request to the app.
"""

import asyncio
import json
from uuid import uuid4

import msgspec
import pytest

from rota.infra.telemetry import tracing
from rota.model.access import Actor, Grant, Role
from rota.model.identity.api_key_format import KeyId
from rota.model.identity.principals import Principal
from rota.server import services
from rota.server.http import codec, fast_path, problem_details
from rota.server.http.middleware import rate_limit
from tests.support.api import PREFIX, Api, a_job, problem
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until

JSON, MSGPACK = {"content-type": "application/json"}, {"content-type": "application/msgpack"}
JOBS = sql("SELECT count(*) FROM rota.job")
BY_APP = "/jobs?by=app"
MISSING = str(uuid4())


def encoded(**more):
    return json.dumps(a_job(**more)).encode()


ANSWERED = {
    "json": (JSON, encoded()),
    "msgpack": (MSGPACK, msgspec.msgpack.encode(a_job())),
    "msgpack answer": (JSON | {"accept": "application/msgpack"}, encoded()),
    "key": (JSON | {"idempotency-key": "once"}, encoded()),
    "empty key": (JSON | {"idempotency-key": ""}, encoded()),
    "longest key": (JSON | {"idempotency-key": "k" * 200}, encoded()),
    "key in the body": (JSON, encoded(idempotency_key="body")),
    "two keys": (JSON | {"idempotency-key": "one"}, encoded(idempotency_key="other")),
    "unknown show": (JSON, encoded(show="flim")),
    "show of others": (JSON, encoded(show="secret")),
    "critical": (JSON, encoded(priority="CRITICAL")),
    "other principal": (JSON, encoded(principal="bob")),
    "no layers": (JSON, b'{"show": "film", "layers": []}'),
    "bad topic": (JSON, encoded(topic="\0")),
    "unknown dependency": (JSON, encoded(after=[MISSING])),
}
LEFT_TO_THE_APP = {
    "charset": ({"content-type": "application/json; charset=utf-8"}, encoded()),
    "no content type": ({}, encoded()),
    "other content type": ({"content-type": "text/plain"}, encoded()),
    "long key": (JSON | {"idempotency-key": "k" * 201}, encoded()),
    "broken": (JSON, b"{"),
    "empty": (JSON, b""),
    "unknown field": (JSON, encoded(colour=1)),
    "wrong type": (JSON, encoded(show=5)),
    "nested": (JSON, b'{"a":' * 100_000),
    "msgpack as json": (JSON, msgspec.msgpack.encode(a_job())),
    "too large": (JSON, b'{"show": "' + b"x" * 5_000_000 + b'"}'),
}


@pytest.fixture
async def api(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm, Api(farm) as api:
        await farm.show()
        await farm.show("secret")
        yield api


@pytest.fixture
async def ann(api):
    return await api.client((Role.SUBMITTER, "film"))


@pytest.fixture
def answered(monkeypatch):
    """Requests that were answered without the app."""
    seen, real = [], fast_path.SubmissionFastPath._submit

    async def record(self, *args):
        seen.append(args)
        await real(self, *args)

    monkeypatch.setattr(fast_path.SubmissionFastPath, "_submit", record)
    return seen


def comparable(answer):
    is_msgpack = "msgpack" in answer.headers["content-type"]
    body = msgspec.msgpack.decode(answer.content) if is_msgpack else answer.json()
    if answer.is_success:
        body["job"] = len(body["job"])
        body.pop("already")
    return answer.status_code, dict(answer.headers) | {"content-length": ""}, body


@pytest.mark.parametrize("case", [*ANSWERED, *LEFT_TO_THE_APP])
async def test_submission_is_answered_as_by_the_app(api, ann, answered, case):
    headers, body = (ANSWERED | LEFT_TO_THE_APP)[case]
    fast = await ann.post("/jobs", content=body, headers=headers)
    assert len(answered) == (case in ANSWERED)
    by_app = await ann.post(BY_APP, content=body, headers=headers)
    assert len(answered) == (case in ANSWERED)
    assert comparable(fast) == comparable(by_app)
    new = 1 if fast.is_success and "key" in case and case != "empty key" else 2
    assert await api.farm.database.value(JOBS) == (new if fast.is_success else 0)


@pytest.mark.parametrize("grant", [Role.VIEWER, (Role.VIEWER, "film"), (Role.SUBMITTER, "secret")])
async def test_key_without_the_role_is_refused_as_by_the_app(api, answered, grant):
    viewer = await api.client(grant)
    fast, by_app = [await viewer.post(path, json=a_job()) for path in ("/jobs", BY_APP)]
    assert comparable(fast) == comparable(by_app)
    assert fast.status_code == 403
    assert len(answered) == (grant == (Role.SUBMITTER, "secret"))


async def test_requests_without_a_known_key_reach_no_path(api, answered):
    stranger = await api.raw_client()
    for path in ("/jobs", BY_APP):
        problem(await stranger.post(path, json=a_job()), 401, "unauthenticated")
    assert answered == []


async def test_defect_is_logged_and_answered_as_by_the_app(ann, monkeypatch):
    async def fail(*_args):
        return 1 / 0

    monkeypatch.setattr(fast_path, "submit_one", fail)
    monkeypatch.setattr("rota.server.http.routes.jobs.submit_one", fail)
    before = problem_details.DEFECTS._value.get()
    fast, by_app = [await ann.post(path, json=a_job()) for path in ("/jobs", BY_APP)]
    problem(fast, 500, "defect")
    assert comparable(fast) == comparable(by_app)
    assert problem_details.DEFECTS._value.get() == before + 2


@pytest.mark.parametrize("path", ["/jobs", BY_APP])
async def test_traceparent_of_the_client_reaches_the_submission(ann, monkeypatch, path):
    parents = []
    monkeypatch.setattr(tracing, "is_enabled", lambda: True)
    monkeypatch.setattr(tracing, "attach", parents.append)
    trace = f"00-{'1' * 32}-{'2' * 16}-01"
    await ann.post(path, json=a_job(), headers={"traceparent": trace})
    assert parents == [trace]


class Connection:
    """A raw connection that sends a head and then, when told, parts of the body."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    @classmethod
    async def opened(cls, api, length, *headers):
        port, key = api.farm.replica.listener.port, await api.key(Role.SUBMITTER)
        connection = cls(*await asyncio.open_connection("127.0.0.1", port))
        head = [f"POST {PREFIX}/jobs HTTP/1.1", "host: localhost", f"x-api-key: {key}"]
        head += ["content-type: application/json", f"content-length: {length}", *headers, "", ""]
        connection.send("\r\n".join(head).encode())
        return connection

    def send(self, data):
        self._writer.write(data)

    async def status(self, *, is_last=True):
        async with asyncio.timeout(10):
            line, *_ = (await self._reader.readuntil(b"\r\n\r\n")).splitlines()
        if is_last:
            self._writer.close()
        return int(line.split()[1])


async def test_body_in_parts_is_read_by_the_app(api, answered, monkeypatch):
    replayed, real = [], fast_path._replayed

    def record(first, receive):
        replayed.append(first["body"])
        return real(first, receive)

    monkeypatch.setattr(fast_path, "_replayed", record)
    body = encoded()
    connection = await Connection.opened(api, len(body))
    connection.send(body[:20])
    await until(lambda: replayed, what="the first part to be read")
    connection.send(body[20:])
    assert await connection.status() == 201
    assert (answered, replayed) == ([], [body[:20]])
    assert await api.farm.database.value(JOBS) == 1


EXPECT = "expect: 100-continue"


@pytest.mark.parametrize("headers", [(EXPECT,), ()], ids=["expect", "no expect"])
async def test_too_large_body_is_refused_before_it_is_sent(api, answered, headers):
    connection = await Connection.opened(api, 5_000_000, *headers)
    assert await connection.status() == 413
    assert answered == []


async def test_body_is_invited_when_the_client_expects_it(api, answered):
    body = encoded()
    connection = await Connection.opened(api, len(body), EXPECT)
    assert await connection.status(is_last=False) == 100
    connection.send(body)
    assert await connection.status() == 201
    assert answered == []


async def test_body_that_does_not_come_times_out(api, monkeypatch):
    monkeypatch.setattr(codec, "BODY_TIMEOUT_S", 0.05)
    connection = await Connection.opened(api, 100)
    assert await connection.status() == 408
    await until(lambda: rate_limit.REQUESTS_IN_FLIGHT._value.get() == 0)


async def test_body_over_the_limit_is_left_to_the_app():
    seen = []

    async def app(_scope, receive, _send):
        seen.append(await receive())

    async def receive():
        return {"type": "http.request", "body": encoded()}

    headers = [(name.encode(), value.encode()) for name, value in JSON.items()]
    user = Actor(KeyId("k"), "ann", Principal("ann"), (Grant(Role.SUBMITTER),))
    scope = {"path": f"{PREFIX}/jobs", "method": "POST", "query_string": b"", "headers": headers, "user": user}
    await fast_path.SubmissionFastPath(app, None, body_bytes_max=10)(scope, receive, None)
    assert seen == [await receive()]

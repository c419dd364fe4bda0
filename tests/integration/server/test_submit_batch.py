"""POST /jobs/batch: many submissions in one request, each answered as if it was sent alone."""

import asyncio
import json
from itertools import zip_longest

import httpx
import pytest

from rota.model.access import Role
from rota.model.errors import PostgresUnavailable
from rota.server import services
from tests.support.api import Api, a_job, problem
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm
from tests.support.tracing import recording

JOBS = sql("SELECT count(*) FROM rota.job")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b{}-01"


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm:
        for show in ("film", "zebra", "hidden"):
            await farm.show(show)
        yield farm


@pytest.fixture
async def api(farm):
    async with Api(farm) as api:
        yield api


async def batch(client, *submissions, status=201, traces=()):
    traces = [*traces, *[""] * len(submissions)]
    items = [{"submission": each, "trace": trace} for each, trace in zip(submissions, traces, strict=False)]
    answer = await client.post("/jobs/batch", json={"items": items})
    assert answer.status_code == status, answer.text
    return answer.json()["items"] if status == 201 else answer


def as_batch_item(answer):
    """What the batch holds for a submission with this answer of its own."""
    if answer.is_success:
        return {"result": answer.json()}
    alone = answer.json()
    found = {name: alone[name] for name in ("status", "code", "detail", "facts") if name in alone}
    return {"problem": found | {"retry_after_s": float(answer.headers.get("retry-after", 0))}}


async def test_each_submission_is_answered_as_if_sent_alone(farm, api):
    client = await api.client((Role.SUBMITTER, "film"), (Role.VIEWER, "zebra"))
    foreign = str(await farm.submit("noop", show="zebra"))
    hidden = str(await farm.submit("noop", show="hidden"))
    missing = "00000000-0000-0000-0000-000000000001"
    await batch(client, a_job("echo", idempotency_key="used"))
    refused = [
        a_job(show="zebra"),
        a_job(show="nowhere"),
        a_job(priority="CRITICAL"),
        a_job(principal="somebody"),
        a_job(folder="nowhere"),
        a_job(after=[missing]),
        a_job(after=[hidden]),
        a_job(layer={"cores": -1}),
        a_job(layer={"frames": "1-"}),
        a_job(labels={"approval_by": "me"}),
        a_job("noop", idempotency_key="used"),
        {"show": "film", "layers": []},
    ]
    accepted = [a_job(name="a"), a_job(name="b", after=[foreign]), a_job("echo", idempotency_key="used")]
    mixed = [each for pair in zip_longest(refused, accepted) for each in pair if each is not None]
    found = await batch(client, *mixed)
    for submission, answer in zip(mixed, found, strict=True):
        alone = await client.post("/jobs", json=submission)
        assert alone.is_success is (submission in accepted), alone.text
        if submission in refused:
            assert answer == as_batch_item(alone)
        else:
            assert answer["result"].keys() == alone.json().keys()
    assert found[5]["result"]["already"] is True
    names = [
        (await client.get(f"/jobs/{answer['result']['job']}")).json()["name"] for answer in found if "result" in answer
    ]
    assert names[:2] == ["a", "b"]


async def test_jobs_of_a_batch_are_created_in_its_order(api):
    client = await api.client(Role.SUBMITTER)
    found = [answer["result"]["job"] for answer in await batch(client, *[a_job(name=f"n{at}") for at in range(50)])]
    assert found == sorted(found)
    assert (await client.get(f"/jobs/{found[7]}")).json()["name"] == "n7"


async def test_batch_repeated_under_the_same_keys_makes_no_second_job(farm, api):
    client = await api.client(Role.SUBMITTER)
    jobs = [a_job(idempotency_key=f"k{number % 3}") for number in range(6)]
    first, again = await batch(client, *jobs), await batch(client, *jobs)
    assert [each["result"]["job"] for each in first] == [each["result"]["job"] for each in again]
    assert all(each["result"]["already"] for each in again)
    assert await farm.database.value(JOBS) == 3


async def test_malformed_batch_submits_nothing(farm, api):
    client = await api.client(Role.SUBMITTER)
    good = {"submission": a_job()}
    for body in (
        b"",
        b"[]",
        b'{"items": []}',
        json.dumps({"items": [good, {"submission": {"show": 5}}]}).encode(),
        json.dumps({"items": [good] * 1001}).encode(),
        json.dumps({"items": [good], "atomic": True}).encode(),
    ):
        problem(
            await client.post("/jobs/batch", content=body, headers={"content-type": "application/json"}),
            400,
            "invalid_input",
        )
    large = json.dumps({"items": [{"submission": a_job(context="x" * 1024 * 1024)}] * 5}).encode()
    answer = await client.post("/jobs/batch", content=large, headers={"content-type": "application/json"})
    problem(answer, 413, "too_large")
    assert await farm.database.value(JOBS) == 0


async def test_batch_requires_a_submitter(farm, api):
    problem(await batch(await api.client(Role.VIEWER), a_job(), status=403), 403, "forbidden")
    problem(await batch(await api.raw_client(), a_job(), status=401), 401, "unauthenticated")
    assert await farm.database.value(JOBS) == 0


async def test_transient_error_is_reported_for_each_submission_with_its_delay(farm, api, monkeypatch):
    client = await api.client(Role.SUBMITTER)

    async def unavailable(*_args, **_more):
        raise PostgresUnavailable("PostgreSQL does not answer: try again.")

    monkeypatch.setattr(farm.replica.engine.submitter, "write", unavailable)
    for answer in await batch(client, a_job(), a_job()):
        found = answer["problem"]
        assert (found["status"], found["code"], found["retry_after_s"]) == (503, "postgres_unavailable", 1.0)


async def test_defect_in_one_submission_is_answered_without_its_text(farm, api, monkeypatch):
    client = await api.client(Role.SUBMITTER)
    write = farm.replica.engine.submitter.write

    async def failing(plans, **more):
        if any(plan.name == "bad" for plan in plans):
            raise ZeroDivisionError("secret")
        return await write(plans, **more)

    monkeypatch.setattr(farm.replica.engine.submitter, "write", failing)
    [answer] = await batch(client, a_job(name="bad"))
    assert (answer["problem"]["status"], answer["problem"]["code"]) == (500, "defect")
    assert "secret" not in json.dumps(answer)


async def test_each_job_belongs_to_the_trace_of_its_item(farm, api, monkeypatch):
    recorder = recording(monkeypatch)
    client = await api.client(Role.SUBMITTER)
    await batch(client, a_job(name="a"), a_job(name="b"), a_job(name="c"), traces=[TRACE.format(1), TRACE.format(2)])
    parents = [span.parent.span_id & 0xF for span in recorder.named("submit")]
    assert sorted(parents) == [0, 1, 2]


async def test_disconnected_client_leaves_other_batches_alone(farm, api):
    key = await api.key(Role.SUBMITTER)
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        httpx.AsyncClient(base_url=api.url, headers=headers) as gone,
        httpx.AsyncClient(base_url=api.url, headers=headers) as stays,
    ):
        given_up = asyncio.create_task(batch(gone, *[a_job()] * 100))
        other = asyncio.create_task(batch(stays, *[a_job(name="mine")] * 100))
        await asyncio.sleep(0)
        given_up.cancel()
        assert all("result" in answer for answer in await other)
        await asyncio.wait([given_up])

"""Jobs over HTTP, on real servers."""

import asyncio
import json

import httpx
import msgspec
import pytest

from rota.api.logs import LogBytes
from rota.infra.blob_store import store as blob_store
from rota.model.access import Role
from rota.server import services
from tests.support.api import Api, a_job, problem
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging

AUDITED = sql("SELECT actor, action, target FROM rota.audit ORDER BY seq DESC LIMIT 1")
JOBS = sql("SELECT count(*) FROM rota.job")
LOSE_BYTES = sql("""
WITH before AS (UPDATE rota.frame_log SET last = false WHERE stream = 'stdout' AND last RETURNING *)
INSERT INTO rota.frame_log (pk_layer, frame, attempt, token, stream, at, data, last)
SELECT pk_layer, frame, attempt, token, stream, at + length(data) + $1::bigint, $2::bytea, true FROM before""")
"""The stream goes on with data $2 after $1 lost bytes."""
NEXT_ATTEMPT = sql("""
INSERT INTO rota.frame_log (pk_layer, frame, attempt, token, stream, at, data, last)
SELECT pk_layer, frame, attempt + 1, token + 1, stream, 0, $1::bytea, true FROM rota.frame_log
WHERE stream = 'stdout' AND last""")
BAD_SUBMISSIONS = [
    (b"{", "application/json", 400, "invalid_input"),
    (b"", "application/json", 400, "invalid_input"),
    (b"[1]", "application/json", 400, "invalid_input"),
    (b'{"show": "film", "layers": [{"task": "x", "gpus": "5"}]}', "application/json", 400, "invalid_input"),
    (b'{"show": "film", "layers": [{"task": "x"}], "colour": 1}', "application/json", 400, "invalid_input"),
    (b'{"show": "film", "layers": []}', "application/json", 400, "invalid_input"),
    (b'{"show": "flim", "layers": [{"task": "x"}]}', "application/json", 404, "not_found"),
    (b'{"show": "film", "layers": [{"task": "x"}], "topic": "\\u0000"}', "application/json", 400, "invalid_input"),
    (b'{"a":' * 100_000, "application/json", 400, "invalid_input"),
    (b"\x91" * 100_000, "application/msgpack", 400, "invalid_input"),
    (b"show=film", "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
    (b'{"show": "' + b"x" * 5_000_000 + b'"}', "application/json", 413, "too_large"),
]
BAD_QUERIES = [
    "/jobs/nonsense",
    "/jobs?after=nonsense",
    "/jobs?limit=0",
    "/jobs?limit=x",
    "/jobs?limit=100000",
    "/jobs/{job}?wait=-1",
    "/jobs/{job}?wait=nan",
    "/jobs/{job}/results?after=x",
    "/jobs/{job}/results?after=99999999999.1",
    "/jobs/{job}/logs?stream=stdin",
    "/jobs/{job}/logs?frame=-1",
    "/jobs/{job}/logs?frame=7",
    "/jobs/{job}/logs?layer=none",
    "/jobs/{job}/logs/stdin",
    "/jobs/{job}/explain?layer=none",
]


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm:
        await farm.show()
        yield farm


@pytest.fixture
async def api(farm):
    async with Api(farm) as api:
        yield api


@pytest.fixture
async def ann(api):
    return await api.client(Role.SUBMITTER)


async def submitted(client, *args, **more):
    layer = {"input": {"args": list(args), "kwargs": {}}} if args else {}
    answer = await client.post("/jobs", json=a_job(layer=layer | more.pop("layer", {}), **more))
    assert answer.status_code == 201, answer.text
    return answer.json()["job"]


async def ended(client, job):
    answer = await client.get(f"/jobs/{job}", params={"wait": 15})
    return answer.json()


async def test_submitted_job_returns_its_result(farm, ann):
    await farm.worker()
    job = await submitted(ann, 12, task="square")
    view = await ended(ann, job)
    assert (view["state"], view["id"], view["show"]) == ("SUCCEEDED", job, "film")
    results = (await ann.get(f"/jobs/{job}/results")).json()
    assert [(one["frame"], one["state"], one["value"]) for one in results["items"]] == [(0, "SUCCEEDED", 144)]
    assert results["next"] is None


async def test_job_principal_is_the_submitting_key(farm, ann):
    job = await submitted(ann)
    assert (await ann.get(f"/jobs/{job}")).json()["details"]["principal"] == "k1"
    for given in (a_job(principal="bob"), a_job(compensation={"topic": "undo", "principal": "bob"})):
        assert "leave principal out" in problem(await ann.post("/jobs", json=given), 403, "forbidden")


async def test_same_idempotency_key_returns_the_same_job(ann):
    first = await ann.post("/jobs", json=a_job(), headers={"Idempotency-Key": "once"})
    again = await ann.post("/jobs", json=a_job(idempotency_key="once"))
    assert (again.json()["job"], again.json()["already"]) == (first.json()["job"], True)
    other = await ann.post("/jobs", json=a_job("echo"), headers={"Idempotency-Key": "once"})
    problem(other, 409, "idempotency_conflict")
    both = await ann.post("/jobs", json=a_job(idempotency_key="a"), headers={"Idempotency-Key": "b"})
    assert "send one of them" in problem(both, 400, "invalid_input")


async def test_msgpack_is_accepted_and_returned(ann):
    body = msgspec.msgpack.encode(a_job())
    kinds = {"content-type": "application/msgpack", "accept": "application/msgpack"}
    answer = await ann.post("/jobs", content=body, headers=kinds)
    assert answer.headers["content-type"].startswith("application/msgpack")
    job = msgspec.msgpack.decode(answer.content)["job"]
    view = await ann.get(f"/jobs/{job}", headers=kinds)
    assert msgspec.msgpack.decode(view.content)["state"] == "SCHEDULED"


async def test_bulk_submission_is_all_or_nothing(farm, ann):
    lines = [json.dumps(a_job(name=f"n{number}")) for number in range(1000)]
    answer = await ann.post("/jobs/bulk", content="\n".join(lines))
    assert answer.status_code == 201
    found = await farm.jobs.get_many([one["job"] for one in answer.json()["items"]])
    assert sorted(job.name for job in found) == sorted(f"n{number}" for number in range(1000))
    bad = await ann.post("/jobs/bulk", content="\n".join([*lines, '{"show": "film"}']))
    assert problem(bad, 400, "invalid_input").startswith("Submission 1001: ")
    assert await farm.database.value(JOBS) == 1000


async def test_bulk_with_a_key_is_submitted_once(farm, ann):
    body = "\n".join(json.dumps(a_job(name=f"n{number}")) for number in range(100))
    first, again = [await ann.put("/jobs/bulk/once", content=body) for _ in range(2)]
    assert [one["job"] for one in again.json()["items"]] == [one["job"] for one in first.json()["items"]]
    assert all(one["already"] for one in again.json()["items"])
    problem(await ann.put("/jobs/bulk/once", content=body + "\n"), 409, "idempotency_conflict")
    own = json.dumps(a_job(idempotency_key="a"))
    assert "of its own" in problem(await ann.put("/jobs/bulk/twice", content=own), 400, "invalid_input")
    problem(await ann.put("/jobs/bulk/" + "x" * 201, content=body), 400, "invalid_input")
    assert await farm.database.value(JOBS) == 100


async def test_malformed_bulk_submits_nothing(farm, ann):
    for body in (b"", b"\n\n", b"[]", b"{", b"\xff\xfe", b"null\n"):
        problem(await ann.post("/jobs/bulk", content=body), 400, "invalid_input")
    assert await farm.database.value(JOBS) == 0


async def test_oversized_bulk_is_refused_while_reading(farm, ann):
    line = json.dumps(a_job()) + "\n"
    problem(await ann.post("/jobs/bulk", content=line * 10_001), 413, "too_large")
    problem(await ann.post("/jobs/bulk", content="x" * (1024 * 1024 + 1)), 413, "too_large")
    assert await farm.database.value(JOBS) == 0


async def test_invalid_submission_is_refused_and_changes_nothing(farm, ann):
    for body, kind, status, code in BAD_SUBMISSIONS:
        problem(await ann.post("/jobs", content=body, headers={"content-type": kind}), status, code)
    assert await farm.database.value(JOBS) == 0


async def test_job_list_is_paged_and_filtered(ann):
    jobs = [await submitted(ann, name=f"n{number}", labels={"shot": str(number)}) for number in range(5)]
    first = (await ann.get("/jobs", params={"limit": 3})).json()
    rest = (await ann.get("/jobs", params={"limit": 3, "after": first["next"]})).json()
    assert [one["id"] for one in first["items"] + rest["items"]] == jobs[::-1]
    assert rest["next"] is None
    found = (await ann.get("/jobs", params={"q": "label:shot=3 state:scheduled show:film"})).json()
    assert [one["id"] for one in found["items"]] == [jobs[3]]


async def test_invalid_job_filter_is_refused(ann):
    for q in ("state:SLEEPING", "colour:red", "state", "label:shot", "show:a show:b", "x" * 2000, "topic:\0"):
        problem(await ann.get("/jobs", params={"q": q}), 400, "invalid_input")


async def test_invalid_query_parameters_are_refused(ann):
    job = await submitted(ann)
    for path in BAD_QUERIES:
        problem(await ann.get(path.format(job=job)), 400, "invalid_input")


async def test_unknown_job_or_route_is_not_found(ann):
    missing = "01a1e0fc-5599-7d21-8561-a4d1f7f319bf"
    for path in (f"/jobs/{missing}", f"/jobs/{missing}/explain", f"/jobs/{missing}/logs", "/nothing", "/jobs/x/y/z"):
        problem(await ann.get(path), 404, "not_found")
    problem(await ann.post(f"/jobs/{missing}/cancel"), 404, "not_found")
    problem(await ann.delete("/jobs"), 405, "method_not_allowed")


async def test_job_cancel_is_idempotent_and_audited(farm, ann):
    job = await submitted(ann)
    first = (await ann.post(f"/jobs/{job}/cancel")).json()
    again = (await ann.post(f"/jobs/{job}/cancel")).json()
    assert [(one["state"], one["changed"]) for one in (first, again)] == [("CANCELLED", True), ("CANCELLED", False)]
    audited = await farm.database.row(AUDITED)
    assert (audited["action"], audited["target"]) == ("job.cancel", f"job:{job}")
    assert audited["actor"].startswith("key:k1:")


async def test_failed_job_is_retried_as_a_new_job(farm, ann):
    await farm.worker()
    job = await submitted(ann, 5, task="fatal")
    assert (await ended(ann, job))["state"] == "FAILED"
    [failed] = (await ann.get(f"/jobs/{job}/results")).json()["items"]
    assert failed["error"]
    again = (await ann.post(f"/jobs/{job}/retry")).json()
    assert (again["old"], again["frames"]) == (job, 1)
    assert (await farm.database.row(AUDITED))["action"] == "job.retry"
    assert "no failed frame" in problem(await ann.post(f"/jobs/{job}/retry"), 400, "invalid_input")


async def test_waiting_job_is_explained(ann):
    job = await submitted(ann)
    view = (await ann.get(f"/jobs/{job}/explain")).json()
    assert (view["state"], view["waiting"], view["known_by"]) == ("SCHEDULED", 1, "server")
    assert [one["code"] for one in view["reasons"]] == ["no_workers"]
    assert view["reasons"][0]["remedy"]


async def test_long_poll_returns_when_the_job_ends(farm, ann):
    gate = hanging("here")
    await farm.worker()
    job = await submitted(ann, "here", task="hang")
    assert (await ann.get(f"/jobs/{job}", params={"wait": 0.01})).json()["state"] != "SUCCEEDED"
    waiting = [asyncio.create_task(ended(ann, job)) for _ in range(20)]
    await farm.running("here")
    frames = (await ann.get(f"/jobs/{job}/frames")).json()["items"]
    assert [(one["frame"], one["attempt"], one["worker"]) for one in frames] == [(0, 1, "w")]
    gate.set()
    assert {(await one)["state"] for one in waiting} == {"SUCCEEDED"}


async def test_logs_are_read_from_an_offset_and_followed_to_the_end(farm, ann):
    await farm.worker()
    layer = {"argv": ["sh", "-c", "echo one; echo two; echo three >&2"], "task": ""}
    job = await submitted(ann, layer=layer)
    followed = await ann.get(f"/jobs/{job}/logs/stdout", params={"follow": True})
    assert (followed.content, followed.headers["content-type"]) == (b"one\ntwo\n", "application/octet-stream")
    from_one = await ann.get(f"/jobs/{job}/logs/stdout", params={"at": 4})
    assert from_one.content == b"two\n"
    pieces = (await ann.get(f"/jobs/{job}/logs")).json()["items"]
    assert "".join(one["text"] for one in pieces if one["stream"] == "stderr") == "three\n"


async def test_artifact_is_downloaded_in_parts_and_never_read_whole(farm, ann, monkeypatch):
    await farm.worker()
    job = await submitted(ann, "a.txt", task="leave")
    await ended(ann, job)
    [file] = (await ann.get(f"/jobs/{job}/artifacts")).json()["items"]

    async def read_whole(*_args):
        raise AssertionError("the artifact was read whole")

    monkeypatch.setattr(farm.replica.engine.store, "get", read_whole)
    monkeypatch.setattr(blob_store, "PART_BYTES", 4)
    url, params = f"/jobs/{job}/artifacts/file", {"at": file["at"]}
    got = await ann.get(url, params=params)
    assert (got.content, got.headers["content-length"]) == (b"a.txt of frame 0", "16")
    head = await ann.head(url, params=params)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "16")
    await farm.database.run(sql("UPDATE rota.blob SET data = 'a.txt of frame 1'"))
    with pytest.raises(httpx.RemoteProtocolError):
        await ann.get(url, params=params)
    await farm.database.run(sql("DELETE FROM rota.blob"))
    problem(await ann.get(url, params=params), 404, "blob_missing")


async def test_log_chunks_resume_at_their_offset_and_start_over_with_a_later_attempt(farm, ann):
    await farm.worker()
    job = await submitted(ann, layer={"argv": ["echo", "one"], "task": ""})
    url = f"/jobs/{job}/logs/stdout/chunks"
    assert (await ann.get(url, params={"follow": True})).headers["content-type"].startswith("application/x-ndjson")
    await farm.database.run(LOSE_BYTES, 100, b"two\n")
    assert await chunks(ann, url) == [(1, 0, b"one\n", 0), (1, 104, b"two\n", 100)]
    assert await chunks(ann, url, at=104, at_attempt=1) == [(1, 104, b"two\n", 0)]
    assert await chunks(ann, url, at=108, at_attempt=1) == [(1, 108, b"", 0)]
    await farm.database.run(NEXT_ATTEMPT, b"again\n")
    assert await chunks(ann, url, at=108, at_attempt=1) == [(2, 0, b"again\n", 0)]
    assert await chunks(ann, url, at=2, at_attempt=2) == [(2, 2, b"ain\n", 0)]


async def chunks(client, url, **params):
    lines = (await client.get(url, params=params)).text.splitlines()
    found = [msgspec.json.decode(line, type=LogBytes) for line in lines]
    return [(one.attempt, one.at, one.data, one.lost) for one in found]


async def test_encoded_slash_belongs_to_its_path_segment(api, ann):
    job = await submitted(ann, layer={"name": "a/b"})
    assert (await ann.get(f"/jobs/{job}/layers/a%2Fb")).json()["name"] == "a/b"
    assert (await ann.get(f"/jobs/{job}/layers/a%2fb")).json()["name"] == "a/b"
    problem(await ann.get(f"/jobs/{job}/layers/a%252Fb"), 404, "not_found")
    problem(await ann.get(f"/jobs/{job}%2Flayers"), 400, "invalid_input")
    admin = await api.client(Role.ADMIN)
    for path in ("/shows/%2F", "/shows/%2F%2F", "/pools/%2f", "/shows/film%2Fsubscriptions"):
        problem(await admin.get(path), 404, "not_found")
    problem(await admin.delete("/shows/%2Ffilm"), 404, "not_found")


async def test_artifacts_are_listed_and_fetched_only_through_their_job(farm, ann):
    await farm.worker()
    job = await submitted(ann, "a.txt", "b.txt", task="leave")
    await ended(ann, job)
    files = (await ann.get(f"/jobs/{job}/artifacts")).json()["items"]
    assert sorted(one["name"] for one in files) == ["a.txt", "b.txt"]
    for one in files:
        got = await ann.get(f"/jobs/{job}/artifacts/file", params={"at": one["at"]})
        assert got.content == f"{one['name']} of frame 0".encode()
    other = await submitted(ann)
    stolen = await ann.get(f"/jobs/{other}/artifacts/file", params={"at": files[0]["at"]})
    problem(stolen, 404, "not_found")


async def test_outcome_is_the_job_and_its_results_when_it_has_ended(farm, ann):
    gate = hanging("slow")
    await farm.worker()
    job = await submitted(ann, "slow", task="hang")
    await farm.running("slow")
    early = (await ann.get(f"/jobs/{job}/outcome", params={"wait": 0.01})).json()
    assert (early["job"]["id"], early["results"]) == (job, None)
    waiting = asyncio.create_task(ann.get(f"/jobs/{job}/outcome", params={"wait": 20}))
    gate.set()
    outcome = (await waiting).json()
    assert outcome["job"] == (await ann.get(f"/jobs/{job}")).json()
    assert outcome["job"]["state"] == "SUCCEEDED"
    assert outcome["results"] == (await ann.get(f"/jobs/{job}/results")).json()
    assert [each["value"] for each in outcome["results"]["items"]] == ["slow"]


async def test_results_are_paged(farm, ann):
    await farm.worker(slots=20)
    job = await submitted(ann, 3, task="square", layer={"frames": "10-28x2"})
    await ended(ann, job)
    seen, after = [], {}
    while True:
        page = (await ann.get(f"/jobs/{job}/results", params={"limit": 4, **after})).json()
        seen += [(one["frame"], one["place"]) for one in page["items"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert seen == [(10 + 2 * place, place) for place in range(10)]
    [one] = (await ann.get(f"/jobs/{job}/results", params={"frame": 14})).json()["items"]
    assert (one["frame"], one["value"]) == (14, 9)


async def test_caps_of_waiting_job_can_be_changed(api, ann):
    job = await submitted(ann)
    problem(await ann.patch(f"/jobs/{job}/caps", json={"max_cores": 3}), 403, "forbidden")
    operator = await api.client(Role.OPERATOR)
    assert (await operator.patch(f"/jobs/{job}/caps", json={"max_cores": 3})).json()["changed"]
    named = await operator.patch(f"/jobs/{job}/caps", json={"layer": "noop", "max_gpus": 1})
    assert named.json() == {"name": "noop", "changed": True}
    problem(await operator.patch(f"/jobs/{job}/caps", json={"layer": "none", "max_gpus": 1}), 404, "not_found")

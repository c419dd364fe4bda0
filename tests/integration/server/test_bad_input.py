"""Out-of-range and malformed values on every route that takes one: refused with a sentence, nothing changes."""

import asyncio

import pytest

from rota.model.access import Role
from rota.server import services
from tests.support.api import Api
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm

CHANGES = sql("SELECT count(*) FROM rota.audit WHERE actor LIKE 'key:%'")
NUMBERS = ("-2", str(2**31), str(2**63), str(2**70), "1e308", "1e400", "NaN", "Infinity", "-Infinity", '"1"', "1.5e-9")
UNREADABLE = (r'"\u0000"', r'"\ud800"', "7")
TEXTS = (r'"\u0000"', r'"\ud800"', '""', '"a/b"', r'"\n"', "7", "null", '"' + "x" * 5000 + '"')
WORDS = ("%00", "%ED%A0%80", "%FF", "%20", "..%2F..", "%0A", "x" * 5000, "%E2%80%AE")
BODIES = [
    *(("PATCH", "/shows/film", "max_jobs", value) for value in NUMBERS),
    *(
        ("PATCH", "/shows/film/subscriptions/local", name, v)
        for v in NUMBERS
        for name in ("size", "burst", "gpu_burst")
    ),
    *(("PATCH", "/shows/film/folders/default", name, v) for v in NUMBERS for name in ("min_cores", "max_gpus")),
    *(("PATCH", "/jobs/{job}/caps", name, value) for value in NUMBERS for name in ("max_cores", "max_gpus")),
    *(("POST", "/pools/local/drain", "timeout_s", value) for value in NUMBERS if value != str(2**31)),
    *(
        ("POST", path, "ids", f"[{value}]")
        for value in NUMBERS
        if value != str(2**31)
        for path in ("/dlq/purge", "/dlq/retry")
    ),
    *(
        ("POST", path, name, v)
        for v in UNREADABLE
        for path in ("/dlq/purge", "/dlq/retry")
        for name in ("queue", "reason")
    ),
    *(("POST", path, "name", v) for v in TEXTS for path in ("/shows", "/pools", "/departments", "/shows/film/folders")),
    *(("POST", f"{path}/rename", "name", v) for v in TEXTS for path in ("/pools/local", "/shows/film/folders/default")),
    *(("PATCH", "/shows/film", "name", value) for value in TEXTS),
    *(("PATCH", "/pools/local", "provides", f"[{value}]") for value in TEXTS if value != '"a/b"'),
    *(("PATCH", "/pools/local", "description", value) for value in UNREADABLE),
    *(("PUT", "/topics/a", "pools", f"[{value}]") for value in TEXTS),
    *(("POST", f"/workflows/{word}/runs", "key", '"k"') for w in WORDS for word in (f"film/{w}", f"{w}/flow")),
    *(("POST", f"/workflows/film/{word}/dry-run", "version", "0") for word in WORDS),
    *(("POST", "/workflows/film/flow/runs", "key", value) for value in TEXTS),
    *(("POST", f"/runs/{word}/rerun", "step", '"a"') for word in WORDS),
    *(("POST", f"/approvals/{word}/approve", "reason", '"a"') for word in WORDS),
]
PATHS = [
    *("/jobs/{word}", "/jobs/{word}/logs/stdout", "/jobs/{job}/layers/{word}", "/jobs/{job}/logs?layer={word}"),
    *("/jobs/{job}/explain?layer={word}", "/jobs/{job}/results?after={word}", "/jobs/{job}/artifacts/file?at={word}"),
    *("/jobs?after={word}", "/jobs?q=show:{word}", "/dlq?job={word}", "/dlq?kind={word}"),
    *("/runs/{word}", "/runs/{word}/events", "/runs?state=x{word}", "/runs?after={word}", "/approvals/{word}"),
    *("/shows/{word}", "/shows/{word}/folders", "/shows/{word}/ledger", "/pools/{word}"),
]
MAY_BE_EMPTY = [
    *("/dlq?reason={word}", "/dlq?queue={word}", "/audit?actor={word}", "/audit?action={word}"),
    *("/runs?show={word}", "/runs?workflow={word}", "/approvals/{job}:{word}"),
    *("/jobs?q=topic:{word}", "/jobs?q=label:a={word}", "/jobs?q=reason:{word}", "/jobs/{job}/artifacts?layer={word}"),
]


@pytest.fixture
async def api(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm, Api(farm) as api:
        await farm.show()
        yield api


def is_sentence(answer):
    details = answer.json()
    return answer.headers["content-type"] == "application/problem+json" and details["detail"].endswith((".", "?"))


class Prober:
    def __init__(self, client, job):
        self.client, self.job, self.wrong = client, job, []

    async def change(self, method, path, name, value):
        body, kind = f'{{"{name}": {value}}}', {"content-type": "application/json"}
        answer = await self.client.request(method, path.format(job=self.job), content=body, headers=kind)
        if answer.status_code not in (400, 404, 409) or not is_sentence(answer):
            self.wrong.append((method, path, body[:60], answer.status_code, answer.text[:200]))

    async def read(self, path, word):
        answer = await self.client.get(path.format(job=self.job, word=word))
        is_empty = path in MAY_BE_EMPTY and answer.status_code == 200 and not answer.json()["items"]
        if not is_empty and (answer.status_code not in (400, 404) or not is_sentence(answer)):
            self.wrong.append((path, word[:10], answer.status_code, answer.text[:200]))


async def test_invalid_values_are_refused_and_change_nothing(api):
    prober = Prober(await api.client(Role.ADMIN), await api.farm.submit("noop"))
    calls = [prober.change(*each) for each in BODIES]
    calls += [prober.read(path, word) for path in (*PATHS, *MAY_BE_EMPTY) for word in WORDS]
    for first in range(0, len(calls), 50):
        await asyncio.gather(*calls[first : first + 50])
    assert not prober.wrong, "\n".join(map(str, prober.wrong))
    assert await api.farm.database.value(CHANGES) == 0


async def test_missing_request_body_is_refused(api):
    client = await api.client(Role.ADMIN)
    for path in ("/workflows", "/workflows/film/flow/runs", "/jobs", "/shows"):
        answer = await client.post(path, headers={"content-type": "application/json"})
        assert (path, answer.status_code, answer.json()["detail"].partition(":")[0]) == (
            path,
            400,
            "The request has no body",
        )

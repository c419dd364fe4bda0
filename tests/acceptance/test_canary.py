"""A secret in payloads, environments, outputs and errors of a full run with a real server, worker and kernel.

It may appear only where its owner reads job inputs and logs.
"""

import asyncio
import base64
import json

import httpx
import pytest

from rota.local.datadir import _free_port as free_port
from rota.model.access import GrantSpec, Role
from rota.server.access import ApiKeyStore
from tests.chaos.pipeline.deployment import Actor, Farm
from tests.support.queue import sql
from tests.support.waiting import until

CANARY = "AKIA" + "CANARYBIRDSINGSX"
ENCODINGS = (CANARY, base64.b64encode(CANARY.encode()).decode().rstrip("="), CANARY.encode().hex(), CANARY[::-1])
APP = "tests/acceptance/canary_tasks.py:app"
POLICY = """
default_decision: deny
rules:
  - {id: no-deletes, match: {topics: [job.delete]}, decision: deny, reason: Nothing is deleted.}
  - {id: ask, match: {topics: [job.ask]}, decision: require_approval, reason: Somebody must look.}
  - {id: all, decision: allow}
output_policy: {fail_mode: hold}
output_rules:
  - {id: errors, match: {has_error: true, scanners: [secret]}, decision: redact}
  - {id: mail, match: {topics: [job.mail], scanners: [secret]}, decision: redact}
  - {id: secrets, match: {scanners: [secret]}, decision: quarantine}
"""
INPUT = {"args": [CANARY], "kwargs": {}}
ITEMS = [{"args": [CANARY], "kwargs": {}}, {"args": [f"twice {CANARY}"], "kwargs": {}}]
ENDED = sql("SELECT count(*) FROM rota.job_done WHERE pk_job = ANY($1::uuid[])")
SCANS = sql("SELECT count(*) FROM rota.scan")
STORED_TEXT = {
    "audit": "SELECT string_agg(a::text, ' ') FROM rota.audit a",
    "dead letters": "SELECT string_agg(concat_ws(' ', reason, cause, error), ' ') FROM rota.dlq_entries",
    "failed frames": "SELECT string_agg(concat_ws(' ', reason, error), ' ') FROM rota.done_entries",
    "errors and checks": "SELECT string_agg(concat_ws(' ', code, error, checks), ' ') FROM rota.frame_end",
    "kept outputs": "SELECT string_agg(concat_ws(' ', o.rule, o.reason, o.meta::text), ' ') FROM rota.output o",
    "states": "SELECT string_agg(concat_ws(' ', reason, history), ' ') FROM rota.job_done",
    "policy decisions": "SELECT string_agg(told::text, ' ') FROM rota.policy_word",
    "approvals": "SELECT string_agg(concat_ws(' ', title, reason, rule), ' ') FROM rota.approval",
}


def layer(task, **more):
    return {"task": task, "input": INPUT, **more}


JOBS = [
    {"layers": [layer("give", env={"CANARY": CANARY})]},
    {"layers": [layer("give_sync")], "context": {"note": CANARY}, "env": {"TOKEN": CANARY}},
    {"layers": [layer("give")], "topic": "job.mail"},
    {"layers": [layer("leave")]},
    {"layers": [layer("break")]},
    {"layers": [layer("break_sync")]},
    {"layers": [layer("exit")]},
    {"layers": [{"task": "break", "items": ITEMS}]},
    {"layers": [layer("nobody-knows-this")], "max_wait_s": 1.0},
    {"layers": [{"argv": ["sh", "-c", f"echo {CANARY} $CANARY; exit 3"], "env": {"CANARY": CANARY}}]},
    {"layers": [{"argv": ["/no/such/program", CANARY]}]},
    {"layers": [layer("give")], "topic": "job.delete"},
    {"layers": [layer("give")], "topic": "job.ask"},
]
BAD = [
    {"layers": [layer("give", gpus=CANARY)]},
    {"layers": [layer("give")], "budget": CANARY},
    {"layers": [layer("give", env={"A": [CANARY]})]},
]


@pytest.fixture
async def farm(private_stack, tmp_path, proxy):
    stack = await private_stack("postgres", "redis", "nats")
    async with Farm(stack, tmp_path, proxy, links=False) as farm:
        await farm.show("film")
        (tmp_path / "policy.yaml").write_text(POLICY)
        port = free_port()
        env = {"ROTA_POLICY_FILE": str(tmp_path / "policy.yaml"), "ROTA_SAFETY_KERNEL_PORT": str(port)}
        env["ROTA_SAFETY_KERNEL_HEALTH_PORT"] = str(free_port())
        kernel = await Actor("kernel", ["kernel"], env, tmp_path).start()
        farm.servers.append(kernel)
        settings = {"ROTA_SAFETY_KERNEL_ADDR": f"127.0.0.1:{port}", "OUTPUT_POLICY_ENABLED": "true"}
        farm.server = await farm.add_server("server", ROTA_OUTPUT_POLICY_FAIL_MODE="closed", **settings)
        await farm.add_worker("worker", app=APP, ROTA_WORKER_METRICS_PORT=str(free_port()))
        await farm.until_workers(1)
        yield farm


@pytest.fixture
async def client(farm):
    made = await ApiKeyStore(farm.database).create("boss", [GrantSpec(Role.ADMIN)], actor="test")
    url = f"http://127.0.0.1:{farm.server.port}"
    async with httpx.AsyncClient(
        base_url=url, headers={"Authorization": f"Bearer {made.plain.text}"}, timeout=30
    ) as client:
        await until(lambda: is_up(client), within_s=30, what="the server")
        yield client


async def is_up(client):
    try:
        return (await client.get("/ready")).status_code == 200
    except httpx.HTTPError:
        return False


async def read_events(client, received):
    """Append the event stream to `received`, starting before the first job."""
    async with client.stream("GET", "/api/v1/events", timeout=None) as stream:
        received.append(str(stream.status_code))
        async for text in stream.aiter_text():
            received.append(text)


@pytest.fixture
async def events(client):
    received: list[str] = []
    reading = asyncio.create_task(read_events(client, received))
    await until(lambda: received, what="the event stream")
    yield received
    reading.cancel()
    await asyncio.wait([reading])


async def test_secret_in_job_data_appears_only_where_its_owner_reads_it(farm, client, events):
    api = "/api/v1"
    answers = [await client.post(f"{api}/jobs", json={"show": "film", **each}) for each in JOBS]
    assert [answer.status_code for answer in answers] == [201] * len(JOBS), [answer.text for answer in answers]
    jobs = [answer.json()["job"] for answer in answers]

    async def all_ended():
        ended = await farm.database.value(ENDED, jobs)
        return ended == len(jobs) - 1 and not await farm.database.value(SCANS)

    await until(all_ended, within_s=60, what="the end of all jobs except the one that waits for approval")
    texts = {
        f"refusal {at}": (await client.post(f"{api}/jobs", json={"show": "film", **each})).text
        for at, each in enumerate(BAD)
    }
    assert all('"status":400' in text for text in texts.values()), texts

    paths = [
        "/jobs",
        "/dlq",
        "/outputs",
        "/approvals",
        "/queues",
        "/audit",
        "/workers",
        "/jobs?q=state:OUTPUT_QUARANTINED",
    ]
    paths += [f"/outputs/{line['id']}" for line in (await client.get(f"{api}/outputs")).json()["items"]]
    for job in jobs:
        paths += [f"/jobs/{job}/explain", f"/jobs/{job}/results"]
    for path in paths:
        answer = await client.get(f"{api}{path}")
        assert answer.status_code == 200, (path, answer.text)
        texts[path] = answer.text
    texts["metrics"] = (await client.get("/metrics")).text
    assert "rota_output_policy_quarantined_total" in texts["metrics"]
    texts |= {what: await farm.database.value(sql(text)) or "" for what, text in STORED_TEXT.items()}
    texts["events"] = "".join(events)
    assert "job.output_quarantined" in texts["events"]
    texts |= {path.name: path.read_text(errors="replace") for path in farm.folder.glob("*.log")}
    assert texts["server.1.log"]
    assert texts["worker.1.log"]
    found = {where: text for where, text in texts.items() if any(encoding in text for encoding in ENCODINGS)}
    assert not found, {where: excerpt(text) for where, text in found.items()}

    states = [(await client.get(f"{api}/jobs/{job}")).json()["state"] for job in jobs]
    assert states == [
        *("OUTPUT_QUARANTINED", "OUTPUT_QUARANTINED", "SUCCEEDED", "OUTPUT_QUARANTINED", "FAILED", "FAILED", "FAILED"),
        *("FAILED", "FAILED", "FAILED", "FAILED", "DENIED", "APPROVAL_REQUIRED"),
    ]
    assert CANARY in (await client.get(f"{api}/jobs/{jobs[0]}")).text, "the owner can read the job input"
    logs = [(await client.get(f"{api}/jobs/{job}/logs")).text for job in (jobs[4], jobs[9])]
    assert all(CANARY in text for text in logs), "the owner can read the job logs"


def excerpt(text):
    at = min(text.index(encoding) for encoding in ENCODINGS if encoding in text)
    return text[max(0, at - 300) : at + 60]


def test_canary_search_finds_a_base64_encoded_secret():
    assert any(
        encoding in json.dumps({"payload": base64.b64encode(CANARY.encode()).decode()}) for encoding in ENCODINGS
    )

"""Held and quarantined outputs over HTTP and the SDK: hidden from readers, released by operators."""

import msgspec
import pytest

from rota import Rota
from rota.model.access import Role
from rota.model.errors import JobQuarantined, OutputHeld
from rota.model.policy.outputs import OutputEffect, OutputScanMode
from rota.policy.output.rules import DEFAULT_RULES, OutputMatch, OutputRule
from rota.server import services
from tests.support.api import Api, a_job, problem
from tests.support.outputs import SECRET, OutputPolicyFarm
from tests.support.queue import sql
from tests.support.waiting import until

FILES = sql("SELECT artifacts[1] FROM rota.frame_end WHERE artifacts IS NOT NULL")


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with OutputPolicyFarm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm:
        await farm.show()
        await farm.show("other", pool="local")
        await farm.worker()
        yield farm


@pytest.fixture
async def api(farm):
    async with Api(farm) as api:
        yield api


def pause_scanner(farm):
    """Pause the output scanner; returns the function that resumes it."""
    scanner = farm.replica.engine.scanner
    step = scanner.scan_due

    async def scan_nothing(_most=1):
        return 0

    async def resume_scanner():
        scanner.scan_due = step
        scanner.outputs.due.set()
        await farm.scanned()

    scanner.scan_due = scan_nothing
    return resume_scanner


async def result_item(client, job):
    [item] = (await client.get(f"/jobs/{job}/results")).json()["items"]
    return item


async def test_held_output_is_hidden_everywhere_until_scanned(farm, api):
    farm.rules(DEFAULT_RULES, mode=OutputScanMode.HOLD)
    resume_scanner = pause_scanner(farm)
    client = await api.client(Role.ADMIN)
    echoed, left = await farm.submit("echo", "hello"), await farm.submit("leave", "a.txt")
    await farm.ended(echoed)
    await farm.ended(left)
    item = await result_item(client, echoed)
    assert (item["value"], item["output"]) == (None, "held")
    assert "held until it has been scanned" in item["problem"]
    assert (await client.get(f"/jobs/{left}/artifacts")).json()["items"] == []
    problem(await client.get(f"/jobs/{left}/artifacts?frame=0"), 409, "output_held")
    pointer = (await farm.database.value(FILES)).partition(" ")[0]
    problem(await client.get(f"/jobs/{left}/artifacts/file?at={pointer}"), 409, "output_held")
    problem(await client.get(f"/jobs/{left}/artifacts/file?at=pg:00"), 404, "not_found")
    problem(await client.get(f"/jobs/{left}/logs"), 409, "output_held")
    problem(await client.get(f"/jobs/{left}/logs/stdout"), 409, "output_held")
    await resume_scanner()
    assert (await result_item(client, echoed))["value"] == "hello"
    [file] = (await client.get(f"/jobs/{left}/artifacts?frame=0")).json()["items"]
    assert (await client.get(f"/jobs/{left}/artifacts/file?at={file['at']}")).content == b"a.txt of frame 0"
    assert (await client.get(f"/jobs/{left}/logs")).status_code == 200


async def test_pointer_to_redacted_content_is_not_found(farm, api):
    farm.rules(
        [OutputRule(id="r", decision=OutputEffect.REDACT, match=OutputMatch(keywords=("frame",)))],
        mode=OutputScanMode.PASS,
    )
    resume_scanner = pause_scanner(farm)
    client = await api.client(Role.ADMIN)
    job = await farm.submit("leave", "a.txt")
    await farm.ended(job)
    [before] = (await client.get(f"/jobs/{job}/artifacts")).json()["items"]
    await resume_scanner()
    [after] = (await client.get(f"/jobs/{job}/artifacts")).json()["items"]
    assert (await client.get(f"/jobs/{job}/artifacts/file?at={after['at']}")).content == b"a.txt of [REDACTED] 0"
    problem(await client.get(f"/jobs/{job}/artifacts/file?at={before['at']}"), 404, "not_found")


async def test_show_operator_releases_output_that_others_only_see_listed(farm, api):
    operator, viewer = await api.client((Role.OPERATOR, "film")), await api.client((Role.VIEWER, "film"))
    other_admin = await api.client((Role.ADMIN, "other"))
    job = await farm.submit("echo", {"note": SECRET})
    await farm.state(job, "OUTPUT_QUARANTINED")
    item = await result_item(viewer, job)
    assert (item["value"], item["output"], item["code"]) == (None, "quarantined", "output_quarantined_async")
    [line] = (await viewer.get("/outputs")).json()["items"]
    at, why = f"/outputs/{line['id']}", {"reason": "A key of a test."}
    seen = await viewer.get(at)
    assert SECRET not in seen.text
    assert seen.json()["checks"][-1]["findings"][0]["where"] == "value.note"
    for act in ("release", "redact"):
        problem(await viewer.post(f"{at}/{act}", json=why), 403, "forbidden")
        problem(await other_admin.post(f"{at}/{act}", json=why), 404, "not_found")
        problem(await operator.post(f"{at}/{act}", json={}), 400, "invalid_input")
    problem(await viewer.post(f"{at}/reveal"), 403, "forbidden")
    problem(await other_admin.get(at), 404, "not_found")
    assert (await other_admin.get("/outputs")).json()["items"] == []
    content = await operator.post(f"{at}/reveal")
    assert msgspec.msgpack.decode(content.content) == {"note": SECRET}
    assert (await operator.post(f"{at}/redact", json=why)).json()["changed"]
    assert (await result_item(viewer, job))["value"] == {"note": "[REDACTED]"}
    assert (await operator.post(f"{at}/release", json=why)).json()["changed"]
    assert (await result_item(viewer, job))["value"] == {"note": SECRET}
    assert (await viewer.get(f"/jobs/{job}")).json()["state"] == "SUCCEEDED"
    assert (await viewer.get("/outputs?kept=quarantined")).json()["items"] == []


async def test_submitter_cannot_release_output_of_their_own_job(farm, api):
    ann, bob = await api.client(Role.OPERATOR, name="ann"), await api.client(Role.OPERATOR)
    laptop = await api.client(Role.ADMIN, name="laptop", owner="ann")
    given = a_job("echo", layer={"input": {"args": [SECRET], "kwargs": {}}})
    job = (await ann.post("/jobs", json=given)).json()["job"]
    await farm.state(job, "OUTPUT_QUARANTINED")
    [line] = (await ann.get(f"/outputs?job={job}")).json()["items"]
    at, why = f"/outputs/{line['id']}/release", {"reason": "It is mine."}
    for client in (ann, laptop):
        problem(await client.post(at, json=why), 403, "forbidden")
    assert (await bob.post(at, json=why)).json()["changed"]


async def test_sdk_waits_for_held_output_and_raises_for_quarantined_output(farm, api):
    farm.rules(DEFAULT_RULES, mode=OutputScanMode.HOLD)
    resume_scanner = pause_scanner(farm)
    key = await api.key(Role.ADMIN)
    async with Rota(farm.replica.listen_url, key=key) as app:
        held = app.job(await farm.submit("echo", "hello"))
        kept = app.job(await farm.submit("echo", SECRET))
        with pytest.raises(OutputHeld, match="held until"):
            await held.result(timeout=0.5)
        await resume_scanner()
        assert await held.result(timeout=10) == "hello"
        with pytest.raises(JobQuarantined, match="A secret was found"):
            await kept.result(timeout=10)
        [line] = await app.outputs.list(state="quarantined")
        assert (await app.outputs.get(line.id)).line.rule == "secrets"
        assert (await app.outputs.release(line.id, "A test.")).changed
        assert await kept.result(timeout=10) == SECRET


async def test_dead_letter_list_omits_frame_arguments(farm, api):
    client = await api.client(Role.ADMIN)
    layer = {"task": "say", "items": [{"args": ["no"], "kwargs": {}}]}
    job = (await client.post("/jobs", json={"show": "film", "layers": [layer]})).json()["job"]
    await farm.ended(job)
    failed = farm.replica.queue.failed
    from rota.queue import FailedFilter

    assert await until(lambda: failed.move_to_dead_letters(FailedFilter(job=job)), what="a dead letter")
    [letter] = (await client.get("/dlq")).json()["items"]
    assert letter["payload"] is None

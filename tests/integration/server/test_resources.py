"""Shows, pools, queues, dead letters, the ledger, keys and settings over HTTP; each change is audited to its key."""

from uuid import UUID

import msgspec
import pytest

from rota.api.admin import DeadLetter
from rota.model.access import Role
from rota.server import services
from tests.support.api import Api, a_job, problem
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm

CHANGES = sql("SELECT action FROM rota.audit WHERE actor LIKE 'key:' || $1::text || ':%' ORDER BY seq")


@pytest.fixture
async def api(database_url, redis_url, nats_url, bus_prefix):
    farm = Farm(database_url, redis_url, nats_url, bus_prefix, faces=services)
    secret = msgspec.structs.replace(farm.settings.grpc, shared_secret="c4nary" * 8)
    farm.settings = msgspec.structs.replace(farm.settings, grpc=msgspec.structs.replace(secret, port=0))
    async with farm, Api(farm) as api:
        await farm.show()
        yield api


@pytest.fixture
async def admin(api):
    return await api.client(Role.ADMIN)


async def checked(answer, status=200):
    assert answer.status_code == status, answer.text
    return answer.json()


async def changes(api, name="k1"):
    """Actions of the key in the audit log."""
    return [row["action"] for row in await api.farm.database.rows(CHANGES, name)]


async def test_show_is_created_configured_changed_and_deleted(api, admin):
    made = await checked(await admin.post("/shows", json={"name": "short"}), 201)
    assert (made["name"], made["managed"], made["max_jobs"]) == ("short", False, -1)
    problem(await admin.post("/shows", json={"name": "short"}), 400, "invalid_input")
    problem(await admin.patch("/shows/short", json={"managed": True, "max_jobs": 1}), 400, "invalid_input")
    assert (await checked(await admin.patch("/shows/short", json={"max_jobs": 3})))["max_jobs"] == 3
    assert (await checked(await admin.patch("/shows/short", json={"managed": True})))["managed"]
    assert (await checked(await admin.patch("/shows/short", json={"name": "long"})))["name"] == "long"
    share = {"pool": "local", "size": 2.5, "burst": 10}
    assert (await checked(await admin.post("/shows/long/subscriptions", json=share), 201))["size"] == 2.5
    changed = await checked(await admin.patch("/shows/long/subscriptions/local", json={"gpu_burst": 4}))
    assert (changed["burst"], changed["gpu_burst"]) == (10, 4)
    folder = await checked(await admin.post("/shows/long/folders", json={"name": "shots", "max_cores": 8}), 201)
    assert folder["max_cores"] == 8
    await checked(await admin.patch("/shows/long/folders/shots", json={"min_cores": 1.25}))
    await checked(await admin.post("/shows/long/folders/shots/rename", json={"name": "takes"}))
    await checked(await admin.post("/departments", json={"name": "fx"}), 201)
    await checked(await admin.post("/shows/long/departments", json={"name": "fx", "max_gpus": 2}), 201)
    await checked(await admin.patch("/shows/long/departments/fx", json={"max_gpus": 3}))
    view = await checked(await admin.get("/shows/long"))
    assert view["show"]["name"] == "long"
    assert [one["pool"] for one in view["subscriptions"]] == ["local"]
    assert {one["name"]: one["min_cores"] for one in view["folders"]}["takes"] == 1.25
    assert {one["name"]: one["max_gpus"] for one in view["departments"]}["fx"] == 3
    for path in ("/folders/takes", "/departments/fx", "/subscriptions/local", ""):
        await checked(await admin.delete(f"/shows/long{path}"))
    await checked(await admin.post("/departments/fx/rename", json={"name": "cfx"}))
    await checked(await admin.delete("/departments/cfx"))
    problem(await admin.get("/shows/long"), 404, "not_found")
    assert await changes(api) == [
        *("show.create", "show.change", "show.set_managed", "show.rename"),
        *("subscription.create", "subscription.change"),
        *("folder.create", "folder.change", "folder.rename"),
        *("dept.create", "point.create", "point.change"),
        *("folder.delete", "point.delete", "subscription.delete", "show.delete"),
        *("dept.rename", "dept.delete"),
    ]


async def test_pools_and_topics_are_created_changed_and_deleted(api, admin):
    assert (await checked(await admin.post("/pools", json={"name": "gpu"}), 201))["status"] == "active"
    view = await checked(await admin.patch("/pools/gpu", json={"provides": ["cuda"], "description": "upstairs"}))
    assert (view["provides"], view["description"]) == (["cuda"], "upstairs")
    assert (await checked(await admin.post("/pools/gpu/drain", json={"timeout_s": 60})))["status"] == "draining"
    assert (await checked(await admin.post("/pools/gpu/activate")))["status"] == "active"
    assert (await checked(await admin.post("/pools/gpu/rename", json={"name": "big"})))["name"] == "big"
    await checked(await admin.put("/topics/render.*", json={"pools": ["big", "local"]}))
    problem(await admin.put("/topics/render.*", json={"pools": ["none"]}), 400, "invalid_input")
    assert (await checked(await admin.get("/topics")))["items"] == [{"topic": "render.*", "pools": ["big", "local"]}]
    assert (await checked(await admin.delete("/topics/render.*")))["changed"]
    problem(await admin.delete("/topics/render.*"), 404, "not_found")
    await checked(await admin.delete("/pools/big"))
    assert [one["name"] for one in (await checked(await admin.get("/pools")))["items"]] == ["local"]
    assert await changes(api) == [
        *("pool.create", "pool.configure", "pool.configure", "pool.configure", "pool.rename"),
        *("topic.map", "topic.unmap", "pool.delete"),
    ]


async def test_queues_are_paused_and_resumed_and_workers_are_listed(api, admin):
    await checked(await admin.post("/jobs", json=a_job()), 201)
    [queue] = (await checked(await admin.get("/queues")))["items"]
    assert (queue["show"], queue["waiting"], queue["paused"]) == ("film", 1, False)
    named = {"queue": queue["queue"]}
    for path, changed in (("pause", True), ("pause", False), ("resume", True), ("resume", False)):
        assert (await checked(await admin.post(f"/queues/{path}", params=named)))["changed"] is changed
    assert await changes(api) == ["queue.pause", "queue.resume"]
    await api.farm.worker("ann", slots=2)
    [worker] = (await checked(await admin.get("/workers")))["items"]
    assert (worker["name"], worker["pool"], worker["slots"], worker["state"]) == ("ann", "local", 2, "up")


async def test_dead_letters_are_listed_retried_and_purged(api, admin):
    nowhere = a_job(topic="nowhere", requires=["quantum"])
    job = (await checked(await admin.post("/jobs", json=nowhere), 201))["job"]
    assert (await checked(await admin.get(f"/jobs/{job}", params={"wait": 15})))["state"] == "FAILED"
    [letter] = (await checked(await admin.get("/dlq", params={"job": job})))["items"]
    assert (letter["kind"], letter["job"]) == ("frame", job)
    for path in ("retry", "purge"):
        problem(await admin.post(f"/dlq/{path}", json={}), 400, "invalid_input")
    again = await checked(await admin.post("/dlq/retry", json={"ids": [letter["id"]]}))
    assert (again["gone"], again["jobs"][0]["old"]) == ([letter["id"]], job)
    lost = [DeadLetter(kind="message", reason="deliveries_exhausted", cause=str(n), job=UUID(job)) for n in range(5)]
    await api.farm.replica.queue.dead_letters.add(lost)
    first = await checked(await admin.get("/dlq", params={"kind": "message", "limit": 3}))
    rest = await checked(await admin.get("/dlq", params={"kind": "message", "limit": 3, "after": first["next"]}))
    assert [one["cause"] for one in first["items"] + rest["items"]] == list("01234")
    assert len((await checked(await admin.post("/dlq/purge", json={"reason": "deliveries_exhausted"})))["gone"]) == 5
    assert await changes(api) == ["dlq.retry", "dlq.purge"]


async def test_ledger_is_audited_and_repaired(api, admin, redis):
    assert (await checked(await admin.get("/shows/film/ledger")))["ok"]
    for key in await redis.keys("*acct:sub*"):
        await redis.hincrby(key, "int_cores", 700)
    assert not (await checked(await admin.get("/shows/film/ledger")))["ok"]
    assert (await checked(await admin.post("/shows/film/ledger/repair")))["ok"]
    assert await changes(api) == ["ledger.repair"]


async def test_key_is_shown_once_and_cannot_grant_more_than_it_has(api, admin):
    await api.farm.show("other")
    grants = [{"role": "admin", "show": "film"}]
    made = await checked(await admin.post("/keys", json={"name": "ann", "grants": grants, "expires_s": 60}), 201)
    ann = await api.raw_client(Authorization=f"Bearer {made['text']}")
    me = {"key": made["key"]["id"], "name": "ann", "principal": "ann", "grants": grants}
    assert await checked(await ann.get("/me")) == me
    listed = await admin.get("/keys")
    assert made["text"] not in listed.text
    assert {one["name"] for one in listed.json()["items"]} == {"k1", "ann"}
    for more in ({"role": "viewer"}, {"role": "viewer", "show": "other"}, {"role": "admin"}):
        problem(await ann.post("/keys", json={"name": "bob", "grants": [*grants, more]}), 403, "forbidden")
    bob = await checked(await ann.post("/keys", json={"name": "bob", "grants": grants}), 201)
    assert {one["name"] for one in (await checked(await ann.get("/keys")))["items"]} == {"ann", "bob"}
    problem(await ann.delete(f"/keys/{(await checked(await admin.get('/me')))['key']}"), 404, "not_found")
    assert (await checked(await ann.delete(f"/keys/{bob['key']['id']}")))["state"] == "revoked"
    problem(await ann.delete("/keys/%00"), 404, "not_found")
    assert await changes(api, "ann") == ["key.create", "key.revoke"]
    entries = (await checked(await admin.get("/audit", params={"action": "key.create", "limit": 2})))["items"]
    assert [one["actor"].split(":")[1] for one in entries] == ["ann", "k1"]
    assert made["text"] not in (await admin.get("/audit", params={"limit": 1000})).text


async def test_settings_are_listed_without_secrets(api, admin):
    answer = await admin.get("/config")
    values = {one["path"]: one["value"] for one in (await checked(answer))["items"]}
    assert values["listen.host"] == "127.0.0.1"
    assert values["grpc.shared_secret"]
    assert "c4nary" not in answer.text

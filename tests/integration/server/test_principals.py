"""Principals over HTTP: rules compare people and services, and nobody gets the name of another."""

import asyncio
from itertools import product

import pytest

from rota import Rota, runtime
from rota.cli.quota.actions import current_actor
from rota.infra.nats import BusMessage
from rota.model.access import GrantSpec, Role
from rota.model.identity.principals import PrincipalKind
from rota.model.jobs.submission import encode_submission
from rota.model.policy.decision import ApprovalTerms, PolicyEffect
from rota.model.protocol import SUBMIT_SUBJECT
from rota.server import services
from rota.server.access import NewPrincipal, PrincipalStore
from tests.support.api import Api, a_job, problem
from tests.support.commands import Terminal
from tests.support.jobs import task
from tests.support.kernels import Table, decision
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm
from tests.support.waiting import until

NAMED = ApprovalTerms(approvers=("ceo",))
HOLDS = ApprovalTerms(quorum=2)
EVERY_SHOW = None
LATEST_JOB = sql("SELECT pk_job FROM rota.job ORDER BY ts_submitted DESC LIMIT 1")


@pytest.fixture
def kernel(monkeypatch):
    kernel = Table(default=decision(PolicyEffect.REQUIRE_APPROVAL, "money", reason="money moves"))
    kernel.decisions["named"] = decision(PolicyEffect.REQUIRE_APPROVAL, "named", approval=NAMED)
    kernel.decisions["pair"] = decision(PolicyEffect.REQUIRE_APPROVAL, "pair", approval=HOLDS)
    monkeypatch.setattr(runtime, "build_policy_kernel", lambda *_: kernel)
    return kernel


@pytest.fixture
async def api(kernel, database_url, redis_url, nats_url, bus_prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm, Api(farm) as api:
        await farm.show("red")
        await farm.show("blue")
        yield api


@pytest.fixture
def cli(api, monkeypatch, capsys, database_url):
    """The command line with PostgreSQL and, after `login`, a key."""
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    monkeypatch.setenv("SAFETY_POLICY_PATH", "policy.yaml")  # servers decide: it is not read here
    terminal = Terminal(monkeypatch, capsys)

    def login(key):
        monkeypatch.setenv("ROTA_API_URL", api.farm.replica.listen_url)
        monkeypatch.setenv("ROTA_API_KEY", key)

    terminal.login = login
    return terminal


async def waiting_job(client, **more):
    """A job of show red that waits for an approval."""
    job = (await client.post("/jobs", json=a_job(show="red", **more))).json()["job"]
    await waits_for_approval(client, job)
    return job


async def waits_for_approval(client, job):
    async def waits():
        return (await client.get(f"/jobs/{job}")).json()["state"] == "APPROVAL_REQUIRED"

    await until(waits, what="a job that waits for an approval")


async def vote(client, job, act="approve"):
    return await client.post(f"/approvals/{job}/{act}", json={})


async def approval_state(client, job):
    return (await client.get(f"/approvals/{job}")).json()["approval"]["state"]


async def test_admin_of_a_show_cannot_approve_own_job_with_a_second_key_of_the_approvers_name(api):
    await api.keys.create("ceo", [GrantSpec(Role.ADMIN)], actor="test")
    red = await api.client((Role.ADMIN, "red"))
    job = await waiting_job(red, topic="named")
    problem(await vote(red, job), 403, "self_approval_denied")
    before = (await red.get("/keys")).json()
    stolen = await red.post("/keys", json={"name": "ceo", "grants": [{"role": "viewer", "show": "red"}]})
    problem(stolen, 409, "name_taken")
    assert (await red.get("/keys")).json() == before
    assert await approval_state(red, job) == "pending"


async def test_named_approver_without_a_key_yet_cannot_be_impersonated_by_admin_of_a_show(api):
    red = await api.client((Role.ADMIN, "red"))
    job = await waiting_job(red, topic="named")
    made = await red.post("/keys", json={"name": "ceo", "grants": [{"role": "operator", "show": "red"}]})
    impostor = await api.raw_client(Authorization=f"Bearer {made.json()['text']}")
    problem(await vote(impostor, job), 403, "forbidden")
    assert await approval_state(red, job) == "pending"


async def test_two_keys_of_one_principal_are_one_person(api):
    ann = await api.client(Role.OPERATOR, name="ann")
    laptop = await api.client(Role.ADMIN, name="laptop", owner="ann")
    bob = await api.client(Role.OPERATOR, name="bob")
    job = await waiting_job(ann)
    for act in ("approve", "reject"):
        problem(await vote(laptop, job, act), 403, "self_approval_denied")
    pair = await waiting_job(bob, topic="pair")
    assert (await vote(ann, pair)).json()["approval"]["agreed"] == 1
    again = (await vote(laptop, pair)).json()
    assert (again["changed"], again["approval"]["agreed"], again["approval"]["state"]) == (False, 1, "pending")
    assert [each["voter"] for each in again["approval"]["votes"]] == ["ann"]
    me = (await laptop.get("/me")).json()
    assert (me["name"], me["principal"]) == ("laptop", "ann")
    entries = (await laptop.get("/audit", params={"action": "approval.vote"})).json()["items"]
    assert [entry["actor"].split(":")[:2] for entry in entries] == [["key", "ann"]]


# Who adds a key, for whom, with which grant: what happens.
RED, BLUE = "red", "blue"
NEW, ITSELF, OTHER = "new", "itself", "other"


def expected(admin_of, whom, show):
    if admin_of is not EVERY_SHOW and show != admin_of:
        return (403, "forbidden")
    if whom == OTHER and admin_of is not EVERY_SHOW:
        return (403, "forbidden")
    return (201, None)


async def test_only_itself_and_admins_of_every_show_add_keys_for_an_existing_principal(api):
    await api.key((Role.VIEWER, "red"), name="victim")
    for number, (admin_of, whom, show) in enumerate(product((EVERY_SHOW, RED), (NEW, ITSELF, OTHER), (RED, BLUE))):
        caller = await api.client((Role.ADMIN, admin_of), name=f"caller{number}")
        before = await api.keys.list()
        principal = {NEW: "", ITSELF: f"caller{number}", OTHER: "victim"}[whom]
        spec = {"name": f"key{number}", "grants": [{"role": "viewer", "show": show}], "principal": principal}
        answer = await caller.post("/keys", json=spec)
        status, code = expected(admin_of, whom, show)
        if code:
            problem(answer, status, code)
            assert await api.keys.list() == before
        else:
            assert (answer.status_code, answer.json()["key"]["principal"]) == (status, principal or f"key{number}")


async def test_names_stay_taken_after_revocation_and_disabling(api):
    boss = await api.client(Role.ADMIN, name="boss")
    red = await api.client((Role.ADMIN, "red"), name="redadmin")
    made = await api.keys.create("gone", [GrantSpec(Role.VIEWER)], actor="test")
    await api.keys.revoke(made.key.id, actor="test")
    await api.key(Role.VIEWER, name="off")
    assert (await boss.post("/principals/off/disable")).json()["disabled_at"]
    assert (await boss.post("/principals", json={"name": "bare"})).status_code == 201
    for name in ("gone", "off", "bare", "boss", "redadmin"):
        for caller in (boss, red):
            spec = {"name": name, "grants": [{"role": "viewer", "show": "red"}]}
            problem(await caller.post("/keys", json=spec), 409, "name_taken")
        problem(await boss.post("/principals", json={"name": name}), 409, "name_taken")
    spec = {"name": "new", "grants": [{"role": "viewer", "show": "red"}], "principal": "off"}
    problem(await boss.post("/keys", json=spec), 409, "principal_disabled")
    problem(await boss.post("/principals", json={"name": "cli:ann"}), 400, "invalid_input")
    problem(await boss.post("/principals/nobody/disable"), 404, "not_found")


async def test_disabled_principal_is_refused_with_all_its_keys_at_once(api):
    boss = await api.client(Role.ADMIN)
    clients = [await api.client(Role.OPERATOR, name="ann")]
    clients += [await api.client(Role.VIEWER, name=f"ann{n}", owner="ann") for n in range(2)]
    assert [(await each.get("/me")).status_code for each in clients] == [200] * 3
    assert (await boss.post("/principals/ann/disable")).json()["keys"] == 3
    for client in clients:
        assert "is disabled" in problem(await client.get("/me"), 401, "unauthenticated")
    listed = {each["name"]: each for each in (await boss.get("/keys")).json()["items"]}
    assert {listed[name]["state"] for name in ("ann", "ann0", "ann1")} == {"disabled"}
    again = (await boss.post("/principals/ann/disable")).json()
    assert again["disabled_at"] is not None
    entries = (await boss.get("/audit", params={"action": "principal.disable"})).json()["items"]
    assert [(entry["target"], entry["detail"]["keys"]) for entry in entries] == [("principal:ann", 3)]


async def test_principals_are_listed_and_managed_by_admins_of_every_show_only(api):
    async with Rota(api.farm.replica.listen_url, key=await api.key(Role.ADMIN, name="boss")) as app:
        created = await app.principals.create("dora")
        assert (created.kind, created.is_global, created.keys) == (PrincipalKind.PERSON, True, 0)
        key = await app.keys.create("laptop", Role.VIEWER, principal="dora")
        assert key.key.principal == "dora"
        red = await app.keys.create("redadmin", Role.ADMIN, shows=["red"])
        assert {each.name: each.keys for each in await app.principals.list()} == {"boss": 1, "dora": 1, "redadmin": 1}
        assert (await app.principals.disable("dora")).disabled_at is not None
    red_client = await api.raw_client(Authorization=f"Bearer {red.text}")
    for call in (
        red_client.get("/principals"),
        red_client.post("/principals", json={"name": "x"}),
        red_client.post("/principals/boss/disable"),
    ):
        problem(await call, 403, "forbidden")


async def test_job_submitted_by_command_line_is_not_approved_by_any_key(api, cli):
    job = (await cli.out("submit noop --topic default --show red --json")).split('"job": "')[1].split('"')[0]
    clients = [
        await api.client(Role.ADMIN),
        await api.client(Role.OPERATOR, name=current_actor().removeprefix("cli:")),
    ]
    await waits_for_approval(clients[0], job)
    for client in clients:
        sentence = problem(await vote(client, job), 403, "self_approval_denied")
        assert "submitted this without a key" in sentence
    assert await approval_state(clients[0], job) == "pending"
    assert (await vote(clients[0], job, "reject")).json()["approval"]["state"] == "rejected"


async def test_command_line_votes_as_the_principal_of_its_key(api, cli):
    ann, bob = await api.key(Role.OPERATOR, name="ann"), await api.key(Role.OPERATOR, name="bob")
    job = await waiting_job(await api.raw_client(Authorization=f"Bearer {ann}"))
    refused = await cli(f"approvals approve {job}")
    assert "No API is configured: set ROTA_API_URL and ROTA_API_KEY" in refused.err
    cli.login(ann)
    refused = await cli(f"approvals approve {job}")
    assert (refused.status != 0, "ann submitted this and cannot approve it" in refused.err) == (True, True)
    cli.login(bob)
    assert "continues after another policy decision" in await cli.out(f"approvals approve {job}")
    assert "Nothing changed" in await cli.out(f"approvals approve {job}")


async def test_bus_submission_that_names_a_principal_is_stored_as_a_claim(api):
    ann, bob = await api.client(Role.OPERATOR, name="ann"), await api.client(Role.ADMIN, name="bob")
    body = encode_submission(task(show="red", principal="ann"))
    await api.farm.replica.bus.publish_many([BusMessage(subject=SUBMIT_SUBJECT, data=body, msg_id="one")])
    job = await until(lambda: api.farm.database.value(LATEST_JOB), what="the job of the message")
    await waits_for_approval(ann, job)
    assert (await ann.get(f"/jobs/{job}")).json()["details"]["principal"] == "bus:ann"
    for client in (ann, bob):
        problem(await vote(client, job), 403, "self_approval_denied")
    assert (await vote(ann, job, "reject")).json()["changed"]
    [retried] = (await bob.post("/dlq/retry", json={"job": str(job)})).json()["jobs"]
    await waits_for_approval(ann, retried["job"])
    problem(await vote(bob, retried["job"]), 403, "self_approval_denied")
    assert (await vote(ann, retried["job"])).json()["approval"]["state"] == "granted"


async def test_concurrent_creators_of_one_name_create_one_principal(api):
    callers = [await api.client((Role.ADMIN, "red")), await api.client((Role.ADMIN, "blue")), await api.client()]
    shows = ("red", "blue", "red")
    answers = await asyncio.gather(
        *(
            caller.post("/keys", json={"name": "prize", "grants": [{"role": "viewer", "show": show}]})
            for caller, show in zip(callers, shows, strict=True)
        )
    )
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409]
    assert len([key for key in await api.keys.list() if key.name == "prize"]) == 1
    assert len([each for each in await PrincipalStore(api.farm.database).list() if each.name == "prize"]) == 1


async def test_vote_of_a_local_principal_does_not_count_for_a_later_policy_that_names_it(api, kernel):
    kernel.decisions["later"] = decision(PolicyEffect.REQUIRE_APPROVAL, "later")
    red = await api.client((Role.ADMIN, "red"))
    local = await api.client((Role.OPERATOR, "red"), name="ceo", owner=NewPrincipal(is_global=False))
    job = await waiting_job(red, topic="later")
    kernel.decisions["later"] = decision(PolicyEffect.REQUIRE_APPROVAL, "later", approval=NAMED)
    assert (await vote(local, job)).json()["approval"]["state"] == "granted"

    async def asked_again():
        return (await red.get(f"/approvals/{job}")).json()["approval"]["state"] == "pending"

    await until(asked_again, what="another approval request")

"""Authorization of every route: each role, in its own show, in another show and in all shows."""

import asyncio
import time
from uuid import UUID, uuid4

import pytest

from rota.agents.repository import AgentRepository
from rota.api.admin import DeadLetter
from rota.model.access import GrantSpec, Role
from rota.model.agents import AgentSpec
from rota.model.approvals import ApprovalRequest
from rota.model.schedules import IntervalSchedule
from rota.model.workflows.spec import StepSpec, WorkflowSpec
from rota.server import services
from rota.server.http.app import litestar_app
from rota.server.http.permissions import route_table
from tests.support.api import Api, a_job, problem
from tests.support.http_calls import Caller
from tests.support.outputs import an_output
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging

DAY_MS = 86_400_000
TOMORROW_MS = int(time.time() * 1000) + DAY_MS
WORKFLOW = "flow"
OWN, FOREIGN, MISSING = "film", "zebra", "quark"
SHARED = {
    **dict.fromkeys(("folder", "dept", "topic"), "default"),
    **dict.fromkeys(("layer", "task"), "noop"),
    "pool": "local",
    "agent": "poll",
    "stream": "stdout",
    "at": "0",
}
TABLES = sql("""
SELECT c.relname AS name FROM pg_class c
WHERE c.relnamespace = 'rota'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition ORDER BY 1""")
# Tables that servers write in the background.
BACKGROUND_TABLES = {
    *("lease", "outbox", "queue_owners", "queue_ring_rotations"),
    *("queue_terminal_count_deltas", "queue_terminal_live_counts", "queue_terminal_rollups"),
}
DIGEST = """
SELECT md5(coalesce(string_agg(row, ',' ORDER BY row), '')) FROM (
  SELECT (to_jsonb(t) - '{{ts_last_used}}'::text[])::text AS row FROM rota.{name} t) AS rows"""


@pytest.fixture
async def api(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm, Api(farm) as api:
        for show in (OWN, FOREIGN):
            await farm.show(show)
        await AgentRepository(farm.database, "test").declare(
            [AgentSpec(name="poll", schedule=IntervalSchedule(DAY_MS))], TOMORROW_MS, [0]
        )
        yield api


async def names_of(api, show):
    """Names for the paths and bodies of calls about `show`."""
    job = str(await api.farm.submit("noop", show=show))
    key = await api.keys.create(f"of-{show}", [GrantSpec(Role.VIEWER, show)], actor="test")
    await ask_for_approval(api, show, job)
    letter = DeadLetter(kind="message", reason="deliveries_exhausted", cause=show, job=UUID(job))
    await api.farm.replica.queue.dead_letters.add([letter])
    output = await an_output(api.farm.database, await api.farm.submit("noop", show=show), 10**12 + len(show))
    queues = (await (await api.client(Role.VIEWER)).get("/queues")).json()["items"]
    return {
        "show": show,
        "name": show,
        "q": f"show:{show}",
        "job": job,
        "run": await a_run(api, show),
        "workflow": WORKFLOW,
        "approval": job,
        "state": "pending",
        "key": key.key.id,
        "output": output,
        "queue": next(one["queue"] for one in queues if one["show"] == show),
        **SHARED,
    }


async def a_run(api, show):
    """A run that waits until tomorrow."""
    commands = api.farm.replica.workflows
    step = StepSpec(id="wait", type="delay", delay_sec=DAY_MS / 1000)
    await commands.declare(WorkflowSpec(name=WORKFLOW, show=show, steps=(step,)), "test")
    return str((await commands.start(show, WORKFLOW, actor="test")).run)


async def ask_for_approval(api, show, job):
    database = api.farm.database
    show_id = await database.value(sql("SELECT pk_show FROM rota.show WHERE str_name = $1"), show)
    async with database.transaction() as tx:
        request = ApprovalRequest(kind="job", subject=job, show=show_id, hash=b"h" * 32)
        await api.farm.replica.engine.approver.approvals.request(tx, [request])


def names_of_missing(foreign):
    """As `foreign`, with each name replaced by one that does not exist."""
    job, key, output = str(uuid4()), "0" * len(foreign["key"]), "1" * len(foreign["output"])
    queue = foreign["queue"].replace(FOREIGN, MISSING)
    return (
        foreign
        | {"show": MISSING, "name": MISSING, "q": f"show:{MISSING}", "job": job, "approval": job}
        | {"run": str(uuid4())}
        | {"key": key, "queue": queue, "output": output}
    )


async def digest(database):
    names = [row["name"] for row in await database.rows(TABLES)]
    return {
        name: await database.value(sql(DIGEST.format(name=name))) for name in names if name not in BACKGROUND_TABLES
    }


def without(text, words):
    """A response without the names in its request."""
    for name in sorted({"show", "name", "job", "run", "key", "queue", "output"}, key=lambda each: -len(words[each])):
        text = text.replace(words[name], "*")
    return text


def refused(answer):
    if answer.request.url.path.endswith("/jobs/batch") and answer.status_code == 201:
        return all(each["problem"]["status"] in (403, 404) for each in answer.json()["items"])
    if answer.status_code == 401:
        problem(answer, 401, "unauthenticated")
    elif answer.status_code == 403:
        problem(answer, 403, "forbidden")
    elif answer.status_code == 404:
        problem(answer, 404, "not_found")
    return answer.status_code in (401, 403, 404)


class Matrix:
    def __init__(self, routes, own, foreign):
        self.routes, self.own, self.foreign, self.missing = routes, own, foreign, names_of_missing(foreign)
        self.caller = Caller()
        self.allowed = []
        """Permitted calls that may change something; `allow` makes them last."""

    async def unauthenticated(self, *clients):
        for route in self.routes:
            for client in clients:
                answer = await self.caller.call(route, self.own).by(client)
                assert problem(answer, 401, "unauthenticated"), route

    async def with_role(self, role, everywhere, in_own):
        async with asyncio.TaskGroup() as tasks:
            for route in self.routes:
                may = route.role <= role
                tasks.create_task(self._in_own_show(route, may, everywhere))
                tasks.create_task(self._in_own_show(route, may and route.where != "everywhere", in_own))
                tasks.create_task(self._in_foreign_show(route, in_own))

    async def _in_own_show(self, route, may, client):
        call = self.caller.call(route, self.own)
        if may and route.method != "GET":
            self.allowed.append((call, client))
            return
        answer = await call.by(client)
        assert (answer.status_code == 403) is not may, (route, answer.text)
        assert answer.status_code in (200, 400, 403, 404), (route, answer.text)
        bare = self.caller.call(route, self.own, bare=True)
        answers = [answer, await bare.by(client)] if bare != call else [answer]
        assert client.sees_all or not any(self._reveals_others(one) for one in answers), route

    async def _in_foreign_show(self, route, client):
        own_call, foreign_call, missing_call = (
            self.caller.call(route, words) for words in (self.own, self.foreign, self.missing)
        )
        if foreign_call == own_call:
            return
        answer, other = await foreign_call.by(client), await missing_call.by(client)
        assert refused(answer), (route, answer.text)
        assert answer.status_code == other.status_code, (route, answer.text, other.text)
        assert without(answer.text, self.foreign) == without(other.text, self.missing), route

    def _reveals_others(self, answer):
        return any(self.foreign[name] in answer.text for name in ("show", "job", "run", "key", "queue"))

    async def allow(self):
        """Make the permitted calls: deletions last, nested resources before their parents. A target may be gone by
        then, but no call is forbidden."""
        order = [(call.method == "DELETE", -call.path.count("/"), client.sees_all) for call, client in self.allowed]
        for _, (call, client) in sorted(zip(order, self.allowed, strict=True), key=lambda each: each[0]):
            answer = await call.by(client)
            # The approval, not the role, decides who may vote.
            agreeing = (403,) if "/approvals/" in call.path else ()
            assert answer.status_code in (200, 201, 400, 404, 409, *agreeing), (call, answer.text)


async def clients_of(api, role):
    everywhere, in_own = await api.client(role), await api.client((role, OWN))
    everywhere.sees_all, in_own.sees_all = True, False
    return everywhere, in_own


@pytest.fixture
async def matrix(api):
    routes = route_table(litestar_app())
    return Matrix(routes, await names_of(api, OWN), await names_of(api, FOREIGN))


async def test_unauthenticated_requests_to_any_route_reveal_and_change_nothing(api, matrix):
    revoked = await api.keys.create("gone", [GrantSpec(Role.ADMIN)], actor="test")
    await api.keys.revoke(revoked.key.id, actor="test")
    before = await digest(api.farm.database)
    await matrix.unauthenticated(await api.raw_client(), await api.raw_client(**{"X-API-Key": revoked.plain.text}))
    assert await digest(api.farm.database) == before


@pytest.mark.slow("every route is called by every role")
async def test_every_route_enforces_its_role_and_leaks_nothing_across_shows(api, matrix):
    clients = {role: await clients_of(api, role) for role in Role}
    before = await digest(api.farm.database)
    for role, (everywhere, in_own) in clients.items():
        await matrix.with_role(role, everywhere, in_own)
    assert await digest(api.farm.database) == before
    assert len(matrix.allowed) > 50
    await matrix.allow()
    assert await digest(api.farm.database) != before


async def test_job_cannot_depend_on_a_job_of_an_invisible_show(api):
    other, missing = await api.farm.submit("noop", show=FOREIGN), uuid4()
    own = await api.client((Role.SUBMITTER, OWN))
    for path in ("/jobs", "/jobs/bulk"):
        answers = [
            problem(await own.post(path, json=a_job(after=[str(job)])), 404, "not_found").replace(str(job), "*")
            for job in (other, missing)
        ]
        assert answers[0] == answers[1]
    everywhere = await api.client(Role.SUBMITTER)
    assert (await everywhere.post("/jobs", json=a_job(after=[str(other)]))).status_code == 201


async def test_explain_names_other_shows_only_to_keys_that_see_them(api):
    gate = hanging("there")
    await api.farm.worker(slots=1)
    await api.farm.submit("hang", "there", show=FOREIGN)
    await api.farm.running("there")
    job = await api.farm.submit("noop", show=OWN)

    async def holders(client):
        explanation = (await client.get(f"/jobs/{job}/explain")).json()
        return [(one["name"], one["cores"]) for cause in explanation["reasons"] for one in cause["holders"]]

    assert await holders(await api.client(Role.VIEWER)) == [(FOREIGN, 1.0)]
    own = await api.client((Role.VIEWER, OWN))
    assert await holders(own) == [("another show", 1.0)]
    assert FOREIGN not in (await own.get(f"/jobs/{job}/explain")).text
    gate.set()

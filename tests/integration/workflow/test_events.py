"""What is told of runs and sagas while they go on: in order, to those who may, and gone on with where it was cut."""

import asyncio

import msgspec
import pytest

from rota.model.access import Role
from rota.model.events import Event, EventFilter
from rota.model.sse import SseParser as Lines
from rota.server import services
from tests.integration.engine.events.events_support import Reading
from tests.support.api import Api, problem
from tests.support.replica_and_worker import Farm

FLOW = {
    "name": "flow",
    "show": "film",
    "rollback_on": ["failed"],
    "steps": [
        {"id": "a", "task": "square", "args": [2], "compensate": {"topic": "undo", "task": "noop"}},
        {"id": "say", "type": "notify", "notify": "a is ${steps.a.output}", "depends_on": ["a"]},
        {"id": "b", "task": "boom", "depends_on": ["say"]},
    ],
}
TOLD = [
    *("run.began", "run.step.began a", "run.step.succeeded a"),
    *("run.step.began say", "run.step.succeeded say", "run.step.began b", "run.notify say"),
    *("run.step.failed b", "run.ending", "run.compensating"),
    *("saga.undoing a", "saga.undone a", "saga.ended.rolled_back", "run.ended.failed"),
]


@pytest.fixture
async def api(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm, Api(farm) as api:
        await farm.show()
        await farm.show("other", pool="elsewhere")
        await farm.worker()
        yield api


def words(events):
    return [" ".join(filter(None, (event.kind, event.facts.get("step")))) for event in events]


async def heard(client, count, after="", **asked):
    """Events as a client of the API reads them."""
    reading, found = Lines(after), []
    headers = {"last-event-id": after} if after else {}
    async with asyncio.timeout(20), client.stream("GET", "/events", params=asked, headers=headers) as stream:
        async for line in stream.aiter_lines():
            if (told := reading.feed(line)) is not None:
                found.append(msgspec.json.decode(told.data, type=Event))
            if len(found) == count:
                return found
    raise AssertionError(f"cut after {words(found)}")


async def test_all_that_happens_to_a_run_is_told_in_order_and_gone_on_with_where_it_was_cut(api):
    client = await api.client(Role.OPERATOR)
    feed = api.farm.replica.engine.event_stream
    async with feed.subscribe(EventFilter()):
        before = str(feed.place)
    await client.post("/workflows", json=FLOW)
    other, run = [(await client.post("/workflows/film/flow/runs", json={})).json()["run"] for _ in range(2)]
    events = await heard(client, len(TOLD), before, run=run, kind="run,saga")
    assert words(events) == TOLD
    assert {(str(event.run), event.show) for event in events} == {(run, "film")}
    assert {event.facts["workflow"] for event in events if event.kind.startswith("run.")} == {"flow"}
    [note] = [event for event in events if event.kind == "run.notify"]
    assert note.facts == {"workflow": "flow", "step": "say", "text": "a is 4"}
    steps = (await client.get(f"/runs/{run}")).json()["steps"]
    ran = {event.facts["step"]: str(event.job) for event in events if event.kind == "run.step.began" and event.job}
    assert ran == {"a": steps[0]["job"], "b": steps[2]["job"]}

    rest = await heard(client, len(TOLD) - 5, events[4].id, run=run, kind="run,saga")
    assert [event.id for event in rest] == [event.id for event in events[5:]]
    ends = await heard(client, 2, before, kind="run.ended")
    assert {(event.kind, str(event.run)) for event in ends} == {("run.ended.failed", each) for each in (run, other)}
    of_job = await heard(client, 1, before, run=run, job=steps[2]["job"], kind="run.step.failed")
    assert words(of_job) == ["run.step.failed b"]


async def test_the_history_of_one_run_is_told_exactly_and_ends_with_it(api):
    client, stranger = await api.client(Role.SUBMITTER), await api.client((Role.OPERATOR, "other"))
    await client.post("/workflows", json=FLOW)
    run = (await client.post("/workflows/film/flow/runs", json={})).json()["run"]
    events = await followed(client, run)
    assert words(events) == [word for word in TOLD if word.startswith("run.") and word != "run.notify say"]
    assert [event.id for event in events] == [str(number) for number in range(1, len(events) + 1)]
    assert "no luck" in next(event for event in events if event.kind == "run.step.failed").facts["why"]
    assert words(await followed(client, run, after="4")) == words(events[4:])
    assert (await client.get(f"/runs/{run}/events", params={"after": len(events)})).status_code == 204
    problem(await stranger.get(f"/runs/{run}/events"), 404, "not_found")
    problem(await client.get(f"/runs/{run}/events", params={"after": "x"}), 400, "invalid_input")


async def test_one_who_watches_a_run_without_events_sees_it_go_on(api):
    histories = api.farm.replica.run_histories
    desk, client = api.farm.replica.workflows, await api.client(Role.OPERATOR)
    ask = {"id": "ok", "type": "approval", "approval": {"text": "Go?"}}
    await client.post("/workflows", json={"name": "ask", "show": "film", "steps": [ask]})
    run = (await desk.start("film", "ask", actor="ann")).run
    desk.advancer.on_happened = lambda _done: None
    async with asyncio.timeout(20), histories.watch(run) as watch:
        assert [moment.happened.what for _, moment in await watch.next_entries(5)] == ["began", "began"]
        await client.post(f"/runs/{run}/cancel")
        assert [(number, moment.happened.what) for number, moment in await watch.next_entries(15)] == [
            (3, "ending"),
            (4, "cancelled"),
            (5, "cancelled"),
        ]
        assert watch.ended
    assert not histories._watches
    assert not histories._known


async def followed(client, run, after=""):
    """The events of one run, until the server says that there are no more."""
    reading, found = Lines(after), []
    headers = {"last-event-id": after} if after else {}
    async with asyncio.timeout(20), client.stream("GET", f"/runs/{run}/events", headers=headers) as stream:
        async for line in stream.aiter_lines():
            if (told := reading.feed(line)) is not None:
                found.append(msgspec.json.decode(told.data, type=Event))
    return found


async def test_a_key_hears_of_runs_of_its_own_shows_alone(api):
    client, stranger = await api.client(Role.OPERATOR), await api.client((Role.OPERATOR, "other"))
    feed = api.farm.replica.engine.event_stream
    async with feed.subscribe(EventFilter()):
        before = str(feed.place)
    for show in ("film", "other"):
        await client.post(
            "/workflows", json={"name": "f", "show": show, "steps": [{"id": "s", "type": "notify", "notify": show}]}
        )
        await client.post(f"/workflows/{show}/f/runs", json={})
    told = await heard(stranger, 1, before, kind="run.notify")
    assert [(event.show, event.facts["text"]) for event in told] == [("other", "other")]
    problem(await stranger.get("/events", params={"show": "film"}), 403, "forbidden")
    problem(await client.get("/events", params={"run": "nonsense"}), 400, "invalid_input")
    problem(await client.get("/events", params={"kind": "run.exploded"}), 400, "invalid_input")


async def test_what_people_do_to_runs_is_told_from_the_audit_trail_and_steps_that_ask_from_the_engine(api):
    client = await api.client(Role.OPERATOR)
    feed = api.farm.replica.engine.event_stream
    async with feed.subscribe(EventFilter()):
        before = feed.place
    ask = {"id": "ok", "type": "approval", "approval": {"text": "Go?"}}
    await client.post("/workflows", json={"name": "ask", "show": "film", "steps": [ask]})
    run = (await client.post("/workflows/film/ask/runs", json={})).json()["run"]
    for what in ("pause", "resume", "cancel"):
        await client.post(f"/runs/{run}/{what}")
    wanted = EventFilter(kinds=("workflow", "approval.requested", "run.paused", "run.step.began", "run.ended"))
    told = await Reading(feed, wanted, before).until(8, within_s=20)
    by_audit = [(event.kind, event.show) for event in told if event.kind.startswith("workflow.")]
    assert by_audit == [(f"workflow.{what}", "film") for what in ("declare", "pause", "resume", "cancel")]
    assert [str(event.run) for event in told if event.kind == "workflow.cancel"] == [run]
    others = {event.kind: event for event in told if not event.kind.startswith("workflow.")}
    assert others.keys() == {"run.step.began", "approval.requested", "run.paused", "run.ended.cancelled"}
    assert str(others["run.step.began"].job) == others["approval.requested"].facts["approval"]


async def test_a_batch_of_runs_is_a_few_groups(api):
    desk, teller = api.farm.replica.workflows, api.farm.replica.engine.event_publisher
    client = await api.client(Role.OPERATOR)
    await client.post(
        "/workflows", json={"name": "wait", "show": "film", "steps": [{"id": "d", "type": "delay", "delay_sec": 60}]}
    )
    groups = []
    real = teller.emit
    teller.emit = lambda kind, **more: groups.append((kind, len(more.get("runs", ())))) or real(kind, **more)
    await desk.start_many("film", "wait", [{}] * 40, actor="ann")
    assert [group for group in groups if group[0].startswith("run.")] == [("run.began", 40), ("run.step.began", 40)]

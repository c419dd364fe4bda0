"""Events of runs and sagas: order, visibility, and resuming after a disconnect."""

import asyncio

import msgspec
import pytest

from rota.model.access import Role
from rota.model.events import Event, EventFilter
from rota.model.sse import SseParser as Lines
from rota.server import services
from rota.workflow.notifier import UnpublishedRuns
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
EXPECTED = [
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


def labels(events):
    return [" ".join(filter(None, (event.kind, event.facts.get("step")))) for event in events]


async def read_events(client, count, after="", **params):
    """Events as a client of the API reads them."""
    reading, found = Lines(after), []
    headers = {"last-event-id": after} if after else {}
    async with asyncio.timeout(20), client.stream("GET", "/events", params=params, headers=headers) as stream:
        async for line in stream.aiter_lines():
            if (received := reading.feed(line)) is not None:
                found.append(msgspec.json.decode(received.data, type=Event))
            if len(found) == count:
                return found
    raise AssertionError(f"stream ended after {labels(found)}")


async def test_run_events_arrive_in_order_and_resume_after_a_disconnect(api):
    client = await api.client(Role.OPERATOR)
    event_stream = api.farm.replica.engine.event_stream
    async with event_stream.subscribe(EventFilter()):
        before = str(event_stream.place)
    await client.post("/workflows", json=FLOW)
    other, run = [(await client.post("/workflows/film/flow/runs", json={})).json()["run"] for _ in range(2)]
    events = await read_events(client, len(EXPECTED), before, run=run, kind="run,saga")
    assert labels(events) == EXPECTED
    assert {(str(event.run), event.show) for event in events} == {(run, "film")}
    assert {event.facts["workflow"] for event in events if event.kind.startswith("run.")} == {"flow"}
    [note] = [event for event in events if event.kind == "run.notify"]
    assert note.facts == {"workflow": "flow", "step": "say", "text": "a is 4"}
    steps = (await client.get(f"/runs/{run}")).json()["steps"]
    ran = {event.facts["step"]: str(event.job) for event in events if event.kind == "run.step.began" and event.job}
    assert ran == {"a": steps[0]["job"], "b": steps[2]["job"]}

    rest = await read_events(client, len(EXPECTED) - 5, events[4].id, run=run, kind="run,saga")
    assert [event.id for event in rest] == [event.id for event in events[5:]]
    ends = await read_events(client, 2, before, kind="run.ended")
    assert {(event.kind, str(event.run)) for event in ends} == {("run.ended.failed", each) for each in (run, other)}
    of_job = await read_events(client, 1, before, run=run, job=steps[2]["job"], kind="run.step.failed")
    assert labels(of_job) == ["run.step.failed b"]


async def test_run_history_stream_is_complete_and_ends_with_the_run(api):
    client, other_show_client = await api.client(Role.SUBMITTER), await api.client((Role.OPERATOR, "other"))
    await client.post("/workflows", json=FLOW)
    run = (await client.post("/workflows/film/flow/runs", json={})).json()["run"]
    events = await read_history(client, run)
    assert labels(events) == [label for label in EXPECTED if label.startswith("run.") and label != "run.notify say"]
    assert [event.id for event in events] == [str(number) for number in range(1, len(events) + 1)]
    assert "no luck" in next(event for event in events if event.kind == "run.step.failed").facts["why"]
    assert labels(await read_history(client, run, after="4")) == labels(events[4:])
    assert (await client.get(f"/runs/{run}/events", params={"after": len(events)})).status_code == 204
    problem(await other_show_client.get(f"/runs/{run}/events"), 404, "not_found")
    problem(await client.get(f"/runs/{run}/events", params={"after": "x"}), 400, "invalid_input")


async def test_history_watch_without_events_still_sees_progress(api):
    histories = api.farm.replica.run_histories
    commands, client = api.farm.replica.workflows, await api.client(Role.OPERATOR)
    ask = {"id": "ok", "type": "approval", "approval": {"text": "Go?"}}
    await client.post("/workflows", json={"name": "ask", "show": "film", "steps": [ask]})
    run = (await commands.start("film", "ask", actor="ann")).run
    commands.advancer.notifier = UnpublishedRuns()
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


async def read_history(client, run, after=""):
    """The events of one run, until the server ends the stream."""
    reading, found = Lines(after), []
    headers = {"last-event-id": after} if after else {}
    async with asyncio.timeout(20), client.stream("GET", f"/runs/{run}/events", headers=headers) as stream:
        async for line in stream.aiter_lines():
            if (received := reading.feed(line)) is not None:
                found.append(msgspec.json.decode(received.data, type=Event))
    return found


async def test_key_receives_only_events_of_its_shows(api):
    client, other_show_client = await api.client(Role.OPERATOR), await api.client((Role.OPERATOR, "other"))
    event_stream = api.farm.replica.engine.event_stream
    async with event_stream.subscribe(EventFilter()):
        before = str(event_stream.place)
    for show in ("film", "other"):
        await client.post(
            "/workflows", json={"name": "f", "show": show, "steps": [{"id": "s", "type": "notify", "notify": show}]}
        )
        await client.post(f"/workflows/{show}/f/runs", json={})
    received = await read_events(other_show_client, 1, before, kind="run.notify")
    assert [(event.show, event.facts["text"]) for event in received] == [("other", "other")]
    problem(await other_show_client.get("/events", params={"show": "film"}), 403, "forbidden")
    problem(await client.get("/events", params={"run": "nonsense"}), 400, "invalid_input")
    problem(await client.get("/events", params={"kind": "run.exploded"}), 400, "invalid_input")


async def test_run_commands_are_published_from_the_audit_log_and_approval_steps_by_the_engine(api):
    client = await api.client(Role.OPERATOR)
    event_stream = api.farm.replica.engine.event_stream
    async with event_stream.subscribe(EventFilter()):
        before = event_stream.place
    ask = {"id": "ok", "type": "approval", "approval": {"text": "Go?"}}
    await client.post("/workflows", json={"name": "ask", "show": "film", "steps": [ask]})
    run = (await client.post("/workflows/film/ask/runs", json={})).json()["run"]
    for what in ("pause", "resume", "cancel"):
        await client.post(f"/runs/{run}/{what}")
    wanted = EventFilter(kinds=("workflow", "approval.requested", "run.paused", "run.step.began", "run.ended"))
    received = await Reading(event_stream, wanted, before).until(8, within_s=20)
    by_audit = [(event.kind, event.show) for event in received if event.kind.startswith("workflow.")]
    assert by_audit == [(f"workflow.{what}", "film") for what in ("declare", "pause", "resume", "cancel")]
    assert [str(event.run) for event in received if event.kind == "workflow.cancel"] == [run]
    others = {event.kind: event for event in received if not event.kind.startswith("workflow.")}
    assert others.keys() == {"run.step.began", "approval.requested", "run.paused", "run.ended.cancelled"}
    assert str(others["run.step.began"].job) == others["approval.requested"].facts["approval"]


async def test_batch_of_runs_is_emitted_as_a_few_groups(api):
    commands, publisher = api.farm.replica.workflows, api.farm.replica.engine.event_publisher
    client = await api.client(Role.OPERATOR)
    await client.post(
        "/workflows", json={"name": "wait", "show": "film", "steps": [{"id": "d", "type": "delay", "delay_sec": 60}]}
    )
    groups = []
    real = publisher.emit
    publisher.emit = lambda kind, **more: groups.append((kind, len(more.get("runs", ())))) or real(kind, **more)
    await commands.start_many("film", "wait", [{}] * 40, actor="ann")
    assert [group for group in groups if group[0].startswith("run.")] == [("run.began", 40), ("run.step.began", 40)]

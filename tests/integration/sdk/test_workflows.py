"""Workflows by the SDK against the API of real servers: from declaration to results and compensation."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from rota import Fatal, NotEnded, Rota, RunNotSucceeded, Steps
from rota.model.access import Role
from rota.model.errors import IdempotencyConflict, InvalidInput, NotFound, Refused
from rota.model.workflows.spec import StepSpec, WorkflowSpec
from rota.server import services
from tests.support import replica_and_worker as worker_support
from tests.support.api import Api
from tests.support.queue import sql
from tests.support.replica_and_worker import Farm, hanging
from tests.support.waiting import until

DELETE_WORKFLOWS = sql("TRUNCATE rota.workflow CASCADE")


@dataclass
class Ticket:
    number: str
    price: int


def declared(app):
    """A travel agency; `booked` holds the bookings that are not cancelled."""
    booked = []

    @app.task
    async def book(city: str, nights: int = 1) -> Ticket:
        booked.append(city)
        return Ticket(city, 100 * nights)

    @app.task
    async def cancel(ticket: Ticket, why: str = "") -> None:
        assert isinstance(ticket, Ticket)
        booked.remove(ticket.number)

    @app.task
    async def pay(amount: int) -> int:
        if amount > 1000:
            raise Fatal(f"there is no money for {amount}")
        return amount

    @app.task(name="hang")
    async def hang(name: str) -> str: ...

    @app.workflow
    def trip(steps: Steps, city: str, nights: int = 2) -> Ticket:
        flight = steps.job("flight", book.call(city), compensate=cancel.call)
        hotel = steps.job("hotel", book.call(f"{city} inn", nights), compensate=cancel.call)
        steps.job("pay", pay.call(flight.output.price + hotel.output.price))
        return hotel.output

    @app.workflow
    def tour(steps: Steps, cities: list[str]) -> list[Ticket]:
        first = steps.workflow("first", trip.call(cities[0], nights=1))
        rest = steps.each("rest", book.call, cities, max_parallel=1, when=first.output.price > 50)
        return rest.output

    @app.workflow
    def slow(steps: Steps, name: str) -> str:
        return steps.job("wait", hang.call(name)).output

    return SimpleNamespace(booked=booked, trip=trip, tour=tour, slow=slow, tasks=(book, cancel, pay))


@pytest.fixture
async def farm(database_url, redis_url, nats_url, bus_prefix):
    async with Farm(database_url, redis_url, nats_url, bus_prefix, faces=services) as farm:
        await farm.show()
        yield farm


@pytest.fixture
async def app(farm):
    async with Rota(farm.replica.listen_url, key=await Api(farm).key(Role.ADMIN), show="film") as app:
        yield app


@pytest.fixture
async def agency(farm, app):
    made = declared(app)
    before = dict(worker_support.app.tasks)
    worker_support.app.tasks.update({task.name: task for task in made.tasks})
    try:
        await farm.worker()
        yield made
    finally:
        worker_support.app.tasks.clear()
        worker_support.app.tasks.update(before)


async def test_run_returns_the_workflow_result(app, agency):
    run = await agency.trip.start("Oslo", nights=3)
    assert await run.result(timeout=20) == Ticket("Oslo inn", 300)
    assert (await run.state(), run.already) == ("SUCCEEDED", False)
    view = await run.get()
    assert ([step.state for step in view.steps], view.input) == (["SUCCEEDED"] * 3, {"city": "Oslo", "nights": 3})
    assert [each.happened.what for each in await run.timeline()][-1] == "succeeded"
    assert await agency.trip.run(run.id).result() == Ticket("Oslo inn", 300)
    assert await app.run(str(run.id)).result() == {"number": "Oslo inn", "price": 300}


async def test_fatal_failure_compensates_the_run(app, agency):
    run = await agency.trip.start("Oslo", nights=30)
    with pytest.raises(RunNotSucceeded, match=r"ended as FAILED: Step pay: .*no money for 3100") as failed:
        await run.result(timeout=20)
    assert (failed.value.run, failed.value.state, failed.value.step) == (run.id, "FAILED", "pay")
    assert agency.booked == []
    saga = await run.saga()
    assert (saga.state, {entry.step for entry in saga.entries}) == ("rolled_back", {"flight", "hotel"})


async def test_workflow_declares_the_workflows_it_runs(app, agency):
    run = await agency.tour.start(["Oslo", "Rome"])
    assert await run.result(timeout=20) == [Ticket("Oslo", 100), Ticket("Rome", 100)]
    assert sorted((line.name, line.version) for line in await app.workflows.list()) == [("tour", 1), ("trip", 1)]


async def test_pruned_version_is_declared_again(farm, app, agency):
    await (await agency.trip.start("Oslo")).wait(timeout=20)
    await farm.database.run(DELETE_WORKFLOWS)
    assert await (await agency.trip.start("Oslo")).result(timeout=20) == Ticket("Oslo inn", 200)


async def test_same_idempotency_key_starts_one_run(app, agency):
    keyed = agency.trip.options(key="order-7")
    first, again = await keyed.start("Oslo"), await keyed.start("Oslo")
    assert (again, again.already, first.already) == (first, True, False)
    with pytest.raises(IdempotencyConflict):
        await keyed.start("Rome")
    assert await agency.trip.start("Oslo") != first
    await first.wait(timeout=20)


async def test_run_is_awaited_paused_cancelled_and_rerun(app, agency):
    gate = hanging("x")
    run = await agency.slow.start("x")
    with pytest.raises(NotEnded, match=r"has not ended within 0\.05 s, it is RUNNING"):
        await run.wait(timeout=0.05)
    assert await run.pause()
    assert await run.state() == "PAUSED"
    assert [reason.code for reason in (await run.explain()).reasons][:1] == ["run_paused"]
    assert await run.resume()
    with pytest.raises(NotFound, match="cancel a live run first"):
        await run.rerun("wait")
    waiting = asyncio.create_task(run.wait(timeout=20))
    await until(lambda: "x" in worker_support.seen.get("began", ()))
    assert await run.cancel()
    assert await waiting == "CANCELLED"
    assert not await run.cancel()
    with pytest.raises(RunNotSucceeded, match="ended as CANCELLED"):
        await run.result()
    with pytest.raises(Refused, match="nothing to undo"):
        await run.rollback()
    gate.set()
    again = await run.rerun("wait")
    assert await again.result(timeout=20) == "x"
    lines = await app.workflows.runs(workflow="slow", state="cancelled")
    assert [line.id for line in lines] == [run.id]
    assert {line.id for line in await app.workflows.runs(show="film")} == {run.id, again.id}


async def test_workflow_is_started_by_name(app, agency):
    spec = WorkflowSpec(
        name="plain",
        show="film",
        inputs={"n": 3},
        steps=(StepSpec(id="a", task="square", args=("${input.n}",)),),
        output="${steps.a.output}",
    )
    assert (await app.workflows.declare(spec)).changed
    assert not (await app.workflows.declare(spec)).changed
    assert await (await app.workflows.start("plain", {"n": 0})).result(timeout=20) == 0
    view = await app.workflows.dry_run("plain")
    assert (view.input, [step.id for step in view.steps]) == ({"n": 3}, ["a"])
    with pytest.raises(InvalidInput, match="no input 'm'"):
        await app.workflows.dry_run("plain", {"m": 1})
    with pytest.raises(NotFound, match="declare it first"):
        await app.workflows.start("nobody")


async def test_sync_facade_has_the_same_calls(app, agency):
    def use_sync_calls():
        run = agency.trip.sync.options(key="k").start("Oslo")
        assert run.result(timeout=20) == Ticket("Oslo inn", 200)
        assert (run.state(), agency.trip.sync.run(run.id).wait(), run.unsync) == ("SUCCEEDED", "SUCCEEDED", run)
        named = app.sync.workflows.start("trip", {"city": "Rome"})
        assert named.result(timeout=20) == app.sync.run(named.id).result() == {"number": "Rome inn", "price": 200}
        assert [line.id for line in app.sync.workflows.runs(most=1)] == [named.id]
        app.sync.close()

    await asyncio.to_thread(use_sync_calls)

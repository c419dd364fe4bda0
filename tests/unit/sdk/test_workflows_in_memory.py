"""Workflows in `rota.testing`: they behave as on servers, in memory."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from rota import Fatal, NotEnded, Retry, Rota, RunNotSucceeded, Steps, context, testing
from rota.model.errors import IdempotencyConflict, InvalidInput, NotFound, Refused


@dataclass
class Ticket:
    number: str
    price: int


@pytest.fixture
def agency():
    app, booked, broken, undone = Rota(show="travel"), [], set(), []

    @app.task(retries=2)
    async def book(city: str, nights: int = 1) -> Ticket:
        if context().attempt == 1:
            raise Retry("the line is busy", after=60)
        if city in broken:
            raise Fatal(f"{city} is full")
        booked.append(city)
        return Ticket(city, 100 * nights)

    @app.task
    def cancel(ticket: Ticket) -> None:
        undone.append(ticket.number)
        if f"undo {ticket.number}" in broken:
            raise Fatal("nobody listens")
        booked.remove(ticket.number)

    @app.workflow
    def trip(steps: Steps, city: str, nights: int = 2) -> Ticket:
        flight = steps.job("flight", book.call(city), compensate=cancel.call)
        hotel = steps.job("hotel", book.call(f"{city} inn", nights), after=flight, compensate=cancel.call)
        return hotel.output

    @app.workflow(rollback_on=["failed", "denied", "cancelled"], timeout="2d")
    def tour(steps: Steps, cities: list[str]) -> list[Ticket]:
        first = steps.workflow("first", trip.call(cities[0]))
        night = steps.delay("night", "8h", after=first)
        rest = steps.each("rest", book.call, cities, after=night, compensate=lambda made: cancel.call(made[0]))
        steps.approval("ok", f"Pay for {cities}?", after=rest)
        return rest.output

    return SimpleNamespace(app=app, booked=booked, broken=broken, undone=undone, trip=trip, tour=tour, book=book)


async def test_run_in_memory_succeeds_with_result_history_and_idempotency(agency):
    with testing.inline() as rehearsal:
        run = await agency.trip.start("Oslo", nights=3)
        assert await run.result() == Ticket("Oslo inn", 300)
        rehearsal.assert_submitted(agency.book, "Oslo inn", 3)
        assert [line.name for line in await agency.app.workflows.list()] == ["trip"]
        assert [each.happened.what for each in await run.timeline()] == [
            *("began", "began", "succeeded", "began", "succeeded"),
            "succeeded",
        ]
        keyed = agency.trip.options(key="k")
        first, again = await keyed.start("Oslo"), await keyed.start("Oslo")
        assert (first, again.already) == (again, True)
        with pytest.raises(IdempotencyConflict):
            await keyed.start("Rome")
        assert len(await agency.app.workflows.runs(workflow="trip", state="succeeded")) == 2


async def test_delays_and_approvals_are_controlled_by_the_test(agency):
    with testing.manual() as rehearsal:
        run = await agency.tour.start(["Oslo", "Rome"])
        with pytest.raises(NotEnded, match="it is RUNNING: call drain"):
            await run.result()
        for _ in range(2):
            await rehearsal.drain()
            rehearsal.clock.advance(60)
        await rehearsal.drain()
        assert (await run.state(), agency.booked) == ("WAITING", ["Oslo", "Oslo inn"])
        rehearsal.clock.advance(8 * 3600)
        await rehearsal.drain()
        rehearsal.clock.advance(60)
        await rehearsal.drain()
        with pytest.raises(InvalidInput, match=r"Step night of run .* does not wait for an approval"):
            await rehearsal.approve(run, "night")
        await rehearsal.approve(run, "ok", by="ann")
        assert await run.result() == [Ticket("Oslo", 100), Ticket("Rome", 100)]
        assert (await run.get()).steps[3].output["by"] == ["ann"]


async def test_failed_run_is_compensated_in_reverse_order(agency):
    agency.broken |= {"Rome", "undo Oslo"}
    with testing.inline() as rehearsal:
        run = await agency.tour.start(["Oslo", "Rome"])
        assert await run.state() == "WAITING"
        rehearsal.clock.advance(8 * 3600)
        await rehearsal.drain()
        with pytest.raises(RunNotSucceeded, match="Step rest: Item 1: Fatal: Rome is full") as failed:
            await run.result()
        assert (failed.value.state, failed.value.step) == ("FAILED", "rest")
        saga = await run.saga()
        assert saga.state == "incomplete"
        undone = [(entry.step.rpartition("/")[2], entry.state) for entry in saga.entries]
        assert undone == [("rest", "failed"), ("hotel", "done"), ("flight", "failed")]
        assert agency.undone == ["Oslo", "Oslo inn", "Oslo"]
        agency.broken.clear()
        assert await run.rollback() == 2
        assert ((await run.saga()).state, agency.booked) == ("rolled_back", [])


async def test_rejected_step_denies_the_run_and_a_slow_run_times_out(agency):
    with testing.inline() as rehearsal:
        run = await agency.tour.start(["Oslo"])
        rehearsal.clock.advance(8 * 3600)
        await rehearsal.drain()
        await rehearsal.reject(run, "ok", by="bob", reason="too dear")
        with pytest.raises(RunNotSucceeded, match="ended as DENIED: Step ok: Rejected by bob: too dear"):
            await run.result()
        assert agency.booked == []
        slow = await agency.tour.start(["Oslo"])
        rehearsal.clock.advance(3 * 86_400)
        await rehearsal.drain()
        assert await slow.wait() == "TIMEOUT"


async def test_run_is_paused_resumed_cancelled_and_rerun(agency):
    with testing.manual() as rehearsal:
        run = await agency.trip.start("Oslo")
        assert await run.pause()
        await rehearsal.drain()
        rehearsal.clock.advance(60)
        await rehearsal.drain()
        assert (await run.state(), agency.booked) == ("PAUSED", ["Oslo"])
        assert await run.resume()
        assert await run.cancel()
        await rehearsal.drain()
        assert await run.wait() == "CANCELLED"
        assert not await run.cancel()
        again = await run.rerun("hotel")
        await rehearsal.drain()
        rehearsal.clock.advance(60)
        await rehearsal.drain()
        assert (await again.result(), agency.booked) == (Ticket("Oslo inn", 200), ["Oslo", "Oslo inn"])
        with pytest.raises(NotFound, match="in this test"):
            await agency.trip.run("00000000-0000-0000-0000-000000000000").get()
        with pytest.raises(NotFound, match="declare it first"):
            await agency.app.workflows.start("nobody")
        with pytest.raises(InvalidInput, match="supports only jobs and workflows"):
            await agency.app.shows.list()


async def test_rollback_of_a_run_without_compensations_is_refused(agency):
    with testing.inline():

        @agency.app.workflow
        def plain(steps: Steps) -> None:
            steps.job("a", agency.book.call("Oslo"))

        run = await plain.start()
        with pytest.raises(Refused, match="nothing to undo"):
            await run.rollback()


async def test_rollback_of_a_succeeded_run_is_refused(agency):
    with testing.inline():
        run = await agency.trip.start("Oslo")
        with pytest.raises(Refused, match="it succeeded"):
            await run.rollback()
        assert (agency.booked, (await run.saga()).entries) == (["Oslo", "Oslo inn"], [])


async def test_rerun_compensates_reused_steps_and_the_original_run_does_not(agency):
    agency.broken.add("Rome")
    with testing.inline():

        @agency.app.workflow(rollback_on=["cancelled"])
        def two(steps: Steps) -> None:
            first = steps.workflow("first", agency.trip.call("Oslo"))
            steps.job("second", agency.book.call("Rome"), after=first)

        failed = await two.start()
        again = await failed.rerun("second")
        with pytest.raises(Refused):
            await failed.rollback()
        assert await again.rollback() == 2
        assert ((await again.saga()).state, agency.booked) == ("rolled_back", [])


def test_run_with_the_sync_facade_succeeds(agency):
    with testing.inline():
        assert agency.trip.sync.start("Oslo").result() == Ticket("Oslo inn", 200)

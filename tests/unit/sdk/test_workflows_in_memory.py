"""Workflows in a rehearsal: they go the way they go on servers, without any."""

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


async def test_a_run_is_played_to_its_end(agency):
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


async def test_time_passes_and_people_agree_when_the_test_says_so(agency):
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


async def test_what_was_done_is_undone_the_last_first(agency):
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


async def test_a_step_that_people_refuse_is_denied_and_a_run_that_is_too_slow_times_out(agency):
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


async def test_a_run_is_paused_cancelled_and_run_again(agency):
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


async def test_nothing_is_undone_where_nothing_can_be(agency):
    with testing.inline():

        @agency.app.workflow
        def plain(steps: Steps) -> None:
            steps.job("a", agency.book.call("Oslo"))

        run = await plain.start()
        with pytest.raises(Refused, match="nothing to compensate"):
            await run.rollback()


async def test_a_run_that_succeeded_has_nothing_to_undo(agency):
    with testing.inline():
        run = await agency.trip.start("Oslo")
        with pytest.raises(Refused, match="it succeeded"):
            await run.rollback()
        assert (agency.booked, (await run.saga()).entries) == (["Oslo", "Oslo inn"], [])


async def test_a_run_again_undoes_what_it_took_over_and_the_one_before_does_not(agency):
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


def test_the_same_for_tests_without_a_loop(agency):
    with testing.inline():
        assert agency.trip.sync.start("Oslo").result() == Ticket("Oslo inn", 200)

"""Services: states, restarts, and the order in which a supervisor starts and stops them."""

import asyncio
import os
import signal
from contextlib import suppress

import pytest

from rota.infra.service import RestartPolicy, Service, ServiceState, Supervisor, lifecycle, run_until_signalled
from rota.model.backoff import Backoff
from rota.model.errors import LoginRefused, PostgresBusy, PostgresUnavailable, SetupFailed
from tests.support.waiting import until

QUICK = RestartPolicy(limit=2, pauses=Backoff(0.001, 0.002))


class Body:
    """A service body that records its events. It crashes shortly after becoming ready, or instead of it."""

    def __init__(self, name="body", journal=None, *, crashes=(), becomes_ready=True, ends_on_drain=True):
        self.name = name
        self.journal = journal if journal is not None else []
        self.crashes = list(crashes)
        self.becomes_ready = becomes_ready
        self.ends_on_drain = ends_on_drain
        self.starts = 0

    async def __call__(self, life):
        self.starts += 1
        self.journal.append(f"{self.name} starts")
        try:
            if self.becomes_ready:
                life.ready()
                await life.pause(0.001)
            if self.crashes:
                raise self.crashes.pop(0)
            await life.until_draining()
            self.journal.append(f"{self.name} drains")
            if not self.ends_on_drain:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.journal.append(f"{self.name} cancelled")
            raise
        self.journal.append(f"{self.name} ends")


def supervised(*services, **options):
    options.setdefault("abandon", lambda status: pytest.fail(f"abandoned with {status}"))
    supervisor = Supervisor(**options)
    supervisor.add(*services)
    return supervisor


async def test_service_goes_from_new_through_ready_to_stopped():
    body, seen, seen_by_another = Body(), [], []
    service = Service("one", body)
    async with asyncio.TaskGroup() as tasks:
        service.subscribe(lambda changed: seen.append(changed.state))
        service.subscribe(lambda changed: seen_by_another.append(changed.state))
        assert service.state is ServiceState.NEW
        service.start(tasks)
        assert await service.wait_for(ServiceState.READY) is ServiceState.READY
        assert await service.stop(budget_s=5)
    assert seen == [ServiceState.STARTING, ServiceState.READY, ServiceState.DRAINING, ServiceState.STOPPED]
    assert seen_by_another == seen
    assert body.journal == ["body starts", "body drains", "body ends"]
    assert not service.cut


async def test_stop_before_start_prevents_the_start():
    body = Body()
    service = Service("one", body)
    async with asyncio.TaskGroup() as tasks:
        assert await service.stop(budget_s=5)
        service.start(tasks)
        assert service.state is ServiceState.STOPPED
    assert body.journal == []


async def test_service_started_twice_runs_one_body():
    body = Body()
    service = Service("one", body)
    async with asyncio.TaskGroup() as tasks:
        service.start(tasks)
        service.start(tasks)
        await service.wait_for(ServiceState.READY)
        await service.stop(budget_s=5)
        service.start(tasks)
    assert body.starts == 1


async def test_stop_right_after_start_ends_it_before_its_first_step():
    body = Body()
    service = Service("one", body)
    async with asyncio.TaskGroup() as tasks:
        service.start(tasks)
        assert await service.stop(budget_s=5)
    assert service.state is ServiceState.STOPPED
    assert body.starts == 0


async def test_stop_during_start_cancels_immediately():
    body = Body(becomes_ready=False, ends_on_drain=False)
    service = Service("one", body)
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        service.start(tasks)
        await until(lambda: body.starts == 1)
        assert await service.stop(budget_s=60)
    assert body.journal == ["body starts", "body cancelled"]
    assert not service.cut


async def test_concurrent_stops_wait_for_the_same_end():
    body = Body()
    service = Service("one", body)
    async with asyncio.TaskGroup() as tasks:
        service.start(tasks)
        await service.wait_for(ServiceState.READY)
        ended = await asyncio.gather(*(service.stop(budget_s=5) for _ in range(5)))
        assert await service.stop(budget_s=0)
    assert ended == [True] * 5
    assert body.journal == ["body starts", "body drains", "body ends"]


async def test_body_that_exceeds_its_drain_budget_is_cancelled():
    body = Body(ends_on_drain=False)
    service = Service("one", body)
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        service.start(tasks)
        await service.wait_for(ServiceState.READY)
        assert await service.stop(budget_s=0.01)
    assert body.journal == ["body starts", "body drains", "body cancelled"]
    assert service.cut


async def test_crashed_body_is_restarted_and_counted():
    body = Body(crashes=[ValueError("boom")])
    service = Service("crashing", body, restarts=QUICK)
    before = lifecycle.SERVICE_RESTARTS.labels("crashing")._value.get()
    async with supervised(service).running():
        await service.wait_for(ServiceState.RESTARTING)
        await service.wait_for(ServiceState.READY)
        assert str(service.error) == "boom"
    assert body.starts == 2
    assert lifecycle.SERVICE_RESTARTS.labels("crashing")._value.get() == before + 1


async def test_body_that_returns_early_or_cancels_itself_counts_as_crashed():
    async def returns(life):
        life.ready()
        await life.pause(0.001)

    async def cancels_itself(life):
        await returns(life)
        raise asyncio.CancelledError

    for body in (returns, cancels_itself):
        service = Service("one", body, restarts=QUICK)
        async with supervised(service).running():
            assert await service.wait_for(ServiceState.FAILED) is ServiceState.FAILED
        assert isinstance(service.error, lifecycle.EndedEarly)


class GroupBody:
    """Its first run ends by the failure of a TaskGroup while it waits for the tasks of the group."""

    def __init__(self, then):
        self.then = then
        self.starts = 0

    async def __call__(self, life):
        self.starts += 1
        life.ready()
        if self.starts > 1:
            await self.then(life)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.crash())

    @staticmethod
    async def crash():
        await asyncio.sleep(0)
        raise ValueError("boom")


async def test_service_restarted_after_a_failed_task_group_is_cancelled_at_the_end_of_its_budget():
    async def never_ends(_):
        await asyncio.Event().wait()

    body = GroupBody(never_ends)
    service = Service("one", body, restarts=QUICK)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        service.start(tasks)
        await until(lambda: body.starts == 2)
        assert await service.stop(budget_s=0.01)
    assert service.cut


async def test_service_cancelled_from_inside_after_a_failed_task_group_is_restarted():
    async def cancels_itself(_):
        raise asyncio.CancelledError

    body = GroupBody(cancels_itself)
    service = Service("one", body, restarts=QUICK)
    async with supervised(service).running():
        assert await service.wait_for(ServiceState.FAILED) is ServiceState.FAILED
    assert body.starts == QUICK.limit + 1


async def test_error_of_a_body_that_was_cancelled_while_draining_is_kept():
    async def fails_when_cancelled(life):
        life.ready()
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("late")

    service = Service("one", fails_when_cancelled)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        service.start(tasks)
        await service.wait_for(ServiceState.READY)
        assert await service.stop(budget_s=0.01)
    assert str(service.error) == "late"


async def test_repeated_crashes_fail_the_service_and_end_the_process_with_status_1():
    journal = []
    steady = Service("steady", Body("steady", journal))
    broken = Service("broken", Body("broken", journal, crashes=[ValueError("boom")] * 9), restarts=QUICK)
    supervisor = supervised(steady, broken)
    async with asyncio.timeout(5), supervisor.running():
        await supervisor.until_stopping()
        assert supervisor.failed() == {"broken": "ValueError"}
        assert steady.state is ServiceState.READY
    assert journal.count("broken starts") == QUICK.limit + 1
    assert journal[-1] == "steady ends"
    assert supervisor.exit_status == 1


@pytest.mark.parametrize(
    "answer",
    [
        PostgresUnavailable("gone"),
        PostgresBusy("locked"),
        LoginRefused("The password was changed while it ran."),
        ExceptionGroup("two", [PostgresUnavailable("gone"), LoginRefused("wrong")]),
    ],
    ids=lambda answer: type(answer).__name__,
)
async def test_answer_of_a_server_to_a_service_that_ran_never_exhausts_restarts(answer):
    outages = [answer] * 5
    body = Body(crashes=outages)
    service = Service("one", body, restarts=QUICK)
    supervisor = supervised(service)
    async with asyncio.timeout(5), supervisor.running():
        while body.starts <= len(outages):
            await service.wait_for(ServiceState.RESTARTING)
            assert "one" in supervisor.unready()
            await service.wait_for(ServiceState.READY)
        assert supervisor.failed() == {}
    assert supervisor.exit_status == 0


async def test_service_returns_soon_after_a_long_outage(monkeypatch):
    """Its pauses have grown to the longest by then; work stands still until it is back."""
    monkeypatch.setattr(lifecycle, "OUTAGE_PAUSE_MAX_S", 0.01)
    body = Body(crashes=[PostgresUnavailable("gone")] * 5)
    service = Service("one", body, restarts=RestartPolicy(pauses=Backoff(60.0, 60.0)))
    async with asyncio.timeout(5), supervised(service).running():
        while body.starts <= 5:
            await service.wait_for(ServiceState.RESTARTING)
            await service.wait_for(ServiceState.READY)


async def test_other_error_among_unavailable_servers_counts_as_a_crash():
    mixed = ExceptionGroup("two", [PostgresUnavailable("gone"), ValueError("boom")])
    service = Service("one", Body(crashes=[mixed] * 9), restarts=QUICK)
    async with supervised(service).running():
        assert await service.wait_for(ServiceState.FAILED) is ServiceState.FAILED


async def test_steady_body_resets_its_restart_count():
    forgiving = RestartPolicy(limit=1, pauses=Backoff(0.001, 0.001), steady_s=0.0)
    body = Body(crashes=[ValueError("boom")] * 6)
    service = Service("one", body, restarts=forgiving)
    async with asyncio.timeout(5), supervised(service).running():
        while body.starts < 7:
            await service.wait_for(ServiceState.RESTARTING)
            await service.wait_for(ServiceState.READY)
        assert service.state is ServiceState.READY


async def test_setup_error_at_start_is_final_and_raised_unchanged():
    refused = LoginRefused("PostgreSQL refused the password; set it.")
    body = Body(crashes=[refused], becomes_ready=False)
    with pytest.raises(LoginRefused) as raised:
        async with supervised(Service("one", body, restarts=QUICK)).running():
            pytest.fail("it must not run")
    assert raised.value is refused
    assert body.starts == 1


async def test_service_not_ready_in_time_fails_the_start_with_a_message():
    journal = []
    first = Service("first", Body("first", journal))
    slow = Service("slow", Body("slow", journal, becomes_ready=False))
    never = Service("never", Body("never", journal))
    with pytest.raises(SetupFailed, match=r"Service slow was not ready within 0\.02 s"):
        async with supervised(first, slow, never, start_timeout_s=0.02).running():
            pytest.fail("it must not run")
    assert journal == ["first starts", "slow starts", "slow cancelled", "first drains", "first ends"]


async def test_message_about_a_late_service_masks_secrets():
    body = Body(crashes=[OSError("redis://:c4nary@host")] * 99, becomes_ready=False)
    service = Service("one", body, restarts=RestartPolicy(limit=99, pauses=Backoff(0.001, 0.001)))
    with pytest.raises(SetupFailed) as raised:
        async with supervised(service, start_timeout_s=0.02).running():
            pytest.fail("it must not run")
    assert "c4nary" not in str(raised.value)
    assert "@host" in str(raised.value)


async def test_services_start_in_order_and_stop_in_reverse():
    journal = []
    supervisor = supervised(*(Service(name, Body(name, journal)) for name in ("one", "two", "three")))
    async with supervisor.running():
        assert supervisor.unready() == {}
    assert journal == [
        *("one starts", "two starts", "three starts"),
        *("three drains", "three ends", "two drains", "two ends", "one drains", "one ends"),
    ]
    assert supervisor.exit_status == 0


async def test_drain_budget_is_shared_and_the_remaining_services_are_cancelled(monkeypatch):
    budgets, stop = [], Service.stop

    async def recorded(service, budget_s):
        budgets.append(budget_s)
        return await stop(service, budget_s)

    monkeypatch.setattr(Service, "stop", recorded)
    stubborn = [Service(f"s{n}", Body(ends_on_drain=False)) for n in range(3)]
    supervisor = supervised(*stubborn, drain_budget_s=0.02)
    async with supervisor.running():
        pass
    assert budgets == [pytest.approx(0.02, abs=0.01), 0.0, 0.0]
    assert all(service.cut for service in stubborn)
    assert supervisor.exit_status == 1


async def test_error_in_the_running_block_still_drains_and_is_raised_unwrapped():
    journal = []
    with pytest.raises(KeyError, match="mine"):
        async with supervised(Service("one", Body("one", journal))).running():
            raise KeyError("mine")
    assert journal[-1] == "one ends"


async def test_body_that_crashes_while_draining_makes_the_exit_unclean():
    async def crashes_late(life):
        life.ready()
        await life.until_draining()
        raise ValueError("late")

    supervisor = supervised(Service("one", crashes_late))
    async with supervisor.running():
        pass
    assert supervisor.services[0].state is ServiceState.STOPPED
    assert supervisor.exit_status == 1


async def test_body_that_ignores_cancellation_is_abandoned(monkeypatch):
    monkeypatch.setattr(lifecycle, "CANCEL_GRACE_S", 0.01)
    released, abandoned = asyncio.Event(), []

    async def ignores(life):
        life.ready()
        with suppress(asyncio.CancelledError):
            await released.wait()
        async with asyncio.timeout(2):
            await released.wait()

    def abandon(status):
        abandoned.append(status)
        released.set()

    async with supervised(Service("stuck", ignores), drain_budget_s=0.01, abandon=abandon).running():
        pass
    assert abandoned == [1]


async def test_pause_ends_early_when_draining():
    iterations = []

    async def loops(life):
        life.ready()
        while await life.pause(0.001 if len(iterations) < 3 else 60):
            iterations.append(1)

    service = Service("one", loops)
    async with asyncio.timeout(5), supervised(service).running():
        await until(lambda: len(iterations) == 3)
    assert not service.cut


async def test_stop_requested_while_starting_ends_the_start():
    journal = []
    supervisor = supervised(
        Service("first", Body("first", journal)),
        Service("slow", Body("slow", journal, becomes_ready=False)),
        Service("never", Body("never", journal)),
    )
    asyncio.get_running_loop().call_later(0.01, supervisor.request_stop)
    async with asyncio.timeout(5), supervisor.running():
        assert supervisor.stopping
    assert journal == ["first starts", "slow starts", "slow cancelled", "first drains", "first ends"]
    assert supervisor.exit_status == 0


async def test_stop_requested_before_the_first_step_of_a_service_ends_the_start():
    journal, loop = [], asyncio.get_running_loop()
    late = Service("late", Body("late", journal))
    supervisor = supervised(Service("first", Body("first", journal)), late)

    def stop_before_its_first_step(service):
        if service.state is ServiceState.STARTING:
            loop.call_soon(supervisor.request_stop)

    late.subscribe(stop_before_its_first_step)
    async with asyncio.timeout(5), supervisor.running():
        assert supervisor.stopping
    assert journal == ["first starts", "first drains", "first ends"]
    assert (late.state, supervisor.exit_status) == (ServiceState.STOPPED, 0)


async def test_service_that_ends_slowly_does_not_prolong_the_start():
    begun, ending = asyncio.Event(), asyncio.Event()

    async def slow(_life):
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await ending.wait()

    supervisor = supervised(Service("slow", slow))
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        tasks.create_task(begun.wait()).add_done_callback(lambda _: loop.call_soon(supervisor.request_stop))
        async with supervisor.running():
            assert supervisor.stopping
            ending.set()
    assert supervisor.exit_status == 0


async def test_signal_handlers_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    service = Service("one", Body())
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run_until_signalled(supervised(service)))
        await service.wait_for(ServiceState.READY)
        os.kill(os.getpid(), signal.SIGTERM)
    assert running.result() == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_duplicate_service_name_is_refused():
    with pytest.raises(AssertionError, match="two services"):
        supervised(Service("one", Body()), Service("one", Body()))

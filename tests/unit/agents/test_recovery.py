"""Periodic passes: a hung pass is cancelled and counted, a failed one is repeated, time budgets are respected."""

import asyncio

from rota.agents.recovery.zombies_and_orphans import Zombies
from rota.agents.running import ActiveRun, AgentRun
from rota.infra.service import periodic
from rota.infra.service.periodic import PASSES_TIMED_OUT, PeriodicTask
from rota.model.agents import AgentOutcome, AgentSpec
from rota.model.schedules import IntervalSchedule
from rota.model.settings.agents import ExceptionalAgentsSettings, ZombieCleanupSettings
from tests.support.waiting import until


class Clock:
    """Advances by one step at every reading."""

    def __init__(self, step_s):
        self.now_s = 1000.0
        self.step_s = step_s

    def monotonic(self):
        self.now_s += self.step_s
        return self.now_s


class Runs:
    def __init__(self, count):
        spec = AgentSpec(name="x", schedule=IntervalSchedule(1000))
        self.by_name = {
            str(at): ActiveRun(spec, AgentRun(str(at), at, None, 0, 0), 0, None, 0.0) for at in range(count)
        }
        self.stopped = []

    def stop(self, run, outcome):
        run.stopped_as, run.stopped_at = outcome, 1000.0 + len(self.stopped)
        self.stopped.append(run.number)


def zombies(runs, *, step_s=0.0, **wanted):
    return Zombies(runs, ZombieCleanupSettings(threshold_ms=0, **wanted), Clock(step_s))


def test_zombie_pass_without_budget_stops_every_zombie():
    runs = Runs(5)
    assert len(zombies(runs, step_s=1.0).sweep()) == 5
    assert {run.stopped_as for run in runs.by_name.values()} == {AgentOutcome.TIMEOUT}


def test_zombie_pass_over_budget_leaves_the_rest_to_the_next_pass():
    runs = Runs(5)
    sweeper = zombies(runs, step_s=0.01, run_budget_ms=25)
    assert len(sweeper.sweep()) == 2
    sweeper.sweep()
    sweeper.sweep()
    assert runs.stopped[:5] == [0, 1, 2, 3, 4], "runs already stopped come last"


def test_disabled_zombie_cleanup_stops_no_run():
    runs = Runs(3)
    sweeper = zombies(runs, enabled=False)
    assert sweeper.sweep() == []
    assert sweeper.stop_after_s(runs.by_name["0"].spec) is None


def test_exceptional_agents_match_on_the_whole_name():
    exceptional = ExceptionalAgentsSettings(pattern="slow-.*", threshold_ms=60_000)
    sweeper = zombies(Runs(0), exceptional_agents=exceptional)
    limits = {
        name: sweeper.stop_after_s(AgentSpec(name=name, schedule=IntervalSchedule(1000)))
        for name in ("slow-a", "a-slow-a", "slow")
    }
    assert limits == {"slow-a": 62.0, "a-slow-a": 2.0, "slow": 2.0}


async def test_hung_pass_is_cancelled_counted_and_followed_by_the_next(monkeypatch):
    monkeypatch.setattr(periodic, "PASS_TIMEOUT_S", 0.02)
    began, cancelled = [], []

    async def work():
        began.append(1)
        if len(began) > 1:
            return
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    before = PASSES_TIMED_OUT.labels("hanging")._value.get()
    async with asyncio.TaskGroup() as tasks:
        each = PeriodicTask("hanging", 0.001, work)
        each.start(tasks)
        await until(lambda: len(began) >= 3)
        await each.stop()
    assert cancelled == [1]
    assert PASSES_TIMED_OUT.labels("hanging")._value.get() == before + 1


async def test_failed_pass_is_followed_by_the_next():
    began = []

    async def work():
        began.append(1)
        raise ValueError("no luck")

    async with asyncio.TaskGroup() as tasks:
        each = PeriodicTask("failing", 0.001, work)
        each.start(tasks)
        await until(lambda: len(began) >= 3)
        await each.stop()


async def test_stop_lets_a_running_pass_finish():
    began, go_on, ended = asyncio.Event(), asyncio.Event(), []

    async def work():
        began.set()
        await go_on.wait()
        ended.append(1)

    async with asyncio.TaskGroup() as tasks:
        each = PeriodicTask("slow", 0.001, work, patience_s=10.0)
        each.start(tasks)
        await began.wait()
        stopping = tasks.create_task(each.stop())
        await asyncio.sleep(0)
        go_on.set()
        await stopping
    assert ended

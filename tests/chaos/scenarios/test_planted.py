"""Faults planted in a running cluster are found by the watch: the checks work on real servers, too."""

import signal

import pytest

from tests.chaos.pipeline.deployment import Farm
from tests.chaos.scenarios.liveness import Disturbances, stopped_runs
from tests.chaos.scenarios.watch import Watch
from tests.support.queue import sql
from tests.support.waiting import until

FOUND_S = 40.0
SET_STATE = sql("UPDATE rota.job SET state = $2::text WHERE pk_job = $1::uuid")
SET_REASON = sql("UPDATE rota.job SET reason = 'lost in the post' WHERE pk_job = $1::uuid")
UNCHECKED_REASONS = sql("ALTER TABLE rota.job DROP CONSTRAINT job_reason")
SET_PRIORITY = sql("UPDATE rota.job SET priority = 9 WHERE pk_job = $1::uuid")
COUNT_ONE_MORE = sql("UPDATE rota.layer SET failed = failed + 1 WHERE pk_job = $1::uuid")
COUNT_ONE_LESS = sql("UPDATE rota.layer SET failed = failed - 1 WHERE pk_job = $1::uuid")
LIVE = sql("SELECT count(*) FROM rota.job WHERE pk_show = $1::uuid")
BOOKED = sql("SELECT count(*) FROM rota.proc WHERE pk_job = $1::uuid")


@pytest.fixture
async def farm(private_stack, tmp_path, proxy):
    stack = await private_stack("postgres", "redis", "nats")
    async with Farm(stack, tmp_path, proxy, links=False) as farm:
        await farm.show("film", burst=2)
        await farm.show("short", burst=4)
        await farm.start(servers=2, workers=2, slots=4)
        yield farm


class Planter:
    """Plants one fault at a time and waits until the watch reports it."""

    def __init__(self, farm, watch):
        self.farm = farm
        self.watch = watch

    async def found(self, invariant, words, plant=None):
        """`plant`: for a fault that the servers repair themselves, planted again and again."""

        async def reported():
            if plant is not None:
                await plant()
            self.watch.check()
            return any(
                violation.invariant.startswith(invariant) and words in violation.sentence
                for violation in self.watch.violations
            )

        await until(reported, within_s=FOUND_S, what=f"{invariant}: {words}")
        self.watch.violations.clear()

    async def running(self, job, frames):
        async def booked():
            return await self.farm.database.value(BOOKED, job) == frames

        await until(booked, within_s=FOUND_S, what="running frames")


@pytest.mark.slow("plants seven faults one after the other, each of which must last a while")
@pytest.mark.timeout(240)
async def test_planted_fault_in_a_running_cluster_is_found(farm):
    disturbances = Disturbances()
    async with Watch(farm, disturbances) as watch:
        planter = Planter(farm, watch)
        long = await farm.submit("nap", 600, show="film", frames=2, name="long", ends=("CANCELLED",))
        await planter.running(long, 2)
        waits = await farm.submit("noop", show="film", name="waits", ends=("CANCELLED",))
        assert not watch.violations, watch.violations

        await planter.found(
            "truth",
            "RUNNING with no frame on a worker",
            plant=lambda: farm.database.run(SET_STATE, waits, "RUNNING"),
        )
        await farm.database.run(SET_STATE, waits, "SCHEDULED")
        await farm.database.run(UNCHECKED_REASONS)
        await farm.database.run(SET_REASON, waits)
        await planter.found("truth", "is not a reason code")
        await farm.database.run(COUNT_ONE_MORE, waits)
        await planter.found("truth", "open frames")
        await farm.database.run(COUNT_ONE_LESS, waits)
        await _plant_inversion(farm, planter)
        await _plant_lost_release(farm, planter)
        await _plant_ended_processes(farm, planter)
        assert [*stopped_runs(farm.read_runs(), set(), disturbances)], "L3: the frames of a killed worker"


async def _plant_inversion(farm, planter):
    """Jobs whose priority is higher than that of their place in the queue."""
    for number in range(24):
        await farm.submit("nap", 0.4, show="short", frames=4, priority=5, name=f"first{number}")
    for _ in range(24):
        last = await farm.submit("nap", 0.1, show="short", priority=1, name="last")
        await farm.database.run(SET_PRIORITY, last)
    await planter.found("O1", "last (9) waits")


async def _plant_lost_release(farm, planter):
    """Redis counts frames that PostgreSQL does not have."""
    show = (await farm.accounting.admin.show("short")).id

    async def is_idle():
        return await farm.database.value(LIVE, show) == 0

    await until(is_idle, within_s=FOUND_S, what="an idle show")
    [pool] = await farm.accounting.admin.pools()
    counter = farm.accounting.live.keys.show_keys(str(show)).counter_key(f"sub:{pool.id}")
    assert float(await farm.client.hget(counter, "int_cores") or 0) == 0
    await farm.client.hset(counter, "int_cores", "4")
    await farm.submit("noop", show="short", name="refused")
    await planter.found("L1", "refused")


async def _plant_ended_processes(farm, planter):
    farm.servers[1].send(signal.SIGKILL)
    await planter.found("L2", "server1 ended")
    farm.workers[0].send(signal.SIGKILL)
    farm.workers[1].send(signal.SIGKILL)
    await planter.found("L2", "worker1 ended")

"""The queue at a fixed rate while a reader holds an old snapshot half of the time: dead rows must not accumulate.

Dead rows are counted from PostgreSQL statistics: an updated or deleted row is dead until vacuum removes it, which an
older snapshot prevents. A succeeded frame leaves no dead row; a retried frame leaves one in `deferred_jobs`.
"""

import asyncio
import os
import time
from dataclasses import dataclass, field

import asyncpg
import pytest

from rota.infra.lease import Leases
from rota.infra.postgres import Database, PostgresTarget, migrate
from rota.infra.service import Service, Supervisor
from rota.queue import FrameFailure, MaintenanceIntervals, Queue, QueueMaintenance
from tests.support.queue import agreed, entry, sql
from tests.support.waiting import until

QUEUE = "film"
TICK_S = 0.02
SLOTS = 60
"""Ring rotations per run, independent of its length."""
RETRIED_OF, FAILED_OF = 200, 1000
DEAD_MAX, DEAD_PER_SLOT = 150, 20
"""Dead rows that maintenance may cause under an old snapshot: before it detects it, and per slot opened and pruned."""

DEAD = sql("""
SELECT relname, n_dead_tup AS dead FROM pg_stat_user_tables
WHERE schemaname = 'rota' AND n_dead_tup > 0 AND relname ~ '^(queue|ready|deferred|done|dlq)'""")
CATALOG_DEAD = sql("SELECT n_dead_tup FROM pg_stat_sys_tables WHERE relname = 'pg_class'")


@dataclass
class Soak:
    """Counters and samples of a run. Times are seconds since the start."""

    seconds: float
    rate: int
    pins_asked: int
    offered: int = 0
    completed: int = 0
    retried: int = 0
    failed: int = 0
    began: float = field(default_factory=time.monotonic)
    pins: list[tuple[float, float]] = field(default_factory=list)
    reads: list[tuple[float, float]] = field(default_factory=list)
    dead: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)
    catalog_dead: int = 0
    completed_in_time: int = 0

    @property
    def slot_s(self):
        return max(self.seconds / SLOTS, MaintenanceIntervals().fold_s)

    @property
    def dead_now(self):
        return sum(self.dead[-1][1].values()) if self.dead else 0

    @property
    def now(self):
        return time.monotonic() - self.began

    @property
    def over(self):
        return self.now >= self.seconds

    def exact_p99_ms(self, within=None):
        """p99 of all reads, or of those that `within(pin, at)` selects."""
        return p99([ms for at, ms in self.reads if within is None or any(within(pin, at) for pin in self.pins)])


def late_in(pin, at):
    first, last = pin
    return last - (last - first) / 4 <= at <= last


def p99(numbers):
    return sorted(numbers)[int(len(numbers) * 0.99)]


async def _offer(queue, soak):
    """Enqueue at a fixed rate and catch up after delays."""
    while not soak.over:
        due = int(soak.now * soak.rate)
        if due > soak.offered:
            more = [entry(QUEUE, payload=b"x" * 75) for _ in range(min(due - soak.offered, 1000))]
            await queue.enqueue(more)
            soak.offered += len(more)
        await asyncio.sleep(TICK_S)


async def _work(queue, owner, lanes, soak):
    """Complete most frames, retry some and fail a few, selected by token."""
    while True:
        claims = await queue.claim(lanes, 256, owner)
        for claim in claims:
            again = [token for token in claim.tokens if token % RETRIED_OF == 1]
            failing = [token for token in claim.tokens if token % FAILED_OF == 2]
            good = [token for token in claim.tokens if token % RETRIED_OF != 1 and token % FAILED_OF != 2]
            completed = await queue.complete(good)
            retried = await queue.retry(again, 0.5)
            failed = await queue.fail([FrameFailure(token, "exit_status") for token in failing])
            soak.completed += completed.accepted
            soak.retried += retried.accepted
            soak.failed += failed.accepted
        if not claims:
            await asyncio.sleep(TICK_S)


async def _pin(url, soak):
    """Hold a snapshot in a reader transaction for half of the time, at intervals."""
    turn_s = soak.seconds / (2 * soak.pins_asked)
    reader = await asyncpg.connect(url)
    try:
        for number in range(soak.pins_asked):
            await asyncio.sleep(max(0.0, turn_s * (2 * number) + turn_s / 2 - soak.now))
            async with reader.transaction(isolation="repeatable_read"):
                await reader.fetch("SELECT * FROM rota.queue_lanes")
                await _hold(soak, turn_s)
    finally:
        await reader.close()


async def _hold(soak, turn_s):
    """While the snapshot is held, little more than the frames retried since may be dead rows."""
    first, retried, dead = soak.now, soak.retried, soak.dead_now
    while soak.now < first + turn_s:
        await asyncio.sleep(min(1.0, first + turn_s - soak.now))
        allowed = dead + soak.retried - retried + DEAD_MAX + DEAD_PER_SLOT * (soak.now - first) / soak.slot_s
        if soak.dead_now > allowed:
            soak.beyond.append(f"{soak.dead_now} dead rows where {allowed:.0f} are allowed: {soak.dead[-1]}")
    soak.pins.append((first, soak.now))


async def _read(reader, soak):
    while not soak.over:
        soak.reads.append((soak.now, float(await reader.line())))


async def _watch(database, soak):
    while not soak.over:
        dead = {row["relname"]: row["dead"] for row in await database.rows(DEAD)}
        soak.dead.append((soak.now, dead))
        soak.catalog_dead = max(soak.catalog_dead, await database.value(CATALOG_DEAD))
        await asyncio.sleep(0.5)


async def _run(url, spawn, *, seconds, rate, pins):
    await migrate(url)
    database = await Database.open(PostgresTarget(url=url))
    queue, leases = Queue(database), Leases(database)
    await queue.ensure_queue(QUEUE, priorities=[5])
    rows = await database.rows(sql("SELECT lane_id FROM rota.queue_lanes ORDER BY 1"))
    lanes = [row["lane_id"] for row in rows]
    supervisor = Supervisor()
    soak = Soak(seconds, rate, pins)
    intervals = MaintenanceIntervals(slot_age_s=soak.slot_s, prune_delay_s=min(soak.slot_s, 5.0))
    maintenance = QueueMaintenance(queue, leases, _never_booked, intervals)
    supervisor.add(Service("queue_upkeep", maintenance.run))
    owners = []
    for number in range(2):
        got = await leases.acquire([f"dispatcher:{number}"], kind="dispatcher", ttl_s=seconds + 600)
        owners.append(await queue.register_owner(got.granted[0]))
    reader = await spawn("tests.chaos.queue.counts_reader")
    await reader.write_line(f"{url}\n{QUEUE}")
    await reader.line()
    soak.began = time.monotonic()
    async with supervisor.running(), asyncio.TaskGroup() as tasks:
        working = [
            tasks.create_task(_work(queue, owner, lanes[at:] + lanes[:at], soak)) for at, owner in enumerate(owners)
        ]
        watching = [tasks.create_task(task) for task in (_watch(database, soak), _read(reader, soak), _pin(url, soak))]
        await _offer(queue, soak)
        soak.completed_in_time = soak.completed + soak.failed
        await asyncio.gather(*watching)
        await reader.write_line("")
        await reader.wait()
        await until(lambda: soak.completed + soak.failed == soak.offered, within_s=60, what="the end of all frames")
        for task in working:
            task.cancel()
    counts = await agreed(database)
    await database.close()
    return soak, counts[QUEUE]


async def _never_booked(tokens):
    return set(tokens)


def _check(soak, counts):
    assert (counts["completed"], counts["failed"]) == (soak.completed, soak.failed)
    assert sum(counts.values()) == soak.offered, "no frame may still wait or run"
    assert len(soak.pins) == soak.pins_asked
    assert soak.retried > 0, "the run must include retries"
    assert not soak.beyond, soak.beyond[:3]
    assert soak.completed_in_time >= 0.95 * soak.seconds * soak.rate


@pytest.mark.slow("measures a sustained rate")
async def test_long_reader_transaction_leaves_few_dead_rows_and_keeps_the_rate(private_stack, spawn):
    stack = await private_stack("postgres")
    soak, counts = await _run(stack.url("postgres"), spawn, seconds=8, rate=1000, pins=1)
    _check(soak, counts)


@pytest.mark.soak
async def test_soak_queue_under_pins(private_stack, spawn, capsys):
    seconds, rate = float(os.environ.get("SOAK_S", "1800")), int(os.environ.get("SOAK_RATE", "2000"))
    stack = await private_stack("postgres")
    soak, counts = await _run(stack.url("postgres"), spawn, seconds=seconds, rate=rate, pins=3)
    worst = max((sum(dead.values()), at, dead) for at, dead in soak.dead)
    with capsys.disabled():
        print(
            f"\nsoak queue_under_pins: {seconds:.0f} s at {soak.rate}/s, {soak.offered:,} offered,"
            f" {soak.completed_in_time / soak.seconds / soak.rate:.1%} ended in time, {soak.retried:,} tried again,"
            f" {soak.failed:,} failed; at most {worst[0]:,} dead rows {worst[2]} and {soak.catalog_dead:,} in pg_class;"
            f" exact counts p99 {soak.exact_p99_ms():.1f} ms, late in a pin {soak.exact_p99_ms(late_in):.1f} ms"
        )
    _check(soak, counts)
    assert soak.exact_p99_ms() <= 10
    assert soak.exact_p99_ms(late_in) <= 10

"""Several producers, dispatchers and workers at once, with maintenance running."""

import asyncio
import random
from contextlib import suppress
from uuid import uuid4

import pytest

from rota.infra.postgres import Database, PostgresTarget
from rota.model.errors import PostgresBusy
from rota.queue import DeadLetterFilter, FailedFilter, FrameFailure, MaintenanceIntervals, Queue, storage
from tests.support.queue import Dispatcher, Leader, agreed, entry, sql
from tests.support.waiting import until

PARKED = uuid4()
"""The job under which the stress test parks frames, so that it can unpark all of them."""
BLOCKED = sql(
    "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
    " WHERE d.datname = current_database() AND l.locktype = 'advisory' AND NOT l.granted"
)


@pytest.fixture
async def database(database_url):
    """With a connection for every task."""
    opened = await Database.open(PostgresTarget(url=database_url, pool_max=16))
    yield opened
    await opened.close()


@pytest.fixture
def queue(database):
    return Queue(database)


@pytest.fixture
async def dispatcher(database):
    return await Dispatcher(database).enlisted()


async def test_concurrent_claimers_never_share_a_frame(queue, database):
    await queue.enqueue([entry(frames=3000), *(entry() for _ in range(1000))])
    claimers = [await Dispatcher(database, str(number)).enlisted() for number in range(4)]

    async def take(claimer):
        taken = []
        while (await queue.counts_exact())["film"].waiting:
            taken += [(piece.job, frame) for piece in await claimer.pieces(64) for frame in piece.frames]
        return taken

    taken = [frame for part in await asyncio.gather(*map(take, claimers)) for frame in part]
    assert len(taken) == len(set(taken)) == 4000


async def test_claimer_skips_a_lane_locked_by_another_claimer(queue, database, dispatcher):
    [busy] = await queue.enqueue([entry(priority=9)])
    await queue.enqueue([entry(priority=1, payload=b"free")])
    async with database.transaction() as tx:
        await tx.value(sql("SELECT pg_advisory_xact_lock(1903519026, $1)"), busy.lane)
        assert [piece.payload for piece in await dispatcher.pieces()] == [b"free"]
    assert len(await dispatcher.pieces()) == 1


async def test_uncommitted_enqueue_is_never_skipped(queue, database, dispatcher):
    """With one shard the second producer waits, so that the cursor cannot pass the positions of the first."""
    await queue.ensure_queue("film", shards=1)
    async with database.transaction() as first:
        [placed] = await queue.enqueue([entry(payload=b"first")], on=first)
        second = asyncio.create_task(queue.enqueue([entry(payload=b"second")]))
        await until(lambda: database.value(BLOCKED), what="the second producer to wait")
        assert await dispatcher.claim(lanes=[placed.lane]) == []
    await second
    assert [piece.payload for piece in await dispatcher.pieces()] == [b"first", b"second"]


async def test_aborted_enqueue_leaves_no_gap(queue, database, dispatcher):
    async def aborted():
        async with database.transaction() as tx:
            await queue.enqueue([entry()], on=tx)
            raise LookupError

    with pytest.raises(LookupError):
        await aborted()
    [placed] = await queue.enqueue([entry()])
    assert placed.first_seq == 0


async def test_producer_in_an_open_transaction_delays_no_other(queue, database, dispatcher):
    async with database.transaction() as tx, asyncio.timeout(5):
        await queue.enqueue([entry(frames=3)], on=tx)
        for queue_name in ("film", "short"):
            await queue.enqueue([entry(queue_name)])
        tokens = await dispatcher.tokens()
        assert len(tokens) == 2
        await queue.retry(tokens, 0.0)
        leader = await Leader.of(queue, MaintenanceIntervals(slot_bytes=1, prune_delay_s=0.0))
        assert await leader.promote() == 2
        await queue.complete(await dispatcher.tokens())
        await leader.fold()
        assert await leader.turn_ring() == "rotated"
        await queue.enqueue([entry()])
        assert len(await dispatcher.tokens()) == 1
    assert len(await dispatcher.tokens()) == 3


async def test_concurrent_operations_of_all_kinds_conserve_every_frame(queue, database, monkeypatch):
    """Frames only move between states: at any time their sum equals the frames enqueued and committed so far."""
    monkeypatch.setattr(storage, "CARRY_MAX", 5)
    stress = StressRun(queue, database, frames=6000)
    async with asyncio.timeout(50), asyncio.TaskGroup() as tasks:
        for number in range(2):
            tasks.create_task(stress.produce(random.Random(number)))
        for number in range(3):
            dispatcher = await Dispatcher(database, str(number)).enlisted()
            tasks.create_task(stress.work(dispatcher, random.Random(number)))
        tasks.create_task(stress.operate(random.Random(7)))
        tasks.create_task(stress.run_maintenance())
        tasks.create_task(stress.watch())
    counts = (await agreed(database))["film"]
    assert counts["waiting"] == counts["running"] == counts["deferred"] == 0
    assert sum(counts.values()) == stress.queued == 6000
    assert stress.observations > 20
    assert stress.pruned


class StressRun:
    def __init__(self, queue, database, frames):
        self.queue, self.database, self.frames = queue, database, frames
        self.queued = self.requested = self.observations = 0
        self.jobs = []
        self.pruned = False
        self.done = asyncio.Event()

    async def produce(self, rng):
        while self.requested < self.frames:
            number = min(rng.choice([1, 5, 40, 300]), self.frames - self.requested)
            self.requested += number
            job = entry(frames=number)
            async with self.database.transaction() as tx:
                await self.queue.enqueue([job], on=tx)
                await asyncio.sleep(rng.random() * 0.01)
            self.queued += number
            self.jobs.append(job.job)

    async def work(self, dispatcher, rng):
        while not self.done.is_set():
            tokens = await dispatcher.tokens(rng.choice([1, 30, 300]))
            await asyncio.sleep(rng.random() * 0.005)
            rng.shuffle(tokens)
            cut = sorted(rng.randrange(len(tokens) + 1) for _ in range(3))
            await self.queue.give_back(tokens[: cut[0] // 4])
            await self.queue.retry(tokens[cut[0] // 4 : cut[0] // 2], 0.0)
            await self.queue.fail([FrameFailure(token, "exception") for token in tokens[cut[0] // 2 : cut[0]]])
            await self.queue.park(tokens[cut[0] : cut[0] + 2], PARKED, rest_of=[1])
            await self.queue.complete(tokens)

    async def operate(self, rng):
        """Operator actions and counter mode changes while frames are enqueued; afterwards unpark everything."""
        while self.queued < self.frames:
            await self.queue.unpark(PARKED, rng.choice([1, 20, 1000]))
            if self.jobs:
                first = rng.randrange(40)
                await self.queue.cancel_waiting(rng.choice(self.jobs), frames=range(first, first + rng.choice([1, 30])))
            await self.queue.failed.retry(FailedFilter(queue="film"), most=10)
            await self.queue.failed.move_to_dead_letters(FailedFilter(queue="film"), most=5)
            await self.queue.dead_letters.retry(DeadLetterFilter(kind="frame"), most=5)
            if rng.random() < 0.1:
                await self.queue.rebuild_counts(rng.choice(["ledger", "scan"]))
            await asyncio.sleep(rng.random() * 0.02)
        await self.queue.rebuild_counts("ledger")
        while not self.done.is_set():
            await self.queue.unpark(PARKED, self.frames)
            await asyncio.sleep(0.02)

    async def run_maintenance(self):
        leader = await Leader.of(self.queue, MaintenanceIntervals(slot_bytes=8192, prune_delay_s=0.0))
        while not self.done.is_set():
            for step in (leader.promote, leader.fold, leader.turn_ring, leader.shed):
                with suppress(PostgresBusy):  # a lock timeout rolls the step back; a leader repeats it in the next pass
                    await step()
            await asyncio.sleep(0.02)
        self.pruned = bool(await self.database.value(sql("SELECT count(*) FROM rota.queue_terminal_rollups")))

    async def watch(self):
        while True:
            least = self.queued
            counts = (await self.queue.counts_exact()).get("film")
            if counts is not None:
                total = counts.waiting + counts.running + counts.deferred + counts.terminal + counts.dead
                assert least <= total <= self.requested
                self.observations += 1
                if self.queued == self.frames and not counts.waiting + counts.running + counts.deferred:
                    self.done.set()
                    return

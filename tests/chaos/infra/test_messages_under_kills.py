"""Every message committed in PostgreSQL is delivered although PostgreSQL and NATS are killed meanwhile."""

import asyncio
import contextlib
import os
import random
import signal
import time

import pytest

from rota.infra.nats import Bus, BusMessage, ConsumerSpec, NatsTarget, StreamSpec
from rota.infra.outbox import OutboxRelay, add
from rota.infra.postgres import Database, PostgresTarget, migrate
from rota.infra.service import Service, Supervisor
from rota.model.errors import NatsUnavailable, PostgresUnavailable
from tests.support.waiting import until

STREAM = StreamSpec(name="CHAOS", subjects=("chaos.>",))
READER = ConsumerSpec(stream="CHAOS", durable="reader", ack_wait_s=2.0)
BATCH = 50
BACKLOG = 2000


class History:
    """Messages acknowledged to the writer and messages received by the reader."""

    def __init__(self):
        self.committed = set()
        self.received = set()
        self.kills = dict.fromkeys(("postgres", "nats"), 0)


async def _write(database, history, stop):
    number = 0
    while not stop.is_set():
        await until(lambda: len(history.committed) < len(history.received) + BACKLOG, within_s=30, what="the reader")
        ids = [f"m{number + at}" for at in range(BATCH)]
        messages = [BusMessage(subject="chaos.tick", data=b"x", msg_id=name) for name in ids]
        try:
            async with database.transaction() as transaction:
                await add(transaction, messages)
        except PostgresUnavailable:
            await asyncio.sleep(0.01)  # unknown commit outcome, so the same ids are written again
        else:
            history.committed.update(ids)
            number += BATCH


async def _read(bus, history):
    async with bus.consumer(READER) as reader:
        async for batch in reader.batches(wait_s=0.5):
            with contextlib.suppress(NatsUnavailable):  # an unacknowledged message is redelivered
                for delivery in batch:
                    history.received.add(delivery.msg_id)
                    await delivery.ack()


async def _kill(stack, history, rng, pause_s):
    """Repeatedly kill a server, wait until messages flow again, and pause for a random time."""
    while True:
        name = rng.choice(["postgres", "nats"])
        server = stack.servers[name]
        pid = server.process.pid
        os.kill(pid, signal.SIGKILL)
        history.kills[name] += 1
        await until(lambda s=server, p=pid: s.process.pid != p and s.process.status is None, within_s=30, what=name)
        seen = len(history.received)
        await until(lambda n=seen: len(history.received) > n + BATCH, within_s=30, what=f"messages after {name} died")
        await asyncio.sleep(rng.random() * pause_s)


async def _run(stack, *, seed, kills=None, seconds=None, pause_s=0.05):
    await migrate(stack.url("postgres"))
    database = await Database.open(PostgresTarget(url=stack.url("postgres"), connect_timeout_s=2))
    bus = await Bus.connect(NatsTarget(url=stack.url("nats")))
    await bus.ensure([STREAM, READER])
    supervisor = Supervisor()
    supervisor.add(stack.service, Service("relay", OutboxRelay(database, bus, poll_s=0.1).run))
    history, stop = History(), asyncio.Event()
    async with supervisor.running():
        writing = asyncio.create_task(_write(database, history, stop))
        reading = asyncio.create_task(_read(bus, history))
        killing = asyncio.create_task(_kill(stack, history, random.Random(seed), pause_s))
        began = time.monotonic()
        await until(
            lambda: (
                killing.done()
                or sum(history.kills.values()) > (kills or 10**9)
                or time.monotonic() - began > (seconds or 10**9)
            ),
            within_s=(seconds or 40) + 40,
        )
        for task in (killing, reading, writing):
            assert not task.done(), task.exception()
        killing.cancel()
        stop.set()
        await writing
        await until(lambda: history.committed <= history.received, within_s=30, what="every committed message")
        reading.cancel()
        await asyncio.gather(reading, killing, return_exceptions=True)
    await bus.close()
    await database.close()
    return history


async def test_committed_messages_arrive_despite_postgres_and_nats_kills(private_stack):
    stack = await private_stack("postgres", "nats")
    history = await _run(stack, seed=7, kills=4)
    assert len(history.committed) > 4 * BATCH
    assert history.committed <= history.received
    assert min(history.kills.values()) > 0, "both servers must be killed at least once"


@pytest.mark.soak
async def test_soak_messages_under_kills(private_stack, capsys, monkeypatch):
    seconds = float(os.environ.get("SOAK_S", "300"))
    stack = await private_stack("postgres", "nats")
    monkeypatch.setattr("rota.local.stack.RESTARTS_MAX", 10**6)  # the test kills servers far more often than this limit
    history = await _run(stack, seed=int(os.environ.get("SOAK_SEED", "1")), seconds=seconds, pause_s=1.0)
    assert history.committed <= history.received
    with capsys.disabled():
        print(
            f"\nsoak messages_under_kills: {seconds:.0f} s, {sum(history.kills.values())} kills {history.kills}, "
            f"{len(history.committed):,} committed, {len(history.committed - history.received)} lost"
        )

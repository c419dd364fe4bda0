"""`rota demo`: a stack of its own, a small real workload with two servers killed on the way, and a count at the end.

Every line it prints is checked before it is printed: a promise that is not kept ends the demo with status 1.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from rich.console import Console

from rota.cli.demo_books import quotas_fill_and_refuse
from rota.cli.demo_tour import Tour, bars
from rota.infra import audit
from rota.infra.audit import AuditEntry
from rota.infra.breaker import Breaker
from rota.infra.clock import SystemClock
from rota.infra.lease import Leases
from rota.infra.nats import Bus, ConsumerSpec, Message, NatsTarget, StreamSpec
from rota.infra.outbox import Relay, add
from rota.infra.postgres import Database, PostgresTarget, migrate
from rota.infra.redis import Keys, RedisTarget, connect
from rota.infra.service import Service, Supervisor
from rota.local import LocalStack, StackOptions
from rota.model.breaker import Consecutive, ProbesByCount, Rules
from rota.model.errors import BreakerOpen, NatsUnavailable, PostgresUnavailable, StaleFence

MESSAGES = 20_000
BATCH = 250
QUIET_S = 60.0
DEMO = StreamSpec(name="DEMO", subjects=("demo.>",))
READER = ConsumerSpec(stream="DEMO", durable="reader", ack_wait_s=5.0)
SAFETY = Rules(counting=Consecutive(3), open_ms=30_000, probing=ProbesByCount(3, 2))


async def run() -> int:
    task = asyncio.current_task()
    assert task
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that nothing is left behind
    console = Console(highlight=False)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rota-demo-", ignore_cleanup_errors=True) as folder:
        async with _opened(console, Path(folder)) as tour:
            await _messages_survive_killed_servers(tour)
            await _a_stale_holder_cannot_write(tour)
            await _a_breaker_opens_for_everybody(tour)
            await quotas_fill_and_refuse(tour)
            await _the_audit_log_is_whole(tour)
    console.print(f"[bold green]All kept[/], {time.monotonic() - began:.1f} s from nothing to stopped.")
    return 0


@asynccontextmanager
async def _opened(console: Console, folder: Path) -> AsyncIterator[Tour]:
    console.print("[bold]A stack from nothing[/]")
    async with AsyncExitStack() as closing:
        stack = LocalStack(StackOptions(folder))
        closing.push_async_callback(stack.stop)
        await stack.start()
        names = ", ".join(server.binary.label for server in stack.servers.values())
        console.print(f"  [green]✓[/] {names} answer after {stack.start_s:.2f} s")
        done = await migrate(stack.url("postgres"))
        console.print(f"  [green]✓[/] schema made by {len(done)} migrations")
        database = await Database.open(PostgresTarget(url=stack.url("postgres")))
        closing.push_async_callback(database.close)
        bus = await Bus.connect(NatsTarget(url=stack.url("nats"), name="demo"))
        closing.push_async_callback(bus.close)
        yield Tour(console, stack, database, bus)


async def _messages_survive_killed_servers(tour: Tour) -> None:
    tour.console.print(f"[bold]{MESSAGES:,} messages, with NATS and then PostgreSQL killed on the way[/]")
    await tour.bus.ensure([DEMO, READER])
    relay = Relay(tour.database, tour.bus, poll_s=0.2)
    supervisor = Supervisor()
    supervisor.add(tour.stack.service, Service("relay", relay.run))
    received: set[str] = set()
    pids = _pids(tour.stack)
    began = time.monotonic()
    async with supervisor.running():
        with bars(tour.console) as drawn:
            committed_bar = drawn.add_task("committed", total=MESSAGES)
            received_bar = drawn.add_task("received", total=MESSAGES)
            async with asyncio.timeout(QUIET_S), asyncio.TaskGroup() as tasks:
                tasks.create_task(_commit_all(tour, lambda n: drawn.update(committed_bar, completed=n)))
                repeated = tasks.create_task(
                    _receive_all(tour, received, lambda: drawn.update(received_bar, completed=len(received)))
                )
    took_s = time.monotonic() - began
    killed = [name for name, pid in _pids(tour.stack).items() if pid != pids[name]]
    tour.shown(killed == ["postgres", "nats"], "both were killed with -9 and are back at the same URLs")
    tour.shown(
        len(received) == MESSAGES,
        f"{len(received):,} of {MESSAGES:,} received in {took_s:.1f} s: none lost, {repeated.result()} delivered twice",
    )


def _pids(stack: LocalStack) -> dict[str, int]:
    return {name: server.process.pid for name, server in stack.servers.items() if server.process}


async def _commit_all(tour: Tour, tell: Callable[[int], None]) -> None:
    batches = range(0, MESSAGES, BATCH)
    victims = {batches[len(batches) // 3]: "nats", batches[2 * len(batches) // 3]: "postgres"}
    for first in batches:
        if name := victims.get(first):
            process = tour.stack.servers[name].process
            assert process
            os.kill(process.pid, signal.SIGKILL)
        await _commit(tour, [f"demo:{number}" for number in range(first, first + BATCH)])
        tell(first + BATCH)


async def _commit(tour: Tour, ids: list[str]) -> None:
    """One transaction. When nobody knows whether it took effect it is made again: the ids tell that it is the same."""
    messages = [Message(subject="demo.tick", data=b"tick", msg_id=name) for name in ids]
    while True:
        try:
            async with tour.database.transaction() as transaction:
                await add(transaction, messages)
        except PostgresUnavailable:
            await asyncio.sleep(0.05)
        else:
            return


async def _receive_all(tour: Tour, received: set[str], tell: Callable[[], None]) -> int:
    repeated = 0
    async with tour.bus.consumer(READER) as reader:
        async for batch in reader.batches(wait_s=1.0):
            with suppress(NatsUnavailable):  # what is not answered comes again
                for delivery in batch:
                    repeated += delivery.msg_id in received
                    received.add(delivery.msg_id)
                    await delivery.ack()
            tell()
            if len(received) >= MESSAGES:
                return repeated
    raise AssertionError("batches end only when we leave them")


async def _a_stale_holder_cannot_write(tour: Tour) -> None:
    tour.console.print("[bold]A lock with a time limit, and a holder that slept too long[/]")
    leases = Leases(tour.database)
    old = (await leases.acquire(["demo"], kind="demo", ttl_s=0.2)).granted[0]
    async with leases.hold("demo", kind="demo", ttl_s=5, wait_s=5) as new:
        tour.shown(
            new.fence > old.fence, f"its lease ran out and went to another (fence {old.fence}, then {new.fence})"
        )
        try:
            async with tour.database.transaction() as transaction:
                await leases.guard(transaction, old)
            refused = False
        except StaleFence:
            refused = True
        tour.shown(refused, "when it woke up, PostgreSQL refused its write")


async def _a_breaker_opens_for_everybody(tour: Tour) -> None:
    tour.console.print("[bold]A failing service, and two replicas that call it[/]")
    client = connect(RedisTarget(url=tour.stack.url("redis")))
    try:
        one, other = (Breaker.shared("demo", SAFETY, SystemClock(), client, Keys()) for _ in range(2))
        for _ in range(3):
            await one.failure(await one.allow())
        try:
            await other.allow()
            told = ""
        except BreakerOpen as error:
            told = error.sentence
        tour.shown(bool(told), f"three failures here; there: {told}")
    finally:
        await client.aclose()


async def _the_audit_log_is_whole(tour: Tour) -> None:
    tour.console.print("[bold]A log that shows when it was changed[/]")
    async with tour.database.transaction() as transaction:
        await audit.append(
            transaction, [AuditEntry(actor="demo", action="visit", target=f"stop {n}") for n in range(5)]
        )
    found = await audit.verify(tour.database)
    tour.shown(found.ok, f"{found.checked} entries, every hash recomputed, head {str(found.head)[:14]}…")

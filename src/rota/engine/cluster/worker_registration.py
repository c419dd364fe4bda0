"""Where workers come in: a worker that says hello is written down, and knows from then on who it is.

A worker is one incarnation: a process that starts again, or was lost and comes back, is another one. Its id is in every
proc it runs, so what an old incarnation still says is refused. A hello whose answer is lost is said again; the row of
the first try is a worker that nobody ever hears, and is lost like any other.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final
from uuid import UUID

import msgspec
import structlog

from rota.infra.clock import Clock, SystemClock
from rota.infra.nats import Bus, CoreMessage
from rota.infra.postgres import Database, query
from rota.infra.service import Lifecycle
from rota.model.errors import InvalidInput, NatsUnavailable, PostgresUnavailable
from rota.model.ids import ENTROPY_BYTES, uuid7
from rota.model.protocol import HANDSHAKE_SUBJECT, Register, Registered, decode, encode

ADD_WORKER = query(__package__, "worker_add")

log = structlog.get_logger(__name__)
NAME_MAX: Final = 200
SLOTS_MAX: Final = 1_000_000
RESOURCE_MAX: Final = 2**40


class WorkerRegistration:
    def __init__(
        self,
        database: Database,
        bus: Bus,
        *,
        heartbeat_s: float = 2.0,
        lease_s: float = 60.0,
        clock: Clock | None = None,
    ) -> None:
        self.database = database
        self.bus = bus
        self._heartbeat_s = heartbeat_s
        self._lease_s = lease_s
        self._clock = clock or SystemClock()
        self.on_came: Callable[[UUID, Register], None] = _ignore

    async def run(self, life: Lifecycle) -> None:
        async with (
            self.bus.subscribe_core(HANDSHAKE_SUBJECT, group="rota-servers") as heard,
            asyncio.TaskGroup() as tasks,
        ):
            opening = tasks.create_task(self._serve_requests(heard))
            life.ready()
            await life.until_draining()
            opening.cancel()

    async def _serve_requests(self, heard: asyncio.Queue[CoreMessage]) -> None:
        while True:
            question = await heard.get()
            try:
                welcome = await self.register(decode(Register, question.data))
            except InvalidInput as error:
                welcome = Registered(refusal=error.sentence)
            except PostgresUnavailable:
                continue  # it asks again
            try:
                await self.bus.respond(question, encode(welcome))
            except NatsUnavailable:
                log.info("hello_not_answered")

    async def register(self, hello: Register) -> Registered:
        _check(hello)
        worker = uuid7(self._clock.now_ms(), os.urandom(ENTROPY_BYTES))
        if not await self.database.rows(ADD_WORKER, worker, hello.name, hello.pool, msgspec.msgpack.encode(hello)):
            raise InvalidInput(f"There is no pool {hello.pool!r}: make it with `rota pool create`, or name another.")
        log.info("worker_came", worker=hello.name, pool=hello.pool, slots=hello.slots)
        self.on_came(worker, hello)
        return Registered(worker, self._heartbeat_s, self._lease_s)


def _check(hello: Register) -> None:
    if not 0 < len(hello.name) <= NAME_MAX or not hello.name.isprintable():
        raise InvalidInput(f"A worker needs a name of 1 to {NAME_MAX} printable characters.")
    if not 0 < len(hello.pool) <= NAME_MAX or not hello.pool.isprintable():
        raise InvalidInput(f"A worker needs a pool of 1 to {NAME_MAX} printable characters.")
    if not 1 <= hello.slots <= SLOTS_MAX:
        raise InvalidInput(f"{hello.slots} is no number of places: give 1 to {SLOTS_MAX}.")
    if min(hello.cores, hello.gpus, hello.memory_mb) < 0:
        raise InvalidInput("A worker cannot have less than nothing: give cores, gpus and memory_mb from 0 on.")
    if max(hello.cores, hello.gpus, hello.memory_mb) > RESOURCE_MAX:
        raise InvalidInput(f"A worker cannot have so much: give cores, gpus and memory_mb up to {RESOURCE_MAX}.")


def _ignore(_worker: UUID, _hello: Register) -> None:
    return None

"""Worker registration: stores a worker that registers, and assigns its id.

An id stands for one worker session: a process that restarts, or that was lost and returns, gets a new id. Every proc
has the id of its worker, so results of an old session are refused. Its heartbeat interval is stored with it: servers
judge its silence by that, whatever the setting is by then. A worker whose reply is lost registers again; the
row of the first try never sends a heartbeat, and is declared lost like any other.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

import msgspec
import structlog

from rota.engine.events.sink import EventSink
from rota.infra.clock import Clock, SystemClock
from rota.infra.nats import Bus, CoreMessage
from rota.infra.postgres import Database, query
from rota.infra.service import Lifecycle
from rota.model.errors import InvalidInput, NatsUnavailable, PostgresUnavailable
from rota.model.heartbeats import HEARTBEAT_INTERVAL_S
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
        events: EventSink,
        *,
        heartbeat_s: float = HEARTBEAT_INTERVAL_S,
        lease_s: float = 60.0,
        clock: Clock | None = None,
    ) -> None:
        self.database = database
        self.bus = bus
        self._heartbeat_s = heartbeat_s
        self._lease_s = lease_s
        self._clock = clock or SystemClock()
        self._events = events

    async def run(self, life: Lifecycle) -> None:
        async with (
            self.bus.subscribe_core(HANDSHAKE_SUBJECT, group="rota-servers") as requests,
            asyncio.TaskGroup() as tasks,
        ):
            server = tasks.create_task(self._serve_requests(requests))
            life.ready()
            await life.until_draining()
            server.cancel()

    async def _serve_requests(self, requests: asyncio.Queue[CoreMessage]) -> None:
        while True:
            request = await requests.get()
            try:
                reply = await self.register(decode(Register, request.data))
            except InvalidInput as error:
                reply = Registered(refusal=error.sentence)
            except PostgresUnavailable:
                continue  # the worker retries
            try:
                await self.bus.respond(request, encode(reply))
            except NatsUnavailable:
                log.info("registration_reply_failed")

    async def register(self, register: Register) -> Registered:
        _check(register)
        worker = uuid7(self._clock.now_ms(), os.urandom(ENTROPY_BYTES))
        if not await self.database.rows(
            ADD_WORKER, worker, register.name, register.pool, msgspec.msgpack.encode(register), self._heartbeat_s
        ):
            raise InvalidInput(
                f"There is no pool {register.pool!r}: create it with `rota pool create`, or use another."
            )
        log.info("worker_registered", worker=register.name, pool=register.pool, slots=register.slots)
        self._events.worker_changed("came", worker, register.name, register.pool)
        return Registered(worker, self._heartbeat_s, self._lease_s)


def _check(register: Register) -> None:
    if not 0 < len(register.name) <= NAME_MAX or not register.name.isprintable():
        raise InvalidInput(f"The worker's name is not valid: use 1 to {NAME_MAX} printable characters.")
    if not 0 < len(register.pool) <= NAME_MAX or not register.pool.isprintable():
        raise InvalidInput(f"The worker's pool is not valid: use 1 to {NAME_MAX} printable characters.")
    if not 1 <= register.slots <= SLOTS_MAX:
        raise InvalidInput(f"{register.slots} is not a valid number of slots: use 1 to {SLOTS_MAX}.")
    if min(register.cores, register.gpus, register.memory_mb) < 0:
        raise InvalidInput("A worker's resources must not be negative: use cores, gpus and memory_mb from 0 on.")
    if max(register.cores, register.gpus, register.memory_mb) > RESOURCE_MAX:
        raise InvalidInput(f"A worker's resources are too large: use cores, gpus and memory_mb up to {RESOURCE_MAX}.")

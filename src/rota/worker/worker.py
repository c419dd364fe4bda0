"""The worker: says Hello until a server answers, lives, and says Hello again when it was lost.

It speaks to NATS alone; PostgreSQL and Redis are the servers' business. While NATS is away before the first Welcome it
waits for ever, with pauses that grow; a server that refuses it ends it with that server's sentence.
"""

from __future__ import annotations

import asyncio
import itertools
from importlib.metadata import PackageNotFoundError, version
from random import SystemRandom

import structlog

from rota.infra.nats import Bus, NatsTarget, StreamSpec
from rota.infra.service import Lifecycle
from rota.model.backoff import Backoff
from rota.model.errors import InvalidInput, NatsUnavailable, SetupFailed
from rota.model.protocol import HANDSHAKE_SUBJECT, Registered, decode, encode
from rota.worker.config import WorkerConfig
from rota.worker.session import WorkerSession

log = structlog.get_logger(__name__)
REGISTRATION_BACKOFF = Backoff(first_s=0.1, longest_s=5.0)
_jitter = SystemRandom().random


class Worker:
    """`Service("worker", Worker(...).run)` runs it."""

    def __init__(self, plan: WorkerConfig, target: NatsTarget, streams: tuple[StreamSpec, ...]) -> None:
        self.plan = plan
        self.left_behind = 0
        """Handlers that still run although everything has ended: the process must not wait for them."""
        self._target = target
        self._streams = streams

    async def run(self, life: Lifecycle) -> None:
        bus = await Bus.connect(self._target)
        try:
            await bus.ensure(self._streams)
            while not life.draining:
                welcome = await self._register(bus)
                incarnation = WorkerSession(bus, self.plan, welcome)
                log.info("worker_welcome", worker=str(incarnation.worker), name=self.plan.offer.name)
                life.ready()
                try:
                    await incarnation.run(life)
                finally:
                    self.left_behind += incarnation.left_behind
        finally:
            await bus.close()

    async def _register(self, bus: Bus) -> Registered:
        """Ask for ever; nobody may be there yet."""
        hello = encode(self.plan.offer.registration_message(tuple(sorted(self.plan.tasks)), _rota_version()))
        for streak in itertools.count(1):
            try:
                welcome = decode(Registered, await bus.request(HANDSHAKE_SUBJECT, hello))
            except (NatsUnavailable, InvalidInput) as error:
                log.log(_log_level(streak), "worker_waits_for_a_server", code=error.code)
            else:
                if welcome.worker is not None:
                    return welcome
                raise SetupFailed(f"The server does not take this worker: {welcome.refusal or 'it did not say why.'}")
            await asyncio.sleep(REGISTRATION_BACKOFF.pause_s(streak, _jitter()))
        raise AssertionError("endless")


def _log_level(streak: int) -> int:
    """Loud now and then: the first time, and when it goes on."""
    return 30 if streak == 3 or streak % 20 == 0 else 10


def _rota_version() -> str:
    try:
        return version("rota")
    except PackageNotFoundError:
        return ""

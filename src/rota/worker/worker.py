"""The worker's main loop: register, run a session, register again when the session is lost.

Registration is retried without limit, with exponential backoff, while NATS or the servers are unavailable. A server's
refusal ends the process with that server's message.
"""

from __future__ import annotations

import asyncio
import itertools
from functools import cache
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
    """Run it as `Service("worker", Worker(...).run)`."""

    def __init__(self, config: WorkerConfig, target: NatsTarget, streams: tuple[StreamSpec, ...]) -> None:
        self.config = config
        self.abandoned_handlers = 0
        """Handlers that ignored cancellation and still run: the process must not wait for them on exit."""
        self._target = target
        self._streams = streams

    async def run(self, life: Lifecycle) -> None:
        bus = await Bus.connect(self._target)
        try:
            await bus.ensure(self._streams)
            while not life.draining:
                registration = await self._register(bus)
                session = WorkerSession(bus, self.config, registration)
                log.info("worker_registered", worker=str(session.worker), name=self.config.offer.name)
                life.ready()
                try:
                    await session.run(life)
                finally:
                    self.abandoned_handlers += session.abandoned_handlers
        finally:
            await bus.close()

    async def _register(self, bus: Bus) -> Registered:
        """Retries until a server answers: none may have started yet."""
        hello = encode(self.config.offer.registration_message(tuple(sorted(self.config.tasks)), _rota_version()))
        for streak in itertools.count(1):
            try:
                registration = decode(Registered, await bus.request(HANDSHAKE_SUBJECT, hello))
            except (NatsUnavailable, InvalidInput) as error:
                log.log(_log_level(streak), "worker_registration_retrying", code=error.code)
            else:
                if registration.worker is not None:
                    return registration
                raise SetupFailed(f"The server refused this worker: {registration.refusal or 'it gave no reason.'}")
            await asyncio.sleep(REGISTRATION_BACKOFF.pause_s(streak, _jitter()))
        raise AssertionError("endless")


def _log_level(streak: int) -> int:
    """WARNING at the 3rd and every 20th failure in a row, otherwise DEBUG."""
    return 30 if streak == 3 or streak % 20 == 0 else 10


@cache
def _rota_version() -> str:
    try:
        return version("rota")
    except PackageNotFoundError:
        return ""

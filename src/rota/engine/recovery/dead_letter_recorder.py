"""Messages that are given up: each becomes a dead letter, once, whoever gives it up and however often.

`Handling` writes the letter before it terminates a message. A message that NATS gives up by itself, because nobody
answered any of its deliveries, is told by an advisory that is not kept; consumers of ours have deliveries to spare, so
this is for what was declared otherwise. Both name the message by its stream, its number there and when it was stored,
so it has one letter; a stream that was wiped counts from one again, and the time tells its messages from older ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from rota.infra.nats import Bus, Delivery, MaxDeliveriesAdvisory
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.backoff import Backoff
from rota.model.errors import Unavailable
from rota.queue.dead_letters import DeadLetter, DeadLetterQueue

log = structlog.get_logger(__name__)
UNREADABLE = "unreadable_message"
EXHAUSTED = "deliveries_exhausted"
RETRY_BACKOFF = Backoff(first_s=0.5, longest_s=30.0)
EXHAUSTED_MESSAGES = metrics.counter(
    "rota_bus_exhausted", "Messages that NATS gave up, by consumer.", labels=("consumer",)
)
WRITE_FAILURES = metrics.counter("rota_dlq_emit_failures", "Dead letters that could not be written at the first try.")


class DeadLetterRecorder:
    def __init__(self, bus: Bus, dead_letters: DeadLetterQueue) -> None:
        self.bus = bus
        self._dead_letters = dead_letters
        self.on_letter: Callable[[str], None] = _ignore
        """Called with the reason of each letter that is new."""

    async def record_terminated(self, delivery: Delivery, reason: str) -> None:
        """For `Handling`: called before a message is terminated, and again if we die in between."""
        try:
            cause = _cause(delivery.stream, delivery.stream_seq, delivery.stored_ns)
            await self._record(cause, UNREADABLE, delivery.data, reason)
        except Unavailable:
            WRITE_FAILURES.inc()
            raise

    async def run(self, life: Lifecycle) -> None:
        async with self.bus.max_deliveries_advisories() as told, asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._record_loop(told))
            life.ready()
            await life.until_draining()
            writing.cancel()

    async def _record_loop(self, told: asyncio.Queue[MaxDeliveriesAdvisory]) -> None:
        while True:
            await self._record_with_retry(await told.get())

    async def _record_with_retry(self, given_up: MaxDeliveriesAdvisory) -> None:
        """However long a server is away: nobody tells us again."""
        EXHAUSTED_MESSAGES.labels(given_up.consumer).inc()
        log.error("deliveries_exhausted", **_log_fields(given_up))
        streak = 0
        while True:
            try:
                return await self.record_exhausted(given_up)
            except Unavailable as away:
                streak += 1
                WRITE_FAILURES.inc()
                log.warning("dead_letter_waits", reason=away.sentence)
                await asyncio.sleep(RETRY_BACKOFF.pause_s(streak, 0.5))

    async def record_exhausted(self, message: MaxDeliveriesAdvisory) -> None:
        stored = await self.bus.get_message(message.stream, message.stream_seq)
        reason = f"Consumer {message.consumer} had it {message.deliveries} times and never answered."
        cause = _cause(message.stream, message.stream_seq, stored.stored_ns if stored is not None else 0)
        await self._record(cause, EXHAUSTED, stored.data if stored is not None else None, reason)

    async def _record(self, cause: str, reason: str, data: bytes | None, error: str) -> None:
        letter = DeadLetter(kind="message", reason=reason, cause=cause, payload=data, error=error[:10_000])
        if await self._dead_letters.add([letter]):
            self.on_letter(reason)


def _cause(stream: str, stream_seq: int, stored_ns: int) -> str:
    return f"{stream}:{stream_seq}:{stored_ns}"


def _log_fields(given_up: MaxDeliveriesAdvisory) -> dict[str, object]:
    return {"stream": given_up.stream, "stream_seq": given_up.stream_seq, "consumer": given_up.consumer}


def _ignore(_reason: str) -> None:
    return None

"""Dead letters for bus messages that are given up: each message gets exactly one, however often it is recorded.

`BatchProcessor` records the dead letter before it terminates a message. When NATS gives up a message by itself, because
no delivery was acknowledged, it sends an advisory that is not stored; Rota's consumers have deliveries to spare, so
this covers consumers that were declared differently. Both paths identify a message by stream, sequence and store time:
the time separates it from older messages after a stream was wiped, because sequences then restart at one.
"""

from __future__ import annotations

import asyncio

import structlog

from rota.api.admin import DeadLetter
from rota.engine.events.sink import EventSink
from rota.infra.nats import Bus, Delivery, MaxDeliveriesAdvisory
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.model.backoff import Backoff
from rota.model.error_reactions import Reaction, reaction_to
from rota.model.errors import RotaError, Unavailable
from rota.model.reasons import DeadLetterReason
from rota.queue.dead_letters import DeadLetterQueue

log = structlog.get_logger(__name__)
UNREADABLE = DeadLetterReason.UNREADABLE_MESSAGE.value
EXHAUSTED = DeadLetterReason.DELIVERIES_EXHAUSTED.value
RETRY_BACKOFF = Backoff(first_s=0.5, longest_s=30.0)
EXHAUSTED_MESSAGES = metrics.counter(
    "rota_bus_exhausted", "Messages given up by NATS after the last delivery, by consumer.", labels=("consumer",)
)
WRITE_FAILURES = metrics.counter("rota_dlq_emit_failures", "Dead letters whose first write failed.")


class DeadLetterRecorder:
    def __init__(self, bus: Bus, dead_letters: DeadLetterQueue, events: EventSink) -> None:
        self.bus = bus
        self._dead_letters = dead_letters
        self._events = events

    async def record_terminated(self, delivery: Delivery, reason: str) -> None:
        """For `BatchProcessor`: called before it terminates a message; called again if the process dies in between."""
        try:
            cause = _cause(delivery.stream, delivery.stream_seq, delivery.stored_ns)
            await self._record(cause, UNREADABLE, delivery.data, reason)
        except Unavailable:
            WRITE_FAILURES.inc()
            raise

    async def run(self, life: Lifecycle) -> None:
        async with self.bus.max_deliveries_advisories() as advisories, asyncio.TaskGroup() as tasks:
            record_task = tasks.create_task(self._record_loop(advisories))
            life.ready()
            await life.until_draining()
            record_task.cancel()

    async def _record_loop(self, advisories: asyncio.Queue[MaxDeliveriesAdvisory]) -> None:
        while True:
            await self._record_with_retry(await advisories.get())

    async def _record_with_retry(self, advisory: MaxDeliveriesAdvisory) -> None:
        """Retries without limit: the advisory is not redelivered."""
        EXHAUSTED_MESSAGES.labels(advisory.consumer).inc()
        log.error("deliveries_exhausted", **_log_fields(advisory))
        streak = 0
        while True:
            try:
                return await self.record_exhausted(advisory)
            except RotaError as error:
                if reaction_to(error) is Reaction.BUG:
                    raise
                streak += 1
                WRITE_FAILURES.inc()
                log.warning("dead_letter_write_failed", reason=error.sentence)
                await asyncio.sleep(RETRY_BACKOFF.pause_s(streak, 0.5))

    async def record_exhausted(self, message: MaxDeliveriesAdvisory) -> None:
        stored = await self.bus.get_message(message.stream, message.stream_seq)
        reason = f"Consumer {message.consumer} received it {message.deliveries} times and never acknowledged it."
        cause = _cause(message.stream, message.stream_seq, stored.stored_ns if stored is not None else 0)
        await self._record(cause, EXHAUSTED, stored.data if stored is not None else None, reason)

    async def _record(self, cause: str, reason: str, data: bytes | None, error: str) -> None:
        dead_letter = DeadLetter(kind="message", reason=reason, cause=cause, payload=data, error=error[:10_000])
        if await self._dead_letters.add([dead_letter]):
            self._events.message_dead_lettered(reason)


def _cause(stream: str, stream_seq: int, stored_ns: int) -> str:
    return f"{stream}:{stream_seq}:{stored_ns}"


def _log_fields(advisory: MaxDeliveriesAdvisory) -> dict[str, object]:
    return {"stream": advisory.stream, "stream_seq": advisory.stream_seq, "consumer": advisory.consumer}

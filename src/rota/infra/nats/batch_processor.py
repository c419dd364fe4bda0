"""Runs a handler over one batch of messages and acknowledges each of them.

A handler receives a batch, works in one transaction (including its deduplication records, because every message may be
redelivered) and returns an `Acknowledgement` per message, or None when all succeeded. Invariants, enforced here:

- only success acknowledges. An unhandled error means redelivery with a growing delay, and so does a cancellation that
  originated inside the handler;
- a poison message does not block others: a failed batch is retried message by message, and only failing ones wait;
- a message that is given up (`Terminate`, `InvalidInput`, or a failed last delivery) goes to `on_terminated` before it
  is terminated. If the dead letter cannot be written, the message is redelivered after `dead_letter_retry_s`. After a
  crash in between it is written again: `on_terminated` must be idempotent, by stream and sequence;
- a message that crashed its process on every delivery is not passed to a handler after its last delivery;
- while a server that the handler or the dead letter needs is down (`Unavailable`), the batch is retried here for as
  long as it takes, because an outage must not use up deliveries. So a handler raises `Unavailable` only for what every
  message needs; for a problem of one message it returns `Nak`;
- a hanging handler is cancelled after `limit_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import SystemRandom
from typing import TypeVar, assert_never

import msgspec
import structlog

from rota.infra import failpoints
from rota.infra.nats.delivery import Delivery
from rota.infra.service.lifecycle import EndedEarly, Lifecycle, cancelled_from_inside, only_unavailable
from rota.infra.telemetry import metrics
from rota.infra.telemetry.redaction import redact_text
from rota.model.backoff import Backoff
from rota.model.errors import InvalidInput, NatsUnavailable, PostgresBusy, RotaError

log = structlog.get_logger(__name__)
MESSAGES_HANDLED = metrics.counter(
    "rota_bus_handled", "Messages acknowledged, by consumer and kind of acknowledgement.", labels=("consumer", "answer")
)

DEAD_LETTER_RETRY_S = 5.0
REDELIVERY_BACKOFF = Backoff(first_s=1.0, longest_s=30.0)
OUTAGE_BACKOFF = Backoff(first_s=0.5, longest_s=3.0)
"""Short, because work that has ended keeps its quota until its result is handled."""
MAX_CONCURRENT_SINGLES = 8
"""Messages of a failed batch that are retried concurrently, so that a hanging one does not block the rest."""
_jitter = SystemRandom().random

T = TypeVar("T")


class Nak(msgspec.Struct, frozen=True):
    """Redeliver. Without `after_s` the delay grows with the number of deliveries."""

    after_s: float | None = None


class Terminate(msgspec.Struct, frozen=True):
    """Give up: this message cannot be handled."""

    reason: str


Acknowledgement = Nak | Terminate | None
BatchHandler = Callable[[Sequence[Delivery]], Awaitable[Sequence[Acknowledgement] | None]]
OnTerminated = Callable[[Delivery, str], Awaitable[None]]


class BatchProcessor:
    def __init__(
        self,
        handler: BatchHandler,
        on_terminated: OnTerminated,
        *,
        limit_s: float = 600.0,
        ack_sync: bool = False,
        dead_letter_retry_s: float = DEAD_LETTER_RETRY_S,
    ) -> None:
        self._handler = handler
        self._on_terminated = on_terminated
        self._limit_s = limit_s
        self._ack_sync = ack_sync
        self._dead_letter_retry_s = dead_letter_retry_s

    async def process(self, batch: Sequence[Delivery], lifecycle: Lifecycle) -> None:
        """Run the handler on a batch of one consumer and acknowledge every message."""
        decided = list(zip(batch, await self._decide_all(batch, lifecycle), strict=True))
        # Dead letters last: they may have to wait for a server.
        for delivery, decision in sorted(decided, key=lambda pair: isinstance(pair[1], Terminate)):
            await self._acknowledge(delivery, decision, lifecycle)

    async def _decide_all(self, batch: Sequence[Delivery], lifecycle: Lifecycle) -> list[Acknowledgement]:
        live = [delivery for delivery in batch if not delivery.overdue]
        decided = dict(zip(live, await self._decide(live, lifecycle), strict=True)) if live else {}
        exhausted = Terminate("its deliveries were used up without an acknowledgement")
        return [decided.get(delivery) if not delivery.overdue else exhausted for delivery in batch]

    async def _decide(self, batch: Sequence[Delivery], lifecycle: Lifecycle) -> Sequence[Acknowledgement]:
        try:
            return await self._retry_while_unavailable(batch[0].consumer, lambda: self._handle(batch), lifecycle)
        except Exception as error:  # noqa: BLE001 - no error may acknowledge the batch
            if _is_outage(error):
                return [Nak()] * len(batch)
            if len(batch) > 1:
                return await self._decide_individually(batch, lifecycle)
            return [self._decide_after_error(batch[0], error)]

    async def _decide_individually(self, batch: Sequence[Delivery], lifecycle: Lifecycle) -> list[Acknowledgement]:
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_SINGLES)

        async def decide_one(delivery: Delivery) -> Acknowledgement:
            async with semaphore:
                return (await self._decide([delivery], lifecycle))[0]

        async with asyncio.TaskGroup() as tasks:
            tasks_by_delivery = [tasks.create_task(decide_one(delivery)) for delivery in batch]
        return [task.result() for task in tasks_by_delivery]

    async def _handle(self, batch: Sequence[Delivery]) -> Sequence[Acknowledgement]:
        decisions = await self._handler(batch)
        if decisions is None:
            return [None] * len(batch)
        assert len(decisions) == len(batch), f"the handler returned {len(decisions)} results for {len(batch)} messages"
        return decisions

    async def _retry_while_unavailable(
        self, consumer: str, work: Callable[[], Awaitable[T]], lifecycle: Lifecycle
    ) -> T:
        """Retry `work` while a server is down. Raises `Unavailable` only when draining."""
        attempts = 0
        while True:
            try:
                return await self._with_timeout(consumer, work)
            except Exception as error:
                if not _is_outage(error):
                    raise
                attempts += 1
                log.warning("handler_server_unavailable", consumer=consumer, reason=str(error))
                if not await lifecycle.pause(OUTAGE_BACKOFF.pause_s(attempts, _jitter())):
                    raise

    async def _with_timeout(self, consumer: str, work: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._limit_s):
                return await work()
        except asyncio.CancelledError as cancelled:
            if not cancelled_from_inside():
                raise
            raise EndedEarly(f"A handler of consumer {consumer} was cancelled from inside.") from cancelled

    def _decide_after_error(self, delivery: Delivery, error: Exception) -> Acknowledgement:
        reason = _reason(error)
        if isinstance(error, InvalidInput):
            return Terminate(reason)
        log.error(
            "handler_failed",
            consumer=delivery.consumer,
            subject=delivery.subject,
            stream_seq=delivery.stream_seq,
            deliveries=delivery.deliveries,
            exc_info=error,
        )
        return Terminate(f"failed {delivery.deliveries} times, last with {reason}") if delivery.last else Nak()

    async def _acknowledge(self, delivery: Delivery, decision: Acknowledgement, lifecycle: Lifecycle) -> None:
        try:
            match decision:
                case None:
                    failpoints.hit("bus.after_work_before_ack")
                    await delivery.ack(sync=self._ack_sync)
                    _count(delivery, "ack")
                case Nak(after_s):
                    await delivery.nak(_redelivery_delay_s(delivery) if after_s is None else after_s)
                    _count(delivery, "nak")
                case Terminate(reason):
                    await self._terminate(delivery, reason, lifecycle)
                case _:
                    assert_never(decision)
        except NatsUnavailable:
            # Not acknowledged, so NATS redelivers the message.
            _count(delivery, "lost")

    async def _terminate(self, delivery: Delivery, reason: str, lifecycle: Lifecycle) -> None:
        try:
            await self._retry_while_unavailable(
                delivery.consumer, lambda: self._on_terminated(delivery, reason), lifecycle
            )
        except Exception:
            # Any error: a message must not be terminated without a dead letter.
            log.exception("dead_letter_write_failed", consumer=delivery.consumer, stream_seq=delivery.stream_seq)
            await delivery.nak(self._dead_letter_retry_s)
            _count(delivery, "nak")
            return
        failpoints.hit("bus.after_dead_letter_before_term")
        await delivery.term()
        _count(delivery, "term")


def _redelivery_delay_s(delivery: Delivery) -> float:
    return REDELIVERY_BACKOFF.pause_s(delivery.deliveries, _jitter())


def _count(delivery: Delivery, answer: str) -> None:
    MESSAGES_HANDLED.labels(delivery.consumer, answer).inc()


def _reason(error: Exception) -> str:
    """The reason in a dead letter: what went wrong, without secrets."""
    if isinstance(error, RotaError):
        return redact_text(error.sentence)
    return redact_text(f"{type(error).__name__}: {error}")


def _is_outage(error: Exception) -> bool:
    """Whether a server is unavailable for every message. A lock may concern one of them: others do not wait for it."""
    return only_unavailable(error) and not isinstance(error, PostgresBusy)

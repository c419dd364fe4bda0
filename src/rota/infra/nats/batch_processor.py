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
- a message whose handler or dead letter needs a server that is down (`Unavailable`) is neither acknowledged nor
  returned to NATS, because an outage must not use up deliveries: the caller keeps it and tries again. After such a
  failure of a batch its messages are tried one by one, so a server that only one of them needs does not stop the
  others; after `MAX_CONCURRENT_SINGLES` failures and no success the server counts as down for the rest of the batch;
- a hanging handler is cancelled after `limit_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import SystemRandom
from typing import NamedTuple, TypeVar, assert_never

import msgspec
import structlog

from rota.infra import failpoints
from rota.infra.nats.delivery import Delivery
from rota.infra.service.lifecycle import EndedEarly, cancelled_from_inside
from rota.infra.telemetry import metrics
from rota.infra.telemetry.redaction import redact_text
from rota.model.backoff import Backoff
from rota.model.error_reactions import is_outage
from rota.model.errors import InvalidInput, NatsUnavailable, RotaError

log = structlog.get_logger(__name__)
MESSAGES_HANDLED = metrics.counter(
    "rota_bus_handled", "Messages acknowledged, by consumer and kind of acknowledgement.", labels=("consumer", "answer")
)

DEAD_LETTER_RETRY_S = 5.0
REDELIVERY_BACKOFF = Backoff(first_s=1.0, longest_s=30.0)
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


class Wait(msgspec.Struct, frozen=True):
    """A server is unavailable: keep the message and try again here."""

    reason: str


Decision = Acknowledgement | Wait


class PendingMessage(NamedTuple):
    """A message without an acknowledgement."""

    delivery: Delivery
    given_up: Terminate | None = None
    """Set when only the dead letter remains to be written."""


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

    async def process(self, batch: Sequence[PendingMessage]) -> list[PendingMessage]:
        """Run the handler on a batch of one consumer and acknowledge every message.

        Returns the messages that need an unavailable server; they are not acknowledged.
        """
        decided = list(zip(batch, await self._decide_all(batch), strict=True))
        pending: list[PendingMessage] = []
        waits: Wait | None = None
        # Dead letters last: if the first has to wait for its server, so have the others.
        for message, decision in sorted(decided, key=lambda pair: isinstance(pair[1], Terminate)):
            match decision:
                case Wait():
                    waits = decision
                    pending.append(message)
                case Terminate():
                    down = waits if pending and pending[-1].given_up else None
                    if (down := down or await self._terminate(message.delivery, decision.reason)) is not None:
                        waits = down
                        pending.append(PendingMessage(message.delivery, decision))
                case _:
                    await self._acknowledge(message.delivery, decision)
        if waits is not None:
            consumer = pending[0].delivery.consumer
            log.warning("handler_server_unavailable", consumer=consumer, messages=len(pending), reason=waits.reason)
        return pending

    async def _decide_all(self, batch: Sequence[PendingMessage]) -> list[Decision]:
        exhausted = Terminate("its deliveries were used up without an acknowledgement")
        given_up = {
            message.delivery: message.given_up or exhausted
            for message in batch
            if message.given_up is not None or message.delivery.overdue
        }
        live = [message.delivery for message in batch if message.delivery not in given_up]
        decided = dict(zip(live, await self._decide(live), strict=True)) if live else {}
        return [given_up.get(message.delivery) or decided.get(message.delivery) for message in batch]

    async def _decide(self, batch: Sequence[Delivery]) -> Sequence[Decision]:
        try:
            return await self._with_timeout(batch[0].consumer, self._handle(batch))
        except Exception as error:  # noqa: BLE001 - no error may acknowledge the batch
            if len(batch) > 1:
                return await self._decide_individually(batch)
            if is_outage(error):
                return [Wait(_reason(error))]
            return [self._decide_after_error(batch[0], error)]

    async def _decide_individually(self, batch: Sequence[Delivery]) -> list[Decision]:
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_SINGLES)
        decisions: list[Decision] = []

        async def decide_one(delivery: Delivery) -> Decision:
            async with semaphore:
                if len(decisions) >= MAX_CONCURRENT_SINGLES and all(isinstance(each, Wait) for each in decisions):
                    return decisions[0]  # the server is down for every message
                [decision] = await self._decide([delivery])
                decisions.append(decision)
                return decision

        async with asyncio.TaskGroup() as tasks:
            tasks_by_delivery = [tasks.create_task(decide_one(delivery)) for delivery in batch]
        return [task.result() for task in tasks_by_delivery]

    async def _handle(self, batch: Sequence[Delivery]) -> Sequence[Acknowledgement]:
        decisions = await self._handler(batch)
        if decisions is None:
            return [None] * len(batch)
        assert len(decisions) == len(batch), f"the handler returned {len(decisions)} results for {len(batch)} messages"
        return decisions

    async def _with_timeout(self, consumer: str, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._limit_s):
                return await work
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

    async def _acknowledge(self, delivery: Delivery, decision: Nak | None) -> None:
        match decision:
            case None:
                failpoints.hit("bus.after_work_before_ack")
                await _settle(delivery, "ack", delivery.ack(sync=self._ack_sync))
            case Nak(after_s):
                delay_s = _redelivery_delay_s(delivery) if after_s is None else after_s
                await _settle(delivery, "nak", delivery.nak(delay_s))
            case _:
                assert_never(decision)

    async def _terminate(self, delivery: Delivery, reason: str) -> Wait | None:
        try:
            await self._with_timeout(delivery.consumer, self._on_terminated(delivery, reason))
        except Exception as error:
            if is_outage(error):
                return Wait(_reason(error))
            # Any error: a message must not be terminated without a dead letter.
            log.exception("dead_letter_write_failed", consumer=delivery.consumer, stream_seq=delivery.stream_seq)
            await _settle(delivery, "nak", delivery.nak(self._dead_letter_retry_s))
            return None
        failpoints.hit("bus.after_dead_letter_before_term")
        await _settle(delivery, "term", delivery.term())
        return None


def _redelivery_delay_s(delivery: Delivery) -> float:
    return REDELIVERY_BACKOFF.pause_s(delivery.deliveries, _jitter())


async def _settle(delivery: Delivery, answer: str, sending: Awaitable[None]) -> None:
    try:
        await sending
    except NatsUnavailable:
        answer = "lost"  # NATS redelivers the message
    MESSAGES_HANDLED.labels(delivery.consumer, answer).inc()


def _reason(error: Exception) -> str:
    """The reason in a dead letter: what went wrong, without secrets."""
    if isinstance(error, RotaError):
        return redact_text(error.sentence)
    return redact_text(f"{type(error).__name__}: {error}")

"""Working off a consumer: batches in, an answer to every message out.

    handling = Handling(consumer, handler, on_terminated)
    service = Service("results", handling.run)

A handler gets a batch, does its work in one transaction (with its "done" marks among it, since every message may come
twice) and returns a verdict per message, or None when all is well. Invariants, kept here:

- only a verdict of success acknowledges. An error that nobody handled means "again, later", with a growing delay;
- one bad message does not hold up its neighbours: a batch that failed is tried again message by message, and what
  fails alone waits alone;
- a message that is given up (`Reject`, `InvalidInput`, or the last delivery failed) goes to `on_terminated` first and
  is terminated only after that. If the dead letter cannot be written, the message comes again in `DEAD_LETTER_RETRY_S`.
  If we die in between, it is written again: `on_terminated` must be idempotent, by stream and sequence;
- a message that killed its worker each time is not handed to a handler any more once its deliveries are used up;
- while a server the handler needs is away (`Unavailable`), the batch is kept and tried again here, because an outage
  must not use up deliveries;
- a handler that hangs is cancelled after `limit_s`; until then NATS is told that the batch is being worked on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from random import SystemRandom
from typing import TYPE_CHECKING, assert_never

import msgspec
import structlog

from rota.infra import faults
from rota.infra.clock import Clock, SystemClock
from rota.infra.nats.consumer import Consumer, kept_alive
from rota.infra.nats.delivery import Delivery
from rota.infra.telemetry import metrics
from rota.infra.telemetry.redaction import redact_text
from rota.model.backoff import Backoff
from rota.model.errors import InvalidInput, NatsUnavailable, RotaError, Unavailable

if TYPE_CHECKING:
    from rota.infra.service.lifecycle import Lifecycle

log = structlog.get_logger(__name__)
HANDLED = metrics.counter(
    "rota_bus_handled", "Messages answered, by consumer and answer.", labels=("consumer", "answer")
)

DEAD_LETTER_RETRY_S = 5.0
AGAIN = Backoff(first_s=1.0, longest_s=30.0)
OUTAGE = Backoff(first_s=0.5, longest_s=30.0)
OUTAGE_TRIES = 6
"""Tries of one delivery while a server is away: about half a minute, before the message goes back to NATS."""
APART_AT_ONCE = 8
"""Messages of a failed batch tried side by side, so that one that hangs does not hold up the rest."""
_chance = SystemRandom().random


class Retry(msgspec.Struct, frozen=True):
    """Not now. Without a time of its own the delay grows with the deliveries."""

    after_s: float | None = None


class Reject(msgspec.Struct, frozen=True):
    """Never: this message cannot be handled."""

    reason: str


Verdict = Retry | Reject | None
Handler = Callable[[Sequence[Delivery]], Awaitable[Sequence[Verdict] | None]]
OnTerminated = Callable[[Delivery, str], Awaitable[None]]


class Handling:
    def __init__(
        self,
        consumer: Consumer,
        handler: Handler,
        on_terminated: OnTerminated,
        *,
        most: int = 256,
        wait_s: float = 30.0,
        limit_s: float = 600.0,
        ack_sync: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._consumer = consumer
        self._handler = handler
        self._on_terminated = on_terminated
        self._most = most
        self._wait_s = wait_s
        self._limit_s = limit_s
        self._ack_sync = ack_sync
        self._clock = clock or SystemClock()
        self._in_hand: Sequence[Delivery] = ()

    async def run(self, life: Lifecycle) -> None:
        """Until draining: then the batch in hand is finished, and what was delivered beyond it goes back."""
        life.ready()
        draining = asyncio.create_task(life.until_draining(), name="nats.draining")
        try:
            while not life.draining:
                if batch := await self._next(draining):
                    await self._work(batch)
        finally:
            draining.cancel()
            await asyncio.wait({draining})
            # In this order: a batch handed back before would come straight here again.
            await self._consumer.close()
            await self._hand_back()

    async def _work(self, batch: Sequence[Delivery]) -> None:
        """Give every message of the batch to the handler, then answer it."""
        self._in_hand = batch
        async with kept_alive(batch, self._consumer.spec.shortest_ack_wait_s / 3, self._clock):
            verdicts = await self._judge_all(batch)
            for delivery, verdict in zip(batch, verdicts, strict=True):
                await self._answer(delivery, verdict)

    async def _next(self, draining: asyncio.Task[None]) -> list[Delivery]:
        fetching = asyncio.create_task(self._consumer.fetch(self._most, self._wait_s), name="nats.fetch")
        try:
            await asyncio.wait({fetching, draining}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not fetching.done():
                fetching.cancel()
                await asyncio.wait({fetching})
        return [] if fetching.cancelled() else fetching.result()

    async def _judge_all(self, batch: Sequence[Delivery]) -> list[Verdict]:
        live = [delivery for delivery in batch if not delivery.overdue]
        judged = dict(zip(live, await self._judge(live), strict=True)) if live else {}
        given_up = Reject("its deliveries were used up without an answer")
        return [judged.get(delivery) if not delivery.overdue else given_up for delivery in batch]

    async def _judge(self, batch: Sequence[Delivery]) -> Sequence[Verdict]:
        try:
            verdicts = await self._try(batch)
        except Unavailable as error:
            log.warning("handler_waits", consumer=self._consumer.spec.durable, reason=error.sentence)
            return [Retry()] * len(batch)
        except Exception as error:  # noqa: BLE001 - whatever it was, it must not be acknowledged
            if len(batch) > 1:
                return await self._judge_apart(batch)
            return [self._verdict_on(batch[0], error)]
        return verdicts if verdicts is not None else [None] * len(batch)

    async def _judge_apart(self, batch: Sequence[Delivery]) -> list[Verdict]:
        turn = asyncio.Semaphore(APART_AT_ONCE)

        async def alone(delivery: Delivery) -> Verdict:
            async with turn:
                return (await self._judge([delivery]))[0]

        async with asyncio.TaskGroup() as tasks:
            judging = [tasks.create_task(alone(delivery)) for delivery in batch]
        return [task.result() for task in judging]

    async def _try(self, batch: Sequence[Delivery]) -> Sequence[Verdict] | None:
        for streak in range(1, OUTAGE_TRIES):
            try:
                async with asyncio.timeout(self._limit_s):
                    return await self._handler(batch)
            except Unavailable:
                await self._clock.sleep(OUTAGE.pause_s(streak, _chance()))
        async with asyncio.timeout(self._limit_s):
            return await self._handler(batch)

    def _verdict_on(self, delivery: Delivery, error: Exception) -> Verdict:
        reason = _reason(error)
        if isinstance(error, InvalidInput):
            return Reject(reason)
        log.error(
            "handler_failed",
            consumer=delivery.consumer,
            subject=delivery.subject,
            stream_seq=delivery.stream_seq,
            deliveries=delivery.deliveries,
            exc_info=error,
        )
        return Reject(f"failed {delivery.deliveries} times, last with {reason}") if delivery.last else Retry()

    async def _answer(self, delivery: Delivery, verdict: Verdict) -> None:
        try:
            match verdict:
                case None:
                    faults.at("bus.after_work_before_ack")
                    await delivery.ack(sync=self._ack_sync)
                    self._count("ack")
                case Retry(after_s):
                    await delivery.nak(self._delay_s(delivery) if after_s is None else after_s)
                    self._count("nak")
                case Reject(reason):
                    await self._terminate(delivery, reason)
                case _:
                    assert_never(verdict)
        except NatsUnavailable:
            # An answer that could not be given is none: the message comes again.
            self._count("lost")

    async def _terminate(self, delivery: Delivery, reason: str) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await self._on_terminated(delivery, reason)
        except Exception:
            # Whatever it was: a message without a dead letter must not end.
            log.exception("dead_letter_failed", consumer=delivery.consumer, stream_seq=delivery.stream_seq)
            await delivery.nak(DEAD_LETTER_RETRY_S)
            self._count("nak")
            return
        faults.at("bus.after_dead_letter_before_term")
        await delivery.term()
        self._count("term")

    async def _hand_back(self) -> None:
        """Only after a crash or a cancellation is anything left: somebody else may begin with it at once."""
        with suppress(NatsUnavailable):
            for delivery in self._in_hand:
                if not delivery.settled:
                    await delivery.nak()

    def _delay_s(self, delivery: Delivery) -> float:
        return AGAIN.pause_s(delivery.deliveries, _chance())

    def _count(self, answer: str) -> None:
        HANDLED.labels(self._consumer.spec.durable, answer).inc()


def _reason(error: Exception) -> str:
    """For a dead letter, which people read: what went wrong, without secrets."""
    if isinstance(error, RotaError):
        return redact_text(error.sentence)
    return redact_text(f"{type(error).__name__}: {error}")

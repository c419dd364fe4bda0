"""Working off a consumer: batches in, an answer to every message out.

    handling = Handling(bus, RESULTS, handler, on_terminated)
    service = Service("results", handling.run)

A handler gets a batch, does its work in one transaction (with its "done" marks among it, since every message may come
twice) and returns a verdict per message, or None when all is well. Invariants, kept here:

- only a verdict of success acknowledges. An error that nobody handled means "again, later", with a growing delay; so
  does a cancellation from inside the handler, which nobody asked for;
- one bad message does not hold up its neighbours: a batch that failed is tried again message by message, and what
  fails alone waits alone;
- a message that is given up (`Reject`, `InvalidInput`, or the last delivery failed) goes to `on_terminated` first and
  is terminated only after that. If the dead letter cannot be written, the message comes again in `dead_letter_retry_s`.
  If we die in between, it is written again: `on_terminated` must be idempotent, by stream and sequence;
- a message that killed its worker each time is not handed to a handler any more once its deliveries are used up;
- while a server that the handler or the dead letter needs is away (`Unavailable`), the batch is kept and tried again
  here, however long that takes, because an outage must not use up deliveries. So a handler raises `Unavailable` only
  for what every message needs; for the trouble of a single one it returns `Retry`;
- a handler that hangs is cancelled after `limit_s`; until then NATS is told that the batch is being worked on.

Each run has a consumer of its own. When a run ends, whatever was delivered to it and not answered goes back at once; a
later run, here or elsewhere, begins with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from random import SystemRandom
from typing import TypeVar, assert_never

import msgspec
import structlog

from rota.infra import failpoints
from rota.infra.clock import Clock, SystemClock
from rota.infra.nats.bus import Bus
from rota.infra.nats.consumer import Consumer, keep_in_progress
from rota.infra.nats.delivery import Delivery
from rota.infra.nats.streams import ConsumerSpec
from rota.infra.service.lifecycle import EndedEarly, Lifecycle, cancelled_from_inside, only_unavailable
from rota.infra.telemetry import metrics
from rota.infra.telemetry.redaction import redact_text
from rota.model.backoff import Backoff
from rota.model.errors import InvalidInput, NatsUnavailable, RotaError

log = structlog.get_logger(__name__)
MESSAGES_HANDLED = metrics.counter(
    "rota_bus_handled", "Messages answered, by consumer and answer.", labels=("consumer", "answer")
)

DEAD_LETTER_RETRY_S = 5.0
REDELIVERY_BACKOFF = Backoff(first_s=1.0, longest_s=30.0)
OUTAGE_BACKOFF = Backoff(first_s=0.5, longest_s=30.0)
MAX_CONCURRENT_SINGLES = 8
"""Messages of a failed batch tried side by side, so that one that hangs does not hold up the rest."""
_jitter = SystemRandom().random

T = TypeVar("T")


class Nak(msgspec.Struct, frozen=True):
    """Not now. Without a time of its own the delay grows with the deliveries."""

    after_s: float | None = None


class Terminate(msgspec.Struct, frozen=True):
    """Never: this message cannot be handled."""

    reason: str


Acknowledgement = Nak | Terminate | None
BatchHandler = Callable[[Sequence[Delivery]], Awaitable[Sequence[Acknowledgement] | None]]
OnTerminated = Callable[[Delivery, str], Awaitable[None]]


class BatchConsumer:
    def __init__(
        self,
        bus: Bus,
        spec: ConsumerSpec,
        handler: BatchHandler,
        on_terminated: OnTerminated,
        *,
        most: int = 256,
        wait_s: float = 30.0,
        limit_s: float = 600.0,
        ack_sync: bool = False,
        dead_letter_retry_s: float = DEAD_LETTER_RETRY_S,
        clock: Clock | None = None,
    ) -> None:
        self._bus = bus
        self._spec = spec
        self._handler = handler
        self._on_terminated = on_terminated
        self._most = most
        self._wait_s = wait_s
        self._limit_s = limit_s
        self._ack_sync = ack_sync
        self._dead_letter_retry_s = dead_letter_retry_s
        self._clock = clock or SystemClock()
        self._life: Lifecycle
        self._in_hand: Sequence[Delivery] = ()

    async def run(self, life: Lifecycle) -> None:
        """Until draining: then the batch in hand is finished, and what was delivered beyond it goes back."""
        self._life = life
        try:
            async with self._bus.consumer(self._spec) as consumer:
                life.ready()
                await self._consume(consumer)
        finally:
            # After the consumer is closed: a batch handed back before would come straight here again.
            await self._nak_unsettled()

    async def _consume(self, consumer: Consumer) -> None:
        draining = asyncio.create_task(self._life.until_draining(), name="nats.draining")
        try:
            while not self._life.draining:
                await self._fetch_unless_draining(consumer, draining)
                if self._in_hand:
                    await self._process_batch()
        finally:
            draining.cancel()
            await asyncio.wait({draining})

    async def _fetch_unless_draining(self, consumer: Consumer, draining: asyncio.Task[None]) -> None:
        """Have the next batch in hand; none when none came, or when it is time to end."""
        fetching = asyncio.create_task(self._fetch_batch(consumer), name="nats.fetch")
        try:
            await asyncio.wait({fetching, draining}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            fetching.cancel()
            await asyncio.wait({fetching})
        if not fetching.cancelled():
            fetching.result()

    async def _fetch_batch(self, consumer: Consumer) -> None:
        # In hand from the moment it is taken, so that a cancellation at any moment after it hands it back.
        self._in_hand = await consumer.fetch(self._most, self._wait_s)

    async def _process_batch(self) -> None:
        """Give every message in hand to the handler, then answer it."""
        batch = self._in_hand
        async with keep_in_progress(batch, self._spec.shortest_ack_wait_s / 3, self._clock):
            judged = list(zip(batch, await self._decide_all(batch), strict=True))
            # Dead letters last: they may have to wait for a server.
            for delivery, verdict in sorted(judged, key=lambda pair: isinstance(pair[1], Terminate)):
                await self._acknowledge(delivery, verdict)
        self._in_hand = ()

    async def _decide_all(self, batch: Sequence[Delivery]) -> list[Acknowledgement]:
        live = [delivery for delivery in batch if not delivery.overdue]
        judged = dict(zip(live, await self._decide(live), strict=True)) if live else {}
        given_up = Terminate("its deliveries were used up without an answer")
        return [judged.get(delivery) if not delivery.overdue else given_up for delivery in batch]

    async def _decide(self, batch: Sequence[Delivery]) -> Sequence[Acknowledgement]:
        try:
            return await self._retry_while_unavailable(lambda: self._handle(batch))
        except Exception as error:  # noqa: BLE001 - whatever it was, it must not be acknowledged
            if only_unavailable(error):
                return [Nak()] * len(batch)
            if len(batch) > 1:
                return await self._decide_individually(batch)
            return [self._decide_after_error(batch[0], error)]

    async def _decide_individually(self, batch: Sequence[Delivery]) -> list[Acknowledgement]:
        turn = asyncio.Semaphore(MAX_CONCURRENT_SINGLES)

        async def alone(delivery: Delivery) -> Acknowledgement:
            async with turn:
                return (await self._decide([delivery]))[0]

        async with asyncio.TaskGroup() as tasks:
            judging = [tasks.create_task(alone(delivery)) for delivery in batch]
        return [task.result() for task in judging]

    async def _handle(self, batch: Sequence[Delivery]) -> Sequence[Acknowledgement]:
        verdicts = await self._handler(batch)
        if verdicts is None:
            return [None] * len(batch)
        assert len(verdicts) == len(batch), f"the handler gave {len(verdicts)} verdicts on {len(batch)} messages"
        return verdicts

    async def _retry_while_unavailable(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work`, again and again while a server is away. Raises `Unavailable` only when it is time to end."""
        streak = 0
        while True:
            try:
                return await self._with_timeout(work)
            except Exception as error:
                if not only_unavailable(error):
                    raise
                streak += 1
                log.warning("handler_waits", consumer=self._spec.durable, reason=str(error))
                if not await self._life.pause(OUTAGE_BACKOFF.pause_s(streak, _jitter())):
                    raise

    async def _with_timeout(self, work: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._limit_s):
                return await work()
        except asyncio.CancelledError as cancelled:
            if not cancelled_from_inside():
                raise
            raise EndedEarly(f"A handler of consumer {self._spec.durable} was cancelled from inside.") from cancelled

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

    async def _acknowledge(self, delivery: Delivery, verdict: Acknowledgement) -> None:
        try:
            match verdict:
                case None:
                    failpoints.hit("bus.after_work_before_ack")
                    await delivery.ack(sync=self._ack_sync)
                    self._count("ack")
                case Nak(after_s):
                    await delivery.nak(self._redelivery_delay_s(delivery) if after_s is None else after_s)
                    self._count("nak")
                case Terminate(reason):
                    await self._terminate(delivery, reason)
                case _:
                    assert_never(verdict)
        except NatsUnavailable:
            # An answer that could not be given is none: the message comes again.
            self._count("lost")

    async def _terminate(self, delivery: Delivery, reason: str) -> None:
        try:
            await self._retry_while_unavailable(lambda: self._on_terminated(delivery, reason))
        except Exception:
            # Whatever it was: a message without a dead letter must not end.
            log.exception("dead_letter_failed", consumer=delivery.consumer, stream_seq=delivery.stream_seq)
            await delivery.nak(self._dead_letter_retry_s)
            self._count("nak")
            return
        failpoints.hit("bus.after_dead_letter_before_term")
        await delivery.term()
        self._count("term")

    async def _nak_unsettled(self) -> None:
        """Only after a crash or a cancellation is anything left: somebody else may begin with it at once."""
        left, self._in_hand = self._in_hand, ()
        with suppress(NatsUnavailable):
            for delivery in left:
                if not delivery.settled:
                    await delivery.nak()

    def _redelivery_delay_s(self, delivery: Delivery) -> float:
        return REDELIVERY_BACKOFF.pause_s(delivery.deliveries, _jitter())

    def _count(self, answer: str) -> None:
        MESSAGES_HANDLED.labels(self._spec.durable, answer).inc()


def _reason(error: Exception) -> str:
    """For a dead letter, which people read: what went wrong, without secrets."""
    if isinstance(error, RotaError):
        return redact_text(error.sentence)
    return redact_text(f"{type(error).__name__}: {error}")

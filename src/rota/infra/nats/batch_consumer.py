"""Pulls batches from a consumer and has a `BatchProcessor` handle and acknowledge them.

    results = BatchConsumer(bus, RESULTS, BatchProcessor(handler, on_terminated))
    service = Service("results", results.run)

A message that needs an unavailable server is *parked*: kept here and tried again after a short back-off, while the
consumer goes on with other messages. It uses up no deliveries, however long the outage takes. With `most` messages
parked the consumer pulls no more, so an outage that concerns all of them fills no memory. There is no order between
messages.

For the messages in hand "in progress" is sent to NATS, so that they are not redelivered. Each run has its own consumer.
When a run ends, its unacknowledged deliveries are returned (nak) for immediate redelivery to a later run, here or
elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from random import SystemRandom
from typing import Final

from rota.infra.clock import Clock, SystemClock
from rota.infra.nats.batch_processor import BatchProcessor, PendingMessage
from rota.infra.nats.bus import Bus
from rota.infra.nats.consumer import Consumer, keep_in_progress
from rota.infra.nats.delivery import Delivery
from rota.infra.nats.streams import ConsumerSpec
from rota.infra.service.lifecycle import Lifecycle
from rota.model.backoff import Backoff
from rota.model.errors import NatsUnavailable

OUTAGE_BACKOFF: Final = Backoff(first_s=0.5, longest_s=3.0)
"""Short, because work that has ended keeps its quota until its result is handled."""
_random = SystemRandom()


class BatchConsumer:
    def __init__(
        self,
        bus: Bus,
        spec: ConsumerSpec,
        processor: BatchProcessor,
        *,
        most: int = 256,
        wait_s: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        self._bus = bus
        self._spec = spec
        self._processor = processor
        self._most = most
        self._wait_s = wait_s
        self._clock = clock or SystemClock()
        self._batch: Sequence[Delivery] = ()
        self._parked: dict[tuple[int, int], PendingMessage] = {}
        """By stream sequence and time of storage: a redelivery replaces the earlier delivery."""
        self._retries = 0
        self._retry_at = 0.0

    async def run(self, lifecycle: Lifecycle) -> None:
        """Run until draining: then finish the current batch and return the other deliveries."""
        try:
            async with self._bus.consumer(self._spec) as consumer:
                lifecycle.ready()
                async with keep_in_progress(self._in_hand, self._spec.shortest_ack_wait_s / 3, self._clock):
                    await self._consume(consumer, lifecycle)
        finally:
            # Only after closing the consumer: a batch returned earlier would be delivered here again.
            await self._nak_unsettled()

    async def _consume(self, consumer: Consumer, lifecycle: Lifecycle) -> None:
        draining = asyncio.create_task(lifecycle.until_draining(), name="nats.draining")
        try:
            while not lifecycle.draining:
                await self._fetch_unless_draining(consumer, draining)
                if self._batch:
                    await self._process_batch()
                if self._parked and self._clock.monotonic() >= self._retry_at and not lifecycle.draining:
                    await self._retry_parked()
        finally:
            draining.cancel()
            await asyncio.wait({draining})

    async def _fetch_unless_draining(self, consumer: Consumer, draining: asyncio.Task[None]) -> None:
        """Fetch the next batch into `_batch`; empty when none arrived, parked messages are due or draining started."""
        fetching = asyncio.create_task(self._fetch_batch(consumer), name="nats.fetch")
        try:
            await asyncio.wait({fetching, draining}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            fetching.cancel()
            await asyncio.wait({fetching})
        if not fetching.cancelled():
            fetching.result()

    async def _fetch_batch(self, consumer: Consumer) -> None:
        wait_s = min(self._wait_s, self._retry_at - self._clock.monotonic()) if self._parked else self._wait_s
        if len(self._parked) >= self._most:
            await self._clock.sleep(max(0.0, wait_s))
            return
        # Stored as soon as it is fetched, so that a cancellation at any later point returns it.
        self._batch = await consumer.fetch(self._most, wait_s)

    async def _process_batch(self) -> None:
        pending = await self._processor.process([PendingMessage(delivery) for delivery in self._batch])
        if pending and not self._parked:
            self._retries = 0
            self._schedule_retry()
        self._parked.update((_message_key(message), message) for message in pending)
        self._batch = ()

    async def _retry_parked(self) -> None:
        # Shuffled: the processor gives up early if the messages it tries first cannot be handled.
        keys = _random.sample(list(self._parked), len(self._parked))
        tried = {key: self._parked[key] for key in islice(keys, self._most)}
        pending = await self._processor.process(list(tried.values()))
        waiting = {_message_key(message): message for message in pending}
        self._retries = self._retries + 1 if len(waiting) == len(tried) else 0
        self._parked = {**{key: each for key, each in self._parked.items() if key not in tried}, **waiting}
        self._schedule_retry()

    def _schedule_retry(self) -> None:
        self._retry_at = self._clock.monotonic() + OUTAGE_BACKOFF.pause_s(self._retries + 1, _random.random())

    def _in_hand(self) -> Iterator[Delivery]:
        yield from self._batch
        for message in list(self._parked.values()):
            yield message.delivery

    async def _nak_unsettled(self) -> None:
        """Return deliveries for immediate redelivery: those parked, and after a crash or cancellation the batch."""
        unsettled = list(self._in_hand())
        self._batch, self._parked = (), {}
        with suppress(NatsUnavailable):
            for delivery in unsettled:
                if not delivery.settled:
                    await delivery.nak()


def _message_key(message: PendingMessage) -> tuple[int, int]:
    return message.delivery.stream_seq, message.delivery.stored_ns

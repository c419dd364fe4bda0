"""Pulls batches from a consumer and has a `BatchProcessor` handle and acknowledge them.

    results = BatchConsumer(bus, RESULTS, BatchProcessor(handler, on_terminated))
    service = Service("results", results.run)

While a batch is processed, "in progress" is sent to NATS, so that it is not redelivered. Each run has its own consumer.
When a run ends, its unacknowledged deliveries are returned (nak) for immediate redelivery to a later run, here or
elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from rota.infra.clock import Clock, SystemClock
from rota.infra.nats.batch_processor import BatchProcessor
from rota.infra.nats.bus import Bus
from rota.infra.nats.consumer import Consumer, keep_in_progress
from rota.infra.nats.delivery import Delivery
from rota.infra.nats.streams import ConsumerSpec
from rota.infra.service.lifecycle import Lifecycle
from rota.model.errors import NatsUnavailable


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

    async def run(self, lifecycle: Lifecycle) -> None:
        """Run until draining: then finish the current batch and return the other deliveries."""
        try:
            async with self._bus.consumer(self._spec) as consumer:
                lifecycle.ready()
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
                    await self._process_batch(lifecycle)
        finally:
            draining.cancel()
            await asyncio.wait({draining})

    async def _fetch_unless_draining(self, consumer: Consumer, draining: asyncio.Task[None]) -> None:
        """Fetch the next batch into `_batch`; empty when none arrived or draining started."""
        fetching = asyncio.create_task(self._fetch_batch(consumer), name="nats.fetch")
        try:
            await asyncio.wait({fetching, draining}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            fetching.cancel()
            await asyncio.wait({fetching})
        if not fetching.cancelled():
            fetching.result()

    async def _fetch_batch(self, consumer: Consumer) -> None:
        # Stored as soon as it is fetched, so that a cancellation at any later point returns it.
        self._batch = await consumer.fetch(self._most, self._wait_s)

    async def _process_batch(self, lifecycle: Lifecycle) -> None:
        async with keep_in_progress(self._batch, self._spec.shortest_ack_wait_s / 3, self._clock):
            await self._processor.process(self._batch, lifecycle)
        self._batch = ()

    async def _nak_unsettled(self) -> None:
        """Return deliveries for immediate redelivery; only a crash or cancellation leaves any."""
        unsettled, self._batch = self._batch, ()
        with suppress(NatsUnavailable):
            for delivery in unsettled:
                if not delivery.settled:
                    await delivery.nak()

"""Publishes in batches: sends all messages, then awaits all acknowledgements, within one timeout.

The server acknowledges each message on a reply subject that names the batch and the index in it. Invariants, enforced
here:

- each message of a batch gets exactly one receipt;
- a message that was sent and not acknowledged is `UNSETTLED`, never assumed lost;
- only a reply with a stream and a sequence number is an acknowledgement: any subscriber of the subject may reply;
- a batch ends with its last acknowledgement, with the connection (later ones cannot arrive) or at its deadline.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence

import msgspec
from nats.aio.msg import Msg

from rota.infra.nats.connection import BusSubscription, NatsConnection
from rota.infra.nats.failures import ApiError
from rota.infra.nats.messages import BusMessage, PublishOutcome, PublishReceipt
from rota.infra.nats.streams import NatsNames
from rota.infra.telemetry import metrics
from rota.model.errors import NatsUnavailable

MESSAGES_PUBLISHED = metrics.counter("rota_bus_published", "Messages published, by outcome.", labels=("outcome",))

FLUSH_EVERY = 64
"""Messages that are encoded before the library may write them: NATS works on the first ones of a large batch while the
others are encoded."""
NO_STREAM = "no stream accepts the subject"
_NO_ACK = PublishReceipt(PublishOutcome.UNSETTLED, reason="no acknowledgement in time")
_PERMANENT_ERROR_CODES = frozenset((10054, 10060, 10097))
"""Message too large for the stream, wrong expected stream, headers too large."""


class _PubAck(msgspec.Struct):
    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: ApiError | None = None


_pub_ack = msgspec.json.Decoder(_PubAck)


class _PublishBatch:
    def __init__(self, size: int) -> None:
        self.receipts = [_NO_ACK] * size
        self.missing = size
        self.ended = asyncio.Event()

    def settle(self, index: int, receipt: PublishReceipt) -> None:
        if self.receipts[index] is _NO_ACK:
            self.receipts[index] = receipt
            self.missing -= 1
            if self.missing == 0:
                self.ended.set()


class JetStreamPublisher:
    def __init__(self, connection: NatsConnection, names: NatsNames) -> None:
        self._connection = connection
        self._names = names
        self._numbers = itertools.count()
        self._batches: dict[int, _PublishBatch] = {}
        self._inbox = ""
        self._subscription: BusSubscription | None = None

    async def open(self) -> None:
        self._inbox = self._connection.new_inbox()
        self._subscription = await self._connection.subscribe(f"{self._inbox}.*.*", self._on_ack)
        self._connection.watchers.add(self)

    async def publish(self, messages: Sequence[BusMessage], deadline: float) -> list[PublishReceipt]:
        """One receipt per message, in order, by `deadline` (event loop time). NatsUnavailable: nothing was sent."""
        number, batch = next(self._numbers), _PublishBatch(len(messages))
        self._batches[number] = batch
        try:
            async with asyncio.timeout_at(deadline):
                await self._send(number, batch, messages)
                if batch.missing:
                    await batch.ended.wait()
        except TimeoutError:
            pass  # the missing ones keep their UNSETTLED receipt
        finally:
            del self._batches[number]
        for outcome, count in Counter(receipt.outcome for receipt in batch.receipts).items():
            MESSAGES_PUBLISHED.labels(outcome.value).inc(count)
        return batch.receipts

    def on_connected(self) -> None:
        return None

    def on_disconnected(self) -> None:
        for batch in self._batches.values():
            batch.ended.set()

    async def _send(self, number: int, batch: _PublishBatch, messages: Sequence[BusMessage]) -> None:
        sent = 0
        max_bytes = self._connection.max_payload
        for index, message in enumerate(messages):
            if (fault := message.fault(max_bytes)) is not None:
                batch.settle(index, PublishReceipt(PublishOutcome.REJECTED, reason=fault))
                continue
            try:
                await self._connection.send(
                    self._names.subject(message.subject),
                    message.data,
                    reply=f"{self._inbox}.{number}.{index}",
                    headers=message.wire_headers(),
                )
            except NatsUnavailable:
                if not sent:
                    raise
                return
            sent += 1
            if sent % FLUSH_EVERY == 0:
                await asyncio.sleep(0)

    async def _on_ack(self, msg: Msg) -> None:
        _, number, index = msg.subject.rsplit(".", 2)
        batch = self._batches.get(int(number))
        if batch is not None and (receipt := _receipt(msg)) is not None:
            batch.settle(int(index), receipt)


def _receipt(msg: Msg) -> PublishReceipt | None:
    """The receipt in the server's reply, or None when the reply is not from JetStream."""
    if not msg.data:
        # "No responders" is a status header without data.
        return PublishReceipt(PublishOutcome.UNSETTLED, reason=NO_STREAM)
    try:
        ack = _pub_ack.decode(msg.data)
    except msgspec.DecodeError:
        return None
    if ack.error is None:
        if not ack.stream or ack.seq < 1:
            return None
        return PublishReceipt(PublishOutcome.DUPLICATE if ack.duplicate else PublishOutcome.STORED, ack.seq)
    outcome = PublishOutcome.REJECTED if ack.error.err_code in _PERMANENT_ERROR_CODES else PublishOutcome.UNSETTLED
    return PublishReceipt(outcome, reason=ack.error.description)

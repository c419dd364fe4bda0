"""NATS JetStream: declared streams and consumers, publishing with message ids, pulling with explicit acknowledgement.

    bus              the facade: publish, consume, ordered reads, core messages; restores lost streams
    topology         Rota's streams and consumers
    streams          `StreamSpec`, `ConsumerSpec` and their NATS configuration; pure
    messages         messages, receipts and their validation; pure
    publisher        batches of publishes with one receipt per message
    consumer         pulls from a durable consumer; `delivery` holds one message and its acknowledgements
    batch_consumer   pulls batches; `batch_processor` runs a handler over each: retries, dead letters, back-off
    ordered_reader   reads a stream in order without acknowledgement, and reports gaps
    jetstream        the JetStream API
    connection       one connection that reconnects after every kind of failure; `failures` maps those to Rota's errors
    target           URL, prefix and timeouts

Invariants: delivery is at least once, so handlers must be idempotent; a publish without acknowledgement has an unknown
outcome and is repeated under the same message id (the outbox does so); only a handler's success acknowledges; NATS may
lose all its data, because PostgreSQL is the system of record. Callers: outbox, engine, placement, workflow, worker.
"""

from rota.infra.nats.batch_consumer import BatchConsumer
from rota.infra.nats.batch_processor import Acknowledgement, BatchProcessor, Nak, Terminate
from rota.infra.nats.bus import Bus, CoreMessage, MaxDeliveriesAdvisory
from rota.infra.nats.consumer import Consumer, keep_in_progress
from rota.infra.nats.delivery import Delivery
from rota.infra.nats.jetstream import StoredMessage, StreamState
from rota.infra.nats.messages import BusMessage, PublishOutcome, PublishReceipt
from rota.infra.nats.ordered_reader import OrderedReader, StreamGap, StreamMessage
from rota.infra.nats.streams import ConsumerSpec, StreamSpec
from rota.infra.nats.target import NatsTarget

__all__ = [
    "Acknowledgement",
    "BatchConsumer",
    "BatchProcessor",
    "Bus",
    "BusMessage",
    "Consumer",
    "ConsumerSpec",
    "CoreMessage",
    "Delivery",
    "MaxDeliveriesAdvisory",
    "Nak",
    "NatsTarget",
    "OrderedReader",
    "PublishOutcome",
    "PublishReceipt",
    "StoredMessage",
    "StreamGap",
    "StreamMessage",
    "StreamSpec",
    "StreamState",
    "Terminate",
    "keep_in_progress",
]

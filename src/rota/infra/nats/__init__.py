"""NATS JetStream: declared streams and consumers, publishing with message ids, pulling with explicit answers."""

from rota.infra.nats.batch_consumer import Acknowledgement, BatchConsumer, Nak, Terminate
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

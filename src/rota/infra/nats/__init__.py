"""NATS JetStream: declared streams and consumers, publishing with message ids, pulling with explicit answers."""

from rota.infra.nats.bus import Bus, Exhausted, Heard
from rota.infra.nats.consumer import Consumer, kept_alive
from rota.infra.nats.delivery import Delivery
from rota.infra.nats.handling import Handling, Reject, Retry, Verdict
from rota.infra.nats.jetstream import Stored, StreamState
from rota.infra.nats.messages import Message, Outcome, Receipt
from rota.infra.nats.streams import ConsumerSpec, StreamSpec
from rota.infra.nats.tail import Missed, Tail, Tailed
from rota.infra.nats.target import NatsTarget

__all__ = [
    "Bus",
    "Consumer",
    "ConsumerSpec",
    "Delivery",
    "Exhausted",
    "Handling",
    "Heard",
    "Message",
    "Missed",
    "NatsTarget",
    "Outcome",
    "Receipt",
    "Reject",
    "Retry",
    "Stored",
    "StreamSpec",
    "StreamState",
    "Tail",
    "Tailed",
    "Verdict",
    "kept_alive",
]

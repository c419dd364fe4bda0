"""Outbox: state changes and the messages they cause are committed together; the relay publishes them."""

from rota.infra.outbox.outbox import CHANNEL, ParkedMessage, add, list_parked, unpark
from rota.infra.outbox.relay import OutboxRelay, RelayCounts

__all__ = ["CHANNEL", "OutboxRelay", "ParkedMessage", "RelayCounts", "add", "list_parked", "unpark"]

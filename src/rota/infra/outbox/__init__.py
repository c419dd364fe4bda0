"""Outbox: state changes and the messages they cause are committed together; the relay publishes them."""

from rota.infra.outbox.box import CHANNEL, ParkedMessage, add, parked, unpark
from rota.infra.outbox.relay import Relay, Tally

__all__ = ["CHANNEL", "ParkedMessage", "Relay", "Tally", "add", "parked", "unpark"]

"""Outbox: state changes and their messages commit together; the relay publishes the messages to NATS.

    outbox    `add` inside the caller's transaction; list and retry parked messages
    relay     claims, publishes and deletes rows; several relays may run concurrently

Invariants: a row is deleted only after NATS confirmed the message, or moved to `outbox_parked` when NATS can never
accept it. Delivery is at least once and unordered across transactions: receivers must be idempotent. Callers: every
package that changes state and publishes about it; the runtime runs the relay as a service.
"""

from rota.infra.outbox.outbox import CHANNEL, ParkedMessage, add, list_parked, unpark
from rota.infra.outbox.relay import OutboxRelay, RelayCounts

__all__ = ["CHANNEL", "OutboxRelay", "ParkedMessage", "RelayCounts", "add", "list_parked", "unpark"]

"""One delivery of a stored message, and the four acknowledgements.

    ack           done; never redelivered (with `sync`, returns after NATS confirmed it)
    nak           not done; redelivered after `delay_s`
    term          not done, never redelivered: write the dead letter first
    in_progress   still working; the ack wait restarts

A lost acknowledgement counts as none: the message is redelivered. A delivery gets exactly one of the first three.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from nats.aio.msg import Msg

from rota.infra.nats.connection import NatsConnection
from rota.infra.nats.messages import ID_HEADER
from rota.infra.nats.streams import ConsumerSpec, NatsNames

_ACK, _NAK, _TERM, _IN_PROGRESS = b"+ACK", b"-NAK", b"+TERM", b"+WPI"
_NO_HEADERS: Mapping[str, str] = {}


class Delivery:
    __slots__ = (
        "_connection",
        "_reply",
        "consumer",
        "data",
        "deliveries",
        "expires_at",
        "headers",
        "last",
        "msg_id",
        "overdue",
        "settled",
        "stored_ns",
        "stream",
        "stream_seq",
        "subject",
    )

    def __init__(
        self, msg: Msg, connection: NatsConnection, names: NatsNames, spec: ConsumerSpec, arrived_at: float
    ) -> None:
        self._connection = connection
        self._reply = msg.reply
        self.subject = names.bare_subject(msg.subject)
        self.data = msg.data
        self.headers: Mapping[str, str] = msg.headers or _NO_HEADERS
        self.msg_id = self.headers.get(ID_HEADER, "")
        self.stream = spec.stream
        self.consumer = spec.durable
        self.deliveries, self.stream_seq, _, self.stored_ns = parse_ack_subject(msg.reply)
        """Deliveries including this one; stream sequence and time of storage, together unique even across a
        re-created stream."""
        self.last = self.deliveries >= spec.max_deliver
        """Whether this is the last delivery to a handler."""
        self.overdue = self.deliveries > spec.max_deliver
        """Whether the last delivery has passed: only the dead letter remains to be written."""
        self.expires_at = arrived_at + spec.ack_wait_of(self.deliveries)
        self.settled = False

    async def ack(self, *, sync: bool = False) -> None:
        self._mark_settled()
        if sync:
            await self._connection.request(self._reply, _ACK)
        else:
            await self._connection.send(self._reply, _ACK)

    async def nak(self, delay_s: float = 0.0) -> None:
        self._mark_settled()
        delay = b" " + msgspec.json.encode({"delay": round(delay_s * 1e9)}) if delay_s > 0 else b""
        await self._connection.send(self._reply, _NAK + delay)

    async def term(self) -> None:
        self._mark_settled()
        await self._connection.send(self._reply, _TERM)

    async def in_progress(self) -> None:
        await self._connection.send(self._reply, _IN_PROGRESS)

    def _mark_settled(self) -> None:
        assert not self.settled, f"message {self.stream_seq} of {self.stream} was answered twice"
        self.settled = True


def parse_ack_subject(reply: str) -> tuple[int, int, int, int]:
    """Delivery count, stream sequence, consumer sequence and time in ns from the acknowledgement subject.

    $JS.ACK.<stream>.<consumer>.<count>.<stream seq>.<consumer seq>.<time>.<pending>, or, from servers with domains,
    $JS.ACK.<domain>.<account>.<stream>.<consumer>.<count>.<stream seq>...
    """
    parts = reply.split(".")
    first = 4 if len(parts) == 9 else 6
    return int(parts[first]), int(parts[first + 1]), int(parts[first + 2]), int(parts[first + 3])

"""One delivery of a stored message, and the four answers to it.

    ack           done; never again (with `sync`, only once NATS has confirmed it)
    nak           not done; again after `delay_s`
    term          never again, although it was not done: write the dead letter first
    in_progress   still at it; the ack wait starts anew

An answer that gets lost is no answer: the message comes again. Only one of the first three is given per delivery.
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
        """How often it was delivered, this time included; its number in the stream, and when it was stored there, which
        together no other message has, even if the stream was made anew."""
        self.last = self.deliveries >= spec.max_deliver
        """Whether a handler is to get it for the last time."""
        self.overdue = self.deliveries > spec.max_deliver
        """Whether the last time is over: only its dead letter is left to write."""
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
    """Delivery count, stream and consumer sequence, and time in ns out of the subject that NATS wants its answer on.

    $JS.ACK.<stream>.<consumer>.<count>.<stream seq>.<consumer seq>.<time>.<pending>, or, from servers that know
    domains, $JS.ACK.<domain>.<account>.<stream>.<consumer>.<count>.<stream seq>...
    """
    words = reply.split(".")
    first = 4 if len(words) == 9 else 6
    return int(words[first]), int(words[first + 1]), int(words[first + 2]), int(words[first + 3])

"""Messages that nobody can read, on every subject that somebody hears, with good ones right behind them.

What is kept by a stream is noted down for P1: it must be in the dead letters once, unless JetStream was wiped since.
"""

import itertools

import msgspec

from rota.infra.nats import BusMessage as Published
from rota.model.errors import NatsUnavailable
from rota.model.protocol import (
    CANCEL_SUBJECT,
    HANDSHAKE_SUBJECT,
    HEARTBEAT_SUBJECT,
    LIVENESS_SUBJECT,
    LOG_SUBJECT,
    PROGRESS_SUBJECT,
    RELEASED_SUBJECT,
    RESULT_SUBJECT,
    SUBMIT_SUBJECT,
)
from tests.chaos.pipeline.history import Message

KEPT = (RESULT_SUBJECT, SUBMIT_SUBJECT, "sys.job.gate")
TOLD_PAST = (
    CANCEL_SUBJECT,
    RELEASED_SUBJECT,
    HANDSHAKE_SUBJECT,
    HEARTBEAT_SUBJECT,
    LOG_SUBJECT,
    PROGRESS_SUBJECT,
    LIVENESS_SUBJECT,
    "sys.server.heartbeat",
)
LARGE = 500_000


class Poisoner:
    def __init__(self, bus, wipes):
        self.sent = []
        self._bus = bus
        self._wipes = wipes
        """How often JetStream was wiped until now."""
        self._numbers = itertools.count(1)

    async def poison(self, chance):
        """One message on each subject. An outage keeps some of them from being sent, which is fine."""
        for subject in KEPT:
            text = f"poison {next(self._numbers)} on {subject}"
            await self.publish(subject, _body(text, chance), text, poison=True)
        try:
            for subject in TOLD_PAST:
                await self._bus.publish_core(subject, _body("poison", chance))
        except NatsUnavailable:
            return

    async def publish(self, subject, data, text, *, poison=False):
        wipes = self._wipes()
        message = Message(text, -1, poison)
        self.sent.append(message)
        try:
            await self._bus.publish(Published(subject=subject, data=data, msg_id=text))
        except NatsUnavailable:
            return
        message.wipes = wipes


def _body(text, chance):
    """Something that is no message of ours; it ends with its text, which `text_of` finds."""
    odd = chance.choice([b"\xc1", b"\x91" * 2000, msgspec.msgpack.encode({"show": "film", "layers": 3}), b"x" * LARGE])
    return odd + b"\0" + text.encode()


def text_of(payload):
    return bytes(payload).rpartition(b"\0")[2].decode(errors="replace")

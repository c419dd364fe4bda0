"""Undecodable messages on every subject that has a consumer.

Those stored by a stream are recorded for P1: each must become one dead letter, unless JetStream was wiped since.
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

STREAM_SUBJECTS = (RESULT_SUBJECT, SUBMIT_SUBJECT, "sys.job.gate")
CORE_SUBJECTS = (
    CANCEL_SUBJECT,
    RELEASED_SUBJECT,
    HANDSHAKE_SUBJECT,
    HEARTBEAT_SUBJECT,
    LOG_SUBJECT,
    PROGRESS_SUBJECT,
    LIVENESS_SUBJECT,
    "sys.server.heartbeat",
)
LARGE_BYTES = 500_000


class Poisoner:
    def __init__(self, bus, wipes):
        self.sent = []
        self._bus = bus
        self._wipes = wipes
        """Returns how often JetStream was wiped so far."""
        self._numbers = itertools.count(1)

    async def poison(self, rng):
        """Publish one message on each subject. An outage may prevent some, which is fine."""
        for subject in STREAM_SUBJECTS:
            text = f"poison {next(self._numbers)} on {subject}"
            await self.publish(subject, _body(text, rng), text, poison=True)
        try:
            for subject in CORE_SUBJECTS:
                await self._bus.publish_core(subject, _body("poison", rng))
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


def _body(text, rng):
    """An invalid message body that ends with its text, which `text_of` extracts."""
    invalid = rng.choice(
        [b"\xc1", b"\x91" * 2000, msgspec.msgpack.encode({"show": "film", "layers": 3}), b"x" * LARGE_BYTES]
    )
    return invalid + b"\0" + text.encode()


def text_of(payload):
    return bytes(payload).rpartition(b"\0")[2].decode(errors="replace")

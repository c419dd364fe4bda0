"""What a worker and a process that runs a sync agent say to each other: msgpack, each message after its length."""

from __future__ import annotations

from typing import Final

import msgspec

from rota.agents.runs import AgentRun
from rota.model.failures import FailureClass

LENGTH: Final = 4
MESSAGE_MAX: Final = 1024 * 1024


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Run this body."""

    run: AgentRun


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The app is loaded, or could not be."""

    problem: str = ""


class Done(msgspec.Struct, frozen=True, tag="done"):
    failure: FailureClass | None = None
    error: str = ""


Said = Loaded | Done
TOLD: Final[msgspec.msgpack.Decoder[Begin]] = msgspec.msgpack.Decoder(Begin)
SAID: Final[msgspec.msgpack.Decoder[Said]] = msgspec.msgpack.Decoder(Said)
_ENCODER = msgspec.msgpack.Encoder()


def packed(message: msgspec.Struct) -> bytes:
    data = _ENCODER.encode(message)
    return len(data).to_bytes(LENGTH, "big") + data


def unpacked(buffer: bytearray) -> bytes | None:
    """The next message, taken out of `buffer`; None when there is no whole one."""
    if len(buffer) < LENGTH:
        return None
    size = int.from_bytes(buffer[:LENGTH], "big")
    if size > MESSAGE_MAX:
        raise msgspec.DecodeError(f"a message of {size} bytes")
    if len(buffer) < LENGTH + size:
        return None
    data = bytes(buffer[LENGTH : LENGTH + size])
    del buffer[: LENGTH + size]
    return data

"""Messages between a worker and its agent processes: msgpack with a length prefix. No I/O."""

from __future__ import annotations

from typing import Final

import msgspec

from rota.agents.running import AgentRun
from rota.model.failure_classes import FailureClass

LENGTH_BYTES: Final = 4
MESSAGE_BYTES_MAX: Final = 1024 * 1024


class AgentProcessRequest(msgspec.Struct, frozen=True, tag="begin"):
    """Runs one agent body."""

    run: AgentRun


class AgentProcessReady(msgspec.Struct, frozen=True, tag="loaded"):
    """The app was loaded, or `problem` says why not."""

    problem: str = ""


class AgentProcessResult(msgspec.Struct, frozen=True, tag="done"):
    failure: FailureClass | None = None
    error: str = ""


AgentProcessMessage = AgentProcessReady | AgentProcessResult
AGENT_REQUEST_DECODER: Final[msgspec.msgpack.Decoder[AgentProcessRequest]] = msgspec.msgpack.Decoder(
    AgentProcessRequest
)
AGENT_MESSAGE_DECODER: Final[msgspec.msgpack.Decoder[AgentProcessMessage]] = msgspec.msgpack.Decoder(
    AgentProcessMessage
)
_ENCODER = msgspec.msgpack.Encoder()


def pack_agent_message(message: msgspec.Struct) -> bytes:
    data = _ENCODER.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def pop_agent_message(buffer: bytearray) -> bytes | None:
    """Removes the next message from `buffer`; None: it is incomplete."""
    if len(buffer) < LENGTH_BYTES:
        return None
    size = int.from_bytes(buffer[:LENGTH_BYTES], "big")
    if size > MESSAGE_BYTES_MAX:
        raise msgspec.DecodeError(f"a message of {size} bytes")
    if len(buffer) < LENGTH_BYTES + size:
        return None
    data = bytes(buffer[LENGTH_BYTES : LENGTH_BYTES + size])
    del buffer[: LENGTH_BYTES + size]
    return data

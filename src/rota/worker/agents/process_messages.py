"""Messages between a worker and its agent processes. No I/O."""

from __future__ import annotations

from typing import Final

import msgspec

from rota.agents.running import AgentRun
from rota.model.failure_classes import FailureClass
from rota.worker.processes.ipc import ProcessReady

AGENT_MESSAGE_BYTES_MAX: Final = 1024 * 1024


class AgentProcessRequest(msgspec.Struct, frozen=True, array_like=True):
    """Runs one agent body."""

    run: AgentRun


class AgentProcessResult(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    failure: FailureClass | None = None
    error: str = ""


AgentProcessMessage = ProcessReady | AgentProcessResult
AGENT_REQUEST_DECODER: Final = msgspec.msgpack.Decoder(AgentProcessRequest)
AGENT_MESSAGE_DECODER: Final[msgspec.msgpack.Decoder[AgentProcessMessage]] = msgspec.msgpack.Decoder(
    AgentProcessMessage
)

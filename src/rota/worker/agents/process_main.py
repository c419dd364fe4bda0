"""Main of an agent process: runs sync agent bodies, one at a time, until its worker is gone (`rota.worker.processes`).

It also dies when the worker's lease expires without renewal: the worker may be stopped (SIGSTOP), and another replica
may run the agent by then. A separate process enforces that (`lease_watchdog_process`), so a body cannot prevent it.

SIGTERM requests a stop: it raises `Cancelled` in the body. The worker kills a body that ignores it.
"""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import NoReturn

from rota.agents.running import format_exception
from rota.model.failure_classes import ClassifyHook, FailureClass, classify
from rota.sdk.agent import AgentDefinition
from rota.sdk.app import Rota
from rota.sdk.exceptions import Cancelled
from rota.worker.agents import lease_watchdog_process
from rota.worker.agents.process_messages import AGENT_REQUEST_DECODER, AgentProcessRequest, AgentProcessResult
from rota.worker.processes.main import HandleRequest, WorkerChannel, run_child


def _raise_cancelled(_number: int, _frame: object) -> NoReturn:
    raise Cancelled


def run_agent_body(agent: AgentDefinition, begin: AgentProcessRequest, hook: ClassifyHook | None) -> AgentProcessResult:
    try:
        signal.signal(signal.SIGTERM, _raise_cancelled)
        agent.call(begin.run)
    except Cancelled:
        return AgentProcessResult(FailureClass.TRANSIENT, "It was stopped.")
    except BaseException as error:  # noqa: BLE001 - any exception ends the body, not the process
        return AgentProcessResult(classify(error, hook), format_exception(error))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return AgentProcessResult()


def set_up(connection: socket.socket, descriptors: list[int]) -> None:
    [lease_descriptor] = descriptors
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lease_watchdog_process.fork_watchdog(socket.socket(fileno=lease_descriptor), connection)


def create_handler(
    app: Rota, _channel: WorkerChannel[AgentProcessRequest], _folder: Path
) -> HandleRequest[AgentProcessRequest]:
    def handle(begin: AgentProcessRequest) -> AgentProcessResult:
        agent = app.recurring.get(begin.run.name)
        if agent is None:
            reason = f"The app has no agent {begin.run.name!r}: restart the worker if its file was changed."
            return AgentProcessResult(FailureClass.UNKNOWN, reason)
        return run_agent_body(agent, begin, app.failure_hook)

    return handle


if __name__ == "__main__":
    run_child(AGENT_REQUEST_DECODER, create_handler, set_up)

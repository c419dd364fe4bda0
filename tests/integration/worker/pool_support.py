"""Pools of the test child (`pool_child`)."""

from pathlib import Path

from rota.worker.processes.child import ChildProcess, ChildProgram
from rota.worker.processes.pool import ProcessPool
from tests.integration.worker.pool_child import MESSAGE_BYTES_MAX, MESSAGE_DECODER

APP = "tests.support.agent_tasks:app"
CHILD = "tests.integration.worker.pool_child"


class PoolProcess(ChildProcess):
    def __init__(self, program, guard):
        self.output = b""
        super().__init__(program, guard)

    def _on_output(self, _stream, data):
        self.output += data


def program(app=APP, folder=None, bytes_max=MESSAGE_BYTES_MAX):
    return ChildProgram(CHILD, app, folder or Path.cwd(), MESSAGE_DECODER, bytes_max, "decode_failed")


def create_pool(*args, idle_max=2, starts_max=8, **more):
    return ProcessPool(
        lambda guard: PoolProcess(program(*args, **more), guard), idle_max=idle_max, starts_max=starts_max
    )

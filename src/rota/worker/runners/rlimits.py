"""Resource limits of a command, and the message for an exit that they may have caused. No I/O."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Final

from rota.model.attempt_codes import AttemptCode
from rota.model.jobs.work import ProcessLimits, Work
from rota.model.units import Mebibytes, format_memory
from rota.worker.processes.os_process import describe_exit

MIB: Final = 1024 * 1024
SHELL_SIGNAL_BASE: Final = 128
"""A shell exits with this plus the number of the signal that ended its last command."""


class CommandRlimits:
    """Limits of each process of one command."""

    def __init__(self, work: Work, ceiling: ProcessLimits) -> None:
        self.limits = work.limits.within(ceiling)
        self.memory_mb = work.memory_mb

    @property
    def as_argument(self) -> str:
        """For `processes/fork_server.py`: CPU seconds, data bytes, address space bytes, open files, file bytes."""
        limits = self.limits
        values = (limits.cpu_s, self.memory_mb * MIB, limits.address_mb * MIB, limits.open_files, limits.file_mb * MIB)
        return ",".join(map(str, values))

    def describe_exit(self, status: int) -> tuple[str, str]:
        """Code and message for a failed command."""
        number = -status if status < 0 else status - SHELL_SIGNAL_BASE
        if number == signal.SIGXCPU and self.limits.cpu_s:
            return (
                AttemptCode.CPU_LIMIT,
                f"The command exceeded its limit of {self.limits.cpu_s} s of CPU time per process.",
            )
        if number == signal.SIGXFSZ and self.limits.file_mb:
            return (
                AttemptCode.FILE_LIMIT,
                f"The command wrote a file of more than {format_memory(Mebibytes(self.limits.file_mb))}.",
            )
        code, sentence = describe_exit(status)
        limits = ", ".join(self._limit_texts())
        return code, f"{sentence} Limits per process: {limits}." if limits else sentence

    def _limit_texts(self) -> Iterator[str]:
        """All limits: most cause an error inside the program, so the exit status does not identify them."""
        if self.limits.cpu_s:
            yield f"{self.limits.cpu_s} s of CPU time"
        if self.memory_mb:
            yield f"{format_memory(Mebibytes(self.memory_mb))} of memory"
        if self.limits.address_mb:
            yield f"{format_memory(Mebibytes(self.limits.address_mb))} of address space"
        if self.limits.open_files:
            yield f"{self.limits.open_files} open files"
        if self.limits.file_mb:
            yield f"files of {format_memory(Mebibytes(self.limits.file_mb))}"

"""What a layer runs, told once for all of its frames: the part of a submission that a worker sees. No I/O."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

TASK_CAPABILITY_PREFIX: Final = "task."
"""What comes before the name of a task among the capabilities of workers that know it."""

FailureKind = Literal["error", "timeout", "lost"]
"""How an attempt may fail: the task said so, it took too long, or its worker was lost."""

CONSTRAINTS_ENV: Final = (
    *("ROTA_POLICY_CONSTRAINTS", "ROTA_REDACTION_LEVEL", "ROTA_MAX_ARTIFACT_BYTES"),
    *("ROTA_MAX_CONCURRENT_JOBS", "ROTA_MAX_RETRIES"),
)
"""Under which constraints of a policy it runs, if there are any."""
FRAME_ENV: Final = (
    *("ROTA_JOB", "ROTA_LAYER", "ROTA_FRAME", "ROTA_ATTEMPT", "ROTA_GPUS", "ROTA_INPUT"),
    *CONSTRAINTS_ENV,
)
"""What the environment of a running frame says about it; no settings."""


class Retries(msgspec.Struct, frozen=True, array_like=True):
    """When an attempt that failed is tried again. A lost worker is nobody's fault and has a number of its own."""

    most: int = 0
    """Attempts after the first one; those that failed by `Fatal` are never tried again."""
    first_s: float = 1.0
    longest_s: float = 300.0
    on: frozenset[FailureKind] = frozenset({"error", "timeout"})
    lost: int = -1
    """How often a frame goes back because its worker was lost, before it fails; -1: as often as servers are set to."""


class ProcessLimits(msgspec.Struct, frozen=True, array_like=True):
    """What one process of a command may use at most; 0 is no limit."""

    cpu_s: int = 0
    address_mb: int = 0
    """Of address space, all that it maps; the memory that a layer asks for limits its data alone."""
    open_files: int = 0
    file_mb: int = 0
    """Of any file that it writes."""

    def within(self, most: ProcessLimits) -> ProcessLimits:
        """The lower of both, each."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(most), strict=True)
        return ProcessLimits(*(min(filter(None, pair), default=0) for pair in pairs))


class Work(msgspec.Struct, frozen=True, array_like=True):
    """A task by its name, or a command by its argv."""

    task: str = ""
    argv: tuple[str, ...] = ()
    env: dict[str, str] = {}
    timeout_s: float = 0.0
    """Of one attempt; 0 is the reconciler's own."""
    kill_after_s: float = 5.0
    """Between asking a frame to stop and killing it."""
    cores: int = 100
    gpus: int = 0
    memory_mb: int = 0
    retries: Retries = Retries()
    limits: ProcessLimits = ProcessLimits()
    """Of a command."""
    artifacts: tuple[str, ...] = ()
    """Patterns of files that each frame leaves in its directory."""
    artifact_bytes_max: int = 0
    """Of all of these together, by a policy; 0 is no limit."""
    fail_fast: bool = False
    """The first frame that fails for good ends the job."""

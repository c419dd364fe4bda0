"""What a layer runs: the part of a submission that is sent to workers, once per layer. No I/O."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

TASK_CAPABILITY_PREFIX: Final = "task."
"""Prefix of a task name among a worker's capabilities."""

FailureKind = Literal["error", "timeout", "lost"]
"""How an attempt may fail: an error, a timeout, or a lost worker."""

CONSTRAINTS_ENV: Final = (
    *("ROTA_POLICY_CONSTRAINTS", "ROTA_REDACTION_LEVEL", "ROTA_MAX_ARTIFACT_BYTES"),
    *("ROTA_MAX_CONCURRENT_JOBS", "ROTA_MAX_RETRIES"),
)
"""Environment variables with the policy constraints of a frame, if there are any."""
FRAME_ENV: Final = (
    *("ROTA_JOB", "ROTA_LAYER", "ROTA_FRAME", "ROTA_ATTEMPT", "ROTA_GPUS", "ROTA_INPUT"),
    *CONSTRAINTS_ENV,
)
"""Environment variables that describe a running frame; none of them is a setting."""


class Retries(msgspec.Struct, frozen=True, array_like=True):
    """When a failed attempt is retried. Lost workers are counted separately, since they are not the task's fault."""

    most: int = 0
    """Attempts after the first one; attempts that raised `Fatal` are never retried."""
    first_s: float = 1.0
    longest_s: float = 300.0
    on: frozenset[FailureKind] = frozenset({"error", "timeout"})
    lost: int = -1
    """Requeues after a lost worker before the frame fails; -1: as configured on the servers."""


class ProcessLimits(msgspec.Struct, frozen=True, array_like=True):
    """Limits of one process of a command; 0: no limit."""

    cpu_s: int = 0
    address_mb: int = 0
    """Mapped address space; the memory a layer requests limits its data segment only."""
    open_files: int = 0
    file_mb: int = 0
    """Size of any file it writes."""

    def within(self, most: ProcessLimits) -> ProcessLimits:
        """The lower value of each limit."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(most), strict=True)
        return ProcessLimits(*(min(filter(None, pair), default=0) for pair in pairs))


class Work(msgspec.Struct, frozen=True, array_like=True):
    """A task by name, or a command by its argv.

    The last fields that have their default are not stored with a layer, so a default never changes, and a new field
    comes last and has one.
    """

    task: str = ""
    argv: tuple[str, ...] = ()
    env: dict[str, str] = {}
    timeout_s: float = 0.0
    """Of one attempt; 0: `reconciler.running_timeout`."""
    kill_after_s: float = 5.0
    """Time between asking a frame to stop and killing it."""
    cores: int = 100
    gpus: int = 0
    memory_mb: int = 0
    retries: Retries = Retries()
    limits: ProcessLimits = ProcessLimits()
    """For commands only."""
    artifacts: tuple[str, ...] = ()
    """Patterns of files that each frame produces in its directory."""
    artifact_bytes_max: int = 0
    """Total size of these files allowed by a policy; 0: no limit."""
    fail_fast: bool = False
    """The first frame that fails permanently ends the job."""


class RetriesView(msgspec.Struct, frozen=True):
    """When a failed attempt is retried."""

    most: int
    first_s: float
    longest_s: float
    on: tuple[FailureKind, ...]
    lost: int


class ProcessLimitsView(msgspec.Struct, frozen=True):
    """Limits of one process of a command; 0: no limit."""

    cpu_s: int
    address_mb: int
    open_files: int
    file_mb: int


class WorkView(msgspec.Struct, frozen=True):
    """What a layer runs, as the API shows it: `Work` with named fields, in an order that does not vary."""

    task: str
    argv: tuple[str, ...]
    env: dict[str, str]
    timeout_s: float
    kill_after_s: float
    cores: int
    """In hundredths."""
    gpus: int
    memory_mb: int
    retries: RetriesView
    limits: ProcessLimitsView
    artifacts: tuple[str, ...]
    artifact_bytes_max: int
    fail_fast: bool


def work_view(work: Work) -> WorkView:
    retries = RetriesView(
        **{**msgspec.structs.asdict(work.retries), "on": tuple(sorted(work.retries.on))}  # a set has no order
    )
    limits = ProcessLimitsView(**msgspec.structs.asdict(work.limits))
    return WorkView(**{**msgspec.structs.asdict(work), "retries": retries, "limits": limits})

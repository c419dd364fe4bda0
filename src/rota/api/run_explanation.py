"""Explanations of workflow runs. No I/O."""

from __future__ import annotations

from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec

from rota.api.explanation import JobExplanation
from rota.api.workflows import SagaView
from rota.model.ids import RunId
from rota.model.reasons import Reason, Tier
from rota.model.workflows.run_state import RunState

JOBS_MAX: Final = 10
"""Jobs that are explained; of others only the ids are included."""
STEPS_MAX: Final = 50


class RunCause(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a run waits for."""

    tier: Tier
    code: Reason
    sentence: str
    remedy: str
    run: RunId
    """The explained run, or a child run of it."""
    step: str | None = None
    """None when it concerns the whole run."""
    waits_for: UUID | None = None
    """The job, run or approval that must end first."""
    next_at: datetime | None = None
    """Time at which the wait ends by itself, where known."""
    next_try: str = ""


class RunExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """What a run waits for, or how it ended."""

    run: RunId
    workflow: str
    version: int
    show: str
    state: RunState
    sentence: str
    """Summary in one sentence."""
    reasons: tuple[RunCause, ...] = ()
    """The one that changes first comes first."""
    jobs: tuple[JobExplanation, ...] = ()
    """The jobs that it waits for, explained."""
    saga: SagaView | None = None


def run_cause(
    code: Reason,
    run: RunId,
    sentence: str = "",
    *,
    remedy: str = "",
    step: str | None = None,
    waits_for: UUID | None = None,
    next_at: datetime | None = None,
    next_try: str = "",
) -> RunCause:
    """A cause with defaults of its code."""
    assert code.tier is not None, f"{code} is not a reason to wait"
    return RunCause(
        tier=code.tier,
        code=code,
        sentence=sentence or code.meaning,
        remedy=remedy or code.remedy(run=str(run), step=step or "STEP", job=str(waits_for or "JOB")),
        run=run,
        step=step,
        waits_for=waits_for,
        next_at=next_at,
        next_try=next_try,
    )

"""How a job ended, and its first failed frame. Reads only."""

from __future__ import annotations

from collections.abc import Sequence

from rota.api.explanation import FrameFailureView, JobExplanation
from rota.api.jobs import JobView, Layer
from rota.engine.explain.policy_causes import denial_text
from rota.infra.postgres import Database, query
from rota.model.job_states import JobState
from rota.model.reasons import Reason

FIRST_FAILURE = query(__package__, "explain_failure")
DEAD_LETTER = query(__package__, "explain_letter")


async def explain_ended_job(database: Database, job: JobView, layers: Sequence[Layer]) -> JobExplanation:
    failure = None if job.state is JobState.SUCCEEDED else await _first_failure(database, layers)
    dead_letter = None if failure or job.state is JobState.SUCCEEDED else await database.row(DEAD_LETTER, job.id)
    denied = denial_text(job)
    error = dead_letter["error"] if dead_letter is not None and dead_letter["error"] and not denied else ""
    return JobExplanation(
        job=job.id,
        name=job.name,
        show=job.show,
        state=job.state,
        reason=job.reason,
        sentence=f"It has ended as {job.state}{_reason_text(job.reason)}{_failure_text(failure)}"
        f"{f' ({error})' if error else ''}{denied}",
        waiting=0,
        on_workers=0,
        first_failure=failure,
        deadline_at=job.deadline_at,
    )


async def _first_failure(database: Database, layers: Sequence[Layer]) -> FrameFailureView | None:
    by_id = {layer.id: layer for layer in layers}
    row = await database.row(FIRST_FAILURE, list(by_id))
    if row is None:
        return None
    layer = by_id[row["layer"]]
    fields = {**dict(row.items()), "layer": layer.name, "frame": layer.frames.number(row["frame"])}
    return FrameFailureView(**fields)


def _reason_text(reason: str | None) -> str:
    if reason is None:
        return "."
    meaning = Reason(reason).meaning if reason in set(Reason) else f"{reason}."
    return f": {meaning}"


def _failure_text(failure: FrameFailureView | None) -> str:
    if failure is None:
        return ""
    why = ": ".join(part for part in (failure.code, failure.error) if part)
    on = f" on {failure.worker}" if failure.worker else ""
    return f" Frame {failure.frame} of {failure.layer} failed first{on}{f' ({why})' if why else ''}."
